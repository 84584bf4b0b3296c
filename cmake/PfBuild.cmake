# Flags, options, and pf_module(): what every module of src/ is built with.
option(PF_TESTS "build the tests" ON)
option(PF_FUZZ "build the fuzz targets (clang)" OFF)
option(PF_WERROR "warnings are errors" ON)
set(PF_SANITIZE "" CACHE STRING "comma-separated sanitizers, e.g. address,undefined or thread")

set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

add_library(pf_flags INTERFACE)
target_compile_definitions(pf_flags INTERFACE _GNU_SOURCE)
target_compile_options(pf_flags INTERFACE
  # -ffp-contract=off: the arithmetic contract says where a product is fused, the compiler never decides.
  -ffp-contract=off -fno-strict-aliasing -fno-common
  -Wall -Wextra -Wshadow -Wvla -Wcast-qual -Wstrict-prototypes -Wmissing-prototypes -Wold-style-definition
  -Wformat=2 -Wundef -Wpointer-arith -Wwrite-strings -Wdouble-promotion -Wimplicit-fallthrough)
if(PF_WERROR)
  target_compile_options(pf_flags INTERFACE -Werror)
endif()
target_include_directories(pf_flags INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>)
if(PF_SANITIZE)
  target_compile_options(pf_flags INTERFACE -fsanitize=${PF_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(pf_flags INTERFACE -fsanitize=${PF_SANITIZE})
endif()
if(PF_FUZZ)
  target_compile_options(pf_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# pf_module(name SOURCES a.c b.c LINKS lower modules and libraries): a static archive `mod_<name>`.
function(pf_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINKS" ${ARGN})
  add_library(mod_${name} STATIC ${ARG_SOURCES})
  target_link_libraries(mod_${name} PUBLIC pf_flags ${ARG_LINKS})
endfunction()
