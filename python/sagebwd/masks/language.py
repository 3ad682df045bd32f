"""Expressions of masks and of functions of the score: nodes, their types and their text.

An expression is a tree of `Node`, which `name`, `literal`, `read` and `operation` make. They check
types, so that whoever makes a tree, a tracer or the parser of text, makes one that has a meaning.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re

import numpy as np

from sagebwd.core.arguments.checks import SpecError

#: The names that an expression may use, with their types; only scores have s.
NAMES = {"b": "int", "h": "int", "q": "int", "k": "int", "s": "float"}
#: Words that are literals, and those that are nothing.
WORDS = {"true": True, "false": False, "inf": math.inf}
RESERVED = ("and", "or", "not", "if", "else", "is", "in", "nan")
#: How tightly operators bind; those of one number are left-associative.
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
PRECEDENCE = {"|": 1, "^": 2, "&": 3, **dict.fromkeys(COMPARISONS, 4), "+": 5, "-": 5, "*": 6,
              "/": 6, "//": 6, "%": 6}  # fmt: skip
UNARY, ATOM = 7, 8
#: Functions with numbers of arguments.
FUNCTIONS = {"min": 2, "max": 2, "abs": 1, "where": 3, "tanh": 1, "exp": 1, "log": 1, "sqrt": 1,
             "sigmoid": 1, "pow": 2, "float": 1}  # fmt: skip
#: Operations whose last bit depends on the machine, which are not folded.
INEXACT = ("tanh", "exp", "log", "sigmoid", "pow")
SUPPORTED = (
    "there are b, h, q, k and, in scores, s; | ^ & ~ of bools; == != < <= > >=; + - * / // %; and "
    f"{', '.join(FUNCTIONS)}"
)
MOST_NODES, MOST_CHARACTERS, MOST_OPERANDS = 500, 2000, 8
_OPERAND = re.compile(r"[a-z][a-z0-9_]{0,15}")


@dataclasses.dataclass(frozen=True)
class Node:
    """A part of an expression.

    `kind` is 'literal' or 'name', whose `value` says which; 'read', of the operand `value`; or an
    operator or function. `source` is what a traced function has indexed. `text` is the canonical
    text, with as few parentheses as can be, and `binds` is how tightly its outermost operator does.
    """

    kind: str
    type: str  #: 'int', 'float' or 'bool'
    parts: tuple[Node, ...] = ()
    value: object = None
    source: object = dataclasses.field(default=None, compare=False, repr=False)
    count: int = dataclasses.field(init=False, compare=False, repr=False)
    text: str = dataclasses.field(init=False, compare=False)
    binds: int = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self):
        count = (self.kind != "float") + sum(part.count for part in self.parts)
        if count > MOST_NODES:
            raise SpecError(f"the expression has more than {MOST_NODES} nodes, which is the most: "
                            "put a part of it into a tensor that it indexes")  # fmt: skip
        text, binds = _text(self)
        for field, value in (("count", count), ("text", text), ("binds", binds)):
            object.__setattr__(self, field, value)


def nodes_of(node):
    """The node and all below it, as the text has them."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.parts)


def _text(node):
    if node.kind == "literal":
        text = _float_text(node.value) if node.type == "float" else str(node.value).lower()
        return text, UNARY if text[0] == "-" else ATOM
    if node.kind == "name":
        return node.value, ATOM
    parts = [_told(node, i) for i in range(len(node.parts))]
    listed = ", ".join(part.text for part in parts)
    if node.kind == "read":
        return f"{node.value}[{listed}]", ATOM
    if node.kind in FUNCTIONS:
        return f"{node.kind}({listed})", ATOM
    if len(parts) == 1:
        return node.kind + _within(parts[0], UNARY), UNARY
    binds, (left, right) = PRECEDENCE[node.kind], parts
    return f"{_within(left, binds)} {node.kind} {_within(right, binds + 1)}", binds


def _told(node, i):
    """A part, or the int that `float` makes a float of where the operation does so untold."""
    part, following = node.parts[i], node.parts[i + 1 : i + 2]
    if part.kind != "float" or node.kind == "abs" or (node.kind == "-" and len(node.parts) == 1):
        return part
    both = following and following[0].kind == "float" and node.kind != "/"
    return part if both else part.parts[0]


def _float_text(value):
    """The shortest text that FP32 reads as this number, with '.', 'e' or 'inf' in it."""
    if math.isinf(value):
        return str(value)
    fixed = f"{value:.0f}" if value.is_integer() else np.format_float_positional(np.float32(value))
    scientific = np.format_float_scientific(np.float32(value), trim="-", exp_digits=2)
    text = fixed if len(fixed) <= len(scientific) else scientific
    return text if "." in text or "e" in text else text + ".0"


def _within(node, least):
    return node.text if node.binds >= least else f"({node.text})"


# ---- making nodes --------------------------------------------------------------------------------


def name(of):
    return Node("name", NAMES[of], value=of)


def literal(value):
    """A bool, an int32, or a float that is not NaN, which is rounded to FP32."""
    if isinstance(value, bool):
        return Node("literal", "bool", value=value)
    if isinstance(value, int):
        if not -(1 << 31) <= value < 1 << 31:
            raise SpecError(f"{value} does not fit int32: pass a number from -2147483648 to "
                            "2147483647, or a float")  # fmt: skip
        return Node("literal", "int", value=value)
    if math.isnan(value):
        raise SpecError("nan is no number of an expression: a mask hides keys")
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(value))
    if value and (rounded == 0 or math.isinf(rounded) != math.isinf(value)):
        raise SpecError(f"{value} is a number that FP32 does not have: pass inf or 0.0")
    return Node("literal", "float", value=rounded)


