"""alpha: its forms, its estimate from the input, and the mixture of the two branches."""

import math

import torch

from sagebwd.core import options
from sagebwd.core.once import once
from sagebwd.core.transforms import refuse_batches, refuse_tangents
from sagebwd.lists import blocks
from sagebwd.lists.given import per_head, rows_of
from sagebwd.sla import estimated_kernels
from sagebwd.sla.parts import (
    alone,
    grouped,
    mask_by_group,
    parts_of,
    save,
    saved,
    saved_tensors,
    summed_to,
    wide,
)
from sagebwd.sla.router import pooled


def alpha_rows(alpha, q, size):
    """alpha of a call as (batch or 1, heads or 1, queries or 1), in FP32 or FP64."""
    rows, is_of_blocks = alpha_of_call(alpha, q, size)
    if is_of_blocks and rows.shape[2] != 1:
        return rows_of(rows, size, q.shape[2])
    return rows


def alpha_of_call(alpha, q, size):
    """(alpha, whether it is of blocks): (batch or 1, heads or 1, query blocks or 1), or queries in
    place of blocks, in FP32 or FP64."""
    batch, heads, queries = q.shape[:3]
    acc = wide(q.dtype)
    if not isinstance(alpha, torch.Tensor):
        return torch.full((1, 1, 1), float(alpha), dtype=acc, device=q.device), True
    count = blocks.count_of(queries, size)
    shape = tuple(alpha.shape)
    fits = (shape in ((), (heads,), (heads, count), (heads, 1))) or (
        len(shape) == 3 and shape[0] in (1, batch) and shape[1] in (1, heads)
        and shape[2] in (1, queries))  # fmt: skip
    if not fits or not alpha.is_floating_point() or alpha.device != q.device:
        raise options.SpecError(
            f"alpha is {alpha.dtype} of {shape} on {alpha.device}: pass a number, or floating "
            f"numbers of ({heads},), one for each head; of ({heads}, {count}), one for each query "
            f"block of a head; or of ({blocks.either(batch)}, {blocks.either(heads)}, {queries}); "
            f"or one number; on {q.device}"
        )
    if alpha.dtype != acc:
        alpha = alpha.to(acc)
    if len(shape) == 3:
        return alpha, shape[2] == 1
    return alpha.view((1, *shape, 1)[:3] if shape else (1, 1, 1)), True


def with_ends(rows, mask, heads, size, queries, linear):
    """The rows with 0 where nothing is listed, and 1 where everything is and the linear branch
    therefore sees nothing."""
    nothing = ~per_head(mask.any(-1), heads)
    rows = torch.where(rows_of(nothing, size, queries), 0.0, rows)
    if linear != "complement":
        return rows
    everything = per_head((mask == 1).all(-1), heads)
    return torch.where(rows_of(everything, size, queries), 1.0, rows)


def estimated_alpha(q, k, lse, mask, beta, sizes, scale):
    """sigmoid(lse - rest - beta) of (batch, heads, queries).

    rest is the logarithm of what the keys of blocks that are not listed weigh, if all keys of a
    block are their mean. It is 1 / (keys of a block) of the work of all scores.
    """
    left = lse - estimated_rest(q, k, mask, sizes, scale)
    return _Sigmoid.apply(left if beta is None else left - beta.to(left.dtype)[:, None])


