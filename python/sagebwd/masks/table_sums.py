"""Sums of a score function's gradient, which the tensors that it indexes get."""

import torch

from sagebwd.core.arguments.checks import SpecError
from sagebwd.masks import language, parsing
from sagebwd.masks.evaluation import value_of


def check_trainable(text, names):
    """SpecError unless a score function is a sum of terms that these tensors are factors of.

    That is, + - * and / (on the left of it) and where() stand above each number that is read.
    """
    _check(parsing.parse(text, "float"), frozenset(names))


def scores(text, places, operands):
    """A score function's values at `places`, tensors of b, h, q, k and s."""
    return value_of(parsing.parse(text, "float"), places, operands)


def visible(spec, places, shift, operands):
    """What the masks and the window of a spec let queries see. `shift`: keys - queries."""
    behind = places["k"] - places["q"]  # how far each key lies behind its query
    if spec.causal != "top-left":
        behind = behind - shift
    seen = torch.ones_like(behind, dtype=torch.bool)
    right = 0 if spec.causal != "none" else spec.window_right
    if right is not None and right >= 0:
        seen = seen & (behind <= right)
    if spec.window_left is not None and spec.window_left >= 0:
        seen = seen & (behind >= -spec.window_left)
    if spec.mask:
        without_s = {name: places[name] for name in "bhqk"}
        seen = seen & value_of(parsing.parse(spec.mask, "int"), without_s, operands)
    return seen


def add_gradients(text, gradient, places, operands, sums):
    """Adds to `sums`, FP64 of one dimension by the names of tensors, the gradients of these.

    Args:
        text: the score function, which `check_trainable` has passed.
        gradient: that of its value at `places`, (batch, heads, queries, keys): dS.
        places: tensors of b, h, q, k and s; those of q and k rise by one.
        operands: the tensors that the text indexes, by name.

    Sums are deterministic: over dimensions that an index does not depend on and over diagonals, if
    it is a function of k - q, by reductions; the rest by index_put_, which sorts on a GPU.
    """
    _add(parsing.parse(text, "float"), gradient, places, operands, sums)


def _reads(node, names):
    return any(x.kind == "read" and x.value in names for x in language.nodes_of(node))


def _check(node, names):
    if node.kind == "read" or not _reads(node, names):
        return
    is_linear = node.kind in ("+", "-", "*", "where") or (
        node.kind == "/" and not _reads(node.parts[1], names)
    )
    if not is_linear:
        raise SpecError(
            f"the score has {node.text}, and a tensor in it requires grad: one gets a gradient "
            "where it is added to scores or multiplied with them, and not within a function. "
            "Pass it by detach(), or use torch.nn.attention.flex_attention"
        )
    for part in node.parts:
        _check(part, names)


def _add(node, gradient, places, operands, sums):
    if not _reads(node, sums):
        return
    if node.kind == "read":
        _add_read(node, gradient, places, operands, sums[node.value])
        return
    last = [gradient] * len(node.parts)
    if node.kind == "-":
        last[-1] = -gradient
    elif node.kind == "/":
        last[0] = _product(gradient, 1 / value_of(node.parts[1], places, operands))
    for i, part in enumerate(node.parts):
        if not _reads(part, sums):
            continue
        of_part = last[i]
        if node.kind == "*":
            of_part = _product(gradient, value_of(node.parts[1 - i], places, operands))
        elif node.kind == "where":
            seen = value_of(node.parts[0], places, operands)
            of_part = torch.where(seen == (i == 1), gradient, 0.0)
        _add(part, of_part, places, operands, sums)


def _product(gradient, factor):
    """Where the gradient is 0, as of hidden scores, a factor need not be finite."""
    return torch.where(gradient == 0, 0.0, gradient * factor)


def _add_read(node, gradient, places, operands, total):
    tensor = operands[node.value]
    places_of = {x.value for index in node.parts for x in language.nodes_of(index)}
    if places_of & {"q", "k"} and all(map(_is_by_distance, node.parts)):
        rows, keys = gradient.shape[-2:]
        gradient = diagonal_sums(gradient)
        behind = places["k"].flatten()[0] - places["q"].flatten()[-1]
        distances = torch.arange(rows + keys - 1, dtype=torch.int32, device=total.device)
        places = {**places, "q": torch.zeros_like(places["q"][:, :, :1]),
                  "k": (distances + behind).view(1, 1, 1, -1)}  # fmt: skip
    at = torch.zeros((), dtype=torch.int64, device=total.device)
    for index, size in zip(node.parts, tensor.shape):
        at = at * size + value_of(index, places, operands).clamp(0, size - 1)
    at = at.expand(torch.broadcast_shapes(at.shape, (1,) * gradient.dim()))
    gradient = gradient.expand(torch.broadcast_shapes(gradient.shape, at.shape))
    of_each = gradient.sum_to_size(at.shape)
    total.index_put_((at.flatten(),), of_each.flatten(), accumulate=True)


def _is_by_distance(node):
    """Whether an index is a function of k - q, and of b, h and constants."""
    if node.kind == "-" and {part.value for part in node.parts} == {"q", "k"}:
        return True
    is_place = node.kind == "name" and node.value in ("q", "k")
    return not is_place and all(map(_is_by_distance, node.parts))


def diagonal_sums(x):
    """Sums over the diagonals of (..., rows, columns): (..., 1, rows + columns - 1), from that of
    the last row's first number to that of the first row's last."""
    rows, columns = x.shape[-2:]
    # Each row of the padded tensor begins one place earlier in the new, longer rows.
    flat = torch.nn.functional.pad(x, (0, rows)).flatten(-2)
    flat = torch.nn.functional.pad(flat, (rows - 1, 1))
    return flat.unflatten(-1, (rows, columns + rows + 1)).sum(-2, keepdim=True)[
        ..., : rows + columns - 1
    ]
