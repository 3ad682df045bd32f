"""Runs every test that needs a GPU and records how many passed: none may be skipped.

    python bench/gpu_tests.py

If there are several GPUs, processes share them out, except that tests which need several see all.
Tests that measure times run after all others. If one of them fails, its file runs once more,
because a shared machine may disturb it: the record tells what failed first.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from harness import Ran, Record, parse, parser, run

from sagebwd.benchmark.common import torch
from sagebwd.benchmark.environment import repository


ALONE = "test_bench_on_gpu.py", "test_exposed_messages.py", "test_monitor_on_gpu.py"
#: The first two take longest.
ON_ALL_GPUS = ("test_shared_training_on_gpus.py", "test_distributed_on_gpus.py",
               "test_distributed_front_on_gpus.py", "test_torch.py")  # fmt: skip


def one_gpu(index: int) -> dict[str, str]:
    """The environment of the index-th process: it sees one of this process's GPUs."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = seen.split(",") if seen else [str(i) for i in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if len(gpus) > 1 else {}


def suite(name: str, ran: Ran, outcomes: dict[str, str]) -> dict:
    """The results of one suite. A suite without results counts as failed."""
    named = {kind: sorted(n for n, o in outcomes.items() if o == kind)
             for kind in ("passed", "failed", "skipped")}
    return {
        "suite": name,
        "exit_status": ran.status,
        "seconds": round(ran.seconds, 2),
        "passed": len(named["passed"]),
        "failed": len(named["failed"]),
        "skipped": len(named["skipped"]),
        "failures": named["failed"],
        "skips": named["skipped"],
        "complete": ran.status == 0 and bool(named["passed"]) and not named["failed"]
        and not named["skipped"],
    }


def googletest(binary: Path, timeout: int, folder: Path, shards: int) -> dict:
    """Runs `shards` processes at a time, because tests mostly wait for their CPU references."""
    def shard(index: int) -> Ran:
        return run([binary, f"--gtest_output=json:{folder / str(index)}.json"], timeout=timeout,
                   show=True, GTEST_TOTAL_SHARDS=str(shards), GTEST_SHARD_INDEX=str(index),
                   **one_gpu(index))

    with ThreadPoolExecutor(shards) as pool:
        all_ran = list(pool.map(shard, range(shards)))
    outcomes = {}
    for report in folder.glob("*.json"):
        for group in json.loads(report.read_text())["testsuites"]:
            for test in group["testsuite"]:
                outcome = "failed" if test.get("failures") else (
                    "skipped" if test.get("result") == "SKIPPED" or test.get("status") == "NOTRUN"
                    else "passed")
                outcomes[f"{group['name']}.{test['name']}"] = outcome
    return suite("googletest", max(all_ran, key=lambda ran: (ran.status != 0, ran.seconds)),
                 outcomes)


def junit(report: Path) -> dict[str, str]:
    """The outcome of every test in pytest's report, if there is one."""
    outcomes = {}
    for test in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        kinds = {child.tag for child in test}
        outcomes[f"{test.get('classname', '')}.{test.get('name')}"] = (
            "failed" if kinds & {"failure", "error"} else
            "skipped" if "skipped" in kinds else "passed")  # fmt: skip
    return outcomes


def pytest(tests: Path, timeout: int, folder: Path, processes: int, before_times) -> dict:
    """Runs `processes` files at a time, each in its own process: most of the time is compiling.
    `before_times()` waits for whatever would disturb what measures times."""
    failed_at_first: list[str] = []

    def one(file: Path, sees: dict[str, str]) -> Ran:
        return run([sys.executable, "-m", "pytest", "-q", "-rf", file,
                    f"--junitxml={report_of(file)}"], timeout=timeout, show=True, **sees)

    def report_of(file: Path) -> Path:
        return folder / f"{file.stem}.xml"

    def twice(file: Path) -> Ran:
        ran = one(file, {})
        failed = [name for name, outcome in junit(report_of(file)).items() if outcome == "failed"]
        if not failed:
            return ran
        failed_at_first.extend(failed)
        report_of(file).unlink()
        return one(file, {})

    files, began = sorted(tests.glob("test_*.py")) or [tests], time.perf_counter()
    files.sort(key=lambda file: file.name not in ON_ALL_GPUS)
    together = [file for file in files if file.name not in ALONE]
    sees = [{} if file.name in ON_ALL_GPUS else one_gpu(i) for i, file in enumerate(together)]
    with ThreadPoolExecutor(processes) as pool:
        all_ran = list(pool.map(one, together, sees))
    before_times()
    all_ran += [twice(file) for file in files if file.name in ALONE]
    seconds = time.perf_counter() - began
    outcomes = {name: outcome for file in files for name, outcome in junit(report_of(file)).items()}
    first_failed = next((ran for ran in all_ran if ran.status != 0), all_ran[0])
    return suite("pytest", replace(first_failed, seconds=seconds), outcomes) | {
        "failed_at_first": failed_at_first}


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "gpu-tests.json", "gpu_tests")
    options.add_argument("--tests", type=Path, help="default: tests/gpu_python")
    options.add_argument("--shards", type=int, default=min(8, os.cpu_count() or 1),
                         help="processes of C++ tests at a time")
    options.add_argument("--processes", type=int, default=4,
                         help="processes of Python tests at a time (default: 4)")
    options.add_argument("--timeout", type=int, default=500, help="seconds for each process")
    options = parse(options, arguments)
    root = repository() or Path.cwd()
    record = Record(options.out)
    tests, limit = options.tests or root / "tests/gpu_python", options.timeout
    # Both at the same time: one waits for its CPU references, the other for Python.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as beside:
        programs = beside.submit(googletest, options.program, limit, Path(folder), options.shards)
        python = pytest(tests, limit, Path(folder), options.processes, programs.result)
        suites = [programs.result(), python]
    for one in suites:
        record.add("suites", one)
    totals = {key: sum(s[key] for s in suites) for key in ("passed", "failed", "skipped")}
    record.set(**{f"total_{key}": value for key, value in totals.items()})
    again = (f"failed at first: {name}" for name in python["failed_at_first"])
    print(totals, *(name for s in suites for name in s["failures"] + s["skips"]), *again,
          sep="\n  ")  # fmt: skip
    return record.finish(all(s["complete"] for s in suites))


if __name__ == "__main__":
    sys.exit(main())
