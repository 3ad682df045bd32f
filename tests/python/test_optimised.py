"""python -OO, which leaves no docstrings and no assertions."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

ALL = """
import importlib, pkgutil, sagebwd
for module in pkgutil.walk_packages(sagebwd.__path__, "sagebwd."):
    if not module.name.endswith(("__main__", "_core", "jax", "diffusers", "transformers", "choice")):
        importlib.import_module(module.name)
assert sagebwd.attention.__doc__ is None
"""


def run(*words):
    return subprocess.run([sys.executable, "-OO", *words], capture_output=True, text=True,
                          timeout=300, env=os.environ)  # fmt: skip


def test_every_module_imports():
    done = run("-c", ALL)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("words", [
    ("sagebwd", "bench"), ("sagebwd", "doctor"),
    *(("sagebwd.experiments." + name,) for name in (
        "corpus", "train", "study", "lora", "capture", "errors", "warning", "plot",
        "sparse_video")),
], ids=" ".join)  # fmt: skip
def test_each_command_says_its_options(words):
    module, *command = words
    done = run("-m", module, *command, "--help")
    assert not done.returncode and "usage: " in done.stdout, done.stderr
