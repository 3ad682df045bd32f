# What other projects link: sagebwd::sagebwd, a static library for C++ and C, and sagebwd::c, a shared
# one for C and whatever calls C. Both have in them what they use of LLVM and show nothing of it: a
# program that links them needs none, and may have another.

# The static one is one object of all layers, of whose symbols only sagebwd's are global. Groups of
# sections that a program may have too would be dropped there with our local symbols in them: they
# are dissolved first. "Unique" symbols can neither be made local nor be in a program twice: those
# that an LLVM may have are made weak before. Binutils 2.38 cannot do that, so ours has none.
set(object ${CMAKE_CURRENT_BINARY_DIR}/sagebwd_bundle.o)
set(layers sagebwd_c sagebwd_runtime sagebwd_cache sagebwd_generator)
list(TRANSFORM layers REPLACE "(.+)" "$<TARGET_FILE:\\1>" OUTPUT_VARIABLE archives)
add_custom_command(
  OUTPUT ${object}
  COMMAND ${CMAKE_CXX_COMPILER} -r -nostdlib -Wl,--force-group-allocation -o ${object}.whole
          -Wl,--whole-archive ${archives} -Wl,--no-whole-archive ${llvm_archives}
  COMMAND sh -c "$1 $2 | sed -n -e '1i #' -e 's/^[0-9a-f]* u //p' > $2.unique" - ${CMAKE_NM}
          ${object}.whole
  COMMAND ${CMAKE_OBJCOPY} --weaken-symbols=${object}.whole.unique ${object}.whole
  COMMAND ${CMAKE_OBJCOPY} --wildcard --keep-global-symbol=sagebwd_*
          --keep-global-symbol=_Z*7sagebwd* ${object}.whole ${object}
  COMMAND ${CMAKE_COMMAND} -E rm ${object}.whole ${object}.whole.unique
  DEPENDS ${layers} ${llvm_archives}
  COMMENT "Bundling the library with what it uses of LLVM"
  VERBATIM)
add_library(sagebwd_bundle STATIC ${object})
set_target_properties(sagebwd_bundle PROPERTIES LINKER_LANGUAGE CXX OUTPUT_NAME sagebwd
                                                EXPORT_NAME sagebwd)
include(PublicHeaders)
add_dependencies(sagebwd_bundle sagebwd_public_headers)
target_include_directories(sagebwd_bundle INTERFACE $<BUILD_INTERFACE:${public_include}>)
target_compile_features(sagebwd_bundle INTERFACE cxx_std_20)
target_link_libraries(sagebwd_bundle INTERFACE Threads::Threads ${CMAKE_DL_LIBS})

add_library(sagebwd_shared SHARED $<TARGET_OBJECTS:sagebwd_c>)
set(exports ${PROJECT_SOURCE_DIR}/c/exports.map)
set_target_properties(
  sagebwd_shared PROPERTIES
  LINKER_LANGUAGE CXX OUTPUT_NAME sagebwd EXPORT_NAME c LINK_DEPENDS ${exports}
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
# It stays loaded after dlclose(): its threads may still compile.
target_link_options(sagebwd_shared PRIVATE -Wl,--version-script=${exports} -Wl,-z,nodelete)
target_link_libraries(sagebwd_shared PRIVATE sagebwd_runtime)

foreach(library bundle shared)
  target_include_directories(sagebwd_${library} INTERFACE
                             $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/c>
                             $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
endforeach()
add_library(sagebwd::sagebwd ALIAS sagebwd_bundle)
add_library(sagebwd::c ALIAS sagebwd_shared)
