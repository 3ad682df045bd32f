"""`cases.py --intervals` draws which intervals of queries do not see a key.

Neighbours of 1 to 300 keys share their numbers, so that some blocks of scores are hidden whole.
Numbers lie anywhere, also outside of the queries and in the wrong order. Some keys hide no query
and some all, and some queries see no key. Heads and sequences have numbers of their own or share
them, and the tensors have several strides.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from frame import torch
from torch import Tensor

HEADS = ("kv", "one")
RUNS = (1, 3, 64, 128, 300)
KINDS = ("anywhere", "short", "documents")
#: Layouts in memory: 'expanded' has strides of zero where numbers are shared, and kernels cannot
#: read 'gaps between columns' and 'shifted' as they lie.
LAYOUTS = ("contiguous", "expanded", "heads last", "gaps between columns", "shifted")


@dataclass(frozen=True)
class Intervals:
    heads: str  #: the key heads that have numbers of their own
    one_batch: bool  #: whether all sequences have the same numbers
    run: int  #: how many keys one behind the other share their numbers
    kind: str
    nothing: float  #: the share of the runs that hide no query
    all: float  #: and that hide every query
    blind: tuple[float, float] | None  #: queries between these shares of all see no key
    layout: str


def draw_intervals(rng: random.Random) -> Intervals:
    blind = tuple(sorted((rng.random(), rng.random())))
    return Intervals(
        heads=rng.choice(HEADS), one_batch=rng.random() < 0.3, run=rng.choice(RUNS),
        kind=rng.choice(KINDS), nothing=rng.choice((0.0, 0.2, 0.6)),
        all=rng.choice((0.0, 0.0, 0.2)), blind=blind if rng.random() < 0.25 else None,
        layout=rng.choice(LAYOUTS))  # fmt: skip


def numbers_of(
    intervals: Intervals, problem: tuple[int, ...], columns: int, causal: bool, seed: int,
    device: str,
) -> Tensor:
    """startend_row_indices. `problem`: batch, heads_kv, queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads_kv, queries, keys = problem
    shape = 1 if intervals.one_batch else batch, 1 if intervals.heads == "one" else heads_kv
    runs = -(-keys // intervals.run)

    def whole_numbers(low: int, high: int) -> Tensor:  # from low to before high
        return torch.randint(low, max(low + 1, high), (*shape, runs), generator=generator)

    def chance() -> Tensor:
        return torch.rand((*shape, runs), generator=generator)

    if intervals.kind == "documents":  # those of keys that see themselves alone
        first = (torch.arange(runs) * intervals.run * queries // max(1, keys)).expand(*shape, runs)
        below, above = first + intervals.run, first
        pairs = [(below, torch.full_like(below, queries)), (torch.zeros_like(above), above)]
    else:
        most = queries + 1 if intervals.kind == "anywhere" else 1 + queries // 4
        begins = [whole_numbers(-20, queries + 20) for _ in range(2)]
        pairs = [(begin, begin + whole_numbers(-5, most)) for begin in begins]
        if columns == 2 and not causal:  # the ends of all queries
            below = queries - whole_numbers(-5, most) // 2
            pairs = [(below, below), (below, whole_numbers(-5, most) // 2)]
    free, full = chance() < intervals.nothing, chance() < intervals.all
    none, every = (queries, queries), (0, queries)
    if columns == 2 and not causal:  # begins of the first and ends of the second
        none, every = (queries, 0), (0, 0)
        pairs = [(pairs[0][0], pairs[1][1])]
    found = []
    for i, pair in enumerate(pairs):
        pair = [x.masked_fill(free, of_none).masked_fill(full, of_all)
                for x, of_none, of_all in zip(pair, none, every if i == 0 else none)]  # fmt: skip
        found += pair
    numbers = torch.stack(found[:columns], -1).repeat_interleave(intervals.run, 2)[:, :, :keys]
    if intervals.blind:
        begin, end = (round(share * queries) for share in intervals.blind)
        hiding = {(1, True): [begin], (2, True): [begin, end], (2, False): [queries, end],
                  (4, False): [begin, end, 0, 0]}[columns, causal]  # fmt: skip
        numbers = torch.tensor(hiding).expand_as(numbers)
    return _laid_out(numbers.int().to(device), intervals.layout, (batch, heads_kv))


def _laid_out(x: Tensor, layout: str, shape: tuple[int, int]) -> Tensor:
    """Gives numbers other strides. `shape` has batch and heads as if nothing were shared."""
    if layout == "expanded":
        return x.expand(*shape, *x.shape[2:])
    if layout == "heads last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "gaps between columns":
        whole = x.new_full((*x.shape, 2), 7)
        whole[..., 0] = x
        return whole[..., 0]
    if layout == "shifted":
        whole = x.new_full((x.numel() + 1,), 7)
        whole[1:] = x.flatten()
        return whole[1:].view(x.shape)
    return x.contiguous()
