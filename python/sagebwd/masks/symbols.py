"""Symbols, which functions of masks and scores are called with once: each operator gives a node."""

import numbers
import operator

import numpy as np
import torch

from sagebwd.core.arguments.checks import SpecError, SpecTypeError, a_kind
from sagebwd.masks import language

_ASKED = (
    "a symbol has no {} while a function is traced. In the place of Python's and, or, not, if, "
    "min, max and chained comparisons write & | ~ and sagebwd.masks.where, minimum and maximum. "
    "sagebwd.masks has tanh, exp, log, sqrt, sigmoid and float_, too, and tensors are indexed as "
    "operand(name, tensor)[q], which torch.as_tensor makes of lists and arrays"
)


def _binary(kind):
    def method(self, other):
        return self._made(kind, self, other)

    def swapped(self, other):
        return self._made(kind, other, self)

    return method, swapped


def _unasked(what):
    def method(self):
        raise SpecTypeError(_ASKED.format(what))

    return method


_USE = ("use Python's operators, abs() and the functions of sagebwd.masks, such as masks.tanh, or "
        "give a function that uses PyTorch to sagebwd.masks.from_flex")


class Symbol:
    """A part of an expression whose value is known when a kernel runs."""

    def __init__(self, node):
        self.node = node

    def _node(self, value):
        """The node of another symbol, or of a number."""
        return node_of(value)

    def _made(self, kind, *values):
        """The symbol of an operation, with bools compared as the language says it."""
        return self._with(combined(kind, *map(self._node, values)))

    def _with(self, node):
        return type(self)(node)

    __add__, __radd__ = _binary("+")
    __sub__, __rsub__ = _binary("-")
    __mul__, __rmul__ = _binary("*")
    __truediv__, __rtruediv__ = _binary("/")
    __floordiv__, __rfloordiv__ = _binary("//")
    __mod__, __rmod__ = _binary("%")
    __pow__, __rpow__ = _binary("pow")
    __lshift__, __rlshift__ = _binary("<<")
    __rshift__, __rrshift__ = _binary(">>")
    __and__, __rand__ = _binary("&")
    __or__, __ror__ = _binary("|")
    __xor__, __rxor__ = _binary("^")
    __eq__ = _binary("==")[0]
    __ne__ = _binary("!=")[0]
    __lt__ = _binary("<")[0]
    __le__ = _binary("<=")[0]
    __gt__ = _binary(">")[0]
    __ge__ = _binary(">=")[0]
    __hash__ = _unasked("hash")
    __bool__ = _unasked("truth value")
    __int__ = __index__ = _unasked("integer value")
    __float__ = _unasked("value as a float")

    def __array__(self, dtype=None, copy=None):  # which arrays ask an index for
        raise SpecTypeError(_ASKED.format("value in an array"))

    def __neg__(self):
        return self._made("-", self)

    def __pos__(self):
        return self

    def __invert__(self):
        return self._made("~", self)

    def __abs__(self):
        return self._made("abs", self)

    def __repr__(self):
        return f"Symbol({self.node.text!r})"

    def __getattr__(self, name):
        if name.startswith("__"):  # which copy() and others ask for
            raise AttributeError(name)
        raise AttributeError(f"a symbol has no {name!r}: {_USE}")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            raise SpecTypeError(
                f"a torch tensor of shape {tuple(args[0].shape)} is indexed with a symbol: wrap "
                "it, as in sagebwd.masks.operand(name, tensor)[q], or give the function to "
                "sagebwd.masks.from_flex, which takes tensors as they are"
            )
        raise SpecTypeError(f"torch.{getattr(function, '__name__', function)} of a symbol: {_USE}")

    def __array_ufunc__(self, function, *given, **more):
        raise SpecTypeError(f"numpy.{function.__name__} of a symbol: {_USE}")


