"""Both branches and their mixture as one function of autograd, for the memory that it saves.

Separately, each branch keeps its output for the backward, the mixture makes a gradient for each,
and each branch makes dq, dk and dv. Here the sparse output alone is kept: that of the linear branch
is formed again, a few heads at a time, its gradient never exists as a whole, and its dq, dk and dv
are added to those of the sparse branch. `by_kernels` has the backward for GPUs.
"""

from typing import NamedTuple

import torch

from sagebwd.core import direct, ops, options
from sagebwd.core.arguments.tensors import DTYPES
from sagebwd.lists import block_sparse, list_ops
from sagebwd.lists.given import rows_of
from sagebwd.sla import by_kernels, estimated_kernels, exact, linear_kernels
from sagebwd.sla.linear import linear_parts
from sagebwd.sla.mixing import sigmoid_slope
from sagebwd.sla.parts import alone, grouped, in_blocks, is_captured, of_heads, once, save, saved


class Sparse(NamedTuple):
    """The sparse branch without autograd. `lists` is a mask, or what the kernels read."""

    lists: torch.Tensor
    told: tuple  #: to the operators, behind the lists; () for PyTorch's own products
    sizes: tuple
    scale: float

    def forward(self, q, k, v):
        if not self.told:
            return exact.forward(q, k, v, self.lists, self.sizes, self.scale)
        given = q, k, v, self.lists
        if direct.is_watched(*given):
            return torch.ops.sagebwd.block_sparse_forward(*given, *self.told)
        return list_ops.forward(*given, *self.told)

    def backward(self, dout, q, k, v, out, lse, dlse):
        given = dout, q, k, v, out, lse, dlse, self.lists
        if not self.told:
            return exact.backward(*given, self.sizes, self.scale)[:3]
        return torch.ops.sagebwd.block_sparse_backward(*given, *self.told)

    def backward_into(self, gradients, empty, dout, q, k, v, out, lse, dlse):
        """`backward` with results in `gradients`, and a workspace from `empty`, see `Room`."""
        given = dout, q, k, v, out, lse, dlse, self.lists
        if self.told:
            list_ops.backward_into(gradients, empty, *given, *self.told)
            return
        for to, found in zip(gradients, exact.backward(*given, self.sizes, self.scale)):
            to.copy_(found)

    def tell_of_backward(self, q, k, v):
        if self.told:
            list_ops.tell_of_backward(q, k, v, self.lists, *self.told)


def check_for_kernels(q):
    """SpecError for a tensor that only precision='exact' takes."""
    if q.device.type in ops.DEVICES and q.dtype in DTYPES:
        return
    text = (f"q is {q.dtype} on {q.device}; the kernels take torch.bfloat16 or torch.float16 on a "
            "CUDA GPU")  # fmt: skip
    if q.device.type in ops.DEVICES:
        raise options.SpecError(
            f"{text}: convert it, run under torch.autocast('cuda'), or pass precision='exact', "
            "which takes every floating type"
        )
    raise options.SpecError(
        f"{text}. Elsewhere pass precision='exact', which takes every floating type on any device; "
        "sagebwd.emulation.emulated_block_sparse_attention computes the sparse branch with its "
        "INT8 products, and sagebwd.reference.sparse_linear all in FP64"
    )


def sparse_of(q, k, v, lists, sizes, scale, kernels):
    """The `Sparse` of a call: `kernels` are the keywords of `block_sparse_attention`."""
    if kernels["precision"] == "exact":
        return Sparse(lists.mask, (), sizes, scale)
    check_for_kernels(q)
    # Tensors and lists belong together, as `functional.prepared` and `lists_of` have found.
    chosen = dict(causal=False, **kernels)
    *_, text = block_sparse.told_of_tensors(q, k, v, sizes, scale, "bhsd", chosen)
    heads = q.shape[1], k.shape[1]
    bits = block_sparse.bits_of_checked(lists.arguments, heads, lists.mask.shape[3], sizes)
    return Sparse(bits, (scale, "bhsd", text), sizes, scale)


