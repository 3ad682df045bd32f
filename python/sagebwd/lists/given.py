"""Lists of blocks as callers give them, as masks, indices or bits: what is none raises."""


import torch

from sagebwd.core import options
from sagebwd.lists import blocks

_LISTS = "block_mask, block_indices (with or without block_counts) or block_bits"
_DTYPES = {"block_mask": (torch.bool, torch.uint8), "block_indices": (torch.int32, torch.int64),
           "block_bits": (torch.int32,)}  # fmt: skip
#: The attribute of `pack_blocks`' tensors that says their block size and how many key blocks there
#: are. Copies do not have it.
PACKED_FOR = "_sagebwd_packed_for"
#: Types of q, k and v where PyTorch's own products compute.
_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_tensor(name, t):
    """TypeError and SpecError for what is no q, k or v."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is {options.a_kind(t)}; pass a torch tensor")
    if t.dtype not in _FLOATING:
        raise options.SpecError(
            f"{name} is {t.dtype}: pass torch.bfloat16, torch.float16, torch.float32 or "
            "torch.float64"
        )
    if t.dim() != 4:
        raise options.SpecError(
            f"{name} has rank {t.dim()} (shape {tuple(t.shape)}): pass (batch, heads, tokens, "
            "head_dim), or layout='bshd'"
        )


def check_heads(q, k):
    """SpecError unless the heads of (batch, heads, tokens, head_dim) tensors belong together."""
    heads, heads_kv = q.shape[1], k.shape[1]
    if not heads_kv or not heads or heads % heads_kv:
        raise options.SpecError(
            f"q has {heads} heads and k has {heads_kv}; the first must be a positive multiple of "
            "the second (is layout= right?)"
        )


def the_one(given, counts):
    """(name, tensor) of the lists among `given`, and checks of what does not depend on a call."""
    there = [name for name, t in given.items() if t is not None]
    if len(there) != 1:
        raise options.SpecError(f"{' and '.join(there) or 'no lists of blocks'} given: pass one of "
                                f"{_LISTS}")  # fmt: skip
    name, t = there[0], given[there[0]]
    blocks.refuse_flex_mask(name, t)
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is {options.a_kind(t)}; pass a torch tensor")
    if t.dtype not in _DTYPES[name]:
        raise options.SpecError(f"{name} is {t.dtype}; pass "
                                f"{' or '.join(map(str, _DTYPES[name]))}")  # fmt: skip
    if counts is None:
        return name, t
    if name != "block_indices":
        raise options.SpecError(f"block_counts belongs to block_indices, and {name} is given")
    if not isinstance(counts, torch.Tensor):
        raise TypeError(f"block_counts is {options.a_kind(counts)}; pass a torch tensor, or None")
    is_count = counts.dtype in _DTYPES["block_indices"]
    if not is_count or counts.shape != t.shape[:-1] or counts.device != t.device:
        raise options.SpecError(
            f"block_counts is {tuple(counts.shape)} {counts.dtype} on {counts.device}; it must be "
            f"{tuple(t.shape[:-1])} torch.int32 or torch.int64 on {t.device}, like block_indices"
        )
    return name, t


def as_kernels_read(numbers):
    """Indices or counts as int32; None for none. Those that int32 does not have become others that
    are none, either: -1, or more than there can be."""
    if numbers is None or numbers.dtype == torch.int32:
        return numbers
    return numbers.clamp(-1, (1 << 31) - 1).to(torch.int32)


def of_call(problem, device, sizes, block_mask, block_indices, block_counts, block_bits):
    """(name, tensor) of the lists of a call. `problem`: batch, heads, heads_kv, seq_q, seq_kv."""
    given = {"block_mask": block_mask, "block_indices": block_indices, "block_bits": block_bits}
    name, t = the_one(given, block_counts)
    blocks.check_lists(name, tuple(t.shape), problem, sizes)
    if t.device != device:
        raise options.SpecError(f"{name} is on {t.device} and q on {device}: move it")
    if name == "block_bits" and not torch.compiler.is_compiling():
        here = sizes, blocks.count_of(problem[4], sizes[1])
        packed_for, count = getattr(t, PACKED_FOR, here)
        if packed_for != sizes:
            raise options.SpecError(f"block_bits were packed with block_size={packed_for}, and "
                                    f"block_size is {sizes} here: pass one of them to both")
        if count != here[1]:
            raise options.SpecError(f"block_bits were packed for {count} key blocks, and {problem[4]} "
                                    f"keys have {here[1]}: pack lists for as many")  # fmt: skip
    return name, t


class Lists:
    """What is listed. `given` has the arguments for `block_sparse_attention`.

    mask is bool of (batch or 1, heads or heads_kv or 1, query blocks, key blocks); invalid, without
    the last dimension, has the rows whose result is NaN, or is None. Kernels take neither, so that
    both are formed when they are asked for.
    """

    def __init__(self, mask, invalid, given):
        self.given = given
        self._parts = mask, invalid

    @classmethod
    def found_by(cls, find, given):
        """`find` gives (mask, invalid)."""
        lists = cls(None, None, given)
        lists._parts, lists._find = None, find
        return lists

    def _found(self):
        if self._parts is None:
            self._parts = self._find()
        return self._parts

    @property
    def mask(self):
        return self._found()[0]

    @property
    def invalid(self):
        return self._found()[1]

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


def rows_of(per_block, size, tokens):
    """(..., blocks) repeated for each token."""
    return per_block[..., None].expand(*per_block.shape, size).flatten(-2)[..., :tokens]


def per_head(x, heads):
    """(batch or 1, heads or heads_kv or 1, ...) with heads or 1 in the second place."""
    return x if x.shape[1] in (1, heads) else x.repeat_interleave(heads // x.shape[1], 1)


def lists_of(q, k, sizes, block_mask, block_indices, block_counts, block_bits):
    """The `Lists` of a call with (batch, heads, tokens, channels) tensors. Raises SpecError and
    TypeError."""
    problem = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2])
    name, t = of_call(problem, q.device, sizes, block_mask, block_indices, block_counts,
                            block_bits)  # fmt: skip
    key_blocks = blocks.count_of(k.shape[2], sizes[1])
    if name == "block_mask":
        return Lists(t.bool(), None, dict(block_mask=t))
    if name == "block_bits":
        return Lists.found_by(lambda: _from_bits(t, key_blocks), dict(block_bits=t))
    told = dict(block_indices=t, block_counts=block_counts)
    return Lists.found_by(lambda: _from_indices(t, block_counts, key_blocks), told)


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
    return mask_of_bits(bits, key_blocks), bits[..., -1] < 0  # the last word's last bit


def mask_of_bits(bits, key_blocks):
    """Lists as bool, without what marks a list that is wrong."""
    places = torch.arange(32, device=bits.device, dtype=torch.int32)
    return ((bits[..., None] >> places) & 1).bool().flatten(-2)[..., :key_blocks]
