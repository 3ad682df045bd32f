"""Attention to the keys of listed blocks in PyTorch's own products, on any device.

This is what `block_sparse_attention` computes, without its kernels: for the CPU, for FP32 and
FP64, for tests, and for masks with values between 0 and 1, where a key of weight m counts m times
(log m is added to its score). Scores exist for a few query blocks at a time.
"""

import math

import torch
import torch.nn.functional as F

from sagebwd.core.once import once
from sagebwd.core.transforms import refuse_batches
from sagebwd.sla.parts import (
    PART_BYTES,
    alone,
    between,
    grouped,
    mask_by_group,
    parts_of,
    product,
    saved_tensors,
    summed_to,
    wide,
)


def listed_attention(q, k, v, mask, sizes, scale):
    """(out, lse) of the keys of listed blocks; arguments are those of `linear_branch`.

    lse is (batch, heads, queries) in FP32 (FP64 for inputs of FP64). A query block that lists
    nothing has out = 0, lse = -inf and no gradient. A mask of None lists everything.
    """
    return _ListedAttention.apply(q, k, v, mask, sizes, float(scale))


def weighted_attention(q, k, v, lists, sizes, scale, kernels):
    """`listed_attention` with masks of 0 to 1, which kernels do not take, in their place."""
    return listed_attention(q, k, v, lists.mask, sizes, scale)


class Scores:
    """Scores of some query blocks with all keys, as (n, n, group rows, keys), in parts."""

    def __init__(self, q, k, mask, sizes, scale):
        self.q, self.heads_kv, self.sizes, self.scale = q, k.shape[1], sizes, scale
        self.of_q = grouped(q, self.heads_kv)
        self.k, self.keys = k, k.shape[2]
        self.shape = q.shape[0], q.shape[1], self.heads_kv
        self.mask = None if mask is None else mask_by_group(mask, self.shape)
        self.low, self.acc = between(q.dtype), wide(q.dtype)

    def parts(self):
        """(where in batch and heads, which queries, which query blocks)."""
        group, queries = self.shape[1] // self.heads_kv, self.q.shape[2]
        of_row = 16 * group * max(1, self.keys)
        for where in parts_of(self.shape[0], self.heads_kv, of_row * queries):
            step = max(1, PART_BYTES // (of_row * self.sizes[0])) * self.sizes[0]
            for first in range(0, queries, step):
                last = min(queries, first + step)
                blocks = slice(first // self.sizes[0], -(-last // self.sizes[0]))
                yield where, slice(first, last), blocks

    def expanded(self, part, rows, blocks):
        """A part of the mask for each (query, key): (n, n, group, rows, keys)."""
        part = part[..., blocks, :].repeat_interleave(self.sizes[1], -1)[..., : self.keys]
        return part.repeat_interleave(self.sizes[0], -2)[..., : rows.stop - rows.start, :]

    def of(self, where, rows, blocks):
        """(scores, mask for each, or None), both (n, n, group, rows, keys)."""
        b, h = where
        x = self.of_q[b, h][..., rows, :]
        s = product(x.flatten(2, 3), self.k[b, h].mT).mul_(self.scale)
        s = s.unflatten(2, x.shape[2:4])
        return s, None if self.mask is None else self.expanded(self.mask[b, h], rows, blocks)

    def summed(self, x):
        """(..., rows, keys) summed over blocks."""
        missing = -x.shape[-2] % self.sizes[0], -x.shape[-1] % self.sizes[1]
        x = F.pad(x, (0, missing[1], 0, missing[0]))
        return x.unflatten(-1, (-1, self.sizes[1])).sum(-1).unflatten(
            -2, (-1, self.sizes[0])).sum(-2)  # fmt: skip


def _weighed(s, m):
    """Scores with the logarithm of the mask, in place."""
    if m is None:
        return s
    return s.masked_fill_(~m, -math.inf) if m.dtype == torch.bool else s.add_(m.log())


class _ListedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, sizes, scale):
        ctx.sizes, ctx.scale = sizes, scale
        with alone(q.device):
            out, lse = forward(q, k, v, mask, sizes, scale)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        refuse_batches(dout, dlse)
        if dout is None and dlse is None:
            return (None,) * 6
        q, k, v, mask, out, lse = saved_tensors(ctx)
        told = dout, dlse, q, k, v, mask
        dout = torch.zeros_like(out) if dout is None else dout
        wants = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        with alone(q.device):
            found = backward(dout, q, k, v, out, lse, dlse, mask, ctx.sizes, ctx.scale, *wants)
        return *once(found, *told), None, None


def forward(q, k, v, mask, sizes, scale):
    """`listed_attention` without gradients."""
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    scores = Scores(q, k, mask, sizes, scale)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=scores.acc)
    of_out, of_lse = grouped(out, k.shape[1]), grouped(lse, k.shape[1])
    for (b, h), rows, blocks in scores.parts() if k.shape[2] else ():
        s, m = scores.of((b, h), rows, blocks)
        s = _weighed(s, m)
        sums = s.logsumexp(-1)
        p = s.sub_(sums.masked_fill(sums == -math.inf, 0).unsqueeze(-1)).exp_()
        of_lse[b, h, :, rows] = sums
        found = product(p.to(scores.low).flatten(2, 3), v[b, h])
        of_out[b, h, :, rows] = found.unflatten(2, p.shape[2:4]).to(out.dtype)
    return out, lse


def backward(dout, q, k, v, out, lse, dlse, mask, sizes, scale, wants_inputs=True,
             wants_mask=False):  # fmt: skip
    """(dq, dk, dv, the mask's gradient), None for what is not wanted; dlse may be None."""
    heads_kv = k.shape[1]
    scores = Scores(q, k, mask, sizes, scale)
    acc, low = scores.acc, scores.low
    delta = (dout.to(acc) * out).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    lse = lse.masked_fill(lse == -math.inf, 0)  # such rows see nothing: p is 0
    dout, delta, lse = (grouped(t, heads_kv) for t in (dout, delta, lse))
    dq = dk = dv = dm = None
    if wants_inputs:
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(t, dtype=acc) for t in (k, v))
        of_dq = grouped(dq, heads_kv)
    if wants_mask:
        dm = torch.zeros_like(scores.mask, dtype=acc, memory_format=torch.contiguous_format)
    for (b, h), rows, blocks in scores.parts() if k.shape[2] else ():
        s, m = scores.of((b, h), rows, blocks)
        s.sub_(lse[b, h, :, rows].unsqueeze(-1))
        do = dout[b, h, :, rows].flatten(2, 3)
        ds = product(do, v[b, h].mT).view_as(s)
        ds.sub_(delta[b, h, :, rows].unsqueeze(-1))
        if wants_mask:  # There is no division by m, so exp could overflow if m is 0.
            dm[b, h, :, blocks] = scores.summed(s.clamp(max=60).exp_() * ds)
        p = _weighed(s, m).exp_()
        if not wants_inputs:
            continue
        ds = ds.mul_(p).to(low).flatten(2, 3)
        p = p.to(low).flatten(2, 3)
        x = scores.of_q[b, h][..., rows, :].flatten(2, 3)
        found = product(ds, k[b, h]).mul_(scale)
        of_dq[b, h, :, rows] = found.unflatten(2, (-1, rows.stop - rows.start)).to(q.dtype)
        dk[b, h] += product(ds.mT, x).mul_(scale)
        dv[b, h] += product(p.mT, do)
    if wants_inputs:
        dk, dv = dk.to(k.dtype), dv.to(v.dtype)
    if wants_mask:
        dm = summed_to(dm, mask.shape).to(mask.dtype)
    return dq, dk, dv, dm
