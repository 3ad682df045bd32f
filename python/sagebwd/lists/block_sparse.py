"""`sagebwd.block_sparse_attention`, and its forward and backward separately, on torch tensors."""

import torch

from sagebwd.core import (
    direct,
    fastest,
    functional,
    keywords,
    max_logits,
    ops,
    options,
    results,
    transforms,
)
from sagebwd.core.arguments.tensors import EMULATION_OF_LISTS, problem_of
from sagebwd.core.front_end import has_front_end
from sagebwd.lists import given
from sagebwd.lists import list_ops as _operators
from sagebwd.lists.blocks import check_block_size, count_of, words_of

_OTHERWISE = keywords.WITH_LISTS | dict.fromkeys(keywords.NOT_WITH_LISTS[2:],
                                                 keywords.NO_OPTION_OF_LISTS)  # fmt: skip


@options.takes(but=keywords.NOT_WITH_LISTS, otherwise=_OTHERWISE, fastest=fastest.of_q())
@has_front_end
def block_sparse_attention(
    q, k, v, *, block_mask=None, block_indices=None, block_counts=None, block_bits=None,
    block_size=(128, 64), softmax_scale=None, layout="bhsd", return_lse=False,
    return_max_logits=False, chosen,
):  # fmt: skip
    """`attention` in which each block of queries sees the keys of listed blocks alone.

    Forward and backward visit the listed blocks and no others. With every block listed, out, lse
    and all gradients have the same bits as the dense kernels of the same groups and tiles, whose
    defaults differ.
    Pass the lists in one of three ways:

    Args:
        q, k, v, softmax_scale, layout, return_lse, return_max_logits: as for `attention`.
        block_mask: bool or uint8 of (batch or 1, heads or heads_kv or 1, query blocks, key blocks),
            true where a key block is listed. The last block of queries or keys may be short.
        block_indices: instead, int32 or int64 of (batch or 1, heads or heads_kv or 1, query blocks,
            width): numbers of key blocks, in any order; one that comes twice counts once.
        block_counts: int32 or int64, like block_indices without its last dimension: how many of the
            indices count; None means all.
        block_bits: instead, what `pack_blocks` gives, for lists that serve several calls.
        block_size: queries and keys of a block, 64 or 128 each; under 'block' 128 queries.
        {options}
        {front_end}

    The lists are read when the kernels run, so a captured CUDA graph can be replayed with others
    (before the capture `warmup(sparse_q=128, sparse_kv=64, ...)` compiles what a call needs). An
    index that is no block's cannot raise an error then: its block of queries gets NaN in out and
    lse. `check_block_indices` looks for such. With an empty list out is 0, lse is -inf, and there
    is no gradient. The lists have no gradient.

    Returns and raises what `attention` does.
    """
    options.yes_or_no("return_lse", return_lse)
    chosen = results.with_max_logits(return_max_logits, chosen)
    lists = block_mask, block_indices, block_counts, block_bits
    out, lse, *more = _forward(q, k, v, lists, block_size, softmax_scale, layout, chosen)
    return results.returned(out, lse, return_lse, more)


@options.takes(but=keywords.NOT_WITH_LISTS, otherwise=_OTHERWISE, fastest=fastest.of_q())
def block_sparse_attention_forward(
    q, k, v, *, block_mask=None, block_indices=None, block_counts=None, block_bits=None,
    block_size=(128, 64), softmax_scale=None, layout="bhsd", chosen,
):  # fmt: skip
    """`block_sparse_attention(..., return_lse=True)`, for callers with their own backward."""
    lists = block_mask, block_indices, block_counts, block_bits
    return _forward(q, k, v, lists, block_size, softmax_scale, layout, chosen)


