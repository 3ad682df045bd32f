# Tests that are built a second time, with sanitizers, in every build: what parses hostile files with
# AddressSanitizer and UBSan, what threads share with ThreadSanitizer. And the fuzz targets.

set(sanitize_memory -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
set(sanitize_threads -fsanitize=thread)

# can_sanitize(RESULT FLAGS...): whether a program built with them runs here, and behind what. Older
# sanitizers do not find their way in an address space that is laid out with much randomness.
function(can_sanitize result)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/sanitized.cpp)
  file(WRITE ${source} "#include <thread>\nint main() { std::thread([] {}).join(); }\n")
  try_compile(compiles ${CMAKE_CURRENT_BINARY_DIR}/${result} ${source}
              COMPILE_DEFINITIONS ${ARGN} LINK_OPTIONS ${ARGN} LINK_LIBRARIES Threads::Threads
              CXX_STANDARD 20 COPY_FILE ${CMAKE_CURRENT_BINARY_DIR}/${result}_program)
  set(found FALSE)
  if(compiles)
    foreach(launcher "setarch;-R" "env")
      execute_process(COMMAND ${launcher} ${CMAKE_CURRENT_BINARY_DIR}/${result}_program
                      RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
      if(status EQUAL 0)
        set(found TRUE)
        set(${result}_launcher ${launcher} PARENT_SCOPE)
        break()
      endif()
    endforeach()
  endif()
  if(NOT found)
    message(STATUS "Tests with ${ARGV1} are left out: this compiler or system cannot")
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# sanitized_objects(NAME SOURCES FLAGS...): what the cache consists of, the order of its
# layers, the generator without its kinds of kernels, which parse nothing, and more sources. Not
# optimised: half of the time to compile, and what they run is short. What the library compiles in
# several groups is here one.
function(sanitized_objects name sources)
  file(GLOB cache_sources CONFIGURE_DEPENDS cache/*.cpp)
  set(together ${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp)
  set(text "")
  foreach(source ${sources} runtime/kernel_builder.cpp runtime/parallel_for.cpp)
    get_filename_component(source ${source} ABSOLUTE)
    string(APPEND text "#include \"${source}\"\n")
  endforeach()
  file(CONFIGURE OUTPUT ${together} CONTENT "${text}")
  set_source_files_properties(${together} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON COMPILE_OPTIONS
                              "$<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>")
  add_library(${name} OBJECT ${cache_sources} ${generator_sources} ${together})
  set_target_properties(${name} PROPERTIES UNITY_BUILD_BATCH_SIZE 30)
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR}
                             PRIVATE ${PROJECT_SOURCE_DIR}/templates)
  target_compile_options(${name} PUBLIC ${warnings} -O0 -fPIC ${ARGN})
  target_precompile_headers(${name} PRIVATE ${PROJECT_SOURCE_DIR}/cmake/precompiled.h)
  target_link_options(${name} PUBLIC ${ARGN})
  target_link_libraries(${name} PUBLIC LLVMSupportOnly Threads::Threads)
endfunction()

# sanitized_executable(NAME OBJECTS SOURCES...): the rest of the library comes as it is; an archive
# gives only what the objects lack.
function(sanitized_executable name objects)
  add_executable(${name} ${ARGN})
  target_precompile_headers(${name} REUSE_FROM ${objects})
  target_link_libraries(${name} PRIVATE ${objects} sagebwd_runtime)
endfunction()

# sanitized_test(NAME KIND COMMAND...)
function(sanitized_test name kind)
  add_test(NAME ${name} COMMAND ${can_sanitize_${kind}_launcher} ${ARGN})
  # Leaks are not the point, and looking for them needs ptrace, which containers forbid.
  set_tests_properties(${name} PROPERTIES LABELS "sanitized;heavy;${kind}" COST 20
                       TIMEOUT ${test_limit}
                       ENVIRONMENT "ASAN_OPTIONS=detect_leaks=0;UBSAN_OPTIONS=print_stacktrace=1")
endfunction()

can_sanitize(can_sanitize_memory ${sanitize_memory})
can_sanitize(can_sanitize_threads ${sanitize_threads})

file(GLOB_RECURSE generator_sources CONFIGURE_DEPENDS generator/*.cpp) # that parses specs
list(REMOVE_ITEM generator_sources ${kernel_sources})

if(can_sanitize_memory)
  sanitized_objects(sagebwd_memory_sanitized "" ${sanitize_memory})
  sanitized_executable(mutation_test_sanitized sagebwd_memory_sanitized
                       tests/cache/mutation_test.cpp)
  target_link_libraries(mutation_test_sanitized PRIVATE GTest::gtest GTest::gtest_main)
  sanitized_test(Sanitized.Mutations memory $<TARGET_FILE:mutation_test_sanitized>)

  file(GLOB fuzz_targets RELATIVE ${PROJECT_SOURCE_DIR}/tests/fuzz CONFIGURE_DEPENDS
       tests/fuzz/*.cpp)
  list(REMOVE_ITEM fuzz_targets replay.cpp libfuzzer.cpp)
  add_library(fuzz_replay OBJECT tests/fuzz/replay.cpp)
  target_precompile_headers(fuzz_replay REUSE_FROM sagebwd_memory_sanitized)
  target_link_libraries(fuzz_replay PRIVATE sagebwd_memory_sanitized)
  foreach(source ${fuzz_targets})
    get_filename_component(target ${source} NAME_WE)
    sanitized_executable(fuzz_${target}_replay sagebwd_memory_sanitized tests/fuzz/${source}
                         $<TARGET_OBJECTS:fuzz_replay>)
    sanitized_test(Fuzz.${target} memory $<TARGET_FILE:fuzz_${target}_replay>)
  endforeach()

  if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
    sanitized_objects(sagebwd_fuzzed "" -fsanitize=fuzzer-no-link ${sanitize_memory})
    foreach(source ${fuzz_targets})
      get_filename_component(target ${source} NAME_WE)
      sanitized_executable(fuzz_${target} sagebwd_fuzzed tests/fuzz/${source}
                           tests/fuzz/libfuzzer.cpp)
      target_link_options(fuzz_${target} PRIVATE -fsanitize=fuzzer)
    endforeach()
  endif()
endif()

if(can_sanitize_threads)
  # The generator too: ThreadSanitizer must see the guards of its function-local statics.
  sanitized_objects(sagebwd_threads_sanitized "${kernel_sources};${called_by_threads}"
                    ${sanitize_threads})
  sanitized_executable(threads_test_sanitized sagebwd_threads_sanitized
                       tests/runtime/threads_test.cpp tests/runtime/parallel_for_test.cpp
                       tests/runtime/calls_of_threads_test.cpp)
  target_compile_definitions(threads_test_sanitized
                             PRIVATE SAGEBWD_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_link_libraries(threads_test_sanitized PRIVATE GTest::gtest GTest::gtest_main)
  sanitized_test(Sanitized.Threads threads $<TARGET_FILE:threads_test_sanitized>)
endif()
