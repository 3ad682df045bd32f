"""The default tiles against the tuned ones, kernel by kernel, and how long tuning takes.

    python bench/tuning.py --gpu 0

Runs `sagebwd tune --force` for D 64 and 128, N 2048 and 8192, causal and not, in a cache of its
own, so that the records of this machine stay as they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import Record, parser

from sagebwd.experiments.environment import brief, repository

LIMIT_S = 60.0  #: of tuning one operation
CASES = [
    {"head_dim": head_dim, "seq_len": seq_len, "causal": causal}
    for head_dim in (64, 128)
    for seq_len in (2048, 8192)
    for causal in ("none", "top-left")
]


def tune(tool: Path, case: dict, options, cache: str) -> tuple[float, dict]:
    """Wall time of one `sagebwd tune` in seconds, and what it prints."""
    words = ["--head-dim", case["head_dim"], "--seq-len", case["seq_len"],
             "--causal", case["causal"], "--batch", options.batch, "--heads", options.heads,
             "--rounds", options.rounds, "--gpu", options.gpu]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(
        [tool, "tune", *map(str, words), "--force", "--json"], capture_output=True, text=True,
        env=os.environ | {"SAGEBWD_CACHE_DIR": cache}, timeout=600, check=False,
    )  # fmt: skip
    wall_s = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"sagebwd tune failed: {done.stderr or done.stdout}")
    return wall_s, json.loads(done.stdout)


def row_of(kernel: dict) -> dict:
    """One kernel of a case: default against winner, and what became of all candidates."""
    candidates = {c["tile"]: c for c in kernel["candidates"]}
    outcomes: dict[str, int] = {}
    for candidate in kernel["candidates"]:
        outcomes[candidate["outcome"]] = outcomes.get(candidate["outcome"], 0) + 1
    return {
        "kernel": kernel["kernel"],
        "bucket": kernel["bucket"],
        "default_tile": kernel["default_tile"],
        "default_ms": kernel["default_ms"],
        "default_mad_ms": candidates[kernel["default_tile"]]["mad_ms"],
        "tile": kernel["tile"],
        "tuned_ms": kernel["tuned_ms"],
        "tuned_mad_ms": candidates[kernel["tile"]]["mad_ms"],
        "speedup": kernel["speedup"],
        "outcomes": outcomes,
        "timings": {
            tile: {"median_ms": c["median_ms"], "mad_ms": c["mad_ms"]}
            for tile, c in candidates.items()
            if c["outcome"] == "timed"
        },
    }


def summary(rows: list[dict]) -> str:
    """The default's time over the tuned one's, of a whole operation's kernels."""
    by_default = sum(row["default_ms"] for row in rows)
    tuned = sum(row["tuned_ms"] for row in rows)
    return f"{by_default:8.3f} ms -> {tuned:8.3f} ms  x{by_default / tuned:.3f}"


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0], "tuning.json")
    options.add_argument("--tool", type=Path, help="default: build/bin/sagebwd")
    options.add_argument("--gpu", type=int, default=0)
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--heads", type=int, default=32)
    options.add_argument("--rounds", type=int, default=25)
    options = options.parse_args(arguments)
    root = repository()
    tool = options.tool or (root / "build/bin/sagebwd" if root else Path("sagebwd"))
    if not tool.exists():
        print(f"no {tool}: build it, or name it with --tool", file=sys.stderr)
        return 2
    record = Record(options.out, batch=options.batch, heads=options.heads, rounds=options.rounds,
                    cores=len(os.sched_getaffinity(0)), limit_s=LIMIT_S)
    passed = True
    with tempfile.TemporaryDirectory() as cache:
        for case in CASES:
            name = f"D{case['head_dim']} N{case['seq_len']} causal={case['causal']}"
            try:
                wall_s, printed = tune(tool, case, options, cache)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
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
