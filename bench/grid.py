"""Speed over all sizes: N 512 .. 131072, D 64, 128, 256, causal and not; FP16, GQA, both layouts.

    python bench/grid.py                   # three minutes on an H200
    python bench/grid.py --tokens 512 1024 --head-dim 64

It measures as speed.py does, and its rows have the same fields, plus the GPU memory that forward +
backward takes. From N 65536 on there are fewer heads, so that a call takes at most a second. FP16,
eight query heads per key/value head, tokens before heads in memory, and PyTorch's attentions under
torch.use_deterministic_algorithms are measured at N 8192.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from harness import Record, parse, parser
from needs_torch import torch
from speed import (
    DETERMINISTIC,
    HEADS_TIMES_DIM,
    LARGEST_ERROR,
    PASSES,
    PEERS,
    TOTAL_TOKENS,
    Cell,
    Ours,
    line,
    measure,
    warm,
)  # fmt: skip

LENGTHS = [512 << i for i in range(9)]
VARIED = 8192  #: the tokens at which the further forms are measured
OURS = ["sagebwd", "sagebwd:precision=gradients16,no-deterministic"]
#: A forward and backward of more scores than this is timed in fewer rounds.
MANY_SCORES = 8192**2 * 4 * 16


def cell_of(head_dim: int, causal: bool, tokens: int) -> Cell:
    heads = HEADS_TIMES_DIM // head_dim
    if tokens > TOTAL_TOKENS:
        heads = max(1, heads * TOTAL_TOKENS // tokens)
    return Cell(head_dim, causal, tokens, max(1, TOTAL_TOKENS // tokens), heads)


def cells_of(head_dims: list[int], lengths: list[int]) -> list[Cell]:
    cells = []
    for head_dim in head_dims:
        cells += [cell_of(head_dim, causal, n) for causal in (False, True) for n in lengths]
        if VARIED in lengths:
            plain = cell_of(head_dim, False, VARIED)
            cells += [replace(plain, dtype="fp16"),
                      replace(plain, heads_kv=max(1, plain.heads // 8)),
                      replace(plain, causal=True, heads_kv=max(1, plain.heads // 8)),
                      replace(plain, layout="bshd")]  # fmt: skip
    return cells


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "speed-grid.json")
    options.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    options.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, metavar="N")
    options.add_argument("--ours", nargs="*", default=OURS, metavar="NAME[:OPTION,...]")
    options.add_argument("--rounds", type=int, default=7, help="3 from a certain size on")
    options.add_argument("--exact-heads", type=int, default=1, help="compared with FP64")
    options = parse(options, arguments)
    options.peers = list(PEERS)
    rounds = options.rounds
    ours = list(map(Ours.parse, options.ours))
    cells = cells_of(options.head_dim, options.tokens)
    record = Record(options.out, total_tokens=TOTAL_TOKENS, heads_times_dim=HEADS_TIMES_DIM,
                    rounds=rounds, seed=options.seed, flops_factor=PASSES,
                    exact_heads=options.exact_heads, largest_error=LARGEST_ERROR)  # fmt: skip
    warm(ours, cells, options, record)
    rows = []
    for cell in cells:
        large = cell.tokens**2 * cell.batch * cell.heads > 2 * MANY_SCORES
        options.rounds, options.warmup = (3, 1) if large else (rounds, 2)
        options.deterministic_peers = cell == cell_of(cell.head_dim, cell.causal, VARIED)
        measured = measure(options, cell, ours, record)
        print("\n".join(map(line, measured)), flush=True)
        rows += measured
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    peers = {name + also for name in PEERS for also in ("", DETERMINISTIC)}
    return record.finish(all(row["correct"] for row in rows if row["attention"] not in peers))


if __name__ == "__main__":
    sys.exit(main())
