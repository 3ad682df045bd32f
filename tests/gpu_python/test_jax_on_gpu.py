"""sagebwd.integrations.jax on a GPU, against FP64 by NumPy, in processes of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sagebwd import _core

if importlib.util.find_spec("jax") is None:
    pytest.skip("needs JAX", allow_module_level=True)
if not _core.jax_targets():
    pytest.skip("built without JAX", allow_module_level=True)

PROGRAM = Path(__file__).with_name("jax_program.py")
#: How XLA takes memory: as it needs it, or a quarter of the GPU's at its start. (By default it is
#: three quarters, which the processes of other tests may hold.)
MEMORY = {"as it needs it": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
          "a quarter at once": {"XLA_PYTHON_CLIENT_PREALLOCATE": "true",
                                "XLA_PYTHON_CLIENT_MEM_FRACTION": ".25"}}  # fmt: skip


def run(check, variables):
    environment = {key: value for key, value in os.environ.items()
                   if not key.startswith(("XLA_", "JAX_"))}  # fmt: skip
    done = subprocess.run([sys.executable, PROGRAM, check], env=environment | variables,
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    if "Unable to initialize backend 'cuda'" in done.stderr or "assert jax.default_backend" in (
        done.stderr
    ):
        pytest.skip("needs JAX with CUDA")
    assert done.returncode == 0 and done.stdout == "right\n", done.stdout + done.stderr


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("check", ["jit", "grad", "vmap", "gradient_of_lse", "windows",
                                   "sparse_linear", "front", "beside_pytorch"])  # fmt: skip
def test_right(check, memory):
    run(check, MEMORY[memory])


def test_too_little_memory_is_told_in_xlas_words():
    run("out_of_memory", {"XLA_PYTHON_CLIENT_PREALLOCATE": "true",
                          "XLA_PYTHON_CLIENT_MEM_FRACTION": ".02"})  # fmt: skip