class _Sigmoid(torch.autograd.Function):
    """torch.sigmoid, whose slope here lacks the difference 1 - sigmoid(x), which FP32 rounds to
    nothing where the exact branch has nearly all the weight."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sigmoid(x)

    @staticmethod
    def backward(ctx, dy):
        refuse_batches(dy)
        (x,) = saved_tensors(ctx)
        return dy * torch.sigmoid(x) * torch.sigmoid(-x)


def estimated_rest(q, k, mask, sizes, scale):
    """rest of `estimated_alpha`, (batch, heads, queries)."""
    if estimated_kernels.take(q, k, mask, sizes):
        return _RestByKernels.apply(q, k, mask, sizes, float(scale))
    of_k, counts = pooled(k, sizes[1])
    weights = (1 - mask.to(of_k.dtype)) * counts[:, 0]
    return _LogSum.apply(q, of_k, weights, sizes[0], float(scale))


class _RestByKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, mask, sizes, scale):
        rest, *kept = estimated_kernels.forward(q, k, mask, sizes, scale)
        save(ctx, q, k, mask, *kept)
        ctx.sizes, ctx.scale = sizes, scale
        return rest

    @staticmethod
    def backward(ctx, drest):
        refuse_batches(drest)
        refuse_tangents(drest)
        q, k, mask, *kept = saved(ctx)
        found = estimated_kernels.backward(drest, q, mask, *kept, ctx.sizes, ctx.scale, k.shape[2])
        return *once(found, drest, q, k), None, None, None


class _LogSum(torch.autograd.Function):
    """log sum_j weights_ij exp(scale q_n . k_j), of (batch, heads, queries), in parts."""

    @staticmethod
    def parts(q, k, weights, size, scale):
        heads_kv, queries = k.shape[1], q.shape[2]
        of_q = grouped(q, heads_kv)
        weights = mask_by_group(weights, (q.shape[0], q.shape[1], heads_kv))
        for b, h in parts_of(q.shape[0], heads_kv, 16 * of_q.shape[2] * queries * k.shape[2]):
            x = of_q[b, h].to(k.dtype)
            s = (x @ k[b, h].unsqueeze(2).mT).mul_(scale)
            each = weights[b, h].repeat_interleave(size, -2)[..., :queries, :]
            yield (b, h), x, s, each

    @staticmethod
    def forward(ctx, q, k, weights, size, scale):
        out = torch.empty(q.shape[:3], dtype=k.dtype, device=q.device)
        to = grouped(out, k.shape[1])
        with alone(q.device):
            for (b, h), _, s, each in _LogSum.parts(q, k, weights, size, scale):
                to[b, h] = s.add_(each.log()).logsumexp(-1)
        ctx.size, ctx.scale = size, scale
        ctx.save_for_backward(q, k, weights, out)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, weights, out = saved_tensors(ctx)
        told = dout, q, k, weights
        heads_kv, size = k.shape[1], ctx.size
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        with alone(q.device):
            dout = dout.masked_fill(out == -math.inf, 0)
            sums = out.masked_fill(out == -math.inf, 0)
            dw = torch.zeros_like(mask_by_group(weights, (q.shape[0], q.shape[1], heads_kv)),
                                  memory_format=torch.contiguous_format)  # fmt: skip
            dout, sums, to = (grouped(t, heads_kv) for t in (dout, sums, dq))
            for (b, h), x, s, each in _LogSum.parts(q, k, weights, size, ctx.scale):
                # The exponent is bounded: exp could overflow if the weight is 0.
                s = s.sub_(sums[b, h].unsqueeze(-1)).clamp_(max=60).exp_()
                s.mul_(dout[b, h].unsqueeze(-1))
                if ctx.needs_input_grad[2]:
                    dw[b, h] = _of_blocks(s, size)
                s.mul_(each)
                to[b, h] = (s @ k[b, h].unsqueeze(2)).mul_(ctx.scale)
                dk[b, h] = (s.mT @ x).sum(2).mul_(ctx.scale)
            dw = summed_to(dw, weights.shape) if ctx.needs_input_grad[2] else None
        return *once((dq, dk, dw), *told), None, None


def _of_blocks(x, size):
    missing = -x.shape[-2] % size
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return x.unflatten(-2, (-1, size)).sum(-2)


def mixed(out_sparse, out_linear, alpha):
    """alpha out_sparse + (1 - alpha) out_linear, in FP32 and rounded once. alpha: (batch or 1,
    heads or 1, queries or 1)."""
    return _Mixture.apply(out_sparse, out_linear, alpha)


class _Mixture(torch.autograd.Function):
    """Keeps no FP32 copies for the backward."""

    @staticmethod
    def forward(ctx, sparse, linear, alpha):
        ctx.save_for_backward(sparse, linear, alpha)
        out = torch.empty_like(sparse)
        with alone(sparse.device):
            for b in range(sparse.shape[0]):
                of = alpha[b if alpha.shape[0] > 1 else 0].unsqueeze(-1)
                out[b] = torch.lerp(linear[b].to(of.dtype), sparse[b].to(of.dtype), of)
        return out

    @staticmethod
    def backward(ctx, dout):
        refuse_batches(dout)
        sparse, linear, alpha = saved_tensors(ctx)
        d_sparse, d_linear = torch.empty_like(sparse), torch.empty_like(linear)
        d_alpha = torch.empty(sparse.shape[:3], dtype=alpha.dtype, device=alpha.device)
        with alone(sparse.device):
            for b in range(sparse.shape[0]):
                of = alpha[b if alpha.shape[0] > 1 else 0].unsqueeze(-1)
                do = dout[b].to(of.dtype)
                first = do * of
                d_sparse[b], d_linear[b] = first, do - first
                d_alpha[b] = (do * (sparse[b].to(of.dtype) - linear[b])).sum(-1)
            d_alpha = d_alpha.sum_to_size(alpha.shape)
        return once((d_sparse, d_linear, d_alpha), dout, sparse, linear, alpha)
