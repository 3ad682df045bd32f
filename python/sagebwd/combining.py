"""What follows from `out` and `lse` without the kernels: parts over other keys, learned sinks.

Everything here is differentiable, and runs wherever its tensors are.
"""

import torch

from sagebwd import options
from sagebwd.tensors import DTYPES


def _beside(rows, out, layout):
    """Values of (batch, heads, queries), or (heads, tokens), as factors of out's channels."""
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
            f"{tuple(lse.shape)}: pass them as sagebwd.attention(..., return_lse=True) gives them"
        )


def _pair(name, part):
    """(out, lse) that a part is. TypeError for anything else, such as a tensor, which unpacks."""
    if not isinstance(part, (tuple, list)) or len(part) != 2:
        given = options.a_kind(part)
        if isinstance(part, (tuple, list)):
            given += f" of {len(part)}"
        raise TypeError(f"{name} is {given}; pass (out, lse) of its keys alone")
    return part


def merge(parts, *, layout="bhsd"):
    """(out, lse) over all keys of attention over some of them each: ring attention's forward.

    out = sum_i exp(lse_i - lse) out_i, lse = log sum_i exp(lse_i), in FP32.

    Args:
        parts: (out, lse) pairs of the same queries and disjoint keys, as `attention_forward` and
            `attention(..., return_lse=True)` give them, one at least.
        layout: of each out, as it was given to them.

    Returns:
        out, in the type of the first; lse, float32 like theirs, -inf where a query sees no key of
        any part: there out is zero, and so are gradients. A part whose lse is +inf, as a sink of
        +inf makes it, takes everything.

    The gradients of each part come from `attention_backward` with the merged out and lse, told of
    the part or of a shared `k_mean` as its documentation says, or from autograd through this
    function, where each part is smoothed by a mean of its own.

    Raises SpecError where parts do not fit together, TypeError for what are no pairs of tensors.
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
    """log sum exp of them, and the share that each has in the sum: (parts, ...).

    An infinite sum has no gradient: at those rows neither values nor gradients are NaN, which
    torch.logsumexp's are.
    """
    lses = torch.stack(lses)
    peak = lses.detach().amax(0)
    none, endless = peak == -torch.inf, peak == torch.inf
    # What is subtracted is finite, and what is added to finite numbers too.
    offset = torch.where(peak.isinf(), 0.0, peak)
    of_endless = torch.where(lses.detach() == torch.inf, 0.0, -torch.inf)
    weights = torch.where(endless, of_endless, lses - offset).exp()
    total = torch.where(none, 1.0, weights.sum(0))
    return torch.where(peak.isinf(), peak, total.log() + offset), weights / total


def of_part(part, dout, out, lse, dlse=None, *, layout="bhsd"):
    """What `attention_backward` takes for a part of the keys alone: dout, out, lse and dlse of it.

    With w = exp(lse of the part - lse), the part's share of a query, dS of the part is that of its
    own attention under w dout and w (rowsum(dout out_part) - rowsum(dout out) + dlse).
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

    # Where the part has nothing to see; in the whole there may be nothing either. Where it has all
    # that the whole has, both may be infinite.
    weight = torch.where(of_lse == lse, 1.0, (of_lse - lse).exp())
    weight = weight.masked_fill(of_lse == -torch.inf, 0)
    of_dout = (dout * _beside(weight, dout, layout)).to(dout.dtype)
    delta = rows(dout, out) if dlse is None else rows(dout, out) - dlse
    # Of dout as it is rounded, so that what kernels take from dP is w delta.
    return of_dout, of_out, of_lse, rows(of_dout, of_out) - weight * delta


def with_sink(out, lse, sink_logits, *, layout="bhsd"):
    """(out, lse) with a learned logit per head among the scores, whose value is zero.

    The form of gpt-oss (arXiv 2508.10925): softmax over the scores and the head's logit, which then
    is dropped. out' = sigmoid(lse - sink) out, lse' = log(exp(lse) + exp(sink)).

    Args:
        out, lse: as `attention(..., return_lse=True)` gives them.
        sink_logits: (heads,), any floating type, in units of the scaled scores.
        layout: of out.

    A logit of -inf switches the head's sink off: out and lse are what they were. One of +inf takes
    everything: out is zero and lse +inf. Neither has a gradient, and through a sink of +inf none
    flows. A query that sees no key leaves everything to a finite sink: out is zero and lse the
    logit. NaN gives NaN in its head.

    Gradients go to out, lse and sink_logits. Raises SpecError, TypeError.
    """
    _check(out, lse, layout)
    check_sink_logits(sink_logits, lse.shape[-2], lse.device)
    sink = sink_logits.float()[:, None].expand_as(lse)
    off, endless, nothing_seen = sink == -torch.inf, sink == torch.inf, lse == -torch.inf
    # Of finite numbers alone, so that gradients are finite where another value is put in its place.
    score, logit = lse.masked_fill(lse.isinf(), 0.0), sink.masked_fill(off | endless, 0.0)
    # sigmoid(score - logit), whose own gradient is 0 where the sink's share is below 2^-24.
    share = torch.exp(-torch.nn.functional.softplus(logit - score))
    share = torch.where(nothing_seen | endless, 0.0, torch.where(lse == torch.inf, 1.0, share))
    share = torch.where(off, 1.0, share)
    out = (out * _beside(share, out, layout)).to(out.dtype)
    whole = torch.where(nothing_seen, logit, torch.logaddexp(score, logit))
    whole = torch.where(off | (lse == torch.inf), lse, whole)
    return out, torch.where(endless, torch.inf, whole)


def check_sink_logits(sink_logits, heads, device):
    """SpecError or TypeError for anything but (heads,) numbers there."""
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
