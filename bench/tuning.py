"""Compares the default tiles with the tuned ones, for each kernel, and says how long tuning takes.

    python bench/tuning.py --gpu 0

Runs `sagebwd tune --force` for D 64 and 128, N 2048 and 8192, causal and not. It uses its own
cache, so that the records of this machine stay as they are.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter

from harness import Record, parse, parser, run_json

from sagebwd.benchmark.environment import brief

LIMIT_S = 60.0  #: the limit for tuning one operation
CASES = [
    {"head_dim": head_dim, "seq_len": seq_len, "causal": causal}
    for head_dim in (64, 128)
    for seq_len in (2048, 8192)
    for causal in ("none", "top-left")
]


def tune(case: dict, options, cache: str) -> tuple[dict, float]:
    """The output of one `sagebwd tune`, and its wall time in seconds."""
    given = case | {key: getattr(options, key) for key in ("batch", "heads", "rounds", "gpu")}
    words = [word for key, value in given.items() for word in ("--" + key.replace("_", "-"), value)]
    return run_json([options.program, "tune", *words, "--force", "--json"], SAGEBWD_CACHE_DIR=cache)


def row_of(kernel: dict) -> dict:
    """One kernel of a case: the default and the winner, and the results of all candidates."""
    candidates = {c["tile"]: c for c in kernel["candidates"]}
    return {
        **{key: kernel[key] for key in ("kernel", "bucket", "default_tile", "default_ms")},
        "default_mad_ms": candidates[kernel["default_tile"]]["mad_ms"],
        **{key: kernel[key] for key in ("tile", "tuned_ms")},
        "tuned_mad_ms": candidates[kernel["tile"]]["mad_ms"],
        "speedup": kernel["speedup"],
        "outcomes": Counter(candidate["outcome"] for candidate in kernel["candidates"]),
        "timings": {
            tile: {"median_ms": c["median_ms"], "mad_ms": c["mad_ms"]}
            for tile, c in candidates.items()
            if c["outcome"] == "timed"
        },
    }


def summary(rows: list[dict]) -> str:
    """The time of an operation with default tiles, divided by that with tuned tiles."""
    by_default = sum(row["default_ms"] for row in rows)
    tuned = sum(row["tuned_ms"] for row in rows)
    return f"{by_default:8.3f} ms -> {tuned:8.3f} ms  x{by_default / tuned:.3f}"


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "tuning.json", "sagebwd")
    options.add_argument("--gpu", type=int, default=0)
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--heads", type=int, default=32)
    options.add_argument("--rounds", type=int, default=25)
    options = parse(options, arguments, gpu=False)
    record = Record(options.out, batch=options.batch, heads=options.heads, rounds=options.rounds,
                    cores=len(os.sched_getaffinity(0)), limit_s=LIMIT_S)
    passed = True
    with tempfile.TemporaryDirectory() as cache:
        for case in CASES:
            name = f"D{case['head_dim']} N{case['seq_len']} causal={case['causal']}"
            try:
                printed, wall_s = tune(case, options, cache)
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr)
                record.add("cases", case | {"error": brief(error), "passed": False})
                passed = False
                continue
            rows = [row_of(kernel) for kernel in printed["kernels"]]
            in_time = wall_s <= LIMIT_S
            record.add("cases", case | {"gpu": printed["kernels"][0]["gpu"], "wall_s": wall_s,
                                        "kernels": rows, "passed": in_time})
            passed &= in_time
            print(f"{name:28} {summary(rows)}  tuned in {wall_s:5.1f} s"
                  f"{'' if in_time else '  over the limit'}", flush=True)
            for row in rows:
                print(f"    {row['kernel']:13} {row['default_ms']:8.4f} -> {row['tuned_ms']:8.4f}"
                      f" ms  x{row['speedup']:.3f}  {row['tile']}", flush=True)
    return record.finish(passed)


if __name__ == "__main__":
    sys.exit(main())
