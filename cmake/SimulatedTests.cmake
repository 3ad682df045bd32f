# Stand-ins for libcuda.so.1 and libnvrtc that run kernels on the CPU (tests/simulator), and the GPU
# tests that run against them.

set(simulator ${PROJECT_BINARY_DIR}/simulator)
foreach(library cuda nvrtc)
  file(GLOB sources CONFIGURE_DEPENDS tests/simulator/lib${library}.cpp)
  add_library(simulated_${library} SHARED ${sources})
  target_include_directories(simulated_${library} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(simulated_${library} PRIVATE ${warnings} -O3 -fno-strict-aliasing)
  set_target_properties(simulated_${library} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${simulator}
                        OUTPUT_NAME ${library})
endforeach()
target_sources(simulated_cuda PRIVATE tests/simulator/block.cpp tests/simulator/products.cpp)
target_link_libraries(simulated_cuda PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
set_target_properties(simulated_cuda PROPERTIES SUFFIX .so.1)
target_compile_definitions(simulated_nvrtc PRIVATE SIMULATOR_COMPILER="${CMAKE_CXX_COMPILER}"
                           SIMULATOR_FOLDER="${PROJECT_SOURCE_DIR}/tests/simulator")
