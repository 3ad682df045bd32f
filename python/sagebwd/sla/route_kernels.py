"""Sums of blocks and lists of the best ones, by kernels, or as PyTorch computes them.

The kernels (templates/kernels/pool_blocks.cuh, top_blocks.cuh) take tensors on a GPU that nobody
watches, of which no gradient is wanted. Compiled code has them as operators.
"""

import functools
import math

import torch

from sagebwd.core import direct, forms, ops
from sagebwd.core.arguments.tensors import DTYPES
from sagebwd.lists import blocks
from sagebwd.sla.linear_kernels import operation_of, place_of, readable
from sagebwd.sla.parts import wide

_LEAST_CHANNELS, _MOST_CHANNELS = 32, 256  #: multiples of 8
_MOST_HEADS, _MOST_SEQUENCES = 32767, 65535
_MOST_BLOCKS, _MOST_ROWS = 16384, 1 << 23
_LEAST_MAJOR = 8  #: compute capability


def _may_run(*tensors):
    """Whether kernels take these tensors' place in the call, as far as that is not their shape's
    matter."""
    if not all(t.is_cuda for t in tensors):
        return False
    if torch.compiler.is_compiling():  # what runs decides
        return True
    return _has_kernels(tensors[0]) and not direct.is_wrapped(*tensors)


def _has_kernels(t):
    return _is_new(t.get_device())


@functools.cache
def _is_new(device):
    return torch.cuda.get_device_properties(device).major >= _LEAST_MAJOR


# ---- sums of blocks ------------------------------------------------------------------------------


def block_sums(x, size):
    """The sum of each block of (batch, heads, tokens, channels), in FP32."""
    acc, tokens = wide(x.dtype), x.shape[2]
    whole = tokens // size
    if not tokens % size:
        return x.unflatten(2, (whole, size)).sum(3, dtype=acc)
    sums = x[:, :, : whole * size].unflatten(2, (whole, size)).sum(3, dtype=acc)
    rest = x[:, :, whole * size :].sum(2, keepdim=True, dtype=acc)
    return torch.cat([sums, rest], 2)


def pools(q, k, sizes, *maps):
    """Whether a kernel adds up blocks of these tensors, if no gradient is wanted, and one may read
    the maps."""
    return (
        q.dtype in DTYPES
        and k.dtype == q.dtype
        and _LEAST_CHANNELS <= q.shape[3] <= _MOST_CHANNELS
        and q.shape[3] % 8 == 0
        and set(sizes) <= set(blocks.SIZES)
        and q.shape[1] <= _MOST_HEADS
        and q.shape[0] <= _MOST_SEQUENCES
        and 0 not in q.shape
        and 0 not in k.shape
        and _may_run(q, k, *maps)
    )


def sums_of_both(q, k, sizes):
    """`block_sums` of the queries and of the keys."""
    wants_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    if wants_gradient or not pools(q, k, sizes):
        return block_sums(q, sizes[0]), block_sums(k, sizes[1])
    if torch.compiler.is_compiling():
        return torch.ops.sagebwd.pool_blocks(q, k, sizes)
    return _pool_blocks(q, k, sizes)


def _pool_blocks(q, k, sizes):
    q, k = readable(q), readable(k)
    of_q, of_k = (_new_sums(t, size) for t, size in zip((q, k), sizes))
    problem = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2])
    operation_of(q, sizes).pool_blocks(
        problem, place_of(q), place_of(k), of_q.data_ptr(), of_k.data_ptr(),
        forms.stream_of(q.get_device()),
    )  # fmt: skip
    return of_q, of_k


def _new_sums(t, size):
    count = blocks.count_of(t.shape[2], size)
    return t.new_empty((*t.shape[:2], count, t.shape[3]), dtype=torch.float32)


# ---- lists of the best blocks --------------------------------------------------------------------


