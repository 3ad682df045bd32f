"""The tests ask what bench/context_parallel.py concludes from its rows and traces."""

import pytest

pytest.importorskip("torch")

import context_parallel

ranks = pytest.importorskip("context_parallel_ranks", reason="needs PyTorch's context_parallel")


def test_time_that_nothing_hides():
    messages, kernels = [(0, 4), (6, 8), (3, 5)], [(1, 2), (7, 9)]
    assert ranks.only_first(messages, kernels) == 1 + 3 + 1
    assert ranks.only_first(messages, [(0, 10)]) == 0
    assert ranks.only_first([], kernels) == 0


def row(attention, efficiency, tokens=131072, gpus=2, **more):
    return {"attention": attention, "efficiency": efficiency, "tokens": tokens, "gpus": gpus,
            "causal": True, **more}  # fmt: skip


def test_the_better_of_both_ways_decides_at_the_longest_length():
    rows = [row("ring", 0.9), row("ulysses", 0.96), row("ring", 0.5, tokens=32768),
            row("ulysses", 0.5, tokens=32768), row("ring", 0.5, gpus=4)]  # fmt: skip
    assert context_parallel.misses(rows) == []
    rows[1]["efficiency"] = 0.94
    assert "131072" in context_parallel.misses(rows)[0]


def test_our_failures_are_misses():
    rows = [{"attention": "ring", "error": "no", "tokens": 1, "gpus": 4, "causal": True}]
    assert context_parallel.misses(rows) == ["ring: no"]
