"""Lists of blocks, checked and as a mask of bool."""

from dataclasses import dataclass

import torch

from sagebwd.sla import blocks, given
from sagebwd.sla.parts import rows_of


@dataclass(frozen=True)
class Lists:
    """What is listed. `given`: the arguments for `block_sparse_attention`."""

    mask: torch.Tensor  #: bool of (batch or 1, heads or heads_kv or 1, query blocks, key blocks)
    invalid: torch.Tensor | None  #: bool, without the last dimension: rows whose result is NaN
    given: dict
    most: int | None = None  #: how many blocks a row lists at most, if that is known

    @property
    def arguments(self):
        """block_mask, block_indices, block_counts and block_bits; one is not None, or two."""
        names = "block_mask", "block_indices", "block_counts", "block_bits"
        return tuple(map(self.given.get, names))

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
    problem = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2])
    name, t = given.of_call(problem, q.device, sizes, block_mask, block_indices, block_counts,
                            block_bits)  # fmt: skip
    key_blocks = blocks.count_of(k.shape[2], sizes[1])
    if name == "block_mask":
        return Lists(t.bool(), None, dict(block_mask=t))
    if name == "block_bits":
        return Lists(*_from_bits(t, key_blocks), dict(block_bits=t))
    told = dict(block_indices=t, block_counts=block_counts)
    return Lists(*_from_indices(t, block_counts, key_blocks), told)


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
