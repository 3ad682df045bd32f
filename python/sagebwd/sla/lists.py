"""Lists of blocks as callers give them: masks, indices or bits, checked and as a mask of bool."""

from dataclasses import dataclass

import torch

from sagebwd import options
from sagebwd.sla import blocks
from sagebwd.sla.parts import rows_of

_ONE_OF = "pass one of block_mask=, block_bits=, and block_indices= (with or without block_counts=)"


@dataclass(frozen=True)
class Lists:
    """What is listed. `given`: the arguments for `block_sparse_attention`."""

    mask: torch.Tensor  #: bool of (batch or 1, heads or heads_kv or 1, query blocks, key blocks)
    invalid: torch.Tensor | None  #: bool, without the last dimension: rows whose result is NaN
    given: dict

    def invalid_rows(self, heads, size, queries):
        """(batch or 1, heads or 1, queries, 1), or None."""
        if self.invalid is None:
            return None
        rows = per_head(self.invalid, heads)
        return rows_of(rows, size, queries).unsqueeze(-1)


def per_head(x, heads):
    """(batch or 1, heads or heads_kv or 1, ...) with heads or 1 in the second place."""
    return x if x.shape[1] in (1, heads) else x.repeat_interleave(heads // x.shape[1], 1)


def lists_of(q, k, sizes, block_mask, block_indices, block_counts, block_bits):
    """The `Lists` of a call with (batch, heads, tokens, channels) tensors. Raises SpecError and
    TypeError."""
    named = {"block_mask": block_mask, "block_indices": block_indices,
             "block_bits": block_bits}  # fmt: skip
    there = [name for name, t in named.items() if t is not None]
    if len(there) != 1:
        raise options.SpecError(f"{' and '.join(there) or 'no lists of blocks'} given: {_ONE_OF}")
    if block_counts is not None and block_indices is None:
        raise options.SpecError(f"block_counts belongs to block_indices: {_ONE_OF}")
    name = there[0]
    t = named[name]
    if type(t).__name__ == "BlockMask":
        raise TypeError(
            f"{name} is flex_attention's BlockMask: pass block_indices=mask.full_kv_indices and "
            "block_counts=mask.full_kv_num_blocks. Its partial blocks are not supported"
        )
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is {options.a_kind(t)}; pass a torch tensor")
    of = _Shape(q, k, sizes)
    if name == "block_mask":
        of.check(name, t, (torch.bool, torch.uint8), of.key_blocks)
        return Lists(t.bool(), None, dict(block_mask=t))
    if name == "block_bits":
        of.check(name, t, (torch.int32,), of.key_blocks // 32 + 1)
        return Lists(*_from_bits(t, of.key_blocks), dict(block_bits=t))
    of.check(name, t, (torch.int32,), None)
    if block_counts is not None:
        if not isinstance(block_counts, torch.Tensor):
            raise TypeError(f"block_counts is {options.a_kind(block_counts)}; pass a torch tensor")
        if block_counts.dtype != torch.int32 or block_counts.shape != t.shape[:-1]:
            raise options.SpecError(
                f"block_counts is {block_counts.dtype} of {tuple(block_counts.shape)}: pass int32 "
                f"of {tuple(t.shape[:-1])}, like block_indices without its last dimension"
            )
        _check_device("block_counts", block_counts, q)
    given = dict(block_indices=t, block_counts=block_counts)
    return Lists(*_from_indices(t, block_counts, of.key_blocks), given)


def _check_device(name, t, q):
    if t.device != q.device:
        raise options.SpecError(f"{name} is on {t.device} and q on {q.device}: move it")


class _Shape:
    def __init__(self, q, k, sizes):
        self.q, self.heads_kv, self.sizes = q, k.shape[1], sizes
        self.tokens = q.shape[2], k.shape[2]
        self.query_blocks = blocks.count_of(q.shape[2], sizes[0])
        self.key_blocks = blocks.count_of(k.shape[2], sizes[1])

    def check(self, name, t, dtypes, width):
        batch, heads = self.q.shape[:2]
        last = {"block_mask": "key blocks", "block_bits": "words"}.get(name, "width")
        wanted = (
            f"(batch or 1, heads or heads_kv or 1, query blocks, {last}): here ({_either(batch)}, "
            f"{_either(heads, self.heads_kv)}, {self.query_blocks}, {width or last})"
        )
        if t.dtype not in dtypes:
            raise options.SpecError(f"{name} is {t.dtype}: pass "
                                    f"{' or '.join(map(str, dtypes))}")  # fmt: skip
        fits = t.dim() == 4 and t.shape[0] in (1, batch) and (
            t.shape[1] in (1, heads, self.heads_kv) and t.shape[2] == self.query_blocks
            and width in (None, t.shape[3]))  # fmt: skip
        if not fits:
            raise options.SpecError(
                f"{name} has shape {tuple(t.shape)}: {self.tokens[0]} queries and {self.tokens[1]} "
                f"keys in blocks of {self.sizes} need {wanted}"
            )
        _check_device(name, t, self.q)


def _either(*numbers):
    return " or ".join(map(str, sorted({*numbers, 1}, reverse=True)))


def _from_indices(indices, counts, key_blocks):
    wrong = (indices < 0) | (indices >= key_blocks)
    bad_count = None
    if counts is not None:
        unused = torch.arange(indices.shape[-1], device=indices.device) >= counts[..., None]
        wrong = wrong & ~unused
        indices = indices.masked_fill(unused, key_blocks)
        bad_count = (counts < 0) | (counts > indices.shape[-1])
    places = indices.masked_fill(wrong, key_blocks).long()
    mask = torch.zeros(*indices.shape[:-1], key_blocks + 1, dtype=torch.bool, device=places.device)
    mask = mask.scatter_(-1, places, True)[..., :key_blocks]
    invalid = wrong.any(-1)
    return mask, invalid if bad_count is None else invalid | bad_count


def _from_bits(bits, key_blocks):
    places = torch.arange(32, device=bits.device, dtype=torch.int32)
    mask = ((bits[..., None] >> places) & 1).bool().flatten(-2)[..., :key_blocks]
    return mask, bits[..., -1] < 0  # the last word's last bit
