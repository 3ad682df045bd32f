# How the library and the command line are compiled.

set(warnings -Wall -Wextra -Wno-unused-parameter)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 sees overlaps in "text" + std::string (bug 105329), and overruns if its header is
  # precompiled.
  list(APPEND warnings -Wno-restrict -Wno-stringop-overflow)
endif()
# Variables of inline functions and templates would be "unique" symbols, which stay global whatever is
# asked (Bundle.cmake), and which no library with them is ever unloaded for.
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fno-gnu-unique>)
endif()
if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  list(APPEND warnings -Wno-subobject-linkage) # it takes the included sources for headers
endif()

# precompiled(NAME HEADER OPTIONS...): an empty library. Its header is compiled once, with those
# options, and other targets with the same options reuse it.
function(precompiled name header)
  file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp "")
  add_library(${name} OBJECT ${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp)
  target_compile_features(${name} PRIVATE cxx_std_20)
  target_compile_options(${name} PRIVATE ${ARGN})
  target_precompile_headers(${name} PRIVATE ${PROJECT_SOURCE_DIR}/cmake/${header})
endfunction()

# Only builds with tests have precompiled headers.
if(SAGEBWD_TESTS)
  precompiled(sagebwd_precompiled precompiled.h ${warnings})
  target_link_libraries(sagebwd_precompiled PRIVATE LLVMSupportOnly)
endif()

# compile(TARGET): the options of the library, the command line and the benchmarks.
function(compile target)
  target_compile_options(${target} PRIVATE ${warnings} -fPIC)
  if(SAGEBWD_TESTS)
    target_precompile_headers(${target} REUSE_FROM sagebwd_precompiled)
  endif()
endfunction()