def node_of(value):
    """The node of a symbol or of a Python number; SpecTypeError for anything else."""
    if isinstance(value, Symbol):
        return value.node
    if isinstance(value, torch.Tensor):
        raise SpecTypeError(
            "a torch tensor in an expression: index it with symbols as sagebwd.masks.operand(name, "
            "tensor)[...], or pass a Python number"
        )
    if isinstance(value, (bool, np.bool_)):
        return language.literal(bool(value))
    if isinstance(value, numbers.Integral):
        return language.literal(operator.index(value))
    if isinstance(value, numbers.Real):
        return language.literal(float(value))
    raise SpecTypeError(f"{a_kind(value)} in an expression: pass symbols and numbers")


def combined(kind, *parts):
    """`language.operation`, and comparisons of bools, which it says in other words. Parts that are
    true or false in any case are left out."""
    types = [part.type for part in parts]
    if kind in ("==", "!=") and "bool" in types:
        unequal = combined("^", *map(_as_bool, parts))
        return unequal if kind == "!=" else combined("~", unequal)
    if kind == "~" and parts[0].kind == "~":
        return parts[0].parts[0]
    if kind in ("&", "|", "^") and types == ["bool"] * 2:
        for constant, other in (parts, parts[::-1]):
            if constant.kind == "literal" and kind == "^":
                return combined("~", other) if constant.value else other
            if constant.kind == "literal":
                return other if constant.value == (kind == "&") else constant
    return language.operation(kind, *parts)


def _as_bool(part):
    """0 and 1 as bools, which Python and PyTorch compare with these."""
    is_bit = part.kind == "literal" and part.type == "int" and part.value in (0, 1)
    return language.literal(bool(part.value)) if is_bit else part


# ---- tensors -------------------------------------------------------------------------------------

_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def as_operand(name, tensor):
    """The tensor as kernels read it: int32 of ints and bools, float32 of floats.

    SpecError for other dtypes, for ranks other than 1 and 2, for no numbers at all, and for int64
    that int32 does not have, for which those are read.
    """
    if not isinstance(tensor, torch.Tensor):
        raise SpecTypeError(f"operand {name!r} is {a_kind(tensor)}; pass a torch tensor")
    if tensor.layout != torch.strided:
        raise SpecError(f"operand {name!r} is {tensor.layout}; pass a dense tensor, such as "
                        f"{name}.to_dense()")  # fmt: skip
    if tensor.dim() not in (1, 2) or not tensor.numel():
        raise SpecError(f"operand {name!r} has shape {tuple(tensor.shape)}; pass a tensor of 1 or "
                        "2 dimensions that is not empty")  # fmt: skip
    if tensor.is_floating_point():
        return tensor.to(torch.float32)
    if tensor.dtype == torch.bool or tensor.dtype in _INTS:
        if tensor.dtype == torch.int64 and not tensor.is_meta:
            least, most = (int(x) for x in torch.aminmax(tensor))
            if least < -(1 << 31) or most >= 1 << 31:
                raise SpecError(f"operand {name!r} has numbers from {least} to {most}; pass "
                                "numbers that fit int32")  # fmt: skip
        return tensor.to(torch.int32)
    raise SpecError(f"operand {name!r} is {tensor.dtype}; pass a tensor of bools, ints or floats")