class Alpha(NamedTuple):
    """alpha of each query from `rows`: they are alpha, or what sigmoid(lse - rows) is to have."""

    estimated: bool
    of_blocks: bool  #: whether rows have one for each query block, or for all
    size: int  #: queries of a block
    none: torch.Tensor  #: blocks that list nothing, (batch or 1, heads or 1, query blocks)
    all: torch.Tensor | None  #: that list everything, if no key is left for the linear branch

    def of(self, rows, lse):
        queries, ends = lse.shape[2], (self.none, self.all)
        if self.estimated:
            rows = torch.sigmoid(lse - rows)
        if not self.of_blocks:
            ends = [t if t is None else rows_of(t, self.size, queries) for t in ends]
        alpha = rows.masked_fill(ends[0], 0)
        if ends[1] is not None:
            alpha.masked_fill_(ends[1], 1)
        if self.of_blocks:
            alpha = rows_of(alpha, self.size, queries)
        return alpha.expand(lse.shape)

    def of_heads(self, b, h, heads_kv):
        """Returns this, of a part of the batch and of the key heads."""
        none, everything = (t if t is None else of_heads(t, b, h, heads_kv) for t in self[3:])
        return self._replace(none=none, all=everything)

    def slope(self, rows, lse):
        """By which an estimated alpha falls with its rows, for each query; None of a given one."""
        if not self.estimated:
            return None
        found = sigmoid_slope(lse - rows)
        self._clear(found)  # the kernels' lse is NaN where a list names no block that exists
        return found

    def gradient(self, d_alpha, slope):
        """That of an estimated alpha's rows, for each query. d_alpha becomes 0 where it is not
        used."""
        self._clear(d_alpha)
        return -d_alpha * slope

    def gradient_of_rows(self, d_alpha, shape):
        """That of alpha as it is given, summed over what shares a row. d_alpha becomes 0 where it
        is not used."""
        self._clear(d_alpha)
        if not self.of_blocks or shape[2] == 1:
            return d_alpha.sum_to_size(shape)
        d_alpha = d_alpha.sum_to_size(*shape[:2], d_alpha.shape[2])
        return in_blocks(d_alpha.unsqueeze(-1), self.size).sum((-2, -1))

    def _clear(self, d_alpha):
        queries = d_alpha.shape[2]
        for end in (self.none, self.all):
            if end is None:
                continue
            if queries % self.size:
                d_alpha.masked_fill_(rows_of(end, self.size, queries), 0)
            else:  # without a copy of the end for each query
                d_alpha.unflatten(2, (-1, self.size)).masked_fill_(end.unsqueeze(-1), 0)


def attend(q, k, v, rows, sparse, alpha, mask, sizes, smooth_k, listed=None, share_lists=False):
    """The mixed output.

    Args:
        rows: (batch or 1, heads or 1, query blocks or queries or 1), see `Alpha`; gets a gradient.
        mask, sizes: the blocks that the linear branch leaves out, as for `linear_branch`.
        listed: a mask of the listed blocks, for which `estimates_inside` is true: then rows are
            estimated here, and what is given as rows is beta or None.
        share_lists: whether the sparse branch has the same lists as the linear one.
    """
    # Bits that the sparse branch's kernels read serve those of the linear branch too.
    as_bits = share_lists and bool(sparse.told)
    return _Attend.apply(q, k, v, rows, mask, sparse.lists, alpha.none, alpha.all, listed,
                         (sparse[1:], alpha[:3], sizes, smooth_k, as_bits))  # fmt: skip