@options.takes(but=keywords.NOT_WITH_LISTS, otherwise=_OTHERWISE, fastest=fastest.of_q(position=1))
def block_sparse_attention_backward(
    dout, q, k, v, out, lse, *, dlse=None, block_mask=None, block_indices=None, block_counts=None,
    block_bits=None, block_size=(128, 64), softmax_scale=None, layout="bhsd", chosen,
):  # fmt: skip
    """(dq, dk, dv), contiguous, like q, k and v.

    The other arguments are those of the forward, out and lse its results; dout and dlse are their
    gradients, and dlse may be None.
    """
    functional.check_tensors(dout=dout, out=out, lse=lse, dlse=lse if dlse is None else dlse)
    lists = block_mask, block_indices, block_counts, block_bits
    q, k, v, *more = told(q, k, v, lists, block_size, softmax_scale, layout, chosen)
    return torch.ops.sagebwd.block_sparse_backward(dout, q, k, v, out, lse, dlse, *more)


def _forward(q, k, v, lists, block_size, softmax_scale, layout, chosen):
    q, k, v, *more = told(q, k, v, lists, block_size, softmax_scale, layout, chosen)
    return max_logits.operator_of("block_sparse_forward", more[-1])(q, k, v, *more)


def told(q, k, v, lists, block_size, softmax_scale, layout, chosen):
    """(q, k, v, bits, softmax_scale, layout, spec), as the operators take them."""
    sizes = check_block_size(block_size)
    q, k, v, text = told_of_tensors(q, k, v, sizes, softmax_scale, layout, chosen)
    bits = bits_of(q, k, v, layout, sizes, ops.DEVICES, *lists)
    return q, k, v, bits, softmax_scale, layout, text


def told_of_tensors(q, k, v, sizes, softmax_scale, layout, chosen):
    """(q, k, v, spec) of `told`."""
    q, k, v = functional.inputs(q, k, v)
    text = functional.text_of(chosen, softmax_scale, layout, q, k)
    return q, k, v, f"{text} sparse_q={sizes[0]} sparse_kv={sizes[1]}"


def bits_of(q, k, v, layout, sizes, devices, *lists):
    """The lists of a call as bits, for all heads or for one. SpecError for what are none."""
    problem = problem_of(q, k, v, layout, devices, EMULATION_OF_LISTS)
    given.of_call(problem, q.device, sizes, *lists)
    return bits_of_checked(lists, problem[1:3], count_of(problem[4], sizes[1]), sizes)


