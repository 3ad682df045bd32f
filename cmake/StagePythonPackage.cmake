# Makes ${CMAKE_BINARY_DIR}/python/sagebwd importable without installing: the module beside links to
# the package's sources. With ${CMAKE_BINARY_DIR}/python in PYTHONPATH, edits are seen at once.

function(stage_python_package module package)
  set(stage ${CMAKE_BINARY_DIR}/python/sagebwd)
  file(MAKE_DIRECTORY ${stage})
  file(GLOB entries CONFIGURE_DEPENDS ${package}/*)
  foreach(entry ${entries})
    get_filename_component(name ${entry} NAME)
    if(NOT name MATCHES "^__pycache__$|\\.so$")
      file(CREATE_LINK ${entry} ${stage}/${name} SYMBOLIC)
    endif()
  endforeach()
  set_target_properties(${module} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${stage})
endfunction()
