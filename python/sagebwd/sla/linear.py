"""Linear attention to the keys of blocks that are not listed, forward and backward.

With F = phi(Q) and G = phi(K - mean) by blocks, h_j = G_j^T V_j and z_j = G_j^T 1, the keys that
query block i sees here have H_i = sum (1 - m_ij) h_j and Z_i = sum (1 - m_ij) z_j, and its output
is (F_i H_i) / (F_i Z_i) (SLA2, arXiv 2602.12675, Algorithm 2). The sums over blocks are one matrix
product, directly over the blocks that are not listed, so that nothing cancels. phi is the softmax
over channels.

16-bit inputs have bf16 operands and sums in FP32, and h and H are rounded to bf16. F and G are
rounded before the normaliser is formed, which keeps the weights of V summing to 1.
"""

import torch

from sagebwd.core.once import once
from sagebwd.core.transforms import refuse_batches, refuse_tangents
from sagebwd.sla import linear_kernels
from sagebwd.sla.parts import (
    alone,
    grouped,
    in_blocks,
    mask_by_group,
    narrow,
    no_tokens,
    of_tokens,
    parts_of,
    product,
    save,
    saved,
    saved_tensors,
    softmax_backward,
    summed_to,
    wide,
)


def linear_branch(q, k, v, mask, sizes, smooth_k=True):
    """The output, like q with v's channels.

    Args:
        q: (batch, heads, queries, channels); k, v: (batch, heads_kv, keys, channels).
        mask: (batch or 1, heads or heads_kv or 1, query blocks, key blocks), bool, or of values
            from 0 to 1, which get a gradient; None means that no block is listed.
        sizes: queries and keys of a block.
    """
    if 0 in (*q.shape[:3], k.shape[2]):
        return no_tokens(q, k, v)
    return _LinearBranch.apply(q, k, v, *lists_or_none(q, k, mask, sizes), smooth_k)


def lists_or_none(q, k, mask, sizes):
    """(mask, sizes); without lists one block of everything, which nobody lists."""
    if mask is not None:
        return mask, sizes
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=q.device), (q.shape[2], k.shape[2])


class _Part:
    """Some key heads of some of the batch, up to what both passes need."""

    def __init__(self, q, k, v, mask, where, sizes, smooth_k, mean):
        b, h = where
        self.acc, self.low, self.smooth_k = wide(q.dtype), narrow(q.dtype), smooth_k
        self.f = in_blocks(q[b, h], sizes[0]).to(self.acc).softmax(-1)
        keys = k[b, h].to(self.acc)
        if smooth_k:
            keys = keys - mean[b, h]
        self.g = in_blocks(keys.softmax(-1), sizes[1])
        self.v = in_blocks(v[b, h], sizes[1]).to(self.low)
        self.left = (1 - mask[b, h].to(self.acc)).to(self.low).flatten(2, 3)  # (n, n, G Tq, Tk)
        self.f_low, self.g_low = self.f.to(self.low), self.g.to(self.low)
        self.h = self.g_low.mT @ self.v
        self.z = self.g_low.sum(-2, dtype=self.acc)
        # These are of all query blocks of the group: (n, n, G Tq, ...).
        self.sums = (self.left @ self.h.flatten(-2)).unflatten(-1, self.h.shape[-2:])
        self.norms = self.left.to(self.acc) @ self.z
        self.f_rows = self.f_low.flatten(2, 3)
        self.u = self.f_rows.to(self.acc) @ self.norms.unsqueeze(-1)
        nothing_left = ~self.left.any(-1)
        self.u = self.u.masked_fill(nothing_left[..., None, None], 1)

    def many(self, a, b):
        """Products of blocks, (n, n, blocks, ...), in the type of sums."""
        found = product(a.flatten(0, 1), b.flatten(0, 1))
        return found.unflatten(0, a.shape[:2])

    def output(self, queries):
        """(n, n, group, queries, channels), in the type of sums."""
        rows = self.many(self.f_rows, self.sums).div_(self.u)
        return of_tokens(rows.unflatten(2, self.f.shape[2:4]), queries)

    def gradients(self, dout, out, keys, wants_mask=False):
        """(dq, dk, dv) in the type of sums, and that of (n, n, group, Tq, Tk) or None; `out` is the
        output and dout its gradient."""
        queries, size = dout.shape[-2], self.f.shape[-2]
        do = in_blocks(dout, size).flatten(2, 3)
        inner = do.to(self.acc) * in_blocks(out, size).flatten(2, 3)
        delta = inner.sum(-1, keepdim=True)
        del inner
        do = do.to(self.low)
        df = self.many(do, self.sums.mT)
        df = (df - delta * self.norms.unsqueeze(-2)) / self.u
        dq = of_tokens(softmax_backward(self.f, df.view_as(self.f)), queries)
        del df
        w = (self.f_rows.to(self.acc) / self.u).to(self.low)
        d_sums, d_norms = w.mT @ do, -(w.to(self.acc) * delta).sum(-2)
        del do, w
        a = (self.left.mT @ d_sums.flatten(-2)).unflatten(-1, d_sums.shape[-2:])
        y = self.left.mT.to(self.acc) @ d_norms
        dv = of_tokens(self.many(self.g_low, a), keys)
        dg = self.many(self.v, a.mT) + y.unsqueeze(-2)
        dk = of_tokens(softmax_backward(self.g, dg), keys)
        if self.smooth_k:
            dk = dk - dk.mean(-2, keepdim=True)
        dm = None
        if wants_mask:
            found = product(d_sums.flatten(-2), self.h.flatten(-2).mT)
            dm = -(found + d_norms @ self.z.mT)
        return dq, dk, dv, dm


