"""`sagebwd.block_sparse_attention`, and its forward and backward separately, on torch tensors."""

import torch

from sagebwd import functional, keywords, list_ops, ops, options
from sagebwd.checks import SpecTypeError, a_kind
from sagebwd.tensors import problem_of

_OTHERWISE = {
    "topk": "list the blocks yourself, such as by torch.topk of scores of pooled queries and keys",
    "density": "the lists say which blocks there are",
    **dict.fromkeys(("BLKQ", "BLKK", "BLOCK_SIZE"), "pass block_size=(queries, keys)"),
    **dict.fromkeys(keywords.WINDOWS, "list the blocks in the window"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"),
                    "lists are of whole sequences: make a call for each"),
}  # fmt: skip
_LISTS = "block_mask, block_indices (with or without block_counts) or block_bits"


@options.takes(but=keywords.NOT_WITH_LISTS, otherwise=_OTHERWISE)
def block_sparse_attention(
    q, k, v, *, block_mask=None, block_indices=None, block_counts=None, block_bits=None,
    block_size=(128, 64), softmax_scale=None, layout="bhsd", return_lse=False, chosen,
):  # fmt: skip
    """`attention` in which each block of queries sees the keys of listed blocks alone.

    Forward and backward visit the listed blocks and no others. With every block listed, out, lse
    and all gradients have the same bits as the dense kernels of the same groups and tiles.
    Pass the lists in one of three ways:

    Args:
        q, k, v, softmax_scale, layout, return_lse: as for `attention`.
        block_mask: bool or uint8 of (batch or 1, heads or heads_kv or 1, query blocks, key blocks),
            true where a key block is listed. The last block of queries or keys may be short.
        block_indices: instead, int32 of (batch or 1, heads or heads_kv or 1, query blocks, width):
            numbers of key blocks, in any order; one that comes twice counts once.
        block_counts: int32, like block_indices without its last dimension: how many of the indices
            count; None means all.
        block_bits: instead, what `pack_blocks` gives, for lists that serve several calls.
        block_size: queries and keys of a block, 64 or 128 each; under 'block' 128 queries.
        {options}

    The lists are read when the kernels run, so a captured CUDA graph can be replayed with others.
    An index that is no block's cannot raise an error then: its block of queries gets NaN in out and
    lse. `check_block_indices` looks for such. With an empty list out is 0, lse is -inf, and there
    is no gradient. The lists have no gradient.

    Returns and raises what `attention` does.
    """
    options.yes_or_no("return_lse", return_lse)
    lists = block_mask, block_indices, block_counts, block_bits
    out, lse = _forward(q, k, v, lists, block_size, softmax_scale, layout, chosen)
    return (out, lse) if return_lse else out


@options.takes(but=keywords.NOT_WITH_LISTS, otherwise=_OTHERWISE)
def block_sparse_attention_forward(
    q, k, v, *, block_mask=None, block_indices=None, block_counts=None, block_bits=None,
    block_size=(128, 64), softmax_scale=None, layout="bhsd", chosen,
):  # fmt: skip
    """`block_sparse_attention(..., return_lse=True)`, for callers with their own backward."""
    lists = block_mask, block_indices, block_counts, block_bits
    return _forward(q, k, v, lists, block_size, softmax_scale, layout, chosen)


@options.takes(but=keywords.NOT_WITH_LISTS, otherwise=_OTHERWISE)
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
    q, k, v, *told = _told(q, k, v, lists, block_size, softmax_scale, layout, chosen)
    return torch.ops.sagebwd.block_sparse_backward(dout, q, k, v, out, lse, dlse, *told)


def _forward(q, k, v, lists, block_size, softmax_scale, layout, chosen):
    q, k, v, *told = _told(q, k, v, lists, block_size, softmax_scale, layout, chosen)
    return torch.ops.sagebwd.block_sparse_forward(q, k, v, *told)


def _told(q, k, v, lists, block_size, softmax_scale, layout, chosen):
    """(q, k, v, bits, softmax_scale, layout, spec), as the operators take them."""
    sizes = check_block_size(block_size)
    q, k, v = functional.inputs(q, k, v)
    text = functional.text_of(chosen, softmax_scale, layout, q, k)
    text += f" sparse_q={sizes[0]} sparse_kv={sizes[1]}"
    bits = bits_of(q, k, v, layout, sizes, ops.DEVICES, *lists)
    return q, k, v, bits, softmax_scale, layout, text


