"""`cases.py --lists` also draws which blocks of keys each block of queries lists.

Lists are given as masks, as indices in any order and with repeats, and as bits, for all heads, for
the key heads or for one, and for all batches or for one. Some rows list nothing and some list every
block; a column may be in every list or in none. Indices beyond the count can be anything, and so
can bits behind the last block's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from frame import torch
from torch import Tensor

NAMES = ("block_mask", "block_indices", "block_counts", "block_bits")
#: Options that calls with lists do not take.
NOT_WITH_LISTS = ("sparse_q", "sparse_kv", "sink_keys", "smooth_q", "dq_sums", "gradient_kernels")
FORMS = ("mask", "bytes", "indices", "counts", "bits")
HEADS = ("all", "kv", "one")
DENSITIES = (0.0, 0.03, 0.1, 0.3, 0.5, 0.7, 1.0)
COLUMNS = ("any", "any", "one in every list", "one in no list", "half in no list")
#: Layouts of lists in memory: 'expanded' has strides of zero where lists are shared.
LAYOUTS = ("contiguous", "expanded", "heads last", "every second")
#: Lengths at which a list begins another word, for blocks of 64 and of 128 tokens.
LONG = (1985, 2047, 2048, 2049, 4032, 4096, 4097, 5000)
WORD = 32


@dataclass(frozen=True)
class Lists:
    form: str
    heads: str  #: the heads that have lists of their own
    one_batch: bool  #: whether all batches have the same lists
    density: float  #: of rows that are neither empty nor full
    empty: float  #: the share of the rows that list nothing
    full: float  #: and that list every block
    column: str
    layout: str


def draw_lists(rng: random.Random) -> Lists:
    return Lists(
        form=rng.choice(FORMS), heads=rng.choice(HEADS), one_batch=rng.random() < 0.3,
        density=rng.choice(DENSITIES), empty=rng.choice((0.0, 0.0, 0.1, 0.5)),
        full=rng.choice((0.0, 0.0, 0.1, 0.3)), column=rng.choice(COLUMNS),
        layout=rng.choice(LAYOUTS))  # fmt: skip


def more_blocks(rng: random.Random, sizes: tuple[int, ...], scores: int) -> tuple[int, ...]:
    """`sizes` as they are (batch, heads of keys, queries' heads for each, queries, keys), or one
    head of so many queries or keys that a list has several words."""
    if rng.random() >= 0.15:
        return sizes
    group = rng.choice((1, 2))
    length = rng.choice(LONG)
    other = rng.randint(1, min(300, max(1, scores // (group * length))))
    return (1, 1, group, *((length, other) if rng.random() < 0.5 else (other, length)))


def lists_of(
    lists: Lists, problem: tuple[int, ...], sizes: tuple[int, int], seed: int, device: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Which blocks are listed, bool of (batch, heads, blocks of queries, of keys), and the
    arguments that say so. `problem`: batch, heads, heads_kv, queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, heads_kv, *tokens = problem
    rows, columns = (-(-n // size) for n, size in zip(tokens, sizes))
    own = {"all": heads, "kv": heads_kv, "one": 1}[lists.heads]
    shape = 1 if lists.one_batch else batch, own, rows, columns
    mask = _mask(lists, shape, generator)
    whole = mask.repeat_interleave(heads // own, 1)
    given = {"mask": _as_mask, "bytes": _as_mask, "indices": _as_indices, "counts": _as_indices,
             "bits": _as_bits}[lists.form](lists, mask, generator)  # fmt: skip
    target = batch, own if lists.heads != "one" else heads
    given = {name: _laid_out(x.to(device), lists.layout, target) for name, x in given.items()}
    return whole.expand(batch, -1, -1, -1).to(device), given


def _mask(lists: Lists, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    def chance(*size: int) -> Tensor:
        return torch.rand(size, generator=generator)

    columns = shape[3]
    mask = chance(*shape) < lists.density
    one = int(torch.randint(columns, (1,), generator=generator))
    if lists.column == "one in every list":
        mask[..., one] = True
    mask |= chance(*shape[:3], 1) < lists.full
    if lists.column == "one in no list":
        mask[..., one] = False
    if lists.column == "half in no list":
        mask &= chance(columns) < 0.5
    mask &= chance(*shape[:3], 1) >= lists.empty
    if lists.form == "indices":  # without counts each row has one at least
        at = torch.randint(columns, (*shape[:3], 1), generator=generator)
        first = torch.zeros_like(mask).scatter_(-1, at, True)
        mask |= first & ~mask.any(-1, keepdim=True)
    return mask


def _as_mask(lists: Lists, mask: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    if lists.form == "mask":
        return {"block_mask": mask}
    some = torch.randint(1, 256, mask.shape, generator=generator, dtype=torch.uint8)
    return {"block_mask": some * mask}


def _as_indices(lists: Lists, mask: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A row has its blocks in a random order, some of them twice, and anything beyond its count."""
    def below(most: int) -> int:
        return int(torch.randint(most, (1,), generator=generator))

    blocks = mask.shape[-1]
    width = int(mask.sum(-1).max()) + below(4)
    wild = torch.tensor([-1, -(1 << 31), blocks, (1 << 31) - 1, 0])
    indices = wild[torch.randint(5, (*mask.shape[:3], width), generator=generator)].int()
    counts = torch.zeros(mask.shape[:3], dtype=torch.int32)
    for place in torch.ones(mask.shape[:3]).nonzero().tolist():
        listed = mask[tuple(place)].nonzero().flatten()
        count = width if lists.form == "indices" else len(listed)
        if len(listed) and lists.form == "counts":
            count += below(width - len(listed) + 1)
        if len(listed):
            again = torch.randint(len(listed), (count - len(listed),), generator=generator)
            row = torch.cat([listed, listed[again]])
            row = row[torch.randperm(count, generator=generator)]
            indices[(*place, slice(count))] = row.int()
        counts[tuple(place)] = count if len(listed) else 0
    if lists.form == "indices":
        return {"block_indices": indices}
    return {"block_indices": indices, "block_counts": counts}


def _as_bits(lists: Lists, mask: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Bits behind the last block's are random, but the last bit of a row is zero."""
    words = mask.shape[-1] // WORD + 1
    bits = torch.rand((*mask.shape[:3], words * WORD), generator=generator) < 0.5
    bits[..., : mask.shape[-1]] = mask
    bits[..., -1] = False
    values = (bits.unflatten(-1, (words, WORD)).long() << torch.arange(WORD)).sum(-1)
    return {"block_bits": torch.where(values >= 1 << 31, values - (1 << 32), values).int()}


def _laid_out(x: Tensor, layout: str, shape: tuple[int, int]) -> Tensor:
    """Gives lists other strides. `shape` has batch and heads as if nothing were shared."""
    if layout == "expanded":
        return x.expand(*shape, *x.shape[2:])
    if layout == "heads last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "every second":
        whole = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 1)
        whole[..., ::2] = x
        return whole[..., ::2]
    return x.contiguous()
