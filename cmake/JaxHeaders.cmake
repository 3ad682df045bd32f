# jaxlib brings the headers of XLA's foreign functions, and nothing to link: with them the module has
# what sagebwd.integrations.jax registers. Sets jax_sources and jax_headers.

set(SAGEBWD_JAX "AUTO" CACHE STRING "Calls for JAX: ON, OFF, or AUTO for where jaxlib is installed")
set(SAGEBWD_JAX_INCLUDEDIR "" CACHE PATH "jaxlib's include folder, instead of an installed one's")
set(jax_sources python/module_jax_none.cpp)
set(jax_headers "")
if(SAGEBWD_JAX)
  set(folder ${SAGEBWD_JAX_INCLUDEDIR})
  if(NOT folder)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "import jaxlib, os; print(os.path.join(jaxlib.__path__[0], 'include'))"
      OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(EXISTS "${folder}/xla/ffi/api/ffi.h")
    add_library(jax_headers INTERFACE)
    target_include_directories(jax_headers SYSTEM INTERFACE ${folder})
    set(jax_headers jax_headers)
    set(jax_sources python/module_jax.cpp python/module_jax_front.cpp)
  elseif(NOT SAGEBWD_JAX STREQUAL "AUTO")
    message(FATAL_ERROR "SAGEBWD_JAX=${SAGEBWD_JAX}, but ${Python_EXECUTABLE} has no jaxlib: "
                        "${Python_EXECUTABLE} -m pip install jaxlib, or -DSAGEBWD_JAX=OFF")
  endif()
endif()
