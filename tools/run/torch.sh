# The second environment of Python, build/torch: PyTorch and what is used with it, for their tests.

torch_python=$root/build/torch/bin/python
torch_wanted=tests/python/requirements.txt

torch_jax=$root/build/torch-jax # jaxlib's headers, with which the module is built

# Downloads side by side and links instead of copying: 40 s, where pip takes 3 minutes.
install_torch_packages() {
  python3 -m venv build/torch &&
    "$torch_python" -m pip install --disable-pip-version-check --retries 2 uv || return
  "$torch_python" -m uv pip install --cache-dir build/torch/uv --python "$torch_python" \
    ${PIP_INDEX_URL:+--default-index "$PIP_INDEX_URL"} -r $torch_wanted ||
    "$torch_python" -m pip install --disable-pip-version-check -r $torch_wanted || return
  rm -rf build/torch/uv
  # PyTorch is a million objects. Each process would look through them several times as it starts.
  echo 'import gc; gc.set_threshold(100_000, 20, 100)' >"$("$torch_python" -c \
    'import sysconfig; print(sysconfig.get_path("purelib"))')/few_collections.pth" || return
  # Python compiles what it imports, once, and not in each of the processes that run tests.
  "$torch_python" -c 'import torch._dynamo, jax, matplotlib.font_manager, transformers, diffusers
from diffusers import WanTransformer3DModel
from transformers import LlamaForCausalLM' || true
  torch_stamp >build/torch/.stamp
}

torch_stamp() { python3 --version && cat $torch_wanted; }
has_torch() { [[ "$(cat build/torch/.stamp 2>/dev/null)" == "$(torch_stamp)" ]]; }

# Before anything is configured. Fails if a package cannot be had: whoever asks for these tests wants
# none of them left out.
prepare_torch_headers() {
  [[ -z ${SAGEBWD_PYTHON_EXE:-} ]] || fail \
    "--with-torch makes an environment of its own, for which the package is built with python3, and" \
    "SAGEBWD_PYTHON_EXE is set. Unset it; or leave --with-torch out, if that Python has PyTorch."
  python_can python3 'import sys; assert sys.version_info >= (3, 11)' || fail \
    "--with-torch needs Python 3.11 or newer, as the packages in $torch_wanted do;" \
    "$(command -v python3) is $(python3 --version). With another Python that has PyTorch:" \
    "  SAGEBWD_PYTHON_EXE=python ./run test"
  cmp -s $torch_wanted "$torch_jax/.requirements" && return
  rm -rf "$torch_jax" && mkdir -p "$torch_jax"
  step torch-jax "Installing jaxlib's headers" pip_install --no-deps --target "$torch_jax" \
    "$(grep '^jaxlib==' $torch_wanted)"
  cp $torch_wanted "$torch_jax/.requirements"
}

# The rest, which may come while the package is built.
prepare_torch() {
  has_torch && return
  rm -rf build/torch
  step torch "Installing PyTorch and others (6 GB)" install_torch_packages
}