class Operand:
    """A tensor that functions of masks and scores index: doc[b, q], doc[b][q], slope[h]."""

    def __init__(self, name, tensor, like=Symbol, indices=()):
        self.name = language.check_operand_name(name)
        self.is_bool = getattr(tensor, "dtype", None) == torch.bool
        self.given, self.tensor = tensor, as_operand(name, tensor)
        self._like, self._indices = like, indices

    def __getitem__(self, index):
        given = (*self._indices, *(index if isinstance(index, tuple) else (index,)))
        if len(given) > self.tensor.dim():
            raise SpecError(f"{self.name} is indexed with {len(given)} numbers, and has "
                            f"{self.tensor.dim()} dimensions")  # fmt: skip
        if len(given) < self.tensor.dim():
            row = object.__new__(Operand)
            row.__dict__ = {**self.__dict__, "_indices": given}
            return row
        indices = [self._index(*pair) for pair in zip(given, self.tensor.shape)]
        type = "float" if self.tensor.is_floating_point() else "int"
        node = language.read(self.name, type, indices, self)
        if self.is_bool:
            node = language.operation("!=", node, language.literal(0))
        return self._like(node)

    def __iter__(self):
        raise SpecTypeError(f"{self.name} is no sequence while a function is traced: index it with "
                            "symbols")  # fmt: skip

    def _index(self, value, size):
        """The node of an index; a negative number counts from the end, as in Python."""
        if value is None or value is Ellipsis or isinstance(value, slice):
            raise SpecError(f"{self.name}[{value}]: pass one number or symbol per dimension")
        node = node_of(value)
        if node.kind == "literal" and node.type == "int":
            if not -size <= node.value < size:
                raise SpecError(f"{self.name} is indexed with {node.value}, and has {size} numbers "
                                "in that dimension")  # fmt: skip
            node = language.literal(node.value % size)
        return node

    def __repr__(self):
        return f"operand({self.name!r}, {tuple(self.tensor.shape)} {self.tensor.dtype})"


def _incomplete(self, *others):
    raise SpecTypeError(f"{self.name} is indexed with {len(self._indices)} of its "
                        f"{self.tensor.dim()} dimensions: give one index for each")  # fmt: skip


for _sign in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod",
              "pow", "and", "or", "xor", "neg", "abs", "invert", "bool"):  # fmt: skip
    setattr(Operand, f"__{_sign}__", _incomplete)


def operand(name, tensor):
    """A tensor that functions given to `trace_mask` and `trace_score` may index with symbols.

        doc = sagebwd.masks.operand("doc", documents)            # (batch, tokens)
        sagebwd.masks.trace_mask(lambda b, h, q, k: doc[b, q] == doc[b, k])

    Indices outside the tensor are clamped into it.

    Args:
        name: what the text calls it: a small letter, then small letters, digits and _; at most 16.
        tensor: 1 or 2 dimensions of bools, ints (read as int32) or floats (read as float32). Bools
            are stored as int32, and the function gets bools.

    Raises SpecError for other names, dtypes and shapes, and for int64 that int32 does not have.
    """
    return Operand(name, tensor)


# ---- functions -----------------------------------------------------------------------------------


def _function(kind, *values):
    symbol = next((value for value in values if isinstance(value, Symbol)), Symbol(None))
    return symbol._made(kind, *values)


def where(condition, x, y):
    """x where the condition is true, else y, of symbols and numbers."""
    return _function("where", condition, x, y)


def minimum(x, y):
    """The smaller one of two symbols or numbers: `min` of the text."""
    return _function("min", x, y)


def maximum(x, y):
    """The larger one of two symbols or numbers: `max` of the text."""
    return _function("max", x, y)


def absolute(x):
    """The magnitude of a symbol: `abs` of the text, which Python's abs() gives as well."""
    return _function("abs", x)


def tanh(x):
    """The hyperbolic tangent of a symbol, such as in 20 * tanh(s / 20)."""
    return _function("tanh", x)


def exp(x):
    """e to the power of a symbol."""
    return _function("exp", x)


def log(x):
    """The natural logarithm of a symbol."""
    return _function("log", x)


def sqrt(x):
    """The square root of a symbol."""
    return _function("sqrt", x)


def sigmoid(x):
    """1 / (1 + exp(-x)) of a symbol."""
    return _function("sigmoid", x)


def pow(x, exponent):
    """A symbol to the power of a number: x ** exponent."""
    return _function("pow", x, exponent)


def float_(x):
    """An int symbol as a float: `float` of the text."""
    return _function("float", x)
