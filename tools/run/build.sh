# Configures and builds, and sets the environment of the programs that were built.

# -O1 takes three quarters of the time of -O2, which users' builds have: `pip install .`, wheels,
# `build library` and the presets. Sums are the same to the bit.
configure() {
  local arguments=(
    -G Ninja -DCMAKE_BUILD_TYPE=Release -DSAGEBWD_PYTHON=ON -DSAGEBWD_TESTS=ON
    "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"
    "-DPython_EXECUTABLE=$python" "-Dpybind11_DIR=$pybind11_dir"
    "-DSAGEBWD_LLVM_LIBDIR=$llvm_libdir" "-DSAGEBWD_LLVM_INCLUDEDIR=$llvm_includedir")
  if [[ -f $torch_jax/.requirements ]]; then
    arguments+=("-DSAGEBWD_TORCH_PYTHON=$torch_python"
      "-DSAGEBWD_JAX_INCLUDEDIR=$torch_jax/jaxlib/include")
  fi
  if [[ "$(cat build/.configured 2>/dev/null)" != "${arguments[*]}" || ! -f build/build.ninja ]]
  then
    rm -f build/CMakeCache.txt build/.configured
    step configure "Configuring" cmake -S . -B build "${arguments[@]}"
    printf '%s' "${arguments[*]}" >build/.configured
  fi
}

# In build/library, without Python, tests and GoogleTest.
configure_library() {
  local packages_to_build="g++ cmake ninja-build llvm-dev" packages_to_test=
  find_llvm || true
  install_packages
  step configure-library "Configuring" cmake -S . -B build/library -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DSAGEBWD_TESTS=OFF "-DSAGEBWD_LLVM_LIBDIR=$llvm_libdir" \
    "-DSAGEBWD_LLVM_INCLUDEDIR=$llvm_includedir"
}

# What `cmake --install` needs.
build_library() {
  configure_library
  step build-library "Building the libraries and the command line" \
    cmake --build build/library -j "$jobs" --target sagebwd sagebwd_bundle sagebwd_shared
}

# prepare TARGET...: everything up to those targets. While they are built, the command in $meanwhile
# runs, whose time is mostly that of downloads.
prepare() {
  check_nvrtc
  find_llvm || true
  install_packages
  prepare_python
  prepare_nvrtc
  [[ -z ${with_torch:-} ]] || prepare_torch_headers
  pybind11_dir=$("$python" -m pybind11 --cmakedir)
  configure
  ${meanwhile:-true} >"$logs/meanwhile.log" 2>&1 &
  local beside=$!
  watch build "Building $*" cmake --build build -j "$jobs" --target "$@" || {
    wait $beside || true # or the next run would install beside it
    tail -n 40 "$logs/build.log"
    fail "" "Building $* failed; the whole log is $logs/build.log"
  }
  wait $beside || true
  export SAGEBWD_CACHE_DIR=${SAGEBWD_CACHE_DIR:-$root/build/cache}
  export PYTHONPATH=$root/build/python${PYTHONPATH:+:$PYTHONPATH}
}
