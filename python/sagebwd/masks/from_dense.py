"""Intervals of a mask that is given as a bool tensor."""

import torch

from sagebwd.core.arguments.checks import SpecError, SpecTypeError, a_kind
from sagebwd.masks.intervals import Intervals, diagonal_of


def from_bool(mask, causal=False, device=None):
    """The `Intervals` of a mask, where intervals can say it exactly.

    The result has as few columns as the mask needs. Random eviction of keys is an example: a key
    that is evicted at query q is hidden from [q, M).

    Args:
        mask: bool tensor of (batch or 1, 1 or heads_kv, queries, keys) or of (queries, keys), True
            where a query sees a key.
        causal: as in `Intervals`. Under a causal mask no query may see keys behind the diagonal.
        device: where the intervals are; None means where the mask is.

    Raises SpecError, which is a ValueError, and names the first key whose hidden queries are not
    one interval (causal) or at most two (otherwise); also for another dtype or shape.
    """
    if not isinstance(mask, torch.Tensor):
        raise SpecTypeError(f"mask is {a_kind(mask)}; pass a bool torch tensor")
    if mask.dtype != torch.bool:
        raise SpecError(f"mask is {mask.dtype}; pass torch.bool, True where a query sees a key")
    if mask.dim() not in (2, 4):
        raise SpecError(f"mask has shape {tuple(mask.shape)}; pass (batch, heads, queries, keys) "
                        "or (queries, keys)")  # fmt: skip
    hidden = ~mask[None, None] if mask.dim() == 2 else ~mask
    queries, keys = hidden.shape[2:]
    diagonal = diagonal_of(causal, queries, keys)
    if diagonal is not None:
        _check_ahead(hidden, causal, diagonal)
        hidden = hidden.tril(diagonal)
    runs = _runs(hidden, most=1 if diagonal is not None else 2)
    (first, first_end), (second, second_end) = runs
    if diagonal is not None:
        columns = [first] if (first_end == queries).all() else [first, first_end]
    else:
        # A run from the first query on is above the diagonal, and so is the first of two.
        above = (second < queries) | (first == 0)
        begin, end = torch.where(above, second, first), torch.where(above, second_end, first_end)
        upper = torch.where(above, first, 0), torch.where(above, first_end, 0)
        short = (end == queries).all() and (upper[0] == 0).all()
        columns = [begin, upper[1]] if short else [begin, end, *upper]
    result = torch.stack(columns, -1).int()
    return Intervals(result.to(device) if device is not None else result, causal)


def _check_ahead(hidden, causal, diagonal):
    """SpecError if a query sees a key that the causal mask hides."""
    ahead = ~hidden & ~torch.ones_like(hidden).tril(diagonal)
    if ahead.any():
        batch, head, query, key = ahead.nonzero()[0].tolist()
        raise SpecError(
            f"mask[{batch}, {head}, {query}, {key}] is True, and causal={causal!r} hides key {key} "
            f"from query {query}: pass causal=False, or a mask that is False there"
        )


def _runs(hidden, most):
    """The first two runs of hidden queries per key, as (begin, end) of (batch, heads, keys); both
    are the number of queries where there is none. SpecError where a key has more than `most`."""
    queries = hidden.shape[2]
    padded = torch.nn.functional.pad(hidden, (0, 0, 1, 1))
    begins, ends = padded[:, :, 1:] & ~padded[:, :, :-1], padded[:, :, :-1] & ~padded[:, :, 1:]
    counts = begins.sum(2)
    if (counts > most).any():
        batch, head, key = (counts > most).nonzero()[0].tolist()
        runs = zip(*(x[batch, head, :, key].nonzero().flatten().tolist() for x in (begins, ends)))
        told = " and ".join(f"[{begin}, {end})" for begin, end in runs)
        raise SpecError(
            f"key {key} of batch {batch} and head {head} is hidden from the queries {told}: "
            f"intervals say at most {most} of these per key{' below the diagonal' * (most == 1)}. "
            "mask=sagebwd.masks.trace_mask('m[q, k] == 1', {'m': matrix}) takes any matrix"
        )
    places = torch.arange(queries + 1, device=hidden.device)[:, None]

    def place(marks, number):
        chosen = marks & (marks.cumsum(2) == number)
        return torch.where(chosen, places, queries).amin(2)

    return [(place(begins, number), place(ends, number)) for number in (1, 2)]
