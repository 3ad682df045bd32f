"""Computes from `out` and `lse` without kernels: merges parts of the keys, adds learned sinks.

Everything here is differentiable, and runs on the device of its tensors.
"""

import torch

from sagebwd.core import options
from sagebwd.core.arguments.tensors import DTYPES


def _beside(rows, out, layout):
    """Values of (batch, heads, queries) or (heads, tokens), in the shape that multiplies out."""
    if layout == "bshd" or out.dim() == 3:
        rows = rows.transpose(-1, -2)
    return rows.unsqueeze(-1)


def _check(out, lse, layout, index=""):
    options.check_layout(layout)
    for name, t in (("out", out), ("lse", lse)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}{index} is {options.a_kind(t)}; pass a torch tensor")
    rows = tuple(out.shape[:-1])
    if out.dim() == 3 or (layout == "bshd" and out.dim() == 4):
        rows = (*rows[:-2], rows[-1], rows[-2])
    if out.dim() not in (3, 4) or tuple(lse.shape) != rows or lse.dtype != torch.float32:
        raise options.SpecError(
            f"out{index} has shape {tuple(out.shape)} and lse{index} is {lse.dtype} of "
            f"{tuple(lse.shape)}: pass them as sagebwd.attention(..., return_lse=True) gives them, "
            f"and the layout that it was given (here layout={layout!r})"
        )


def _pair(name, part):
    """The part, if it is a pair (out, lse). TypeError otherwise, even for a tensor of length 2."""
    if not isinstance(part, (tuple, list)) or len(part) != 2:
        given = options.a_kind(part)
        if isinstance(part, (tuple, list)):
            given += f" of {len(part)}"
        raise TypeError(f"{name} is {given}; pass (out, lse) of its keys alone")
    return part


def merge(parts, *, layout="bhsd"):
    """Merges attention over parts of the keys into (out, lse) over all keys, as in ring attention.

    out = sum_i exp(lse_i - lse) out_i, lse = log sum_i exp(lse_i), in FP32.

    Args:
        parts: at least one pair (out, lse), with the same queries and disjoint keys, as
            `attention_forward` and `attention(..., return_lse=True)` return them.
        layout: the layout of every out.

    Returns:
        out, in the dtype of the first part, and lse, float32. For a query that sees no key of any
        part, lse is -inf, and out and gradients are zero. A part with an lse of +inf, which a sink
        of +inf causes, takes all the weight.

    Gradients flow through this function. To compute them without autograd, call
    `attention_backward` for each part with the merged out and lse, and with `part` or a shared
    `k_mean`.

    Raises SpecError if the parts do not fit together, and TypeError if they are not pairs of
    tensors.
    """
    if isinstance(parts, torch.Tensor) or not hasattr(parts, "__iter__"):
        raise TypeError(f"parts is {options.a_kind(parts)}; pass a list of (out, lse) pairs")
    parts = [_pair(f"part {i}", part) for i, part in enumerate(parts)]
    if not parts:
        raise options.SpecError("merge() was given no parts: pass (out, lse) pairs, one at least")
    for i, (out, lse) in enumerate(parts):
        _check(out, lse, layout, f" of part {i}")
        if out.shape != parts[0][0].shape or out.device != parts[0][0].device:
            raise options.SpecError(
                f"part 0 has out of {tuple(parts[0][0].shape)} on {parts[0][0].device} and part "
                f"{i} of {tuple(out.shape)} on {out.device}: all are of the same queries"
            )
    lse, shares = _shares([part[1] for part in parts])
    out = sum(x * _beside(share, x, layout) for (x, _), share in zip(parts, shares))
    return out.to(parts[0][0].dtype), lse


def _shares(lses):
    """Their log-sum-exp, and the share of each in the sum, of (parts, ...).

    An infinite sum has no gradient. There neither values nor gradients are NaN, as they would be
    with torch.logsumexp.
    """
    lses = torch.stack(lses)
    peak = lses.detach().amax(0)
    none, endless = peak == -torch.inf, peak == torch.inf
    # Subtract and add only finite numbers.
    offset = torch.where(peak.isinf(), 0.0, peak)
    of_endless = torch.where(lses.detach() == torch.inf, 0.0, -torch.inf)
    weights = torch.where(endless, of_endless, lses - offset).exp()
    total = torch.where(none, 1.0, weights.sum(0))
    return torch.where(peak.isinf(), peak, total.log() + offset), weights / total


