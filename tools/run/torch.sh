# The second environment of Python, build/torch: PyTorch and what is used with it, for their tests.

torch_python=$root/build/torch/bin/python
torch_wanted=tests/python/requirements.txt

# Downloads side by side and links instead of copying: 40 s, where pip takes 3 minutes.
install_torch_packages() {
  python3 -m venv build/torch &&
    "$torch_python" -m pip install --disable-pip-version-check --retries 2 uv || return
  "$torch_python" -m uv pip install --cache-dir build/torch/uv --python "$torch_python" \
    ${PIP_INDEX_URL:+--default-index "$PIP_INDEX_URL"} -r $torch_wanted ||
    "$torch_python" -m pip install --disable-pip-version-check -r $torch_wanted || return
  rm -rf build/torch/uv
  cp $torch_wanted build/torch/.requirements
}

has_torch() { cmp -s $torch_wanted build/torch/.requirements; }

# Fails if a package cannot be had: whoever asks for these tests wants none of them left out.
prepare_torch() {
  has_torch && return
  python_can python3 'import sys; assert sys.version_info >= (3, 11)' || fail \
    "--with-torch needs Python 3.11 or newer, as the packages in $torch_wanted do;" \
    "$(command -v python3) is $(python3 --version). With another Python that has PyTorch:" \
    "  SAGEBWD_PYTHON_EXE=python ./run test"
  rm -rf build/torch
  step torch "Installing PyTorch and others (6 GB)" install_torch_packages
}
