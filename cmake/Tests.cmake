# The tests. A label says what a test is of; with `heavy` in it those that take most of the time,
# which `./run test quick` leaves out. COST puts long ones first, so that none is left at the end.
# Limits are for what hangs: beside other work everything takes several times as long.

enable_testing()
find_package(GTest REQUIRED)
include(GoogleTest)
set(test_limit 3600)
# On a busy machine a compile takes long enough to be told of, amid what a test compares.
set(test_environment SAGEBWD_LOG=0)

# Tests are compiled more often than they run: without optimisation.
precompiled(tests_precompiled precompiled_tests.h -O0 -fPIE)
target_link_libraries(tests_precompiled PRIVATE GTest::gtest)

foreach(suite generator templates cache runtime gpu)
  file(GLOB test_sources CONFIGURE_DEPENDS tests/${suite}/*.cpp)
  add_executable(${suite}_tests ${test_sources})
  target_compile_definitions(${suite}_tests PRIVATE
                             SAGEBWD_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
                             SAGEBWD_BINARY_DIR="${CMAKE_BINARY_DIR}")
  target_include_directories(${suite}_tests PRIVATE ${PROJECT_SOURCE_DIR}/templates) # layouts/
  target_link_libraries(${suite}_tests PRIVATE sagebwd_runtime LLVMSupportOnly GTest::gtest
                        GTest::gtest_main)
  target_compile_options(${suite}_tests PRIVATE -O0)
  target_precompile_headers(${suite}_tests REUSE_FROM tests_precompiled)
  set(properties LABELS ${suite} TIMEOUT ${test_limit} ENVIRONMENT ${test_environment})
  set(filter)
  if(suite STREQUAL gpu)
    list(APPEND properties RESOURCE_LOCK gpu) # one at a time: they fill its memory
    target_link_libraries(gpu_tests PRIVATE sagebwd::c)
  elseif(suite STREQUAL runtime)
    target_link_libraries(runtime_tests PRIVATE sagebwd_c) # with the layers below it in common
  elseif(suite STREQUAL templates) # what compiles hundreds of kernels
    gtest_discover_tests(templates_tests DISCOVERY_TIMEOUT 600 TEST_LIST heavy_templates_tests
                         TEST_FILTER "On/*" PROPERTIES
                         LABELS templates_heavy TIMEOUT ${test_limit} COST 60
                         ENVIRONMENT ${test_environment})
    set(filter TEST_FILTER "-On/*")
    list(APPEND properties COST 30)
  endif()
  gtest_discover_tests(${suite}_tests DISCOVERY_TIMEOUT 600 ${filter} PROPERTIES ${properties})
endforeach()

include(SanitizedTests)
include(SimulatedTests)

add_executable(cache_speed bench/cache_speed.cpp)
compile(cache_speed)
target_link_libraries(cache_speed PRIVATE sagebwd_runtime)
# That a new process finds every kernel and opens no NVRTC. How fast is for people to read.
add_test(NAME Speed.Cache COMMAND cache_speed)
set_tests_properties(Speed.Cache PROPERTIES LABELS speed TIMEOUT ${test_limit})

# What `./run test quick` builds.
add_custom_target(quick_tests DEPENDS sagebwd sagebwd_example sagebwd_sparse_linear_example
                  sagebwd_c_example generator_tests templates_tests cache_tests runtime_tests
                  gpu_tests simulator_tests cache_speed)
if(TARGET sagebwd_hub)
  add_dependencies(quick_tests sagebwd_hub)
endif()
