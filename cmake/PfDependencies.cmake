# Third-party libraries, each seen by one module: jansson and xxhash by base, OpenBLAS and libpng by model, libmicrohttpd by server.
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(PNG REQUIRED IMPORTED_TARGET libpng)
pkg_check_modules(MICROHTTPD REQUIRED IMPORTED_TARGET libmicrohttpd>=0.9.75)
# The pthread flavour by path: Debian's alternatives may point `openblas` at the serial one, which is not reentrant.
find_library(PF_OPENBLAS NAMES openblas PATH_SUFFIXES openblas-pthread REQUIRED
  PATHS /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE} NO_DEFAULT_PATH)
find_path(PF_OPENBLAS_INCLUDE cblas.h PATH_SUFFIXES openblas-pthread REQUIRED
  PATHS /usr/include/${CMAKE_LIBRARY_ARCHITECTURE} NO_DEFAULT_PATH)
# It is opened at run time (model/gemm.c says why), so only its header and its place are needed here.
get_filename_component(PF_OPENBLAS_DIR "${PF_OPENBLAS}" DIRECTORY)
add_library(pf_openblas INTERFACE)
target_compile_definitions(pf_openblas INTERFACE PF_OPENBLAS_PATH="${PF_OPENBLAS_DIR}/libopenblas.so.0")
target_link_libraries(pf_openblas INTERFACE ${CMAKE_DL_LIBS})
target_include_directories(pf_openblas SYSTEM INTERFACE ${PF_OPENBLAS_INCLUDE})
