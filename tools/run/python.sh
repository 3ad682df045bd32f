# Python and its packages.

python_has_packages='import pytest, numpy, pybind11'

# make_venv FLAGS... : makes build/venv, because a .venv in the tree belongs to its owner.
make_venv() {
  rm -rf build/venv
  python3 -m venv "$@" build/venv
  # Its Python imports the package that is built here.
  echo "$root/build/python" \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/sagebwd.pth"
}

# Without compiling to bytecode what may never be imported: the first import compiles.
pip_install() {
  "$python" -m pip install --disable-pip-version-check --retries 2 --no-compile "$@"
}

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

# Sets python.
prepare_python() {
  local stamp
  if [[ -n ${SAGEBWD_PYTHON_EXE:-} ]]; then
    python=$(command -v "$SAGEBWD_PYTHON_EXE") ||
      fail "SAGEBWD_PYTHON_EXE is '$SAGEBWD_PYTHON_EXE', which is not a command here."
    python_can "$python" "$python_has_packages" ||
      fail "$python needs pytest, numpy and pybind11; or leave SAGEBWD_PYTHON_EXE unset."
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
  export VIRTUAL_ENV=$root/build/venv
}

# One test reads machine code. Without the disassembler it is skipped, and says so.
prepare_nvdisasm() {
  command -v nvdisasm >/dev/null && return
  local folder=$root/build/nvdisasm/nvidia/cu13/bin
  [[ -x $folder/nvdisasm ]] ||
    try_step pip-nvdisasm "Installing nvdisasm for one test" \
      pip_install --no-deps --target "$root/build/nvdisasm" 'nvidia-cuda-nvdisasm==13.5.37' ||
    return 0
  export PATH=$PATH:$folder
}
