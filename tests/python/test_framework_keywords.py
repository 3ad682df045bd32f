"""Installed frameworks' sources show what they hand to attention: a new name fails."""

import ast
import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch")


def sources(package, word, pattern="*.py"):
    """The names and texts of its files that have a word."""
    for path in sorted(Path(package.__file__).parent.rglob(pattern)):
        text = path.read_text(encoding="utf-8")
        if word in text:
            yield path.name, text


def keywords(tree, function):
    """They are those of all calls of a function by that name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and function in (
            getattr(node.func, "id", None), getattr(node.func, "attr", None)
        ):  # fmt: skip
            yield from (k.arg for k in node.keywords if k.arg)


def read_from_module(tree):
    """Functions of eager attention read these from their first argument, the module."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and "attention_forward" in function.name:
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "module":
                    yield node.attr


#: Names that the door refuses unless they ask for nothing, here written out by hand.
REFUSED = {"block_indices", "indices", "sinks", "output_attentions"}
#: Eager attention reads these; q, k, v and keywords have them, or the door asks for them: sinks.
OF_MODULES = {"training", "num_key_value_groups", "head_dim", "sinks"}


def test_what_transformers_models_hand_to_attention():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    import sagebwd.integrations.transformers as door

    taken = set(inspect.signature(door.attend).parameters) | door.HARMLESS | REFUSED
    names, attributes, files, parts = {}, {}, 0, {}
    for file, text in sources(transformers, "attention_interface", "modeling_*.py"):
        # Models have most of their functions and classes from one another, word for word.
        for part in re.split(r"\n(?=@|def |class )", text):
            if "attention_interface(" in part or "attention_forward" in part:
                parts.setdefault(part, file)
    for part, file in parts.items():
        tree = ast.parse(part)
        found = set(keywords(tree, "attention_interface"))
        files += bool(found)
        names |= dict.fromkeys(found - taken, file)
        attributes |= dict.fromkeys(set(read_from_module(tree)) - OF_MODULES, file)
    assert files > 100  # models still call it by that name
    assert not names, f"decide whether each is honoured, harmless or refused: {names}"
    assert not attributes, f"decide whether the door has to ask modules for each: {attributes}"


def test_models_get_their_attention_by_the_name_that_is_scanned():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    other = {}
    for file, text in sources(transformers, "ALL_ATTENTION_FUNCTIONS", "modeling_*.py"):
        # An assignment from it, or a call of an element.
        lines = "\n".join(line for line in text.split("\n") if "ALL_ATTENTION_FUNCTIONS" in line)
        targets = re.findall(r"(\w+)(?:: \w+)? = \(?ALL_ATTENTION_FUNCTIONS[.\[]", lines)
        targets += re.findall(r"ALL_ATTENTION_FUNCTIONS\[[^]]*\]\(", text)
        other |= dict.fromkeys(set(targets) - {"attention_interface"}, file)
    assert not other, f"scan calls of these too: {other}"


def test_what_diffusers_models_hand_to_attention():
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
    import sagebwd.integrations.diffusers as door

    taken = set(inspect.signature(door.attend).parameters)
    of_the_dispatcher = {"backend", "parallel_config", "attention_kwargs"}
    found, files = {}, 0
    for file, text in sources(diffusers, "dispatch_attention_fn"):
        names = set(keywords(ast.parse(text), "dispatch_attention_fn"))
        files += bool(names)
        names |= set(re.findall(r"attention_kwargs = \{\"(\w+)\"", text))
        found |= dict.fromkeys(names - taken - of_the_dispatcher, file)
    assert files > 20  # models still call it by that name
    assert not found, f"decide whether each is honoured or refused: {found}"