def estimates_inside(q, k, v, listed, sizes, mask, sizes_of_linear):
    """Whether the estimate's gradients can be added to those of both branches where they lie."""
    return estimated_kernels.take(q, k, listed, sizes) and (
        linear_kernels.take(q, k, v, mask, sizes_of_linear))  # fmt: skip


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, rows, mask, lists, none, everything, listed, more):
        told, of_alpha, sizes, smooth_k, as_bits = ctx.more = more
        ctx.estimates = listed is not None
        ctx.was_captured = is_captured(q)
        sparse, alpha = Sparse(lists, *told), Alpha(*of_alpha, none, everything)
        with alone(q.device):
            of_sparse, lse = sparse.forward(q, k, v)
            estimate = ()
            if ctx.estimates:
                beta = rows
                rows, *kept = estimated_kernels.of_call(q, k, listed, sparse.sizes, sparse.scale)
                estimate = beta, listed, *kept
                if beta is not None:
                    rows.add_(beta.to(rows.dtype)[:, None])
            ctx.shape_of_rows = rows.shape
            mixed = alpha.of(rows, lse)
            rows = rows if alpha.estimated else mixed
            given = q, k, v, rows, mask, lists, none, everything, of_sparse, lse, *estimate
            if ctx.estimates or linear_kernels.take(q, k, v, mask, sizes):
                listed_there = lists if as_bits else mask
                linear = linear_kernels.LinearKernels(q, k, v, listed_there, sizes, smooth_k)
                out = linear.output(of_sparse, mixed)
                save(ctx, *given, *linear.keep())
                return out
            out = torch.empty_like(of_sparse)
            to, others, share = (grouped(t, k.shape[1]) for t in (out, of_sparse, mixed))
            for (b, h), part in linear_parts(q, k, v, mask, sizes, smooth_k):
                linear = part.output(q.shape[2]).to(q.dtype).to(share.dtype)
                del part
                other, weight = others[b, h].to(share.dtype), share[b, h].unsqueeze(-1)
                to[b, h] = torch.lerp(linear, other, weight)
        save(ctx, *given)
        return out

    @staticmethod
    def backward(ctx, dout):
        ops.refuse_batches(dout)
        q, k, v, rows, mask, lists, none, everything, of_sparse, lse, *kept = saved(ctx)
        told, of_alpha, sizes, smooth_k, as_bits = ctx.more
        sparse, alpha = Sparse(lists, *told), Alpha(*of_alpha, none, everything)
        heads_kv, queries = k.shape[1], q.shape[2]
        if ctx.estimates or linear_kernels.take(q, k, v, mask, sizes):
            ops.refuse_tangents(dout)
            estimate, kept = (kept[:5], kept[5:]) if ctx.estimates else ((), kept)
            # Hooks for saved tensors may have changed strides. The name for the same memory that is
            # left shows whether the others are gone.
            of_sparse = of_sparse.contiguous().detach()
            kept = [t if t is None else t.contiguous() for t in kept]
            if not is_captured(q):
                ctx.maybe_clear_saved_tensors()
            of_call = by_kernels.Saved(q, k, v, rows, lists if as_bits else mask, of_sparse, lse,
                                       kept, ctx.was_captured)  # fmt: skip
            found = by_kernels.backward(dout, of_call, sparse, alpha, sizes, smooth_k,
                                        ctx.shape_of_rows)  # fmt: skip
            if ctx.estimates:
                found, rows = _with_estimate(found, q, sparse, *estimate), estimate[0]
            return *once(found, dout, q, k, v, rows), *(None,) * 6
        with alone(q.device):
            mixed, slope = alpha.of(rows, lse) if alpha.estimated else rows, alpha.slope(rows, lse)
            d_alpha = torch.empty(lse.shape, dtype=mixed.dtype, device=q.device)
            do, others, share, to = (
                grouped(t, heads_kv) for t in (dout, of_sparse, mixed, d_alpha)
            )

            def parts(find_alpha):
                """(where, part, its output), and d_alpha of it."""
                for (b, h), part in linear_parts(q, k, v, mask, sizes, smooth_k):
                    linear = part.output(queries).to(q.dtype)
                    if find_alpha:
                        apart = others[b, h].to(to.dtype) - linear
                        to[b, h] = (do[b, h].to(to.dtype) * apart).sum(-1)
                        del apart
                    yield b, h, part, linear
                    del part, linear

            wants_inputs = any(ctx.needs_input_grad[:3])
            wants_alpha = ctx.needs_input_grad[3] or alpha.estimated
            alpha_first = wants_alpha and (alpha.estimated or not wants_inputs)
            if alpha_first:
                for _ in parts(True):
                    pass
            dq = dk = dv = d_rows = None
            if wants_inputs:
                # An estimated alpha depends on lse, whose gradient the sparse branch is to know.
                dlse = -alpha.gradient(d_alpha, slope) if alpha.estimated else None
                d_sparse = torch.empty_like(of_sparse)
                for b in range(q.shape[0]):
                    d_sparse[b] = dout[b].to(mixed.dtype) * mixed[b].unsqueeze(-1)
                dq, dk, dv = sparse.backward(d_sparse, q, k, v, of_sparse, lse, dlse)
                del d_sparse
                of_dq = grouped(dq, heads_kv)
                for b, h, part, linear in parts(wants_alpha and not alpha_first):
                    of_part, weight = do[b, h].to(share.dtype), share[b, h].unsqueeze(-1)
                    d_linear = (of_part - of_part * weight).to(q.dtype)
                    del of_part
                    more = part.gradients(d_linear, linear, k.shape[2])[:3]
                    del part, linear, d_linear
                    for x, found in zip((of_dq, dk, dv), more):
                        x[b, h].add_(found)
                    del more
            if ctx.needs_input_grad[3]:
                d_rows = alpha.gradient(d_alpha, slope).sum_to_size(ctx.shape_of_rows) if (
                    alpha.estimated) else alpha.gradient_of_rows(d_alpha, ctx.shape_of_rows)
        return *once((dq, dk, dv, d_rows), dout, q, k, v, rows), *(None,) * 6


def _with_estimate(found, q, sparse, beta, listed, *kept):
    """(dq, dk, dv, d_beta) from (dq, dk, dv, d_rows), to which those of the estimate are added."""
    dq, dk, dv, d_rows = found
    with alone(q.device):
        estimated_kernels.gradients(d_rows, q, listed, kept, sparse.sizes, sparse.scale,
                                    dk.shape[2], (dq, dk))  # fmt: skip
        return dq, dk, dv, None if beta is None else d_rows.sum((0, 2)).to(beta.dtype)