def of_part(part, dout, out, lse, dlse=None, *, layout="bhsd"):
    """dout, out, lse and dlse with which `attention_backward` gives the gradients of a part.

    With w = exp(lse of the part - lse), the share of the part in a query's output, dS of the part
    is that of its own attention with the gradients w dout and w (rowsum(dout out_part) -
    rowsum(dout out) + dlse).
    """
    of_out, of_lse = _pair("part", part)
    _check(out, lse, layout)
    _check(of_out, of_lse, layout, " of part")
    given = {"out of part": (of_out, out), "dout": (dout, out)}
    if dlse is not None:
        given["dlse"] = dlse, lse
    for name, (t, like) in given.items():
        if (t.shape, t.dtype, t.device) != (like.shape, like.dtype, like.device):
            raise options.SpecError(
                f"{name} is {tuple(t.shape)} {t.dtype} on {t.device}; it must be "
                f"{tuple(like.shape)} {like.dtype} on {like.device}, as that of all keys is"
            )

    def rows(x, y):
        sums = (x.float() * y.float()).sum(-1)
        return sums.transpose(-1, -2) if layout == "bshd" or x.dim() == 3 else sums

    # Both may be -inf if a query sees no key, or infinite if the part has all keys that it sees.
    weight = torch.where(of_lse == lse, 1.0, (of_lse - lse).exp())
    weight = weight.masked_fill(of_lse == -torch.inf, 0)
    of_dout = (dout * _beside(weight, dout, layout)).to(dout.dtype)
    delta = rows(dout, out) if dlse is None else rows(dout, out) - dlse
    # From the rounded dout, so that the kernels subtract w delta from dP.
    return of_dout, of_out, of_lse, rows(of_dout, of_out) - weight * delta


def with_sink(out, lse, sink_logits, *, layout="bhsd"):
    """(out, lse) with a learned logit per head among the scores, with a value of zero.

    This is the sink of gpt-oss (arXiv 2508.10925): softmax over the scores and the head's logit,
    whose weight is then dropped. out' = sigmoid(lse - sink) out, lse' = log(exp(lse) + exp(sink)).

    Args:
        out, lse: results of `attention(..., return_lse=True)`.
        sink_logits: (heads,), any floating type, in the units of the scaled scores.
        layout: the layout of out.

    A logit of -inf switches the head's sink off: out and lse do not change. A logit of +inf takes
    all the weight: out is zero and lse is +inf. Both have a gradient of zero, and no gradient flows
    through a sink of +inf. If a query sees no key, a finite sink takes all the weight: out is zero
    and lse is the logit. A logit of NaN gives NaN in its head.

    Gradients flow to out, lse and sink_logits. Raises SpecError and TypeError.
    """
    _check(out, lse, layout)
    check_sink_logits(sink_logits, lse.shape[-2], lse.device)
    sink = sink_logits.float()[:, None].expand_as(lse)
    off, endless, nothing_seen = sink == -torch.inf, sink == torch.inf, lse == -torch.inf
    # Only finite numbers, so that gradients are finite even where the value is replaced.
    score, logit = lse.masked_fill(lse.isinf(), 0.0), sink.masked_fill(off | endless, 0.0)
    # sigmoid(score - logit), whose gradient in PyTorch is 0 if the share of the sink is below
    # 2^-24.
    share = torch.exp(-torch.nn.functional.softplus(logit - score))
    share = torch.where(nothing_seen | endless, 0.0, torch.where(lse == torch.inf, 1.0, share))
    share = torch.where(off, 1.0, share)
    out = (out * _beside(share, out, layout)).to(out.dtype)
    whole = torch.where(nothing_seen, logit, torch.logaddexp(score, logit))
    whole = torch.where(off | (lse == torch.inf), lse, whole)
    return out, torch.where(endless, torch.inf, whole)


def check_sink_logits(sink_logits, heads, device):
    """SpecError or TypeError unless these are (heads,) numbers on the device."""
    if not isinstance(sink_logits, torch.Tensor):
        raise TypeError(
            f"sink_logits is {options.a_kind(sink_logits)}; pass a torch tensor of (heads,)"
        )
    if sink_logits.dtype not in (torch.float32, torch.float64, *DTYPES):
        raise options.SpecError(f"sink_logits is {sink_logits.dtype}: pass a floating type")
    if tuple(sink_logits.shape) != (heads,) or sink_logits.device != device:
        raise options.SpecError(
            f"sink_logits has shape {tuple(sink_logits.shape)} on {sink_logits.device}: pass "
            f"({heads},), one logit for each query head, on {device}"
        )