def bits_of(q, k, v, layout, sizes, devices, mask, indices, counts, bits):
    """The lists of a call as bits, for all heads or for one. SpecError for what are none."""
    given = {"block_mask": mask, "block_indices": indices, "block_bits": bits}
    name, t = _the_one(given, counts)
    problem = problem_of(q, k, v, layout, devices)
    batch, heads, heads_kv, seq_q, seq_kv = problem
    lists, blocks = list_ops.blocks_of(seq_q, sizes[0]), list_ops.blocks_of(seq_kv, sizes[1])
    last = {"block_mask": blocks, "block_bits": list_ops.words_of(blocks)}.get(name)
    shape = tuple(t.shape)
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads, heads_kv)
    if not fits or shape[2] != lists or last not in (None, shape[3]):
        wanted = (f"{_either(batch)}, {_either(heads, heads_kv)}, {lists}, "
                  f"{'width' if last is None else last}")  # fmt: skip
        raise options.SpecError(
            f"{name} has shape {shape}; {seq_q} queries and {seq_kv} keys in blocks of {sizes} "
            f"need (batch, heads, query blocks, ...) = ({wanted})"
        )
    if t.device != q.device:
        raise options.SpecError(f"{name} is on {t.device} and q on {q.device}: move it")
    packed = t if name == "block_bits" else _packed(name, t, counts, blocks, sizes)
    if packed.shape[1] in (1, heads):
        return packed
    return packed.repeat_interleave(heads // heads_kv, 1)


def pack_blocks(
    block_mask=None, *, block_indices=None, block_counts=None, keys=None, block_size=(128, 64)
):
    """Lists of blocks as bits, for several calls: int32 of (batch, heads, query blocks, words).

    Args:
        block_mask, or block_indices with or without block_counts: as for `block_sparse_attention`;
            batch and heads may be 1.
        keys: with block_indices, how many keys the lists are for.
        block_size: as there.

    Bit b % 32 of word b / 32 is set if block b of the keys is listed; bit 31 of the last word if
    an index is no block's. Nothing is read back. Raises SpecError.
    """
    sizes = check_block_size(block_size)
    name, t = _the_one({"block_mask": block_mask, "block_indices": block_indices}, block_counts)
    if t.dim() != 4:
        raise options.SpecError(f"{name} has shape {tuple(t.shape)}; it has 4 dimensions: batch, "
                                "heads, query blocks, and key blocks or width")  # fmt: skip
    if name == "block_mask":
        return _packed(name, t, None, t.shape[3], sizes)
    return _packed(name, t, block_counts, _blocks_of_keys(keys, sizes), sizes)


def check_block_indices(block_indices, block_counts=None, *, keys, block_size=(128, 64)):
    """Waits for the device, and raises SpecError if an index or a count is wrong.

    The arguments are those of `pack_blocks`. The message has the position.
    """
    sizes = check_block_size(block_size)
    name, t = _the_one({"block_indices": block_indices}, block_counts)
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


def check_block_size(block_size):
    """(queries, keys). SpecError unless kernels have such blocks."""
    if not isinstance(block_size, (tuple, list)) or len(block_size) != 2:
        raise SpecTypeError(f"block_size={block_size!r}: pass two numbers, queries and keys, such "
                            "as (128, 64)")  # fmt: skip
    sizes = tuple(options.whole_number("block_size", size) for size in block_size)
    if not set(sizes) <= {64, 128}:
        raise options.SpecError(f"block_size={sizes}: kernels have blocks of 64 and 128 queries and "
                                "keys; pass two of these, such as (128, 64)")  # fmt: skip
    return sizes


def _blocks_of_keys(keys, sizes):
    if keys is None:
        raise options.SpecError("pass keys=, the number of keys: indices do not say how many blocks "
                                "there are")  # fmt: skip
    return list_ops.blocks_of(options.whole_number("keys", keys, 0), sizes[1])


_DTYPES = {"block_mask": (torch.bool, torch.uint8), "block_indices": (torch.int32,),
           "block_bits": (torch.int32,)}  # fmt: skip


def _the_one(given, counts):
    """(name, tensor) of the lists among `given`, and checks of what does not depend on a call."""
    there = [name for name, t in given.items() if t is not None]
    if len(there) != 1:
        raise options.SpecError(f"{' and '.join(there) or 'no lists of blocks'} given: pass one of "
                                f"{_LISTS}")  # fmt: skip
    name, t = there[0], given[there[0]]
    if type(t).__name__ == "BlockMask":
        raise TypeError(
            f"{name} is flex_attention's BlockMask: pass block_indices=mask.full_kv_indices and "
            "block_counts=mask.full_kv_num_blocks; its partial blocks are not supported"
        )
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is {a_kind(t)}; pass a torch tensor")
    if t.dtype not in _DTYPES[name]:
        raise options.SpecError(f"{name} is {t.dtype}; pass "
                                f"{' or '.join(map(str, _DTYPES[name]))}")  # fmt: skip
    if counts is None:
        return name, t
    if name != "block_indices":
        raise options.SpecError(f"block_counts belongs to block_indices, and {name} is given")
    if not isinstance(counts, torch.Tensor):
        raise TypeError(f"block_counts is {a_kind(counts)}; pass a torch tensor, or None")
    if counts.dtype != torch.int32 or counts.shape != t.shape[:-1] or counts.device != t.device:
        raise options.SpecError(
            f"block_counts is {tuple(counts.shape)} {counts.dtype} on {counts.device}; it must be "
            f"{tuple(t.shape[:-1])} torch.int32 on {t.device}, like block_indices"
        )
    return name, t


def _packed(name, t, counts, blocks, sizes):
    if name == "block_mask":
        return torch.ops.sagebwd.pack_block_mask(t, sizes)
    if t.shape[3] == 0:  # every list is empty
        return t.new_zeros((*t.shape[:3], list_ops.words_of(blocks)))
    return torch.ops.sagebwd.pack_block_indices(t, counts, blocks, sizes)


def tokens_of(bits, q, k, sizes):
    """Which keys each query lists, bool of (batch, heads, queries, keys), and the queries of wrong
    lists, of (batch, heads, queries). q and k are (batch, heads, tokens, channels)."""
    blocks = list_ops.blocks_of(k.shape[2], sizes[1])
    each = (bits[..., None] >> torch.arange(32, device=bits.device) & 1).flatten(-2) != 0

    def of_queries(x):
        x = x.repeat_interleave(sizes[0], 2)[:, :, : q.shape[2]]
        return x.expand(*q.shape[:2], *x.shape[2:])

    listed = each[..., :blocks].repeat_interleave(sizes[1], -1)[..., : k.shape[2]]
    return of_queries(listed), of_queries(each[..., -1])


def _either(*numbers):
    return " or ".join(map(str, sorted({*numbers, 1}, reverse=True)))
