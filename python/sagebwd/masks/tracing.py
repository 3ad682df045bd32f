"""Functions and texts of masks and scores become expressions: one canonical text with tensors."""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from types import FunctionType

from sagebwd.core.arguments.checks import SpecError, SpecTypeError, a_kind
from sagebwd.core.compat import called_by_the_compiler
from sagebwd.masks import evaluation, language, parsing
from sagebwd.masks.symbols import Symbol, as_operand, node_of

#: Functions are called with these.
ARGUMENTS = {"mask": "bhqk", "score": "sbhqk"}


@dataclasses.dataclass(frozen=True, eq=False)
class Expression:
    """A mask or a score function, as `trace_mask`, `trace_score` and `from_flex` give it.

    kind: 'mask' or 'score'. text: the canonical text. operands: the tensors that the text indexes,
    int32 or float32, by name, in the order of their first use.
    """

    kind: str
    text: str
    operands: dict

    def dense(self, batch, heads, queries, keys, scores=None):
        """`sagebwd.masks.dense` of this text and these operands."""
        return evaluation.dense(self.text, self.operands, batch, heads, queries, keys, scores)

    def __str__(self):
        return self.text


def trace_mask(function, operands=None):
    """The expression of a mask: a function of (b, h, q, k), which are the batch, the query's head
    and the positions of query and key, that gives whether query q sees key k; or its text.

        trace_mask(lambda b, h, q, k: (q >= k) & (q - k < 512)).text     # "q >= k & q - k < 512"

    The function is called once, with symbols. They have Python's operators and comparisons, with
    & | ^ ~ in the place of and, or and not; // and % by constants; `sagebwd.masks.where`, `minimum`
    and so on; and they index tensors that are wrapped by `operand`. Numbers that the function reads
    elsewhere are constants of the text.

    Args:
        function: the function, or a text, such as "doc[b, q] == doc[b, k] & q >= k".
        operands: with a text, the tensors that it indexes, by name, as `operand` takes them; bools
            are the ints 0 and 1. None: they are ints and come later.

    Returns an `Expression`. Raises SpecError for what the text cannot say (also a TypeError where a
    truth value is asked of a symbol), with what there is.
    """
    return traced("mask", function, operands)


def trace_score(function, operands=None):
    """The expression of a score function: a function of (s, b, h, q, k) that gives the score to use
    in the place of s, the scaled score before the softmax; or its text. Otherwise as `trace_mask`.

        trace_score(lambda s, b, h, q, k: 20 * tanh(s / 20)).text        # "20.0 * tanh(s / 20.0)"

    Without operands= those of a text are floats.
    """
    return traced("score", function, operands)


def traced(kind, function, operands):
    if callable(function):
        if operands is not None:
            raise SpecError("operands= belongs to a text, and a function is given: wrap the "
                            "tensors by sagebwd.masks.operand(name, tensor)")  # fmt: skip
        return expression_of(kind, called(kind, function, Symbol))
    if not isinstance(function, str):
        raise SpecTypeError(f"the {kind} is {a_kind(function)}; pass a function or a text")
    tensors, types = None, "int" if kind == "mask" else "float"
    if operands is not None:
        if not isinstance(operands, Mapping):
            raise SpecTypeError(f"operands is {a_kind(operands)}; pass a dict of tensors by name")
        tensors = {name: as_operand(name, tensor) for name, tensor in operands.items()}
        types = tuple(types_of(tensors).items())
    text, used = _read(kind, function, types)
    _check_ints(kind, text, tensors or {})
    if unused := [name for name in tensors or () if name not in used]:
        raise SpecError(f"operands has {unused[0]!r}, which {text!r} does not index: leave it "
                        "out")  # fmt: skip
    return Expression(kind, text, {name: tensors[name] for name in used} if tensors else {})


#: The trees of texts, which calls of attention may give again and again.
@functools.lru_cache(maxsize=1024)
def _parsed(text, types):
    return parsing.parse(text, types if isinstance(types, str) else dict(types))


@called_by_the_compiler  # compiled functions may make expressions of texts
def _read(kind, text, types):
    return _read_before(kind, text, types)


