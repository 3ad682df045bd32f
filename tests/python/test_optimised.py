"""python -OO, which leaves no docstrings and no assertions."""

import pytest
import warm

pytest.importorskip("torch", reason="needs PyTorch")

#: Compiles our modules as -OO does. That flag would have all of PyTorch compiled again, and
#: imported by a server of its own.
OURS = """
import importlib.machinery, sys
class Optimised(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True, optimize=2)
class Finder:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("sagebwd", "experiments"):
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                spec.loader = Optimised(name, spec.origin)
            return spec
sys.meta_path.insert(0, Finder())
"""
ALL = """
import importlib, pkgutil
import experiments, sagebwd
LEFT = ("__main__", "_core", "jax", "diffusers", "transformers", "choice", "sagebwd.experiments")
for module in (*pkgutil.walk_packages(sagebwd.__path__, "sagebwd."),
               *pkgutil.walk_packages(experiments.__path__, "experiments.")):
    if not module.name.endswith(LEFT):
        importlib.import_module(module.name)
assert sagebwd.attention.__doc__ is None
"""


def test_every_module_imports():
    done = warm.run(["-c", OURS + ALL], loaded="torch._dynamo")
    assert not done.returncode, done.stderr


HELPS = """
import contextlib, io, runpy, sys
for command in sys.argv[1:]:
    words = command.split()
    sys.argv, said = ["-m", *words[1:], "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as left:
        print(*words, left.code or 0, "usage: " in said.getvalue())
"""
COMMANDS = ("sagebwd bench", "sagebwd doctor", *(f"experiments.{name}" for name in (
    "corpus", "train", "study", "lora", "capture", "errors", "warning", "plot",
    "sparse_video")))  # fmt: skip


def test_each_command_says_its_options():
    """In one process, which imports the package once."""
    done = warm.run(["-c", OURS + HELPS, *COMMANDS], loaded="torch")
    assert not done.returncode, done.stderr
    assert done.stdout.splitlines() == [f"{command} 0 True" for command in COMMANDS]
