# What is shipped: the library, shared and static, from the objects of every module but bench, server and cli; the `pageflip` command;
# its man page and completions; and the install rules and package of all of it.
set(library_modules ${PF_MODULES})
list(REMOVE_ITEM library_modules bench server cli)
set(library_objects)
foreach(module IN LISTS library_modules)
  if(TARGET mod_${module})
    list(APPEND library_objects $<TARGET_OBJECTS:mod_${module}>)
  endif()
endforeach()
if(PF_FUZZ OR NOT TARGET mod_cli)
  return()
endif()
set(library_links Threads::Threads PkgConfig::JANSSON PkgConfig::XXHASH PkgConfig::PNG pf_openblas m)

# Shared: only pf_* leaves it.
add_library(pageflip_shared SHARED ${library_objects})
target_link_libraries(pageflip_shared PRIVATE pf_flags ${library_links})
target_link_options(pageflip_shared PRIVATE "LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/pageflip.map")
set_target_properties(pageflip_shared PROPERTIES OUTPUT_NAME pageflip VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
  LINKER_LANGUAGE C LINK_DEPENDS "${PROJECT_SOURCE_DIR}/cmake/pageflip.map")

# Static: linked into one object first, so that internal names become local and cannot collide with those of a program.
set(one_object "${PROJECT_BINARY_DIR}/pageflip_one.o")
add_custom_command(OUTPUT ${one_object}
  COMMAND ${CMAKE_LINKER} -r -o ${one_object} "$<JOIN:${library_objects},;>"
  COMMAND ${CMAKE_OBJCOPY} --wildcard "--keep-global-symbol=pf_*" ${one_object}
  DEPENDS ${library_objects} COMMAND_EXPAND_LISTS VERBATIM)
add_library(pageflip_static STATIC ${one_object})
set_source_files_properties(${one_object} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
set_target_properties(pageflip_static PROPERTIES OUTPUT_NAME pageflip LINKER_LANGUAGE C)

# The command. In the build tree a link beside it leads to the bundled data, as share/pageflip does after installation.
add_executable(pageflip ${PROJECT_SOURCE_DIR}/src/cli/main.c)
target_link_libraries(pageflip PRIVATE mod_cli)
set_target_properties(pageflip PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}")
file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/share")
file(CREATE_LINK "${PROJECT_SOURCE_DIR}/data" "${PROJECT_BINARY_DIR}/share/pageflip" SYMBOLIC)

set(generated_docs)
foreach(shell IN ITEMS bash zsh)
  add_custom_command(OUTPUT "${PROJECT_BINARY_DIR}/completion.${shell}"
    COMMAND pageflip completion ${shell} > "${PROJECT_BINARY_DIR}/completion.${shell}" DEPENDS pageflip VERBATIM)
  list(APPEND generated_docs "${PROJECT_BINARY_DIR}/completion.${shell}")
endforeach()
find_program(PF_SCDOC scdoc)
if(PF_SCDOC)
  add_custom_command(OUTPUT "${PROJECT_BINARY_DIR}/pageflip.1"
    COMMAND ${PF_SCDOC} < "${PROJECT_SOURCE_DIR}/man/pageflip.1.scd" > "${PROJECT_BINARY_DIR}/pageflip.1"
    DEPENDS "${PROJECT_SOURCE_DIR}/man/pageflip.1.scd" VERBATIM)
  list(APPEND generated_docs "${PROJECT_BINARY_DIR}/pageflip.1")
  install(FILES "${PROJECT_BINARY_DIR}/pageflip.1" DESTINATION "${CMAKE_INSTALL_MANDIR}/man1")
else()
  message(STATUS "scdoc not found: the man page is not built")
endif()
add_custom_target(pageflip_docs ALL DEPENDS ${generated_docs})

file(RELATIVE_PATH prefix_from_pc "/x/${CMAKE_INSTALL_LIBDIR}/pkgconfig" /x)
configure_file(cmake/pageflip.pc.in "${PROJECT_BINARY_DIR}/pageflip.pc" @ONLY)
install(TARGETS pageflip pageflip_shared pageflip_static)
install(FILES include/pageflip.h DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(FILES "${PROJECT_BINARY_DIR}/pageflip.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
install(FILES "${PROJECT_BINARY_DIR}/completion.bash" DESTINATION "${CMAKE_INSTALL_DATADIR}/bash-completion/completions" RENAME pageflip)
install(FILES "${PROJECT_BINARY_DIR}/completion.zsh" DESTINATION "${CMAKE_INSTALL_DATADIR}/zsh/site-functions" RENAME _pageflip)
install(DIRECTORY data/emoji-dit data/adapters DESTINATION "${CMAKE_INSTALL_DATADIR}/pageflip")
install(FILES data/README.md DESTINATION "${CMAKE_INSTALL_DATADIR}/pageflip") # the attribution stays with the weights
install(CODE "# at install time: only then the prefix is known, which a package sets to another one
  set(CMAKE_INSTALL_FULL_BINDIR \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}\")
  configure_file(\"${PROJECT_SOURCE_DIR}/packaging/pageflip.service.in\" \"${PROJECT_BINARY_DIR}/pageflip.service\" @ONLY)")
install(FILES "${PROJECT_BINARY_DIR}/pageflip.service" DESTINATION lib/systemd/system)
install(FILES packaging/grafana-dashboard.json DESTINATION "${CMAKE_INSTALL_DATADIR}/pageflip")
install(FILES LICENSE NOTICE DESTINATION "${CMAKE_INSTALL_DOCDIR}")

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME pageflip)
set(CPACK_PACKAGE_CONTACT "the pageflip authors <pageflip@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_DEPENDS libopenblas0-pthread)
set(CPACK_DEBIAN_PACKAGE_SECTION graphics)
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
include(CPack)