def check_operand_name(of):
    """The name; SpecError unless operands may be called that."""
    if not isinstance(of, str) or not _OPERAND.fullmatch(of):
        raise SpecError(f"an operand is called {of!r}: pass a name of at most 16 small letters, "
                        "digits and _ that begins with a letter")  # fmt: skip
    if of in NAMES or of in WORDS or of in FUNCTIONS or of in RESERVED:
        raise SpecError(f"an operand is called {of!r}, which means something else: pass another "
                        "name")  # fmt: skip
    return of


def read(operand, type, indices, source=None):
    """A number of an operand: an int or a float at one or two indices."""
    for index in indices:
        if index.type != "int":
            raise SpecError(f"{operand} is indexed with {a_type(index)}, {index.text}; pass an int")
        if any(node.value == "s" and node.kind == "name" for node in nodes_of(index)):
            raise SpecError(f"{operand} is indexed with {index.text}; indices are formed of b, h, "
                            "q, k and operands, and not of s, the score")  # fmt: skip
    if len(indices) not in (1, 2):
        raise SpecError(f"{operand} is indexed with {len(indices)} numbers; pass 1 or 2")
    return Node("read", type, tuple(indices), operand, source)


def a_type(node):
    """The type with its article, for messages."""
    return f"{'an' if node.type == 'int' else 'a'} {node.type}"


def operation(kind, *parts):
    """The result of an operator or function. An int becomes a float, by 'float', where the other
    side is one and in functions of floats. Operations on literals are folded.

    '-' of one part is a negative; '~' has one part. SpecError for types that do not go together.
    """
    _check_types(kind, parts)
    if kind == "float" and parts[0].type == "float":
        return parts[0]
    sides = parts[1:] if kind == "where" else parts
    of_floats = kind in INEXACT or kind in ("sqrt", "/")
    if kind != "float" and (of_floats or any(side.type == "float" for side in sides)):
        sides = tuple(operation("float", side) for side in sides)
    parts = parts[: len(parts) - len(sides)] + sides
    is_bool = kind in ("&", "|", "^", "~") or kind in COMPARISONS
    type = "bool" if is_bool else "float" if kind == "float" else sides[-1].type
    made = Node(kind, type, parts)
    if all(part.kind == "literal" for part in parts):
        value = _folded("negative" if kind == "-" and len(parts) == 1 else kind,
                        *(part.value for part in parts))  # fmt: skip
        if math.isnan(value):
            raise SpecError(f"{made.text} is NaN, which is no number of an expression: a mask "
                            "hides keys")  # fmt: skip
        if kind not in INEXACT:
            return literal(value)
    return made


def _check_types(kind, parts):
    types = [part.type for part in parts]
    if kind not in PRECEDENCE and kind not in FUNCTIONS and kind != "~":
        raise SpecError(f"{kind} is not supported: {SUPPORTED}")
    if kind in ("&", "|", "^", "~"):
        if set(types) != {"bool"}:
            _refuse(kind, parts, "bools: compare the numbers first, such as x != 0")
    elif kind == "where":
        if types[0] != "bool" or types[1:].count("bool") == 1:
            _refuse(kind, parts, "a bool and two numbers, or three bools")
    elif "bool" in types:
        _refuse(kind, parts, "numbers: where(x, 1, 0) is the number of a bool")
    elif kind in ("//", "%"):
        if set(types) != {"int"}:
            _refuse(kind, parts, "ints")
        if parts[1].kind != "literal" or parts[1].value == 0:
            _refuse(kind, parts, "a constant other than zero on the right")
    elif kind == "pow" and parts[1].kind != "literal":
        _refuse(kind, parts, "a constant as the second argument")


def _folded(kind, *values):
    """The value of an operation on literals; floats are rounded to FP32 once."""
    if kind == "where":
        return values[1] if values[0] else values[2]
    if kind == "float":
        return float(values[0])
    x, y = values[0], values[-1]
    if kind in _LOGIC:
        return bool(_LOGIC[kind](x, y))
    if all(isinstance(value, int) for value in values):
        return _as_int32(_ARITHMETIC[kind](x, y))
    with np.errstate(all="ignore"):
        return float(np.float32(_ARITHMETIC[kind](np.float64(x), np.float64(y))))


_LOGIC = {
    "&": lambda x, y: x and y, "|": lambda x, y: x or y, "^": operator.ne,
    "~": lambda x, _: not x, "==": operator.eq, "!=": operator.ne, "<": operator.lt,
    "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_ARITHMETIC = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": operator.floordiv, "%": operator.mod, "min": lambda x, y: y if y < x else x,
    "max": lambda x, y: y if x < y else x, "abs": lambda x, _: abs(x),
    "negative": lambda x, _: -x, "sqrt": lambda x, _: np.sqrt(x), "tanh": lambda x, _: np.tanh(x),
    "exp": lambda x, _: np.exp(x), "log": lambda x, _: np.log(x), "pow": np.power,
    "sigmoid": lambda x, _: 1 / (1 + np.exp(-x)),
}  # fmt: skip


def _as_int32(value):
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _refuse(kind, parts, wanted):
    told = " and ".join(f"{a_type(part)} ({part.text})" for part in parts)
    raise SpecError(f"{kind} of {told}: it takes {wanted}")
