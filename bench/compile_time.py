"""How long the first use of an operation takes, when its kernels are compiled and when they are
read from disk, and how long it takes to find a kernel in memory.

    python bench/compile_time.py --cores 2

Runs `sagebwd build` in fresh processes, first with an empty cache each time, then with the cache
that the last of them filled. The forward's kernels alone, which a first call waits for while the
backward's are compiled in the background, are compiled from an empty cache too. bin/cache_speed
measures the library alone, without the start and the output of the command line. No GPU is needed.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from statistics import median

from harness import Record, first_cores, parse, parser, run_json

from sagebwd.benchmark.environment import brief

COLD_LIMIT_MS = 2000.0
#: A first forward may wait this long for its kernels.
FIRST_LIMIT_MS = 1500.0
#: The limit for a process that does nothing else, from its start to its end.
DISK_LIMIT_MS = 10.0
LOOKUP_LIMIT_NS = 2000.0
SPECS = {
    "d128 bf16": ["--head-dim", "128", "--dtype", "bf16", "--causal", "none"],
    "d64 bf16 causal": ["--head-dim", "64", "--dtype", "bf16", "--causal", "top-left"],
    "d128 bf16 block": ["--head-dim", "128", "--dtype", "bf16", "--causal", "none",
                        "--granularity", "block"],
}


def measure(words: list[str], options) -> dict:
    """One operation: `sagebwd build` cold and warm, and what bin/cache_speed prints."""
    cores = first_cores(options.cores)
    first, cold, warm = [], [], []

    def build_in(cache: str, *more: str) -> tuple[list[dict], float]:
        printed, seconds = run_json([options.program, "build", *words, *more, "--json"],
                                    timeout=300, cores=cores, SAGEBWD_CACHE_DIR=cache)
        return printed["kernels"], seconds * 1e3

    for _ in range(options.cold_runs):
        with tempfile.TemporaryDirectory() as cache:
            first.append(build_in(cache, "--pass", "forward")[1])
        with tempfile.TemporaryDirectory() as cache:
            build = partial(build_in, cache)
            kernels, wall_ms = build()
            cold.append(wall_ms)
            if any(kernel["cached"] for kernel in kernels):
                raise RuntimeError("an empty cache served a kernel: SAGEBWD_CACHE_DIR is ignored")
            for _ in range(options.warm_runs):
                again, wall_ms = build()
                warm.append(wall_ms)
                if not all(kernel["cached"] for kernel in again):
                    raise RuntimeError("the second process compiled again")
    alone, _ = run_json([options.program.with_name("cache_speed"), *words], timeout=300,
                        cores=cores)
    return {
        "kernels": kernels,
        "first_ms": {"median": median(first), "worst": max(first), "runs": len(first)},
        "cold_ms": {"median": median(cold), "worst": max(cold), "runs": len(cold)},
        "warm_ms": {"median": median(warm), "worst": max(warm), "runs": len(warm)},
        **{key: alone[key] for key in ("disk_process_ms", "disk_ms", "lookup_ns")},
        "passed": median(first) <= FIRST_LIMIT_MS
        and median(cold) <= COLD_LIMIT_MS
        and alone["disk_process_ms"] <= DISK_LIMIT_MS
        and alone["lookup_ns"] <= LOOKUP_LIMIT_NS,
    }


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "compile-time.json", "sagebwd")
    options.add_argument("--arch", default="sm_90a")
    options.add_argument("--cores", type=int, default=2, help="that the processes may use")
    options.add_argument("--cold-runs", type=int, default=3)
    options.add_argument("--warm-runs", type=int, default=5, help="after each cold one")
    options = parse(options, arguments, gpu=False)
    record = Record(options.out, arch=options.arch, cores=options.cores,
                    limits={"first_ms": FIRST_LIMIT_MS, "cold_ms": COLD_LIMIT_MS,
                            "disk_process_ms": DISK_LIMIT_MS, "lookup_ns": LOOKUP_LIMIT_NS})
    passed = True
    for name, words in SPECS.items():
        try:
            row = measure(["--arch", options.arch, *words], options)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)
            record.add("ops", {"op": name, "error": brief(error), "passed": False})
            passed = False
            continue
        record.add("ops", {"op": name} | row)
        print(f"{name:18} {len(row['kernels'])} kernels, cold {row['cold_ms']['median']:7.0f} ms "
              f"(the forward's {row['first_ms']['median']:.0f} ms), "
              f"from disk {row['warm_ms']['median']:5.1f} ms "
              f"({row['disk_process_ms']:.1f} without the command line), "
              f"in memory {row['lookup_ns']:.0f} ns"
              f"{'' if row['passed'] else '  over the limit'}", flush=True)
        passed &= row["passed"]
    return record.finish(passed)


if __name__ == "__main__":
    sys.exit(main())
