# pytest as several tests, which run beside those of C++. Each writes a report of its own, from
# which ./run test counts.

execute_process(COMMAND ${Python_EXECUTABLE} -c "import pytest, numpy" RESULT_VARIABLE status
                OUTPUT_QUIET ERROR_QUIET)
if(NOT status EQUAL 0)
  message(STATUS "Python's tests are left out: ${Python_EXECUTABLE} lacks pytest or numpy")
  return()
endif()

# python_test(NAME FILES...)
function(python_test name)
  add_test(NAME Python.${name}
           COMMAND ${Python_EXECUTABLE} -m pytest -q -p no:cacheprovider
                   --junitxml ${PROJECT_BINARY_DIR}/reports/${name}.xml ${ARGN}
           WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(Python.${name} PROPERTIES LABELS python TIMEOUT ${test_limit} COST 50
                       ENVIRONMENT "PYTHONPATH=${PROJECT_BINARY_DIR}/python;${test_environment}")
endfunction()

# python_tests(NAME FOLDER LAST): the files there in LAST + 1 parts, which take about as long.
function(python_tests name folder last)
  file(GLOB tests RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${folder}/test_*.py)
  math(EXPR parts "${last} + 1")
  set(part 0)
  foreach(test ${tests})
    list(APPEND files_${part} ${test})
    math(EXPR part "(${part} + 1) % ${parts}")
  endforeach()
  foreach(part RANGE ${last})
    python_test(${name}_${part} ${files_${part}})
  endforeach()
endfunction()
python_tests(package tests/python 3)
python_tests(tools tests/tools 1)

python_test(on_gpu tests/gpu_python)
# pytest gives 5 where nothing runs: without PyTorch whole files are skipped, by name in the report.
set_tests_properties(Python.on_gpu PROPERTIES RESOURCE_LOCK gpu LABELS "python;gpu"
                                              SKIP_RETURN_CODE 5)
python_test(others tests/layering_test.py)

# The package's doors for arrays of other libraries than PyTorch; a test whose library is not
# installed is skipped.
if(TARGET simulated_cuda)
  add_test(NAME Python.simulated
           COMMAND ${simulator}/simulate ${Python_EXECUTABLE} -m pytest -q -p no:cacheprovider
                   --junitxml ${PROJECT_BINARY_DIR}/reports/simulated.xml tests/simulated_python
           WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(Python.simulated PROPERTIES LABELS "python;simulated" COST 40
                       TIMEOUT ${test_limit} ENVIRONMENT "PYTHONPATH=${PROJECT_BINARY_DIR}/python")
endif()
