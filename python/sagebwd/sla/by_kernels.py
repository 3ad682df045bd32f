"""The backward of both branches by kernels, some heads at a time, for the memory that it saves.

Copies in 8 bits and sums of blocks, which lie between the kernels, exist of some heads alone. A
part's gradients are written to their places. Those of later parts are memory that nothing has been
written to, and where a part's copies lie as long as they fit. dq comes to lie where the sparse
output was kept, if nobody else has that memory.
"""

import math
import sys
from typing import NamedTuple

import torch

from sagebwd.core.compat import not_compiled
from sagebwd.sla.linear_kernels import LinearKernels, new_like, readable
from sagebwd.sla.parts import alone, is_captured, of_heads

#: The parts of a call that is large enough. The last, which has no room behind it, is halved.
PARTS = 4
#: The fewest queries of all heads in a part. Each part launches all kernels. Four parts of 16 heads
#: of 32,768 tokens lower the peak from 8.7 to 4.8 times V, but a call takes 10 to 15 % longer on an
#: H200, and its host 6 to 7 ms instead of 4: longer than the GPU at a density of 3 %.
LEAST_QUERIES = 1 << 19


class Saved(NamedTuple):
    """The forward saved this. `rows` are those of an estimated alpha, else alpha of each query;
    `mask` is as `LinearKernels` takes it, and `kept` what its `keep` gave; `was_captured` says
    whether a CUDA graph has captured it, whose replays write to `of_sparse` again."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: torch.Tensor
    mask: torch.Tensor
    of_sparse: torch.Tensor
    lse: torch.Tensor
    kept: list
    was_captured: bool
    slope: torch.Tensor | None = None  #: of an estimated alpha, which the backward adds


def parts_of(batch, heads_kv, queries):
    """Pairs of slices (of the batch, of the key heads), which lie one behind the other in memory.
    `queries`: of all heads that share a key head."""
    count = min(PARTS, batch * heads_kv * queries // LEAST_QUERIES)
    if count <= 1:
        return [(slice(0, batch), slice(0, heads_kv))]
    if count <= batch:
        found = [(b, slice(0, heads_kv)) for b in _divided(0, batch, count)]
    else:
        of_one = _divided(0, heads_kv, min(heads_kv, -(-count // batch)))
        found = [(slice(b, b + 1), h) for b in range(batch) for h in of_one]
    b, h = found.pop()
    if b.stop - b.start > 1:
        return found + [(half, h) for half in _divided(b.start, b.stop, 2)]
    return found + [(b, half) for half in _divided(h.start, h.stop, min(2, h.stop - h.start))]


def _divided(begin, end, parts):
    """Slices of nearly equal lengths, of which longer ones come later."""
    ends = [begin + (end - begin) * i // parts for i in range(parts + 1)]
    return list(map(slice, ends, ends[1:]))


class Room:
    """Memory that something else is written to later."""

    ALIGNMENT = 256  #: bytes

    def __init__(self, *tensors):
        self.free = [t.flatten().view(torch.uint8) for t in tensors if t.numel()]

    def empty(self, like, shape, dtype):
        """A tensor there or, without room, of its own; on the device of `like`."""
        size = math.prod(shape) * dtype.itemsize
        for i, free in enumerate(self.free):
            begin = -free.data_ptr() % self.ALIGNMENT
            if begin + size <= free.numel():
                self.free[i] = free[begin + size :]
                return free[begin : begin + size].view(dtype).view(shape)
        return like.new_empty(shape, dtype=dtype)


def _has_alone(t):
    """Whether nothing else has the tensor's memory, and nothing will: an autograd graph that is
    kept would, a hook for saved tensors, another library, and a CUDA graph."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    other = torch.empty(0, device="cpu")
    storage, alone_too = t.untyped_storage(), other.untyped_storage()
    return (
        count is not None
        and count(storage._cdata) == count(alone_too._cdata)
        and sys.getrefcount(storage) == sys.getrefcount(alone_too)
        and storage.resizable()  # memory that comes from elsewhere is not
        and storage.nbytes() == t.numel() * t.element_size()
        and t.is_contiguous()
        and not is_captured(t)
    )


