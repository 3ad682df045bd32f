"""Functions of the score that other libraries have arguments for, as `score=` of attention."""

import math

import torch

from sagebwd.core import seams
from sagebwd.core.options import SpecError

#: Rows of a position bias are as long as a multiple of this many keys, so that sequences of similar
#: lengths share kernels: their text has the length.
_KEYS = 256


def score_of(softcap, alibi_slopes, q, k):
    """What flash-attention makes of a scaled score s: softcap tanh(s / softcap), and then minus
    slope |i + keys - queries - j|. None where nothing is asked for.

    Args:
        softcap: a number; None and 0 mean none.
        alibi_slopes: float32 of (heads,) or (batch, heads) on q's device, or None.
        q, k: (batch, tokens, heads, head_dim).

    Raises SpecError for other values and shapes.
    """
    capped = softcapped(softcap)
    if alibi_slopes is None or not all(_has_four_dimensions(t) for t in (q, k)):
        return capped  # attention says what is wrong with the tensors
    _check_slopes(alibi_slopes, q)
    slope = "slope[h]" if alibi_slopes.dim() == 1 else "slope[b, h]"
    operands, distance, shift = {"slope": alibi_slopes}, "q - k", k.shape[1] - q.shape[1]
    if shift:  # no constant of the text: each number of keys would have kernels of its own
        operands["shift"] = torch.full((1,), shift, dtype=torch.float32, device=q.device)
        distance = "q - k + shift[0]"
    return seams.traced("score", f"{capped or 's'} - {slope} * abs({distance})", operands)


def _has_four_dimensions(t):
    return isinstance(t, torch.Tensor) and t.dim() == 4


def softcapped(softcap):
    """The text of softcap tanh(s / softcap), or None for None and 0."""
    if softcap is None:
        return None
    is_number = isinstance(softcap, (int, float)) and not isinstance(softcap, bool)
    if not is_number or not 0 <= softcap < math.inf:
        raise SpecError(f"softcap={softcap!r}: pass a positive number, below which scores stay, or "
                        "0.0 for none")  # fmt: skip
    return f"{float(softcap)} * tanh(s / {float(softcap)})" if softcap else None


def _check_slopes(slopes, q):
    if not isinstance(slopes, torch.Tensor) or slopes.dtype != torch.float32:
        what = slopes.dtype if isinstance(slopes, torch.Tensor) else type(slopes).__name__
        raise SpecError(f"alibi_slopes is {what}: pass a torch.float32 tensor of (heads,) or "
                        "(batch, heads)")  # fmt: skip
    batch, _, heads, _ = q.shape
    if tuple(slopes.shape) not in ((heads,), (batch, heads)) or slopes.device != q.device:
        raise SpecError(f"alibi_slopes has shape {tuple(slopes.shape)} on {slopes.device}: pass "
                        f"({heads},) or ({batch}, {heads}) on {q.device}")  # fmt: skip


def biased(capped, bias, query, key):
    """A score function that adds a tensor, as models such as T5 hand one to attention.

    Args:
        capped: the text of what comes before, or None.
        bias: (batch or 1, heads, queries, keys) of a floating type. It gets a gradient.
        query, key: (batch, heads, tokens, head_dim).

    Raises SpecError for other shapes.
    """
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    if tuple(bias.shape) not in ((1, heads, queries, keys), (batch, heads, queries, keys)):
        raise SpecError(f"position_bias has shape {tuple(bias.shape)}: pass (batch or 1, {heads}, "
                        f"{queries}, {keys}), a number for each score")  # fmt: skip
    columns = -(keys // -_KEYS) * _KEYS
    rows = torch.nn.functional.pad(bias.float(), (0, columns - keys)).flatten(0, 1).flatten(1)
    row = "h" if bias.shape[0] == 1 else f"b * {heads} + h"
    text = f"{capped or 's'} + bias[{row}, q * {columns} + k]"
    return seams.traced("score", text, {"bias": rows})
