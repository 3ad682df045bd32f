# Makes ${CMAKE_BINARY_DIR}/python/sagebwd importable without installing: the module and the type
# stubs beside links to the package's sources. With ${CMAKE_BINARY_DIR}/python in PYTHONPATH, edits
# are seen at once. A wheel has the stubs too.

function(stage_python_package module package)
  set(stage ${CMAKE_BINARY_DIR}/python/sagebwd)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS RELATIVE ${package}
       ${package}/*.py ${package}/py.typed)
  file(GLOB_RECURSE links ${stage}/*.py)
  foreach(link ${links})
    if(IS_SYMLINK ${link} AND NOT EXISTS ${link}) # to a source that is no more
      file(REMOVE ${link})
    endif()
  endforeach()
  foreach(source ${sources})
    get_filename_component(folder ${stage}/${source} DIRECTORY)
    if(IS_SYMLINK ${folder}) # of an earlier version, to the sources
      file(REMOVE ${folder})
    endif()
    file(MAKE_DIRECTORY ${folder})
    file(CREATE_LINK ${package}/${source} ${stage}/${source} SYMBOLIC)
  endforeach()
  set_target_properties(${module} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${stage})

  list(TRANSFORM sources PREPEND ${package}/)
  file(GLOB writers CONFIGURE_DEPENDS ${package}/../stubs/*.py)
  add_custom_command(
    OUTPUT ${stage}/__init__.pyi
    COMMAND ${Python_EXECUTABLE} -B ${package}/../stubs/write.py ${stage}
    DEPENDS ${sources} ${writers} COMMENT "Writing type stubs" VERBATIM)
  add_custom_target(type_stubs DEPENDS ${stage}/__init__.pyi)
  add_dependencies(${module} type_stubs)
  if(SKBUILD)
    install(DIRECTORY ${stage} DESTINATION . COMPONENT python FILES_MATCHING PATTERN *.pyi)
  endif()
endfunction()
