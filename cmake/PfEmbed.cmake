# pf_embed(out_var OUT.c HEADER h FILES ...): a C source that defines `asset_<name>` for each file, made again when a file changes.
# Run as a script (cmake -P) it writes that source.
if(CMAKE_SCRIPT_MODE_FILE)
  set(text "/* Made by cmake/PfEmbed.cmake. */\n#include \"${HEADER}\"\n")
  foreach(file IN LISTS FILES)
    get_filename_component(name "${file}" NAME)
    string(MAKE_C_IDENTIFIER "${name}" name)
    file(READ "${file}" hex HEX)
    string(LENGTH "${hex}" n_digits)
    math(EXPR n_bytes "${n_digits} / 2")
    string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," hex "${hex}")
    string(APPEND text "static const unsigned char ${name}[] = {${hex}0};\nconst struct asset asset_${name} = {${name}, ${n_bytes}};\n")
  endforeach()
  file(WRITE "${OUT}" "${text}")
  return()
endif()

set(PF_EMBED_SCRIPT "${CMAKE_CURRENT_LIST_FILE}")
function(pf_embed out_var out)
  cmake_parse_arguments(ARG "" "HEADER" "FILES" ${ARGN})
  list(TRANSFORM ARG_FILES PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/")
  add_custom_command(OUTPUT "${out}"
    COMMAND ${CMAKE_COMMAND} "-DOUT=${out}" "-DHEADER=${ARG_HEADER}" "-DFILES=${ARG_FILES}" -P "${PF_EMBED_SCRIPT}"
    DEPENDS ${ARG_FILES} "${PF_EMBED_SCRIPT}" VERBATIM)
  set(${out_var} "${out}" PARENT_SCOPE)
endfunction()
