# The shared library that a kernel for the Hugging Face Hub carries (docs/use/hub.md): it has
# libstdc++ in it, and asks for glibc 2.28. hub/write.py takes it. libgcc stays outside, as in wheels.
# libpthread and libdl are named, because libc has what they had from glibc 2.34 on.
if(NOT CMAKE_SYSTEM_PROCESSOR STREQUAL x86_64 OR CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  return()
endif()

add_library(sagebwd_hub SHARED hub/old_glibc.c $<TARGET_OBJECTS:sagebwd_c>)
set_target_properties(
  sagebwd_hub PROPERTIES
  LINKER_LANGUAGE CXX OUTPUT_NAME sagebwd NO_SONAME ON LINK_DEPENDS ${exports} UNITY_BUILD OFF
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/hub-library)
if(NOT SAGEBWD_TESTS)
  set_target_properties(sagebwd_hub PROPERTIES EXCLUDE_FROM_ALL ON)
endif()
target_link_options(sagebwd_hub PRIVATE -static-libstdc++ -s -Wl,--version-script=${exports}
                    -Wl,-z,nodelete -Wl,-Bsymbolic
                    -Wl,--push-state,--no-as-needed,-l:libpthread.so.0,-l:libdl.so.2,--pop-state)
target_link_libraries(sagebwd_hub PRIVATE sagebwd_runtime)
