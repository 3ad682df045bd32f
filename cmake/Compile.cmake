# How the library and the command line are compiled.

set(warnings -Wall -Wextra -Wno-unused-parameter)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 sees overlaps and overruns in "text" + std::string (bug 105329).
  list(APPEND warnings -Wno-restrict -Wno-array-bounds -Wno-stringop-overflow)
endif()

# Of a call most time passes in the driver and in NVRTC: -O3 takes half as long again to compile, and
# nothing shows it (bench/host_time.cpp, bench/cache_speed.cpp).
set(optimised $<$<CONFIG:Release>:-O1>)

# precompiled(NAME HEADER OPTIONS...): an empty library whose header is compiled once, with those
# options, for all that reuse it.
function(precompiled name header)
  file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp "")
  add_library(${name} OBJECT ${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp)
  target_compile_features(${name} PRIVATE cxx_std_20)
  target_compile_options(${name} PRIVATE ${ARGN})
  target_precompile_headers(${name} PRIVATE ${PROJECT_SOURCE_DIR}/cmake/${header})
endfunction()

# Builds without tests do without, so that each source has to include what it uses.
if(SAGEBWD_TESTS)
  precompiled(sagebwd_precompiled precompiled.h ${warnings} ${optimised})
  target_link_libraries(sagebwd_precompiled PRIVATE LLVMSupportOnly)
endif()

# compile(TARGET): the options of all that is ours and no test.
function(compile target)
  target_compile_options(${target} PRIVATE ${warnings} ${optimised} -fPIC)
  if(SAGEBWD_TESTS)
    target_precompile_headers(${target} REUSE_FROM sagebwd_precompiled)
  endif()
endfunction()
