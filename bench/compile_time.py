"""How long the first use of an operation takes: compiling all its kernels, then from the disk; and
how long a kernel that is in memory takes to find.

    python bench/compile_time.py --cores 2

Runs `sagebwd build` in fresh processes: cold, each time with an empty cache, then again with the
cache the last one filled; and bin/cache_speed, whose times are those of the library alone, without
the command line's start and output. Needs no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from harness import Record, parser

from sagebwd.experiments.environment import brief, repository

COLD_LIMIT_MS = 2000.0
#: Of a new process that does nothing else, from its start to its end.
DISK_LIMIT_MS = 10.0
LOOKUP_LIMIT_NS = 2000.0
SPECS = {
    "d128 bf16": ["--head-dim", "128", "--dtype", "bf16", "--causal", "none"],
    "d64 bf16 causal": ["--head-dim", "64", "--dtype", "bf16", "--causal", "top-left"],
    "d128 bf16 block": ["--head-dim", "128", "--dtype", "bf16", "--causal", "none",
                        "--granularity", "block"],
}


def build(tool: Path, words: list[str], cache: str, cores: list[int]) -> tuple[float, list[dict]]:
    """Wall time of one process in milliseconds, and the kernels it reports."""
    environment = os.environ | {"SAGEBWD_CACHE_DIR": cache}
    start = time.perf_counter()
    done = subprocess.run(
        [tool, "build", *words, "--json"], capture_output=True, text=True, env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores), timeout=300,
    )
    wall_ms = (time.perf_counter() - start) * 1e3
    if done.returncode:
        raise RuntimeError(f"sagebwd build {' '.join(words)} failed:\n{done.stderr or done.stdout}")
    return wall_ms, json.loads(done.stdout)["kernels"]


def library_alone(tool: Path, words: list[str], cores: list[int]) -> dict:
    """What bin/cache_speed prints: disk_process_ms, disk_ms, lookup_ns, and more."""
    done = subprocess.run(
        [tool.with_name("cache_speed"), *words], capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode:
        raise RuntimeError(f"cache_speed {' '.join(words)} failed:\n{done.stderr or done.stdout}")
    return json.loads(done.stdout)


def measure(tool: Path, words: list[str], options) -> dict:
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    cold, warm = [], []
    for _ in range(options.cold_runs):
        with tempfile.TemporaryDirectory() as cache:
            wall_ms, kernels = build(tool, words, cache, cores)
            cold.append(wall_ms)
            if any(kernel["cached"] for kernel in kernels):
                raise RuntimeError("an empty cache served a kernel: SAGEBWD_CACHE_DIR is ignored")
            for _ in range(options.warm_runs):
                wall_ms, again = build(tool, words, cache, cores)
                warm.append(wall_ms)
                if not all(kernel["cached"] for kernel in again):
                    raise RuntimeError("the second process compiled again")
    alone = library_alone(tool, words, cores)
    return {
        "kernels": kernels,
        "cold_ms": {"median": median(cold), "worst": max(cold), "runs": len(cold)},
        "warm_ms": {"median": median(warm), "worst": max(warm), "runs": len(warm)},
        "disk_process_ms": alone["disk_process_ms"],
        "disk_ms": alone["disk_ms"],
        "lookup_ns": alone["lookup_ns"],
        "passed": median(cold) <= COLD_LIMIT_MS
        and alone["disk_process_ms"] <= DISK_LIMIT_MS
        and alone["lookup_ns"] <= LOOKUP_LIMIT_NS,
    }


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0], "compile-time.json")
    options.add_argument("--tool", type=Path, help="default: build/bin/sagebwd")
    options.add_argument("--arch", default="sm_90a")
    options.add_argument("--cores", type=int, default=2, help="that the processes may use")
    options.add_argument("--cold-runs", type=int, default=3)
    options.add_argument("--warm-runs", type=int, default=5, help="after each cold one")
    options = options.parse_args(arguments)
    root = repository()
    tool = options.tool or (root / "build/bin/sagebwd" if root else Path("sagebwd"))
    if not tool.exists():
        print(f"no {tool}: build it, or name it with --tool", file=sys.stderr)
        return 2
    record = Record(options.out, arch=options.arch, cores=options.cores,
                    limits={"cold_ms": COLD_LIMIT_MS, "disk_process_ms": DISK_LIMIT_MS,
                            "lookup_ns": LOOKUP_LIMIT_NS})
    passed = True
    for name, words in SPECS.items():
        try:
            row = measure(tool, ["--arch", options.arch, *words], options)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{name}: {error}", file=sys.stderr)
            record.add("ops", {"op": name, "error": brief(error), "passed": False})
            passed = False
            continue
        record.add("ops", {"op": name} | row)
        print(f"{name:18} {len(row['kernels'])} kernels, cold {row['cold_ms']['median']:7.0f} ms, "
              f"from disk {row['warm_ms']['median']:5.1f} ms "
              f"({row['disk_process_ms']:.1f} without the command line), "
              f"in memory {row['lookup_ns']:.0f} ns"
              f"{'' if row['passed'] else '  over the limit'}", flush=True)
        passed &= row["passed"]
    return record.finish(passed)


if __name__ == "__main__":
    sys.exit(main())
