"""Functions that were written for flex_attention, whose symbols stand for tensors of PyTorch."""

import inspect
import math

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from sagebwd.core.arguments.checks import SpecError, SpecTypeError
from sagebwd.masks import language, tracing
from sagebwd.masks.symbols import Operand, Symbol, combined, node_of

_DTYPES = {"int": torch.int32, "float": torch.float32, "bool": torch.bool}
#: Symbols say that they are here, and may be moved here alone.
_DEVICE = torch.device("meta")


class _Unsupported(SpecTypeError, AttributeError):
    """An operation of PyTorch that expressions lack, also where it is a method."""


def from_flex(function):
    """The expression of a mask_mod or score_mod of flex_attention.

    It is called once, with symbols in the place of tensors: mask_mod with (b, h, q_idx, kv_idx),
    score_mod with (score, b, h, q_idx, kv_idx). Python's operators are traced, and those functions
    and methods of PyTorch that expressions have an operation for. Tensors that it indexes, or that
    have no dimension, become operands, under their names in the function if they have one that the
    language takes, else as t0, t1 and so on. Numbers are constants of the text.

    Three things differ from flex_attention: indices outside a tensor are clamped (there, negative
    ones count from the end); floats are float32 (score_mod computes in FP32 as well); and a result
    is formed by one expression.

    Args:
        function: the mask_mod or score_mod. PyTorch's or_masks and and_masks may have made it.

    Returns an `Expression`: a mask of 4 arguments without defaults, a score of 5. Raises SpecError,
    which names an operation that expressions lack and what there is, and for other numbers of
    arguments; it is also a TypeError.
    """
    if hasattr(function, "mask_mod"):
        raise SpecTypeError("a BlockMask is no function: pass its mask_mod")
    try:
        listed = inspect.signature(function).parameters.values()
        count = sum(p.default is p.empty for p in listed)  # as flex_attention counts them
    except (TypeError, ValueError):
        count = 0
    kind = {4: "mask", 5: "score"}.get(count)
    if kind is None:
        raise SpecTypeError("pass a mask_mod, of (b, h, q_idx, kv_idx), or a score_mod, of (score, "
                            "b, h, q_idx, kv_idx)")  # fmt: skip
    mode = _Tracing(function)
    with mode:
        tree = tracing.called(kind, function, mode.symbol)
    return tracing.expression_of(kind, tree)


class _Tensor(Symbol):
    """A symbol that PyTorch's functions take, and that has a tensor's methods."""

    @classmethod
    def __torch_function__(cls, *given):
        return NotImplemented  # PyTorch asks the mode first, and raises without one

    def __init__(self, node, mode):
        super().__init__(node)
        self.mode = mode

    def _with(self, node):
        return type(self)(node, self.mode)

    def _node(self, value):
        return self.mode.node(value)

    def __getattr__(self, name):
        if name in ("dtype", "shape", "ndim", "device"):
            return {"dtype": _DTYPES[self.node.type], "shape": torch.Size(()), "ndim": 0,
                    "device": _DEVICE}[name]  # fmt: skip
        if name not in OPERATIONS:
            raise _Unsupported(_lacks(f"Tensor.{name}"))
        return lambda *given, **named: self.mode.applied(name, f"Tensor.{name}", (self, *given),
                                                         named)  # fmt: skip


class _Tracing(TorchFunctionMode):
    """Hears of PyTorch's functions while a function is traced."""

    def __init__(self, function):
        super().__init__()
        self.operands = []
        try:
            found = inspect.getclosurevars(function)
            self.names = {**found.globals, **found.nonlocals}
        except TypeError:  # no function of Python's
            self.names = {}

    def symbol(self, node):
        return _Tensor(node, self)

    def node(self, value):
        """As `node_of`; a tensor without dimensions is an operand of one number."""
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return self.operand(value)[0].node
        if isinstance(value, torch.Tensor):
            raise SpecTypeError(f"a tensor of shape {tuple(value.shape)} in an expression: index "
                                "it with symbols")  # fmt: skip
        return node_of(value)

    def operand(self, tensor):
        for known, operand in self.operands:
            if known is tensor:
                return operand
        whole = tensor[None] if tensor.dim() == 0 else tensor
        operand = Operand(self._name_of(tensor), whole, self.symbol)
        self.operands.append((tensor, operand))
        return operand

    def _name_of(self, tensor):
        taken = {operand.name for _, operand in self.operands}
        for name in (name for name, value in self.names.items() if value is tensor):
            try:
                if name not in taken:
                    return language.check_operand_name(name)
            except SpecError:
                continue
        return next(name for name in (f"t{i}" for i in range(99)) if name not in taken)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        flat = [x for given in (*args, *kwargs.values())
                for x in (given if isinstance(given, (tuple, list)) else [given])]  # fmt: skip
        if not any(isinstance(x, _Tensor) for x in flat):
            return function(*args, **kwargs)
        if function is torch.Tensor.__getitem__:
            return self.operand(args[0])[args[1]]
        name = function.__name__
        return self.applied(name, resolve_name(function) or name, args, kwargs)

    def applied(self, name, whole_name, args, kwargs):
        """The symbol of an operation of this name; the error calls it by its whole name."""
        if name.startswith("__") and name.endswith("__"):
            name = name[2:-2]
        operation = OPERATIONS.get(name) or SWAPPED.get(name)
        if operation is None:
            raise _Unsupported(_lacks(whole_name))
        try:
            inspect.signature(operation).bind(*args, **kwargs)
        except TypeError:
            told = f"with {len(args)} arguments"
            told += f" and {', '.join(kwargs)}" if kwargs else ""
            raise _Unsupported(_lacks(f"{whole_name} {told}")) from None
        values = [self._traced(x) for x in args]
        named = {key: self._traced(x) for key, x in kwargs.items()}
        return self.symbol(operation(*values, **named))

    def _traced(self, value):
        is_told = value is None or isinstance(value, (str, tuple, torch.dtype, torch.device))
        return value if is_told else self.node(value)


