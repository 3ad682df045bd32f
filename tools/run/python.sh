# Python, its packages, and NVRTC.

python_has_packages='import pytest, numpy, pybind11'

# NVRTC 12.8 is the first that knows sm_120. Prints the first library that is new enough.
find_nvrtc() {
  local path version
  for path in ${SAGEBWD_NVRTC:+"$SAGEBWD_NVRTC"} \
    ${CUDA_HOME:+"$CUDA_HOME"/lib64/libnvrtc.so.1[23]} \
    ${CUDA_PATH:+"$CUDA_PATH"/lib64/libnvrtc.so.1[23]} \
    /usr/local/cuda/lib64/libnvrtc.so.1[23] /usr/lib/*-linux-gnu/libnvrtc.so.1[23]; do
    [[ -f $path ]] || continue
    version=$(basename "$(readlink -f "$path")")
    version=${version#libnvrtc.so.}
    case $version in
      12.[0-7].* | 12.[0-7]) continue ;;
      *) echo "$path" && return ;;
    esac
  done
  return 1
}

# nvrtc_of PYTHON: the library among its packages; PyTorch brings one.
nvrtc_of() {
  "$1" - <<'END'
import glob, site, sys
for folder in site.getsitepackages() + [site.getusersitepackages()] + sys.path:
    found = glob.glob(folder + "/nvidia/cu13/lib/libnvrtc.so.13")
    found += glob.glob(folder + "/nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    if found:
        sys.exit(print(found[0]))
sys.exit(1)
END
}

# A cubin of NVRTC 13 does not load on a driver for CUDA 12.
nvrtc_packages() {
  if command -v nvidia-smi >/dev/null && nvidia-smi 2>/dev/null | grep -q 'CUDA Version: 12'; then
    printf '%s\n' 'nvidia-cuda-nvrtc-cu12>=12.8' 'nvidia-cuda-runtime-cu12>=12.8'
  else
    printf '%s\n' 'nvidia-cuda-nvrtc>=13,<14' 'nvidia-cuda-runtime>=13,<14'
  fi
}

# make_venv FLAGS... : makes build/venv, because a .venv in the tree belongs to its owner.
make_venv() {
  rm -rf build/venv
  python3 -m venv "$@" build/venv
  # Its Python imports the package that is built here.
  echo "$root/build/python" \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/sagebwd.pth"
}

pip_install() { "$python" -m pip install --disable-pip-version-check --retries 2 "$@"; }

# From pip, or from the distribution if no index can be reached.
install_python_packages() {
  try_step pip "Installing pytest, numpy, pybind11" pip_install pytest numpy pybind11 && return
  if ! command -v apt-get >/dev/null || [[ $(command -v python3) != /usr/bin/python3 ]]; then
    tail -n 20 "$logs/pip.log"
    fail "" "pip cannot install pytest, numpy and pybind11; install them for" \
      "$(command -v python3) or set SAGEBWD_PYTHON_EXE to a Python that has them."
  fi
  step apt-python "Installing the distribution's instead" \
    apt_install python3-pytest python3-numpy python3-pybind11
  step venv "Making build/venv over them" make_venv --system-site-packages
}

# install_nvrtc PACKAGE...: commands that only build do not need it.
install_nvrtc() {
  try_step pip-nvrtc "Installing NVRTC" pip_install "$@" &&
    printf '%s' "$*" >build/venv/.nvrtc && return
  nvrtc=$(nvrtc_of python3) && export SAGEBWD_NVRTC=$nvrtc && return
  local message=(
    "pip cannot install NVRTC, which compiles the kernels (log: $logs/pip-nvrtc.log)."
    "Install a CUDA toolkit 12.8 or newer, or set SAGEBWD_NVRTC to its libnvrtc.so.")
  [[ -z ${needs_nvrtc:-} ]] || fail "${message[@]}"
  printf '%s\n' "${message[@]}"
}

# Sets python. In build/venv, build/bin/* look for pip's NVRTC without any environment variable.
prepare_python() {
  local nvrtc packages=() stamp
  nvrtc=$(find_nvrtc || true)
  if [[ -n ${SAGEBWD_PYTHON_EXE:-} ]]; then
    python=$(command -v "$SAGEBWD_PYTHON_EXE") ||
      fail "SAGEBWD_PYTHON_EXE is '$SAGEBWD_PYTHON_EXE', which is not a command here."
    python_can "$python" "$python_has_packages" ||
      fail "$python needs pytest, numpy and pybind11; or leave SAGEBWD_PYTHON_EXE unset."
    [[ -n $nvrtc ]] || nvrtc=$(nvrtc_of "$python") || return 0
    export SAGEBWD_NVRTC=$nvrtc
    return
  fi
  [[ ! -L build/venv ]] || rm build/venv # that of older trees led to .venv
  python=$root/build/venv/bin/python
  stamp="$(command -v python3) $(python3 --version)"
  if [[ "$(cat build/venv/.stamp 2>/dev/null)" != "$stamp" || ! -x $python ]]; then
    # Uses a Python that has PyTorch (with which the demo compares) or all packages.
    local flags=()
    if python_can python3 'import torch' || python_can python3 "$python_has_packages"; then
      flags=(--system-site-packages)
    fi
    step venv "Making build/venv" make_venv "${flags[@]}"
    python_can "$python" "$python_has_packages" || install_python_packages
    printf '%s' "$stamp" >build/venv/.stamp
  fi
  if [[ -z $nvrtc ]]; then
    mapfile -t packages < <(nvrtc_packages)
    [[ "$(cat build/venv/.nvrtc 2>/dev/null)" == "${packages[*]}" ]] ||
      install_nvrtc "${packages[@]}"
  fi
  export VIRTUAL_ENV=$root/build/venv
}

# One test shares a cache directory between NVRTC 12 and 13. NVRTC 12 is in a folder where nothing
# else finds it. Without it the test is skipped, and says so.
prepare_nvrtc_12() {
  [[ -n ${SAGEBWD_TEST_NVRTC12:-} ]] && return
  local folder=$root/build/nvrtc12
  local library=$folder/nvidia/cuda_nvrtc/lib/libnvrtc.so.12
  if [[ ! -f $library ]]; then
    try_step pip-nvrtc12 "Installing NVRTC 12 for one test" \
      pip_install --no-deps --target "$folder" 'nvidia-cuda-nvrtc-cu12>=12.8' || return 0
  fi
  export SAGEBWD_TEST_NVRTC12=$library
}

# One test reads machine code. Without the disassembler it is skipped, and says so.
prepare_nvdisasm() {
  command -v nvdisasm >/dev/null && return
  local folder=$root/build/nvdisasm/nvidia/cu13/bin
  [[ -x $folder/nvdisasm ]] ||
    try_step pip-nvdisasm "Installing nvdisasm for one test" \
      pip_install --no-deps --target "$root/build/nvdisasm" 'nvidia-cuda-nvdisasm>=13,<14' ||
    return 0
  export PATH=$PATH:$folder
}
