"""The type stubs, which the build writes: they are what the running package says, and mypy takes
them."""

import ast
import importlib
import inspect
import operator
import subprocess
import sys
from pathlib import Path

import pytest

import sagebwd

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(sagebwd.__file__).parent

PROGRAM = """
import sagebwd
from sagebwd import reference

q, k, v, dout = reference.random_inputs(32, head_dim=64)
table = sagebwd.trace(q, k, v, dout, causal="top-left", precision=("s", "pv"))
exact = reference.exact(q, k, v)
reveal_type(sagebwd.PlanFigures("dv16", "split", 5, 1.0, 2.0, {}).forward_ms)
reveal_type([kernel.speedup for kernel in sagebwd.tune(head_dim=64)])
reveal_type(sagebwd.flash_attn_func)
sagebwd.trace(q, k, v, dout, causl=True)  # type: ignore[call-arg]
sagebwd.trace(q, k, v, dout, granularity="rows")  # type: ignore[arg-type]
sagebwd.emit("sm_80", head_dim="64")  # type: ignore[arg-type]
sagebwd.Spec(head_dims=64)  # type: ignore[call-arg]
sagebwd.attnetion  # type: ignore[attr-defined]
try:
    sagebwd.build("sm_80")
except sagebwd.CompileError as error:
    print(error.log.upper())
"""
WITH_TORCH = """
import torch

x = torch.zeros(1)
reveal_type(sagebwd.attention(x, x, x))
reveal_type(sagebwd.attention(x, x, x, return_lse=True))
reveal_type(sagebwd.sageattn(x, x, x, "HND", True, None, bool(x)))
mask = sagebwd.masks.documents(lengths=[1])
reveal_type(sagebwd.attention(x, x, x, **mask.arguments))
"""
#: Only the modules of torch.Tensor are read: all of PyTorch takes half a minute.
CONFIG = """
[mypy]
[mypy-torch.*]
follow_imports = skip
[mypy-torch,torch._C,torch._tensor]
follow_imports = silent
"""


def functions_of_stubs():
    for path in sorted(PACKAGE.rglob("*.pyi")):
        name = ".".join(["sagebwd", *path.relative_to(PACKAGE).with_suffix("").parts])
        tree = ast.parse(path.read_text())
        for node in tree.body:
            of_class = isinstance(node, ast.ClassDef)
            for inside in node.body if of_class else [node]:
                if isinstance(inside, ast.FunctionDef) and "property" not in map(
                    ast.unparse, inside.decorator_list
                ):
                    own = f"{node.name}.{inside.name}" if of_class else node.name
                    yield name.removesuffix(".__init__"), own, inside


def test_the_running_package_has_these_signatures():
    pytest.importorskip("torch", reason="needs PyTorch")
    seen, last = 0, {}
    for module, name, node in functions_of_stubs():
        if name.endswith("__init__") or not name.endswith("__"):
            last[module, name] = node  # of overloads the last has every parameter in order
    for (module, name), node in last.items():
        try:
            function = operator.attrgetter(name)(importlib.import_module(module))
        except ImportError:  # JAX's, diffusers'
            continue
        except AttributeError:
            if name.startswith(("MonitorTable.", "TraceTable.")):  # what only results have
                continue
            raise
        parameters = [*inspect.signature(function).parameters.values()]
        a = node.args
        if not a.vararg:  # functions that take keywords alone refuse others by a message
            parameters = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
        positional = [*a.posonlyargs, *a.args]
        told = [x.arg for x in positional] + ([a.vararg.arg] if a.vararg else [])
        told += [x.arg for x in a.kwonlyargs] + ([a.kwarg.arg] if a.kwarg else [])
        if not a.kwarg and parameters and parameters[-1].kind is parameters[-1].VAR_KEYWORD:
            assert {p.name for p in parameters[:-1]} <= {*told}, name  # it lists the others, too
            continue
        assert told == [p.name for p in parameters], name
        assert {x.arg for x in a.kwonlyargs} == {
            p.name for p in parameters if p.kind is p.KEYWORD_ONLY}, name  # fmt: skip
        defaults = {p.name: p.default for p in parameters}
        for x, default in (*zip(reversed(positional), reversed(a.defaults)),
                           *zip(a.kwonlyargs, a.kw_defaults)):  # fmt: skip
            if isinstance(default, ast.Constant) and default.value is not ...:
                assert defaults[x.arg] == default.value, (name, x.arg)
        seen += 1
    assert seen > 60


def test_stubs_have_every_public_name():
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    named = {getattr(node, "name", None) for node in tree.body}
    named |= {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom)
              for alias in node.names}  # fmt: skip
    named |= {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    assert set(sagebwd.__all__) <= named


def mypy():
    for python in (Path(sys.executable), ROOT / "build/docs/bin/python"):
        has = [python, "-c", "import mypy"]
        if (
            python.exists()
            and subprocess.run(has, capture_output=True, check=False).returncode == 0
        ):
            return [python, "-m", "mypy"]
    pytest.skip("needs mypy, which ./run test installs into build/docs")


def test_mypy_takes_a_typed_program_and_finds_its_mistakes(tmp_path):
    checker = mypy()
    torch = sagebwd.attention.__module__ != "sagebwd._compat"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + (WITH_TORCH if torch else ""))
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG)
    result = subprocess.run(
        [*checker, "--strict", "--ignore-missing-imports", "--allow-subclassing-any",
         "--follow-imports=silent", "--config-file", config, "--cache-dir", tmp_path / "cache",
         "--python-executable", sys.executable, program],
        env={"MYPYPATH": str(PACKAGE.parent), "PATH": ""}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    revealed = [line.partition('"')[2].rstrip('"') for line in result.stdout.splitlines()
                if "Revealed type" in line]  # fmt: skip
    assert revealed[:2] == ["builtins.float", "builtins.list[builtins.float]"] or (
        revealed[:2] == ["float", "list[float]"])  # fmt: skip
    if torch:
        assert "Tensor" in revealed[3] and "tuple" not in revealed[3]
        assert revealed[4].count("Tensor") == 2 and "|" not in revealed[4]
        assert "|" in revealed[5]
        assert revealed[6] == revealed[3]
