# Headers as other projects include them: "sagebwd/runtime/attention.h". They are copies in the
# build's include/, where they include each other in this way too, so that a program's own folders
# may be called runtime or cache.

file(GLOB_RECURSE public_headers RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS
     generator/*.h cache/*.h runtime/*.h)
# These wrap LLVM, or include templates/layouts/, and nobody but .cpp files includes them.
list(REMOVE_ITEM public_headers cache/untrusted.h cache/bounded_json.h
     generator/kernels/attention.h)
set(public_include ${CMAKE_CURRENT_BINARY_DIR}/include)
set(write_public_headers ${PROJECT_SOURCE_DIR}/cmake/write_public_headers.cmake)
set(sources ${public_headers})
list(TRANSFORM sources PREPEND ${PROJECT_SOURCE_DIR}/)
add_custom_command(
  OUTPUT ${public_include}/written
  COMMAND ${CMAKE_COMMAND} "-DHEADERS=${public_headers}" -DFROM=${PROJECT_SOURCE_DIR}
          -DTO=${public_include} -P ${write_public_headers}
  DEPENDS ${sources} ${write_public_headers}
  COMMENT "Writing the headers for other projects"
  VERBATIM)
add_custom_target(sagebwd_public_headers DEPENDS ${public_include}/written)
