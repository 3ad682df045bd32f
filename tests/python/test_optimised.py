"""python -OO, which leaves no docstrings and no assertions."""

import pytest
import warm

pytest.importorskip("torch", reason="needs PyTorch")

ALL = """
import experiments, importlib, pkgutil, sagebwd
LEFT = ("__main__", "_core", "jax", "diffusers", "transformers", "choice", "sagebwd.experiments")
for module in (*pkgutil.walk_packages(sagebwd.__path__, "sagebwd."),
               *pkgutil.walk_packages(experiments.__path__, "experiments.")):
    if not module.name.endswith(LEFT):
        importlib.import_module(module.name)
assert sagebwd.attention.__doc__ is None
"""


def test_every_module_imports():
    done = warm.run(["-OO", "-c", ALL], loaded="torch")
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("words", [
    ("sagebwd", "bench"), ("sagebwd", "doctor"),
    *(("experiments." + name,) for name in (
        "corpus", "train", "study", "lora", "capture", "errors", "warning", "plot",
        "sparse_video")),
], ids=" ".join)  # fmt: skip
def test_each_command_says_its_options(words):
    module, *command = words
    done = warm.run(["-OO", "-m", module, *command, "--help"])
    assert not done.returncode and "usage: " in done.stdout, done.stderr
