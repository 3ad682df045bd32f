# pytest as several tests, which run beside those of C++. Each writes a report of its own, from
# which ./run test counts.

execute_process(COMMAND ${Python_EXECUTABLE} -c "import pytest, numpy" RESULT_VARIABLE status
                OUTPUT_QUIET ERROR_QUIET)
if(NOT status EQUAL 0)
  message(STATUS "Python's tests are left out: ${Python_EXECUTABLE} lacks pytest or numpy")
  return()
endif()

# Memory that is given back is asked for again at once, and the system clears it each time.
set(kept_memory MALLOC_TRIM_THRESHOLD_=1000000000;MALLOC_MMAP_THRESHOLD_=1000000000)

# python_test(NAME PYTHON LABEL FILES...): tests run side by side, and so each has one thread.
function(python_test name python label)
  add_test(NAME Python.${name}
           COMMAND ${python} -m pytest -q -p no:cacheprovider
                   --junitxml ${PROJECT_BINARY_DIR}/reports/${name}.xml ${ARGN}
           WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(Python.${name} PROPERTIES LABELS "python;${label}" TIMEOUT ${test_limit} COST 50
                       ENVIRONMENT "PYTHONPATH=${PROJECT_BINARY_DIR}/python;OMP_NUM_THREADS=1;${kept_memory};${test_environment}")
endfunction()

# python_tests(NAME FOLDER PARTS PYTHON LABEL): the files there in parts, which take about as long.
# With PyTorch only those that name a package which is there alone, without the tests that are marked
# `anywhere`: their programs do without PyTorch, and the parts of the other Python run them.
function(python_tests name folder parts python label)
  set(chosen)
  file(GLOB tests RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${folder}/test_*.py)
  if(label STREQUAL torch)
    foreach(test ${tests})
      file(STRINGS ${test} named REGEX "torch|transformers|diffusers|jax" LIMIT_COUNT 1)
      if(NOT named)
        list(REMOVE_ITEM tests ${test})
      endif()
    endforeach()
    set(chosen -m "not anywhere")
  endif()
  set(part 0)
  foreach(test ${tests})
    list(APPEND files_${part} ${test})
    math(EXPR part "(${part} + 1) % ${parts}")
  endforeach()
  math(EXPR last "${parts} - 1")
  foreach(part RANGE ${last})
    python_test(${name}_${part} ${python} ${label} ${chosen} ${files_${part}})
  endforeach()
endfunction()

# on_gpu_and_simulated(PREFIX PYTHON LABEL): what needs a GPU, and the package's doors for arrays of
# other libraries than PyTorch; a test whose library is not installed is skipped.
function(on_gpu_and_simulated prefix python label)
  python_test(${prefix}on_gpu ${python} "${label};gpu_python" tests/gpu_python)
  # pytest gives 5 where nothing runs: without PyTorch whole files are skipped, by name in the report.
  set_tests_properties(Python.${prefix}on_gpu PROPERTIES RESOURCE_LOCK gpu SKIP_RETURN_CODE 5)
  # Where there is no GPU ./run test leaves that process out. The other one has imported what those
  # files import, and names them.
  if(TARGET simulated_cuda)
    python_test(${prefix}simulated "${simulator}/simulate;${python}" "${label};simulated"
                tests/simulated_python tests/gpu_python)
  endif()
endfunction()

python_tests(package tests/python 4 ${Python_EXECUTABLE} package)
python_tests(tools tests/tools 2 ${Python_EXECUTABLE} tools)
python_test(others ${Python_EXECUTABLE} others tests/layering_test.py)
on_gpu_and_simulated("" ${Python_EXECUTABLE} package)

# The same with PyTorch and what is used with it (./run test --with-torch). In two parts, as each
# imports all of that, and so do the servers that start its programs and ranks. They take longest, and
# so they start first.
if(SAGEBWD_TORCH_PYTHON)
  python_tests(torch tests/python 2 ${SAGEBWD_TORCH_PYTHON} torch)
  python_test(torch_trainers ${SAGEBWD_TORCH_PYTHON} torch tests/trainers)
  on_gpu_and_simulated(torch_ ${SAGEBWD_TORCH_PYTHON} torch)
  set_tests_properties(Python.torch_0 Python.torch_1 PROPERTIES COST 100)
  if(TARGET simulated_cuda)
    set_tests_properties(Python.torch_simulated PROPERTIES COST 100)
  endif()
endif()