def best_by_sorting(scores, kept, forced):
    """`top_blocks` as PyTorch computes it. `forced`: None, or bool of a shape like the scores'."""
    nothing = torch.zeros_like(scores, dtype=torch.bool, memory_format=torch.contiguous_format)
    rest = scores if forced is None else scores.masked_fill(forced, -math.inf)
    best, order = rest.sort(dim=-1, descending=True, stable=True)
    are_listed = best[..., :kept] != -math.inf
    if forced is None:
        return nothing.scatter_(-1, order[..., :kept], are_listed)
    wanted = kept - forced.sum(-1, keepdim=True)
    are_listed &= torch.arange(kept, device=scores.device) < wanted
    return nothing.scatter_(-1, order[..., :kept], are_listed).logical_or_(forced)


def best_blocks(scores, kept, always, sizes):
    """(mask, bits): bool like the scores, the `kept` best of each row, among which those of
    `always`, bool of (key blocks,) or None, count; and the same as `pack_blocks` gives it, or None.
    """
    count = scores.shape[-1]
    if not (
        scores.dtype == torch.float32
        and scores.numel()
        and count <= _MOST_BLOCKS
        and scores.numel() // count <= _MOST_ROWS
        and _may_run(scores, *(() if always is None else (always,)))
    ):
        return best_by_sorting(scores, kept, always), None
    if not set(sizes) <= set(blocks.SIZES):
        sizes = (128, 64)
    if torch.compiler.is_compiling():
        return torch.ops.sagebwd.top_blocks(scores, kept, always, sizes), None
    bits = scores.new_empty((*scores.shape[:-1], blocks.words_of(count)), dtype=torch.int32)
    return _top_blocks(scores, kept, always, sizes, bits), bits


def _top_blocks(scores, kept, always, sizes, bits=None):
    scores = scores.contiguous()
    always = None if always is None else always.contiguous()
    listed = torch.empty_like(scores, dtype=torch.bool)
    device, count = scores.get_device(), scores.shape[-1]
    operation = forms.operation(device, f"sparse_q={sizes[0]} sparse_kv={sizes[1]}")
    operation.top_blocks(
        scores.numel() // count, count, scores.data_ptr(), kept,
        0 if always is None else always.data_ptr(), listed.data_ptr(),
        0 if bits is None else bits.data_ptr(), forms.stream_of(device),
    )  # fmt: skip
    return listed


# ---- as operators, for torch.compile -------------------------------------------------------------

_library = ops.library()
_library.define("pool_blocks(Tensor q, Tensor k, int[2] sizes) -> (Tensor of_q, Tensor of_k)",
                tags=ops.TAGS)  # fmt: skip
_library.define(
    "top_blocks(Tensor scores, SymInt kept, Tensor? always, int[2] sizes) -> Tensor", tags=ops.TAGS
)


def _pool_blocks_without_kernels(q, k, sizes):
    return block_sums(q, sizes[0]), block_sums(k, sizes[1])


def _top_blocks_without_kernels(scores, kept, always, sizes):
    return best_by_sorting(scores, kept, always)


def on_gpu(by_kernels, without):
    """Compiled code asks for no GPU's kernels before it runs."""

    def call(first, *rest):
        return (by_kernels if _has_kernels(first) else without)(first, *rest)

    return call


_library.impl("pool_blocks", on_gpu(_pool_blocks, _pool_blocks_without_kernels), "CUDA")
_library.impl("top_blocks", on_gpu(_top_blocks, _top_blocks_without_kernels), "CUDA")
_library.impl("pool_blocks", _pool_blocks_without_kernels, "CPU")
_library.impl("top_blocks", _top_blocks_without_kernels, "CPU")


@torch.library.register_fake("sagebwd::pool_blocks", lib=_library)
def _pool_blocks_fake(q, k, sizes):
    return tuple(_new_sums(t, size) for t, size in zip((q, k), sizes))


@torch.library.register_fake("sagebwd::top_blocks", lib=_library)
def _top_blocks_fake(scores, kept, always, sizes):
    return scores.new_empty(scores.shape, dtype=torch.bool)
