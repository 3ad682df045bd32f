"""What masks and score functions are at given places: what queries see, and scores with slopes.

A slope is the derivative with respect to s. The rules are those of generator/expression_derivative,
which the kernels are compiled of: of two that are equal min and max have the slope of the first,
conditions are constants, and a factor that does not depend on s adds nothing, even an infinite one.
"""

import torch

from sagebwd.masks import parsing
from sagebwd.masks.evaluation import applied, value_of


def sees(text, places, operands):
    """What a mask says at `places`, int32 tensors of b, h, q and k that broadcast: bools."""
    return value_of(parsing.parse(text, "int"), places, operands)


def scored(text, places, operands):
    """(values, slopes) of a score function at `places`, tensors of b, h, q, k and, FP64, of s.

    Both are FP64 of the shape that the places have together.
    """
    value, slope = _with_slope(parsing.parse(text, "float"), places, operands)
    slope = torch.zeros((), dtype=value.dtype, device=value.device) if slope is None else slope
    return torch.broadcast_tensors(value, slope)


def _with_slope(node, places, operands):
    """(value, slope) of a node; None stands for a slope that is zero everywhere."""
    parts, slopes = [], []
    for part in node.parts:  # no comprehension, which would take two frames per level
        value, slope = _with_slope(part, places, operands)
        parts.append(value)
        slopes.append(slope)
    value = applied(node, parts, places, operands)
    if node.kind == "name":
        return value, torch.ones_like(value) if node.value == "s" else None
    if node.type != "float" or all(slope is None for slope in slopes):
        return value, None
    return value, _slope(node, value, parts, slopes)


def _slope(node, value, parts, slopes):
    """The slope of a node of which some part has one."""
    a, b = (*parts, None)[:2]
    of_a, of_b = (*slopes, None)[:2]
    if node.kind == "+":
        return _sum(of_a, of_b)
    if node.kind == "-":
        return _negative(of_a) if b is None else _sum(of_a, _negative(of_b))
    if node.kind == "*":
        return _sum(_product(of_a, b, node.parts[1]), _product(of_b, a, node.parts[0]))
    if node.kind == "/":  # without the square of b, which could overflow
        return _sum(of_a, _negative(_product(of_b, value))) / b
    if node.kind == "abs":
        return torch.where(a < 0, -of_a, of_a)
    if node.kind == "where":
        return _chosen(a, *slopes[1:])
    if node.kind == "min":
        return _chosen(b < a, of_b, of_a)
    if node.kind == "max":
        return _chosen(a < b, of_b, of_a)
    return of_a * _SLOPES[node.kind](value, *parts)


def _power(_, a, b):
    """The factor of pow(a, b), whose b is a constant. Constants are FP32 in kernels."""
    return b * torch.pow(a, (b - 1).float().double())


#: Factors of the functions of one part, of their values and their parts.
_SLOPES = {
    "tanh": lambda value, a: 1 - value * value, "exp": lambda value, a: value,
    "log": lambda value, a: 1 / a, "sqrt": lambda value, a: 1 / (2 * value),
    "sigmoid": lambda value, a: value * (1 - value), "pow": _power,
}  # fmt: skip


def _sum(a, b):
    return b if a is None else a if b is None else a + b


def _negative(a):
    return None if a is None else -a


def _product(slope, factor, node=None):
    """The slope times a factor, unless the factor is the constant 0."""
    is_zero = node is not None and node.kind == "literal" and node.value == 0
    return None if slope is None or is_zero else slope * factor


def _chosen(condition, a, b):
    if a is None and b is None:
        return None
    a, b = (0.0 if x is None else x for x in (a, b))
    return torch.where(condition, a, b)
