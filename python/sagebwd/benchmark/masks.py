"""The masks of intervals that `sagebwd bench` measures, and masks as flex_attention takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate

from sagebwd.benchmark.cases import Case
from sagebwd.benchmark.common import torch
from sagebwd.masks import Intervals, documents, prefix_lm, window_and_global

#: Documents have these shares of the tokens; the last one has the rest.
DOCUMENTS = (1 / 32, 3 / 32, 2 / 32, 6 / 32, 4 / 32, 8 / 32, 5 / 32)
#: The shares of a prefix, of a window, and of first tokens that everybody sees.
PREFIX, WINDOW, GLOBAL = 1 / 4, 1 / 16, 1 / 128


def _part(tokens: int, share: float) -> int:
    return int(tokens * share)


def _lengths(tokens: int) -> list[int]:
    parts = [_part(tokens, share) for share in DOCUMENTS]
    return [*parts, tokens - sum(parts)]


@functools.lru_cache(maxsize=4)
def intervals_of(name: str, tokens: int, device) -> Intervals:
    """The mask of a name of `cases.INTERVALS`."""
    if name == "documents":
        return documents(lengths=_lengths(tokens), device=device)
    if name == "prefix":
        return prefix_lm(_part(tokens, PREFIX), tokens, device=device)
    return window_and_global(tokens, _part(tokens, WINDOW), _part(tokens, GLOBAL), device=device)


def arguments_of(case: Case, device) -> dict:
    """The keywords of `sagebwd.attention` that say what a query sees."""
    if not case.intervals:
        return case.mask()
    return intervals_of(case.intervals, case.seq_len, device).arguments


def as_function(case: Case, device) -> Callable:
    """The mask as a function of (b, h, q, k), without anything of `sagebwd.masks`."""
    tokens = case.seq_len
    if case.intervals == "documents":
        ends = torch.tensor(list(accumulate(_lengths(tokens))), device=device)
        number = torch.bucketize(torch.arange(tokens, device=device), ends, right=True)
        return lambda b, h, q, k: (q >= k) & (number[q] == number[k])
    if case.intervals == "prefix":
        prefix = _part(tokens, PREFIX)
        return lambda b, h, q, k: (q >= k) | (k < prefix)
    if case.intervals == "window":
        window, first = _part(tokens, WINDOW), _part(tokens, GLOBAL)
        return lambda b, h, q, k: (q >= k) & ((q - k <= window) | (k < first))
    shift = 0 if case.causal == "top-left" else case.seq_kv - case.seq_len
    left = case.seq_kv + tokens if case.window_left is None else case.window_left
    right = case.seq_kv + tokens if case.window_right is None else case.window_right
    right = 0 if case.causal != "none" else right
    return lambda b, h, q, k: (k - q - shift >= -left) & (k - q - shift <= right)
