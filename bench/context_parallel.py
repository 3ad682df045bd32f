"""Attention over GPUs that share a sequence: ours and PyTorch's, forward and backward.

    python bench/context_parallel.py                          # 2 GPUs, and 4 where they are
    python bench/context_parallel.py --gpus 2 --tokens 32768

Per number of GPUs, length and mask: `ring` and `ulysses` of sagebwd.distributed, PyTorch's
context_parallel (a ring) and Ulysses, both with cuDNN's and FlashAttention's kernels (SDPA), and on
one GPU of the same run sagebwd.attention with all tokens. All take turns. tokens/s are of all GPUs
together; `efficiency` is one GPU's time over the number of GPUs times theirs. `exposed_ms` is the
time in which the first GPU sends or receives and computes nothing, from a trace. The highest memory
of a rank includes what it receives, and not its inputs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import Record, parse, parser, progress, run
from needs_torch import torch

#: The better of ring and Ulysses must reach this on two GPUs at the longest length, for both passes
#: together.
LEAST_EFFICIENCY = 0.95
MODULE = "context_parallel_ranks"


def ranks_of(gpus: int, options, folder: Path) -> tuple[list[dict], str]:
    """The rows that so many ranks measured, and why there are none."""
    rows = folder / f"{gpus}.jsonl"
    program = Path(__file__).with_name(f"{MODULE}.py")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc-per-node={gpus}", program, "--rows", rows]  # fmt: skip
    for name in ("tokens", "heads", "heads_kv", "head_dim", "rounds", "seed"):
        value = getattr(options, name)
        words += ["--" + name.replace("_", "-"), *(value if isinstance(value, list) else [value])]
    done = run(words, timeout=options.timeout, OMP_NUM_THREADS="4")
    found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    why = "" if done.status == 0 else done.errors.strip() or f"exit code {done.status}"
    return found, why


def misses(rows: list[dict]) -> list[str]:
    """Which demands the rows miss, in words."""
    found = []
    of_two = [row for row in rows if row["gpus"] == 2]
    longest = max((row["tokens"] for row in of_two), default=0)
    for causal in (True, False):
        best = max((row.get("efficiency") or 0 for row in of_two
                    if row["attention"] in ("ring", "ulysses") and row["causal"] == causal
                    and row["tokens"] == longest), default=None)  # fmt: skip
        if best is not None and best < LEAST_EFFICIENCY:
            found.append(f"{longest} tokens, causal={causal}: efficiency {best} on 2 GPUs, "
                         f"below {LEAST_EFFICIENCY}")  # fmt: skip
    wrong = [row for row in rows if row["attention"] in ("ring", "ulysses") and "error" in row]
    return found + [f"{row['attention']}: {row['error']}" for row in wrong]


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "context-parallel.json")
    there = torch.cuda.device_count()
    add = options.add_argument
    add("--gpus", type=int, nargs="+", default=[n for n in (2, 4) if n <= there] or [2])
    add("--tokens", type=int, nargs="+", default=[32768, 131072])
    add("--heads", type=int, default=16)
    add("--heads-kv", type=int, default=16)
    add("--head-dim", type=int, default=128)
    add("--rounds", type=int, default=5)
    add("--timeout", type=int, default=550, help="seconds for each number of GPUs")
    given = parse(options, arguments)
    if max(given.gpus) > there:
        options.error(f"--gpus {max(given.gpus)}: there {'is' if there == 1 else 'are'} {there}")
    names = ("gpus", "tokens", "heads", "heads_kv", "head_dim", "rounds", "seed")
    record = Record(given.out, **{name: getattr(given, name) for name in names})
    failed = []
    with TemporaryDirectory() as folder:
        for index, gpus in enumerate(given.gpus, 1):
            rows, why = ranks_of(gpus, given, Path(folder))
            for row in rows:
                record.add("rows", row)
            if why:
                failed.append(f"{gpus} GPUs: {why[-2000:]}")
            progress(index, len(given.gpus), "numbers of GPUs")
    failed += misses(record.content.get("rows", []))
    for line in failed:
        print(line, flush=True)
    record.set(misses=failed)
    return record.finish(not failed)


if __name__ == "__main__":
    os.environ.setdefault("SAGEBWD_LOG", "0")
    sys.exit(main())
