"""How long it takes to build a pack for a fleet: 8 architectures, both head dimensions and dtypes.

    python bench/prebuild.py --cores 2

Runs `sagebwd prebuild` in a fresh process and folder, as often as --runs says. Then it opens the
pack offline for one operation of each architecture. No GPU is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from harness import Record, first_cores, parse, parser

from sagebwd.benchmark.environment import brief

LIMIT_S = 480.0
ARCHS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100", "sm_103", "sm_120")


def run(command: list, cores: list[int], **variables) -> tuple[dict, float, int]:
    """Gives a process's JSON, its wall seconds and its peak resident bytes.

    This is not the harness's run(), because only wait4 tells the peak of one process.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | variables,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} exited with {process.returncode}")
    return json.loads(printed), time.perf_counter() - start, usage.ru_maxrss << 10


def measure(options, cores: list[int]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        pack = Path(folder) / "fleet.pack"
        figures, wall_s, peak = run(
            [options.program, "prebuild", "--arch", ",".join(options.archs), "--head-dim", "64,128",
             "--dtype", "bf16,fp16", "--out", pack, "--json"], cores,
        )
        if figures["compiled"] != figures["kernels"]:
            raise RuntimeError("a new folder held kernels")
        offline = {"SAGEBWD_CACHE_DIR": f"{folder}/cache", "SAGEBWD_CACHE_PACKS": str(pack),
                   "SAGEBWD_OFFLINE": "1", "SAGEBWD_NVRTC": f"{folder}/none"}
        for arch in options.archs:
            run([options.program, "build", "--arch", arch, "--json"], cores, **offline)
        return {
            "wall_s": wall_s,
            "peak_rss_bytes": peak,
            "sha256": hashlib.sha256(pack.read_bytes()).hexdigest(),
            **{key: figures[key]
               for key in ("kernels", "bytes", "threads", "compile_s", "lowest_driver", "archs")},
            "compile_s_per_kernel": figures["compile_s"] / figures["kernels"],
        }


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "prebuild.json", "sagebwd")
    options.add_argument("--archs", type=lambda text: text.split(","), default=list(ARCHS))
    options.add_argument("--cores", type=int, default=2, help="that the processes may use")
    options.add_argument("--runs", type=int, default=3)
    options = parse(options, arguments, gpu=False)
    cores = first_cores(options.cores)
    record = Record(options.out, archs=options.archs, head_dims=[64, 128], dtypes=["bf16", "fp16"],
                    cores=len(cores), limit_s=LIMIT_S)
    runs = []
    for _ in range(options.runs):
        try:
            runs.append(measure(options, cores))
        except (RuntimeError, OSError) as error:
            print(error, file=sys.stderr)
            record.add("runs", {"error": brief(error)})
            return record.finish(False)
        record.add("runs", runs[-1])
        one = runs[-1]
        print(f"{one['kernels']} kernels for {len(options.archs)} architectures: "
              f"{one['wall_s']:.1f} s on {len(cores)} cores, {one['compile_s_per_kernel']:.3f} s "
              f"a kernel, {one['bytes'] / 2**20:.1f} MiB, "
              f"peak {one['peak_rss_bytes'] / 2**20:.0f} MiB", flush=True)
    wall_s = median(one["wall_s"] for one in runs)
    same = len({one["sha256"] for one in runs}) == 1
    record.set(wall_s={"median": wall_s, "worst": max(one["wall_s"] for one in runs)},
               byte_identical=same)
    if not same:
        print("the runs' packs differ", file=sys.stderr)
    return record.finish(same and wall_s <= LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