def _lacks(name):
    known = sorted(name for name in OPERATIONS if hasattr(torch.Tensor, name))
    return (
        f"{name} has no place in an expression. Of PyTorch's functions and methods these have: "
        f"{', '.join(known)}. In a text {language.SUPPORTED}"
    )


# ---- what PyTorch's operations are in the language: functions of nodes ---------------------------


def _of(kind, swap=False):
    def one(input):
        return combined(kind, input)

    def two(input, other):
        return combined(kind, *((other, input) if swap else (input, other)))

    return one if kind in ("~", "abs", "tanh", "exp", "log", "sqrt", "sigmoid") else two


def _logical(kind):
    def operation(input, other):
        return combined(kind, _bool(input), _bool(other))

    return operation


def _bool(input):
    zero = language.literal(0)
    return input if input.type == "bool" else combined("!=", input, zero)


def _where(condition, input, other):
    return combined("where", condition, input, other)


def _clamp(input, min=None, max=None):
    if min is not None:
        input = combined("max", input, min)
    return input if max is None else combined("min", input, max)


def _to(input, dtype):
    """A conversion: exact ones alone, as the language has no rounding to ints."""
    if dtype == _DEVICE:
        return input
    if not isinstance(dtype, torch.dtype):
        raise _Unsupported("a symbol is moved or converted to what is no dtype: leave that out")
    if dtype == torch.bool:
        return _bool(input)
    if input.type == "bool":
        one, zero = (1.0, 0.0) if dtype.is_floating_point else (1, 0)
        return combined("where", input, language.literal(one), language.literal(zero))
    if dtype.is_floating_point:
        return combined("float", input)
    if input.type == "float":
        raise _Unsupported(f"a float, {input.text}, is made {dtype}: an expression has no "
                           "rounding; use // of ints")  # fmt: skip
    return input


def _conversion(dtype):
    return lambda input: _to(input, dtype)


def _div(input, other, *, rounding_mode=None):
    if rounding_mode not in (None, "floor"):
        raise _Unsupported(f"rounding_mode={rounding_mode!r} has no place in an expression: // of "
                           "ints rounds down")  # fmt: skip
    return combined("/" if rounding_mode is None else "//", input, other)


def _filled(value):
    def operation(input, size, *, dtype=None):
        if size != ():
            raise _Unsupported(f"a tensor of shape {size} in an expression: use numbers")
        return _to(language.literal(value), dtype or _DTYPES[input.type])

    return operation


def _scaled_exp(factor):
    return lambda input: combined("exp", combined("*", input, language.literal(factor)))


_BINARY = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "floor_divide": "//", "mod": "%",
           "remainder": "%", "pow": "pow", "and": "&", "or": "|", "xor": "^"}  # fmt: skip
#: By the names of PyTorch's functions and methods; those of Python's operators lack their __.
OPERATIONS = {
    **{name: _of(kind) for name, kind in _BINARY.items()},
    **{name: _of(name) for name in ("abs", "tanh", "exp", "log", "sqrt", "sigmoid")},
    **{name: _of(kind) for name, kind in zip(("eq", "ne", "lt", "le", "gt", "ge"),
                                             ("==", "!=", "<", "<=", ">", ">="))},
    "subtract": _of("-"), "multiply": _of("*"), "absolute": _of("abs"),
    "div": _div, "divide": _div, "truediv": _of("/"), "true_divide": _of("/"),
    "minimum": _of("min"), "maximum": _of("max"), "clamp": _clamp, "clip": _clamp,
    "neg": lambda input: combined("-", input), "negative": lambda input: combined("-", input),
    "square": lambda input: combined("pow", input, language.literal(2)),
    "exp2": _scaled_exp(math.log(2)),
    "where": _where, "invert": _of("~"),
    **{f"bitwise_{name}": _of(kind) for name, kind in (("and", "&"), ("or", "|"), ("xor", "^"),
                                                       ("not", "~"))},
    **{f"logical_{name}": _logical(kind) for name, kind in (("and", "&"), ("or", "|"),
                                                            ("xor", "^"))},
    "logical_not": lambda input: combined("~", _bool(input)),
    "to": _to, "type": _to, "bool": _conversion(torch.bool), "int": _conversion(torch.int32),
    "long": _conversion(torch.int64), "float": _conversion(torch.float32),
    "new_ones": _filled(True), "new_zeros": _filled(False),
}  # fmt: skip
#: Python's operators of a tensor without dimensions and a symbol, in this order.
SWAPPED = {f"r{name}": _of(kind, swap=True)
           for name, kind in {**_BINARY, "div": "/", "truediv": "/"}.items()}  # fmt: skip
