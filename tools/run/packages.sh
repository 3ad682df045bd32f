# Installs system packages and finds LLVM.

# All there are, by Debian's names; llvm-dev stands for the newest that apt knows. docs/install.md
# names those that `pip install .` needs.
packages_to_build="g++ cmake ninja-build llvm-dev python3-dev python3-venv"
packages_to_test="libgtest-dev"

llvm_versions="19 18 17 16 15 14"

has_llvm() {
  [[ -f $1/libLLVMSupport.a && -f $1/libLLVMDemangle.a && -f $2/llvm/Support/JSON.h ]]
}

# Sets llvm_libdir and llvm_includedir to the newest LLVM here.
find_llvm() {
  llvm_libdir=${SAGEBWD_LLVM_LIBDIR:-} llvm_includedir=${SAGEBWD_LLVM_INCLUDEDIR:-}
  if [[ -n $llvm_libdir || -n $llvm_includedir ]]; then
    has_llvm "$llvm_libdir" "$llvm_includedir" || fail \
      "SAGEBWD_LLVM_LIBDIR (${llvm_libdir:-not set}) needs libLLVMSupport.a and libLLVMDemangle.a, and" \
      "SAGEBWD_LLVM_INCLUDEDIR (${llvm_includedir:-not set}) needs llvm/Support/JSON.h. Set both, or neither."
    return
  fi
  local version
  for version in $llvm_versions; do
    llvm_libdir=/usr/lib/llvm-$version/lib llvm_includedir=/usr/lib/llvm-$version/include
    has_llvm "$llvm_libdir" "$llvm_includedir" && return
  done
  return 1
}

python_can() { "$1" -c "$2" >/dev/null 2>&1; }

python_has_headers='import os, sysconfig
assert os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))'

# has PACKAGE: whether it, or a replacement, is installed.
has() {
  case $1 in
    g++) command -v c++ ;;
    ninja-build) command -v ninja ;;
    llvm-dev) find_llvm ;;
    libgtest-dev) [[ -f ${GTest_ROOT:-/usr}/include/gtest/gtest.h ]] ;;
    python3-dev) [[ -n ${SAGEBWD_PYTHON_EXE:-} ]] || python_can python3 "$python_has_headers" ;;
    python3-venv) [[ -n ${SAGEBWD_PYTHON_EXE:-} ]] || python_can python3 'import venv, ensurepip' ;;
    *) command -v "$1" ;;
  esac >/dev/null
}

missing_packages() {
  local package
  for package in $packages_to_build $packages_to_test; do
    has "$package" || echo "$package"
  done
}

as_root() {
  if [[ $EUID -eq 0 ]]; then "$@"; else sudo "$@"; fi
}

apt_install() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

newest_llvm_package() {
  local version
  for version in $llvm_versions; do
    apt-cache show "llvm-$version-dev" >/dev/null 2>&1 && echo "llvm-$version-dev" && return
  done
  echo llvm-14-dev
}

install_packages() {
  local packages
  mapfile -t packages < <(missing_packages)
  [[ ${#packages[@]} -eq 0 ]] && return
  if ! command -v apt-get >/dev/null; then
    fail "Missing, and this system has no apt-get: ${packages[*]} (Debian's names)." \
      "Install a C++20 compiler, CMake 3.22, Ninja, GoogleTest, LLVM 14 to 19 (libSupport) and" \
      "Python 3 with venv and headers, then run this again."
  fi
  if [[ $EUID -ne 0 ]] && ! command -v sudo >/dev/null; then
    fail "Missing: ${packages[*]}. As root, run" \
      "  apt-get update && apt-get install ${packages[*]/llvm-dev/llvm-14-dev}" \
      "(any of llvm-14-dev to llvm-19-dev will do), then run this again."
  fi
  # Installing ca-certificates rewrites this file; pip may need what a proxy's owner put there.
  local bundle=/etc/ssl/certs/ca-certificates.crt
  [[ -f $bundle ]] && cp "$bundle" build/ca-certificates.crt
  step apt-update "Reading the package lists" as_root apt-get update
  packages=("${packages[@]/#llvm-dev/$(newest_llvm_package)}")
  step apt-install "Installing system packages (${#packages[@]})" apt_install "${packages[@]}"
  if [[ -f build/ca-certificates.crt && ${PIP_CERT:-$bundle} == "$bundle" ]]; then
    export PIP_CERT=$root/build/ca-certificates.crt
  fi
  find_llvm || fail "LLVM's libSupport is still missing; see $logs/apt-install.log"
}
