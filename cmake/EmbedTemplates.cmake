# Compiles the device templates into the library as strings, so that it needs no files at run time.

function(embed_templates target folder)
  file(GLOB_RECURSE templates CONFIGURE_DEPENDS ${folder}/*.cuh)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/embedded_templates.cpp)
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DFOLDER=${folder} -DOUTPUT=${output}
            -P ${PROJECT_SOURCE_DIR}/cmake/write_embedded_templates.cmake
    DEPENDS ${templates} ${PROJECT_SOURCE_DIR}/cmake/write_embedded_templates.cmake
    COMMENT "Embedding device templates")
  # On its own, for programs that have sanitized objects of all other sources.
  set_source_files_properties(${output} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  target_sources(${target} PRIVATE ${output})
endfunction()
