"""Values of expressions on torch tensors, by what the language says of each operation."""

import torch

from sagebwd.core.arguments.checks import SpecError, SpecTypeError, a_kind, whole_number
from sagebwd.masks import parsing

_FLOATS = {"tanh": torch.tanh, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt,
           "sigmoid": torch.sigmoid, "pow": torch.pow, "/": torch.true_divide}  # fmt: skip
_NUMBERS = {
    "+": torch.add, "-": torch.sub, "*": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "//": torch.floor_divide, "%": torch.remainder, "==": torch.eq, "!=": torch.ne, "<": torch.lt,
    "<=": torch.le, ">": torch.gt, ">=": torch.ge, "abs": torch.abs,
}  # fmt: skip
_BOOLS = {"&": torch.logical_and, "|": torch.logical_or, "^": torch.logical_xor,
          "~": torch.logical_not}  # fmt: skip


def dense(text, operands, batch, heads, queries, keys, scores=None):
    """Evaluates an expression everywhere, on torch tensors.

    Floats of scores are float64 (constants are rounded to float32), and those of masks float32, as
    in kernels. Ints wrap as int32, and indices of operands are clamped.

    Args:
        text: a mask or a score function, as text.
        operands: the tensors that it indexes, by name (1 or 2 dimensions of bools, ints or floats);
            {} or None for none.
        batch, heads, queries, keys: sizes.
        scores: the scaled scores, for a text with s: a float tensor that (batch, heads, queries,
            keys) can be had of by broadcasting.

    Returns a tensor of (batch, heads, queries, keys) on the device of scores and operands: bool for
    a mask, float64 for scores. Raises SpecError, with the column where the text is wrong.
    """
    told = {"batch": batch, "heads": heads, "queries": queries, "keys": keys}
    sizes = [whole_number(name, size, least=0) for name, size in told.items()]
    operands = dict(operands or {})
    types = {name: _type_of(name, tensor) for name, tensor in operands.items()}
    tree = parsing.parse(text, types)
    given = [t for t in (scores, *operands.values()) if t is not None]
    device = given[0].device if given else None
    places = {name: torch.arange(size, dtype=torch.int32, device=device).view(
        [-1 if i == axis else 1 for i in range(4)])
        for axis, (name, size) in enumerate(zip("bhqk", sizes))}  # fmt: skip
    if scores is not None:
        places["s"] = scores.double()
    return value_of(tree, places, operands).expand(sizes).contiguous()


def _type_of(name, tensor):
    if not isinstance(tensor, torch.Tensor):
        raise SpecTypeError(f"operand {name!r} is {a_kind(tensor)}; pass a torch tensor")
    if tensor.dim() not in (1, 2) or not tensor.numel():
        raise SpecError(f"operand {name!r} has shape {tuple(tensor.shape)}; pass 1 or 2 dimensions "
                        "that are not empty")  # fmt: skip
    return "float" if tensor.is_floating_point() else "int", tensor.dim()


def value_of(node, places, operands):
    """A node's value: `places` has tensors of the names, which broadcast. Floats have the type of s
    there, or float32 without s."""
    parts = []
    for part in node.parts:  # no comprehension, which would take two frames per level
        parts.append(value_of(part, places, operands))
    return applied(node, parts, places, operands)


def applied(node, parts, places, operands):
    """A node's value, of the values of its parts."""
    if node.kind == "name":
        if node.value not in places:
            raise SpecError("the text has s, the score: pass scores=")
        return places[node.value]
    floats = places["s"].dtype if "s" in places else torch.float32
    if node.kind == "literal":
        dtype = {"bool": torch.bool, "int": torch.int32, "float": floats}[node.type]
        # Captured graphs take no copies from the host.
        return torch.full((), node.value, dtype=dtype, device=places["q"].device)
    if node.kind == "read":
        tensor = operands[node.value]
        found = tensor[tuple(x.clamp(0, size - 1).long() for x, size in zip(parts, tensor.shape))]
        return found.to(floats if node.type == "float" else torch.int32)
    if node.kind == "where":
        return torch.where(parts[0], *_alike(parts[1:]))
    if node.kind in _BOOLS:
        return _BOOLS[node.kind](*parts)
    if node.kind == "float":
        return parts[0].to(floats)
    if node.kind in _FLOATS:
        return _FLOATS[node.kind](*parts)
    parts = _alike(parts)
    result = -parts[0] if node.kind == "-" and len(parts) == 1 else _NUMBERS[node.kind](*parts)
    return result.to(torch.int32) if node.type == "int" else result


def _alike(parts):
    """Ints as int64, in which no operation of two int32 overflows; bools and floats as they are."""
    return [part.long() if part.dtype == torch.int32 else part for part in parts]