class _LinearBranch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, sizes, smooth_k):
        ctx.sizes, ctx.smooth_k = sizes, smooth_k
        ctx.by_kernels = linear_kernels.take(q, k, v, mask, sizes)
        if ctx.by_kernels:
            save(ctx, q, k, v, mask)
            return linear_kernels.forward(q, k, v, mask, sizes, smooth_k)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        to = grouped(out, k.shape[1])
        with alone(q.device):
            for (b, h), part in linear_parts(q, k, v, mask, sizes, smooth_k):
                to[b, h] = part.output(q.shape[2])
                del part
        ctx.save_for_backward(q, k, v, mask, out)
        return out

    @staticmethod
    def backward(ctx, dout):
        refuse_batches(dout)
        if ctx.by_kernels:
            refuse_tangents(dout)
            given = saved(ctx)
            found = linear_kernels.backward(dout, *given, ctx.sizes, ctx.smooth_k)
            return *once(found, dout, *given[:3]), None, None, None
        q, k, v, mask, out = saved_tensors(ctx)
        told = dout, q, k, v, mask
        heads_kv, wants_mask = k.shape[1], ctx.needs_input_grad[3]
        dq, dk, dv, dm = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None
        with alone(q.device):
            if wants_mask:
                of_group = mask_by_group(mask, (q.shape[0], q.shape[1], heads_kv))
                dm = torch.empty_like(of_group, dtype=wide(q.dtype),
                                      memory_format=torch.contiguous_format)  # fmt: skip
            dout, out, to = (grouped(t, heads_kv) for t in (dout, out, dq))
            for (b, h), part in linear_parts(q, k, v, mask, ctx.sizes, ctx.smooth_k):
                to[b, h], dk[b, h], dv[b, h], found = part.gradients(
                    dout[b, h], out[b, h], k.shape[2], wants_mask
                )
                if wants_mask:
                    dm[b, h] = found.view_as(dm[b, h])
                del part, found
            if wants_mask:
                dm = summed_to(dm, mask.shape).to(mask.dtype)
        return *once((dq, dk, dv, dm), *told), None, None


def linear_parts(q, k, v, mask, sizes, smooth_k):
    """(where, _Part), each of as many heads as memory is meant for."""
    batch, heads_kv, keys, channels = k.shape
    group, queries = q.shape[1] // heads_kv, q.shape[2]
    blocks = group * -(-queries // sizes[0]) + -(-keys // sizes[1])
    bytes_of_one = 4 * blocks * channels * v.shape[3] + 24 * channels * (group * queries + keys)
    mean = k.mean(2, keepdim=True, dtype=wide(k.dtype)) if smooth_k else None
    by_group, of_q = mask_by_group(mask, (batch, q.shape[1], heads_kv)), grouped(q, heads_kv)
    for where in parts_of(batch, heads_kv, bytes_of_one):
        yield where, _Part(of_q, k, v, by_group, where, sizes, smooth_k, mean)