def bits_of_checked(lists, heads, blocks_kv, sizes):
    """`bits_of` of lists that belong to a call. `heads`: those of q and of k."""
    mask, indices, counts, packed = lists
    if mask is not None:
        packed = _packed("block_mask", mask, None, blocks_kv, sizes)
    elif indices is not None:
        packed = _packed("block_indices", indices, counts, blocks_kv, sizes)
    if packed.shape[1] in (1, heads[0]):
        return packed
    return packed.repeat_interleave(heads[0] // heads[1], 1)


@keywords.known_keywords(keywords.WITH_LISTS)
def pack_blocks(
    block_mask=None, *, block_indices=None, block_counts=None, keys=None, block_size=(128, 64)
):
    """Lists of blocks as bits, for several calls: int32 of (batch, heads, query blocks, words).

    Args:
        block_mask, or block_indices with or without block_counts: as for `block_sparse_attention`;
            batch and heads may be 1.
        keys: with block_indices, how many keys the lists are for.
        block_size: as there, and in the calls that take the bits.

    Bit b % 32 of word b / 32 is set if block b of the keys is listed; bit 31 of the last word if
    an index is no block's. Nothing is read back. A call with another block_size, or with keys of
    another number of blocks, refuses the bits; but not copies of them, such as clones and slices,
    nor what a compiled function packs, which do not know theirs. There bits of blocks that do not
    exist list nothing. Raises SpecError.
    """
    sizes = check_block_size(block_size)
    named = {"block_mask": block_mask, "block_indices": block_indices}
    name, t = given.the_one(named, block_counts)
    _check_dimensions(name, t)
    if name == "block_mask" and keys is None:
        blocks = t.shape[3]
    else:
        blocks = _blocks_of_keys(keys, sizes)
    if name == "block_mask" and blocks != t.shape[3]:
        raise options.SpecError(f"block_mask has {t.shape[3]} key blocks, and keys={keys} have "
                                f"{blocks} of {sizes[1]}: pass the mask alone")  # fmt: skip
    bits = _packed(name, t, block_counts, blocks, sizes)
    if not torch.compiler.is_compiling():
        setattr(bits, given.PACKED_FOR, (sizes, blocks))
    return bits


def _check_dimensions(name, t):
    if t.dim() != 4:
        raise options.SpecError(f"{name} has shape {tuple(t.shape)}; it has 4 dimensions: batch, "
                                "heads, query blocks, and key blocks or width")  # fmt: skip


@keywords.known_keywords(keywords.WITH_LISTS)
def check_block_indices(block_indices, block_counts=None, *, keys, block_size=(128, 64)):
    """Waits for the device, and raises SpecError if an index or a count is wrong.

    The arguments are those of `pack_blocks`. The message has the position.
    """
    sizes = check_block_size(block_size)
    name, t = given.the_one({"block_indices": block_indices}, block_counts)
    _check_dimensions(name, t)
    if t.is_meta:
        raise options.SpecError(f"{name} is on {t.device}, where there are no numbers to check: "
                                "pass a tensor of another device")  # fmt: skip
    transforms.refuse_transforms("check_block_indices")
    blocks, width = _blocks_of_keys(keys, sizes), t.shape[-1]
    counted = torch.ones_like(t, dtype=torch.bool)
    if block_counts is not None:
        wrong = (block_counts < 0) | (block_counts > width)
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            raise options.SpecError(f"block_counts{list(place)} is {block_counts[place].item()}; a "
                                    f"list has 0 to {width} indices")  # fmt: skip
        counted = torch.arange(width, device=t.device) < block_counts[..., None]
    wrong = counted & ((t < 0) | (t >= blocks))
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise options.SpecError(
            f"{name}{list(place)} is {t[place].item()}; {keys} keys have {blocks} blocks of "
            f"{sizes[1]}, numbered from 0"
        )


def _blocks_of_keys(keys, sizes):
    if keys is None:
        raise options.SpecError(
            "pass keys=, the number of keys: indices do not say how many blocks there are"
        )
    return count_of(options.whole_number("keys", keys, 0), sizes[1])


def _packed(name, t, counts, blocks, sizes):
    if name == "block_mask":
        if t.is_cuda and not direct.is_watched(t):
            return _operators.pack_mask(t, sizes)
        return torch.ops.sagebwd.pack_block_mask(t, sizes)
    t, counts = given.as_kernels_read(t), given.as_kernels_read(counts)
    if t.shape[3] == 0:  # every list is empty, or has a count that is wrong
        wrong = t.new_zeros(t.shape[:3]) if counts is None else (counts != 0).int()
        return torch.nn.functional.pad(wrong[..., None] << 31, (words_of(blocks) - 1, 0))
    return torch.ops.sagebwd.pack_block_indices(t, counts, blocks, sizes)


def tokens_of(bits, q, k, sizes):
    """Which keys each query lists, bool of (batch, heads, queries, keys), and the queries of wrong
    lists, of (batch, heads, queries). q and k are (batch, heads, tokens, channels)."""
    blocks = count_of(k.shape[2], sizes[1])
    each = (bits[..., None] >> torch.arange(32, device=bits.device) & 1).flatten(-2) != 0

    def of_queries(x):
        x = x.repeat_interleave(sizes[0], 2)[:, :, : q.shape[2]]
        return x.expand(*q.shape[:2], *x.shape[2:])

    listed = each[..., :blocks].repeat_interleave(sizes[1], -1)[..., : k.shape[2]]
    return of_queries(listed), of_queries(each[..., -1])