@functools.lru_cache(maxsize=1024)
def _read_before(kind, text, types):
    """The canonical text, and the names that it indexes, in the order of their first use."""
    tree = _parsed(text, types)
    check_kind(kind, tree)
    names = (node.value for node in language.nodes_of(tree) if node.kind == "read")
    return tree.text, tuple(dict.fromkeys(names))


def called(kind, function, like):
    """The node that a function gives for symbols, which `like` makes of nodes."""
    symbols = [like(language.name(name)) for name in ARGUMENTS[kind]]
    try:
        if not _takes(function, len(symbols)):
            inspect.signature(function).bind(*symbols)
    except TypeError as error:
        raise SpecTypeError(f"a {kind} is a function of ({', '.join(ARGUMENTS[kind])}), and this "
                            f"one has others: {error}") from None  # fmt: skip
    except ValueError:  # it has no signature that Python knows
        pass
    try:
        return node_of(function(*symbols))
    except TypeError as error:
        if isinstance(error, SpecError) or "indices must be" not in str(error):
            raise
        raise SpecTypeError(
            f"{error}. If these are symbols: they index tensors alone, as in "
            "sagebwd.masks.operand(name, tensor)[q, k], and torch.tensor makes one of a list"
        ) from error


def _takes(function, count):
    """Whether this is a plain function of as many arguments, which is seen at once."""
    if type(function) is not FunctionType or function.__dict__:
        return False
    code = function.__code__
    return code.co_argcount == count and not code.co_kwonlyargcount


def expression_of(kind, tree):
    """The expression of a tree with its tensors; its text is read again, as kernels will."""
    check_kind(kind, tree)
    read = {}
    for node in language.nodes_of(tree):
        if node.kind == "read" and (
            read.setdefault(node.value, node.source).given is not node.source.given
        ):
            raise SpecError(f"two tensors are called {node.value!r}: give each its own name")
    operands = {name: operand.tensor for name, operand in read.items()}
    _check_ints(kind, tree.text, operands)
    again = _parsed(tree.text, tuple(types_of(operands).items()))
    assert again == tree, f"{again} is not {tree}"
    return Expression(kind, tree.text, operands)


def check_kind(kind, tree):
    """SpecError unless a tree is a mask (a bool without s) or a score (a float with s)."""
    has_s = any(node.kind == "name" and node.value == "s" for node in language.nodes_of(tree))
    if kind == "mask" and (tree.type != "bool" or has_s):
        wrong = "has s, the score" if has_s else f"is {language.a_type(tree)}"
        raise SpecError(f"{tree.text!r} {wrong}: a mask is a bool of b, h, q and k, such as q >= k")
    if kind == "score" and (tree.type != "float" or not has_s):
        wrong = f"is {language.a_type(tree)}" if tree.type != "float" else "has no s"
        raise SpecError(f"{tree.text!r} {wrong}: a score is a float that is formed of s, such as "
                        "20.0 * tanh(s / 20.0)")  # fmt: skip


def _check_ints(kind, text, tensors):
    """SpecError for what a score makes of tensors of ints: kernels read them as floats."""
    ints = {name: t for name, t in tensors.items() if not t.is_floating_point()}
    if kind != "score" or not ints:
        return
    try:
        _parsed(text, "float")
    except SpecError:
        raise SpecError(
            f"{text!r} takes elements of {', '.join(ints)} as indices or divides them by // or %: a "
            "score reads tensors as floats. Pass a tensor that is indexed by positions"
        ) from None
    for name, tensor in ints.items():
        if not tensor.is_meta and max(-int(tensor.min()), int(tensor.max())) > 1 << 24:
            raise SpecError(f"the score indexes {name}, whose ints go beyond 2^24: it is read as "
                            "float32, which does not have all of them")  # fmt: skip


def types_of(tensors):
    """The type and number of indices of each operand, as the parser takes them."""
    return {name: ("float" if tensor.is_floating_point() else "int", tensor.dim())
            for name, tensor in tensors.items()}  # fmt: skip
