"""Renews every record that a machine with a GPU can give, in one process, with a progress line.

    python bench/all.py                          # all of them
    python bench/all.py --only errors cases      # some of them
    python bench/all.py --out FOLDER             # elsewhere than bench/results

PyTorch starts once, and the benchmarks share the compiled kernels. Each record names the command
that renews it alone. An old record is replaced when the new one is complete. If a benchmark fails,
the others still run, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

from harness import RESULTS, require_gpu
from needs_torch import torch

from sagebwd.benchmark.environment import print_failure

#: These benchmarks run in this order, and each writes the record of this name. Separate programs
#: come first, while this process holds no GPU memory. The two benchmarks of speed are the first
#: within the process.
BENCHMARKS = {
    "gpu_tests": "gpu-tests.json",
    "sanitize": "sanitizer.json",
    "compile_time": "compile-time.json",
    "tuning": "tuning.json",
    "host_time": "host-time.json",
    "speed": "speed.json",
    "grid": "speed-grid.json",
    "sparse": "sparse.json",
    "layer": "layer.json",
    "balance": "balance.json",
    "balance_lists": "balance-lists.json",
    "balance_masks": "balance-masks.json",
    "masks": "masks.json",
    "intervals": "intervals.json",
    "scores": "scores.json",
    "very_wide": "very_wide.json",
    "generation": "generation.json",
    "inference": "inference.json",
    "errors": "errors.json",
    "cases": "cases.json",
    "cases_of_lists": "cases_of_lists.json",
    "cases_of_intervals": "cases_of_intervals.json",
    "sla_cases": "sla_cases.json",
    "front_cases": "front_cases.json",
}


#: The last five are a test, which has a folder of its own.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/drawn"))
#: The setting of cuBLAS that cases.py needs. It must be made before cuBLAS starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def run(name: str, out: Path) -> int:
    """Runs one benchmark as its own command would, so that its record says that command."""
    words = ["--out", str(out / BENCHMARKS[name])]
    own = sys.argv
    sys.argv = [f"{name}.py", *words]
    try:
        return importlib.import_module(name).main(words)
    except SystemExit as refused:  # it has printed what is missing
        return 2 if refused.code is None else int(refused.code)
    except Exception as error:  # the others are still measured
        print_failure(name, error)
        return 1
    finally:
        sys.argv = own
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS),
                        metavar="NAME", help="of " + ", ".join(BENCHMARKS))
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER",
                        help="default: bench/results")
    options = parser.parse_args(arguments)
    require_gpu(parser)  # better than after the benchmarks that need none
    names = [name for name in BENCHMARKS if name in options.only]
    codes, began = {}, time.perf_counter()
    for index, name in enumerate(names, 1):
        print(f"\n[{index}/{len(names)}, {time.perf_counter() - began:.0f} s] {name}", flush=True)
        codes[name] = run(name, options.out)
    failed = [name for name, code in codes.items() if code]
    print(f"\n{len(names)} benchmarks in {time.perf_counter() - began:.0f} s; "
          + (f"FAILED: {', '.join(failed)}" if failed else "all passed"), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
