"""torch.ops.sagebwd.route_blocks: the lists of SLA2's router, from queries and keys to bits, as one
operation of the kernels (templates/kernels/pool_blocks.cuh, route_blocks.cuh).

Scores are those of `router.pooled_block_scores`, and lists those of `router.top_blocks`, but scores
are nowhere stored, and have no gradient. The kernel subtracts another mean of keys from them all: where
a key is NaN or infinite, scores of other blocks may stay finite.
"""

import torch

from sagebwd.core import forms, ops
from sagebwd.lists import blocks, list_ops
from sagebwd.lists.given import Lists, mask_of_bits
from sagebwd.sla import always as always_listed
from sagebwd.sla import route_kernels, router
from sagebwd.sla.linear_kernels import operation_of, place_of, readable

#: The most blocks of keys that the kernel takes; queries and keys of the blocks may be any.
MOST_BLOCKS = 2048

_library = ops.library()
_library.define(
    "route_blocks(Tensor q, Tensor k, Tensor? query_map, Tensor? key_map, SymInt kept, "
    "Tensor? always, int[2] sizes, bool wants_mask) -> (Tensor bits, Tensor mask)",
    tags=ops.TAGS,
)


def lists_of(q, k, query_map, key_map, density, always, sizes, wants_mask):
    """The `Lists` of (batch, heads, tokens, channels) tensors, or None where there are no kernels
    for them. `wants_mask`: whether the mask will be asked for in any case."""
    count = blocks.count_of(k.shape[2], sizes[1])
    maps = [t for t in (query_map, key_map) if t is not None]
    if (
        count > MOST_BLOCKS
        or not all(_is_map(t, q) for t in maps)
        or not route_kernels.pools(q, k, sizes, *maps)
    ):
        return None
    kept = blocks.kept_of(density, count)
    forced = always_listed.mask_of(always, count, q.device)
    told = q, k, query_map, key_map, kept, forced, sizes, wants_mask
    if torch.compiler.is_compiling():
        with torch.no_grad():
            bits, mask = torch.ops.sagebwd.route_blocks(*told)
    else:
        bits, mask = _launch(*told)
    given = dict(block_bits=bits)
    if wants_mask:
        return Lists(mask, None, given)
    return Lists.found_by(lambda: (mask_of_bits(bits, count), None), given)


def _is_map(t, q):
    channels = q.shape[3]
    shapes = (channels, channels), (q.shape[1], channels, channels)
    return t.dtype == torch.float32 and tuple(t.shape) in shapes


def _told_of_map(t):
    """(tensor, whether each head has its own), as kernels are told it. The first must be kept."""
    if t is None:
        return None, (0, False)
    t = t.contiguous()
    if t.data_ptr() % 16:
        t = t.clone()
    return t, (t.data_ptr(), t.dim() == 3)


def _launch(q, k, query_map, key_map, kept, always, sizes, wants_mask):
    """(bits, mask or None)."""
    q, k = readable(q), readable(k)
    of_q, told_q = _told_of_map(query_map)
    of_k, told_k = _told_of_map(key_map)
    always = None if always is None else always.contiguous()
    batch, heads, queries, channels = q.shape
    _, heads_kv, keys, _ = k.shape
    rows, columns = blocks.count_of(queries, sizes[0]), blocks.count_of(keys, sizes[1])
    bits = q.new_empty((batch, heads, rows, blocks.words_of(columns)), dtype=torch.int32)
    mask = q.new_empty((batch, heads, rows, columns), dtype=torch.bool) if wants_mask else None
    count, more = batch * heads * rows * channels, batch * heads_kv * columns * channels
    sums = q.new_empty(count + more, dtype=torch.float32)
    first = sums.data_ptr()
    operation_of(q, sizes).route_blocks(
        (batch, heads, heads_kv, queries, keys), place_of(q), place_of(k),
        (first, first + 4 * count), (told_q, told_k), kept,
        0 if always is None else always.data_ptr(), mask.data_ptr() if wants_mask else 0,
        bits.data_ptr(), forms.stream_of(q.get_device()),
    )  # fmt: skip
    return bits, mask


def _without_kernels(q, k, query_map, key_map, kept, always, sizes, wants_mask):
    scores = router.pooled_block_scores(q, k, block_size=tuple(sizes), query_map=query_map,
                                        key_map=key_map)  # fmt: skip
    mask = route_kernels.best_by_sorting(scores, kept, always)
    bits = list_ops.pack_mask_by_sums(mask)
    return bits, mask if wants_mask else mask.new_empty(0)


def _by_kernels(q, *given):
    bits, mask = _launch(q, *given)
    return bits, q.new_empty(0, dtype=torch.bool) if mask is None else mask


_library.impl("route_blocks", route_kernels.on_gpu(_by_kernels, _without_kernels), "CUDA")
_library.impl("route_blocks", _without_kernels, "CPU")


@torch.library.register_fake("sagebwd::route_blocks", lib=_library)
def _fake(q, k, query_map, key_map, kept, always, sizes, wants_mask):
    rows, count = (blocks.count_of(t.shape[2], size) for t, size in zip((q, k), sizes))
    shape = (q.shape[0], q.shape[1], rows)
    bits = q.new_empty((*shape, blocks.words_of(count)), dtype=torch.int32)
    return bits, q.new_empty((*shape, count) if wants_mask else (0,), dtype=torch.bool)
