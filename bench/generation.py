"""Few queries and many keys, as in generation: the forward, compared with PyTorch's attentions.

    python bench/generation.py

Each call quantises all keys and values again. That alone reads and writes more memory than 16-bit
attention reads. The record says how long it takes, and so why there is no KV cache.
"""

from __future__ import annotations

import sys
from functools import partial

from harness import Record, parse, parser
from needs_torch import torch
from speed import PEERS

import sagebwd
from sagebwd.benchmark.attentions import of_pytorch
from sagebwd.benchmark.timing import clock_of, time_interleaved
from sagebwd.benchmark.truth import relative_l2

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
QUERIES, KEYS = (1, 16), (4096, 32768, 131072)
LARGEST_ERROR = 0.03  #: the largest error against FlashAttention-2


def measure(options, queries: int, keys: int) -> dict:
    generator = torch.Generator(options.device).manual_seed(options.seed)
    q, k, v = (
        torch.randn(1, heads, tokens, HEAD_DIM, generator=generator, device=options.device)
        .bfloat16() for heads, tokens in ((HEADS, queries), (HEADS_KV, keys), (HEADS_KV, keys))
    )  # fmt: skip
    calls = {name: partial(of_pytorch(name, options.device, False), q, k, v) for name in PEERS}
    error = relative_l2(sagebwd.attention(q, k, v), calls["fa2"]())
    calls["sagebwd"] = partial(sagebwd.attention, q, k, v)
    times = time_interleaved(calls, clock_of(options.device), options.rounds)
    best = min(times[name].median_ms for name in PEERS)
    return {"queries": queries, "keys": keys, "rel_l2_to_fa2": error,
            "correct": error <= LARGEST_ERROR, **{name: t.json() for name, t in times.items()},
            "ratio_to_best_peer": round(best / times["sagebwd"].median_ms, 4)}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "generation.json")
    options.add_argument("--keys", type=int, nargs="+", default=KEYS)
    options.add_argument("--rounds", type=int, default=15)
    options = parse(options, arguments)
    record = Record(options.out, heads=HEADS, heads_kv=HEADS_KV, head_dim=HEAD_DIM, dtype="bf16",
                    seed=options.seed, rounds=options.rounds)  # fmt: skip
    rows = []
    for queries in QUERIES:
        for keys in options.keys:
            rows.append(measure(options, queries, keys))
            record.add("rows", rows[-1])
            print(*(f"{key}={value}" for key, value in rows[-1].items() if key != "correct"))
    return record.finish(all(row["correct"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