@not_compiled("the backward of SLA2's kernels")  # by compiled autograd: it looks at memory
def backward(dout, saved, sparse, alpha, sizes, smooth_k, shape_of_rows):
    """(dq, dk, dv, d_rows), of a `fused.Sparse` and a `fused.Alpha`."""
    q, k, v, rows, _, of_sparse, lse, _, was_captured, _ = saved
    with alone(q.device):
        parts = parts_of(q.shape[0], k.shape[1], q.shape[1] // k.shape[1] * q.shape[2])
        mixed = alpha.of(rows, lse) if alpha.estimated else rows
        saved = saved._replace(rows=mixed, slope=alpha.slope(rows, lse))
        d_alpha = mixed.new_empty(lse.shape)
        dk, dv = new_like(k), new_like(v)
        reused = len(parts) > 1 and not was_captured and _has_alone(of_sparse)
        gradients = of_sparse if reused else new_like(q), dk, dv, d_alpha
        del of_sparse
        if len(parts) == 1:
            _backward_of(dout, saved, sparse, alpha, sizes, smooth_k, gradients, q.new_empty)
        else:
            for b, h in parts:
                _backward_of(*_part(b, h, dout, saved, sparse, alpha, sizes, smooth_k, gradients))
        sparse.tell_of_backward(q, k, v)
        d_rows = d_alpha.sum_to_size(shape_of_rows) if alpha.estimated else (
            alpha.gradient_of_rows(d_alpha, shape_of_rows))  # fmt: skip
        return *gradients[:3], d_rows


def _part(b, h, dout, saved, sparse, alpha, sizes, smooth_k, gradients):
    """Returns what `_backward_of` takes of some heads: views, and memory behind their gradients."""
    batch, heads_kv = saved.k.shape[:2]
    group = saved.q.shape[1] // heads_kv
    of_q = slice(h.start * group, h.stop * group)
    behind = (b.stop - 1) * heads_kv + h.stop
    room = Room(*(t.flatten(0, 1)[behind:] for t in gradients[1:3]))
    dq, dk, dv, d_alpha = gradients
    kept = [t if t is None else t.reshape(batch, heads_kv, -1)[b, h] for t in saved.kept]
    of_part = saved._replace(
        **{name: getattr(saved, name)[b, of_q] for name in ("q", "rows", "of_sparse", "lse")},
        slope=None if saved.slope is None else saved.slope[b, of_q],
        k=saved.k[b, h], v=saved.v[b, h], mask=of_heads(saved.mask, b, h, heads_kv), kept=kept,
    )  # fmt: skip
    sparse = sparse._replace(lists=of_heads(sparse.lists, b, h, heads_kv))
    return (dout[b, of_q], of_part, sparse, alpha.of_heads(b, h, heads_kv), sizes, smooth_k,
            (dq[b, of_q], dk[b, h], dv[b, h], d_alpha[b, of_q]),
            lambda shape, dtype: room.empty(saved.q, shape, dtype))  # fmt: skip


def _backward_of(dout, saved, sparse, alpha, sizes, smooth_k, gradients, empty):
    """Writes to dq, dk, dv and d_alpha, which becomes d_rows where alpha is estimated. `empty`: a
    function of a shape and a type. The rows that are saved are alpha of each query."""
    q, k, v, mixed, mask, of_sparse, lse, kept, _, slope = saved
    to_dq, dk, dv, d_alpha = gradients
    dout = readable(dout)
    linear = LinearKernels(q, k, v, mask, sizes, smooth_k, kept)
    d_sparse = empty(q.shape, dtype=q.dtype)
    # The sparse output is read until dq is written where it lies.
    is_apart = to_dq.data_ptr() != of_sparse.data_ptr()
    dq = to_dq if is_apart else empty(q.shape, dtype=q.dtype)
    of_queries = dict(exact=of_sparse, alpha=mixed, d_alpha=d_alpha)
    if alpha.estimated:  # lse has a gradient, which the sparse branch is to know
        more, sums = linear.of_queries(dout, **of_queries, d_exact=d_sparse)
        d_alpha.copy_(alpha.gradient(d_alpha, slope))
        sparse.backward_into((dq, dk, dv), empty, d_sparse, q, k, v, of_sparse, lse, -d_alpha)
        torch.add(dq, more, out=to_dq)
        del more
    else:
        linear.share(dout, mixed, d_sparse)
        sparse.backward_into((dq, dk, dv), empty, d_sparse, q, k, v, of_sparse, lse, None)
        del d_sparse
        _, sums = linear.of_queries(dout, **of_queries, more=dq, to=to_dq)
    del dq
    linear.of_keys(sums, dk, dv)
