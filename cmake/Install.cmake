# What `cmake --install` gives other projects: find_package(sagebwd) in CMake, pkg-config for C.

include(CMakePackageConfigHelpers)
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/sagebwd)
set(generated ${CMAKE_CURRENT_BINARY_DIR}/package)

install(TARGETS sagebwd) # the command line, which C++ programs tune with
install(TARGETS sagebwd_bundle sagebwd_shared EXPORT sagebwd)
install(EXPORT sagebwd FILE sagebwdTargets.cmake NAMESPACE sagebwd:: DESTINATION ${package})
install(FILES c/sagebwd.h TYPE INCLUDE)
install(DIRECTORY ${public_include}/sagebwd TYPE INCLUDE)
install(FILES LICENSE NOTICE TYPE DOC)

# Before 1.0 a minor version may change what programs see.
write_basic_package_version_file(${generated}/sagebwdConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
file(WRITE ${generated}/sagebwdConfig.cmake "include(CMakeFindDependencyMacro)
find_dependency(Threads)
include(\${CMAKE_CURRENT_LIST_DIR}/sagebwdTargets.cmake)
")
install(FILES ${generated}/sagebwdConfig.cmake ${generated}/sagebwdConfigVersion.cmake
        DESTINATION ${package})

# Relative to where this file lies, so that the tree can be moved.
file(RELATIVE_PATH prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
file(WRITE ${generated}/sagebwd.pc "prefix=\${pcfiledir}/${prefix}
libdir=\${prefix}/${CMAKE_INSTALL_LIBDIR}
includedir=\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}

Name: sagebwd
Description: Trainable INT8 attention for NVIDIA GPUs
Version: ${PROJECT_VERSION}
Cflags: -I\${includedir}
Libs: -L\${libdir} -lsagebwd
Libs.private: -lstdc++ -lm -ldl -pthread
")
install(FILES ${generated}/sagebwd.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
