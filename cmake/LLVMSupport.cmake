# LLVMSupportOnly: libSupport and libDemangle as plain archives. find_package(LLVM) demands many
# more development packages than these two need. LLVM 14 to 19.

if(NOT SAGEBWD_LLVM_LIBDIR OR NOT SAGEBWD_LLVM_INCLUDEDIR)
  find_program(SAGEBWD_LLVM_CONFIG NAMES llvm-config llvm-config-19 llvm-config-18 llvm-config-17
               llvm-config-16 llvm-config-15 llvm-config-14)
  if(NOT SAGEBWD_LLVM_CONFIG)
    message(FATAL_ERROR "LLVM's libSupport (14 to 19) was not found. Install llvm-dev, or set "
            "SAGEBWD_LLVM_CONFIG to an llvm-config, or SAGEBWD_LLVM_LIBDIR and "
            "SAGEBWD_LLVM_INCLUDEDIR to its folders:\n"
            "  cmake -DSAGEBWD_LLVM_CONFIG=FILE\n"
            "  pip install . --config-settings=cmake.define.SAGEBWD_LLVM_CONFIG=FILE")
  endif()
  foreach(folder libdir includedir)
    execute_process(COMMAND ${SAGEBWD_LLVM_CONFIG} --${folder} OUTPUT_VARIABLE llvm_${folder}
                    RESULT_VARIABLE llvm_failed OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(llvm_failed OR NOT IS_DIRECTORY "${llvm_${folder}}")
      message(FATAL_ERROR "SAGEBWD_LLVM_CONFIG is '${SAGEBWD_LLVM_CONFIG}', which is no "
              "llvm-config: '--${folder}' names no folder (result: ${llvm_failed}). Correct it, "
              "or leave it out: then llvm-config is looked for in PATH.")
    endif()
  endforeach()
  set(SAGEBWD_LLVM_LIBDIR ${llvm_libdir})
  set(SAGEBWD_LLVM_INCLUDEDIR ${llvm_includedir})
endif()
if(NOT EXISTS ${SAGEBWD_LLVM_INCLUDEDIR}/llvm/Config/llvm-config.h)
  message(FATAL_ERROR "There is no llvm/Config/llvm-config.h in '${SAGEBWD_LLVM_INCLUDEDIR}': set "
          "SAGEBWD_LLVM_CONFIG, or SAGEBWD_LLVM_INCLUDEDIR, to those of LLVM 14 to 19 with its "
          "development package.")
endif()

file(STRINGS ${SAGEBWD_LLVM_INCLUDEDIR}/llvm/Config/llvm-config.h llvm_version
     REGEX "define LLVM_VERSION_MAJOR")
string(REGEX MATCH "[0-9]+" llvm_version "${llvm_version}")
if(llvm_version LESS 14 OR llvm_version GREATER 19)
  message(FATAL_ERROR "LLVM ${llvm_version} in ${SAGEBWD_LLVM_INCLUDEDIR}: 14 to 19 are supported.")
endif()
message(STATUS "LLVM libSupport ${llvm_version} in ${SAGEBWD_LLVM_LIBDIR}")

add_library(LLVMSupportOnly INTERFACE)
target_include_directories(LLVMSupportOnly SYSTEM INTERFACE ${SAGEBWD_LLVM_INCLUDEDIR})
add_library(sagebwd_llvm_needs STATIC cmake/llvm_needs.cpp)
set(llvm_archives ${SAGEBWD_LLVM_LIBDIR}/libLLVMSupport.a ${SAGEBWD_LLVM_LIBDIR}/libLLVMDemangle.a
    $<TARGET_FILE:sagebwd_llvm_needs>)
add_dependencies(LLVMSupportOnly sagebwd_llvm_needs)
find_package(Threads REQUIRED)
target_link_libraries(LLVMSupportOnly INTERFACE ${llvm_archives} ${CMAKE_DL_LIBS} Threads::Threads)
