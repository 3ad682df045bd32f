"""What frameworks hand to attention, read from their installed sources: a new name fails."""

import ast
import inspect
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch")


def sources(package, *words):
    """The syntax trees of its files that have one of the words."""
    for path in sorted(Path(package.__file__).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(word in text for word in words):
            yield path, ast.parse(text)


def keywords(tree, function):
    """Of calls of a function by that name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == function:
            yield from (k.arg for k in node.keywords if k.arg)


#: Names that the door refuses unless they ask for nothing, here written out by hand.
REFUSED = {"block_indices", "indices", "sinks", "output_attentions"}


def test_what_transformers_models_hand_to_attention():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    import sagebwd.integrations.transformers as door

    taken = set(inspect.signature(door.attend).parameters)
    found, files = {}, 0
    for path, tree in sources(transformers, "attention_interface"):
        names = set(keywords(tree, "attention_interface"))
        files += bool(names)
        for name in names - taken - door.HARMLESS - REFUSED:
            found.setdefault(name, path.name)
    assert files > 100  # models still call it by that name
    assert not found, f"decide whether each is honoured, harmless or refused: {found}"


def test_models_get_their_attention_by_the_name_that_is_scanned():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    other = {}
    for path, tree in sources(transformers, "ALL_ATTENTION_FUNCTIONS"):
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            if "ALL_ATTENTION_FUNCTIONS" not in ast.unparse(node.value):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in map(ast.unparse, targets):
                if target not in ("attention_interface", "ALL_ATTENTION_FUNCTIONS", "can_set"):
                    other[target] = path.name
    assert not other, f"scan calls of these too: {other}"


def test_what_eager_attention_takes_from_modules():
    """Numbers that models' eager attention reads beside its arguments, which no keyword says."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    known = {"training", "num_key_value_groups", "head_dim", "sinks", "config", "scaling",
             "is_causal", "layer_idx"}  # fmt: skip
    found = {}
    for path, tree in sources(transformers, "eager_attention_forward"):
        for function in ast.walk(tree):
            if not (isinstance(function, ast.FunctionDef) and "attention_forward" in function.name
                    and function.args.args and function.args.args[0].arg == "module"):  # fmt: skip
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "module":
                    if node.attr not in known:
                        found[node.attr] = path.name
    assert not found, f"decide whether the door has to ask for each: {found}"


def test_what_diffusers_models_hand_to_attention():
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
    import sagebwd.integrations.diffusers as door

    taken = set(inspect.signature(door.attend).parameters)
    of_the_dispatcher = {"backend", "parallel_config", "attention_kwargs"}
    found, files = {}, 0
    for path, tree in sources(diffusers, "dispatch_attention_fn"):
        names = set(keywords(tree, "dispatch_attention_fn"))
        files += bool(names)
        for node in ast.walk(tree):  # attention_kwargs = {"window_size": ..}
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                if ast.unparse(node.targets[0]) == "attention_kwargs":
                    names |= {key.value for key in node.value.keys if key is not None}
        for name in names - taken - of_the_dispatcher:
            found[name] = path.name
    assert files > 20
    assert not found, f"decide whether each is honoured or refused: {found}"
