"""Names in Python code mean one thing: no function hides one of its module that it reads first, and
no dictionary has a key twice."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("python", "bench", "docs/_site", "examples", "experiments", "hub", "tests",
           "tools")  # fmt: skip
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def names_of_module(tree):
    """Functions, classes and modules."""
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def own_nodes(function):
    """All nodes of a function except those of functions and comprehensions within it."""
    waiting = [*function.body]
    while waiting:
        node = waiting.pop()
        yield node
        inner = (ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp, ast.SetComp,
                 ast.DictComp, ast.GeneratorExp)  # fmt: skip
        waiting += [] if isinstance(node, inner) else ast.iter_child_nodes(node)


def read_too_early(tree):
    """(line, name) where a function reads a name of its module that it assigns itself, before or
    while it does so for the first time."""
    module = names_of_module(tree)
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        nodes = list(own_nodes(function))
        elsewhere = {name for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal))
                     for name in node.names}  # fmt: skip
        arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
        places = {}
        for node in nodes:
            if isinstance(node, ast.Name):
                stored = isinstance(node.ctx, ast.Store)
                places.setdefault(node.id, {True: [], False: []})[stored].append(node.lineno)
        for name in (places.keys() & module) - elsewhere - arguments:
            stored, loaded = places[name][True], places[name][False]
            if stored and loaded and min(loaded) <= min(stored):
                yield min(loaded), name


def keys_twice(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = [ast.dump(key) for key in node.keys if isinstance(key, ast.Constant)]
            yield from ((node.lineno, key) for key in set(keys) if keys.count(key) > 1)


def test_functions_read_no_name_before_they_hide_it():
    found = [(str(path.relative_to(ROOT)), *place) for path in FILES
             for place in read_too_early(ast.parse(path.read_text()))]  # fmt: skip
    assert len(FILES) > 400 and not found


def test_dictionaries_have_each_key_once():
    found = [(str(path.relative_to(ROOT)), *place) for path in FILES
             for place in keys_twice(ast.parse(path.read_text()))]  # fmt: skip
    assert not found


@pytest.mark.parametrize("code, found", [
    ("def f(): pass\ndef g():\n  f = f()", [(3, "f")]),
    ("def f(): pass\ndef g():\n  x = f()\n  f = 1", [(3, "f")]),
    ("def f(): pass\ndef g(f):\n  f = f()", []),
    ("def f(): pass\ndef g():\n  f = 1\n  return f", []),
    ("def f(): pass\ndef g():\n  global f\n  f = f()", []),
])  # fmt: skip
def test_the_check_finds_what_it_looks_for(code, found):
    assert list(read_too_early(ast.parse(code))) == found
    assert list(keys_twice(ast.parse("{1: 2, 1: 3}")))
