"""All benchmarks share this: their options, their records, and how they run programs.

Timing and errors are the package's (sagebwd.benchmark), which `sagebwd bench` measures with.

A record names the tree, the GPU, the libraries, the command and the date. Only the harness writes
records. While a benchmark runs, its record is a file beside the old one, and is written again after
every figure, so that an interrupted run keeps what it has. At the end it replaces the old one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sagebwd.benchmark.common import torch
from sagebwd.benchmark.environment import brief, environment, print_failure, repository, write_json
from sagebwd.benchmark.machine import nvrtc_identity
from sagebwd.benchmark.measuring import compiled

RESULTS = Path(__file__).resolve().parent / "results"
sys.path.append(str(RESULTS.parents[1]))  # experiments


# ---- the command line and the record -------------------------------------------------------------


def parser(
    description: str | None, result: str, program: str | None = None
) -> argparse.ArgumentParser:
    """The options that every benchmark has, and one for the built `program` that it measures."""
    options = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    options.add_argument("--out", type=Path, default=RESULTS / result,
                         help=f"the record to write (default: bench/results/{result})")
    options.add_argument("--device", default="cuda", help="cpu only to try the script itself")
    options.add_argument("--seed", type=int, default=0)
    if program:
        options.add_argument("--tool" if program == "sagebwd" else "--binary", dest="program",
                             type=Path, default=(repository() or Path()) / "build/bin" / program,
                             metavar="FILE", help=f"default: build/bin/{program}")
    return options


def parse(
    options: argparse.ArgumentParser, arguments: list[str] | None, gpu: bool = True
) -> argparse.Namespace:
    """The options. Exits if what they need, a GPU or the program, is missing."""
    parsed = options.parse_args(arguments)
    if gpu and torch is None:
        options.error("this needs PyTorch: pip install torch")
    if gpu and parsed.device == "cuda":
        require_gpu(options)
    program = getattr(parsed, "program", None)
    if program and not program.exists():
        options.error(f"no {program}: build it (./run build), or name another")
    return parsed


def require_gpu(options: argparse.ArgumentParser) -> None:
    if not torch.cuda.is_available():
        options.error("no CUDA GPU here: run this on a machine with one")


class Record:
    """A JSON file under construction: ``record.add("rows", row)`` writes it at once, beside the
    file that it is to replace."""

    def __init__(self, path: Path, **parameters) -> None:
        self.path = path
        self.unfinished = path.with_name(path.name + ".unfinished")
        self.content = {
            "environment": environment() | {"nvrtc": nvrtc_identity()},
            "parameters": parameters,
            "status": "running",
        }
        self.write()
        print(f"{path.name} is written when all is measured; until then: {self.unfinished}",
              file=sys.stderr, flush=True)

    def add(self, key: str, value) -> None:
        self.content.setdefault(key, []).append(value)
        self.write()

    def set(self, **values) -> None:
        self.content |= values
        self.write()

    def close(self, passed: bool = True) -> None:
        """Replaces the old record."""
        self.set(status="finished", passed=passed)
        self.unfinished.replace(os.path.realpath(self.path))  # a symbolic link stays one

    def finish(self, passed: bool = True) -> int:
        """Closes the record; gives the exit code."""
        self.close(passed)
        print(f"{'passed' if passed else 'FAILED'}; wrote {self.path.name}", flush=True)
        return 0 if passed else 1

    def write(self) -> None:
        write_json(self.unfinished, self.content)


def progress(done: int, total: int, note: str) -> None:
    """Shows progress: one line on a terminal, elsewhere one line per tenth of the work."""
    last = done == total
    if sys.stderr.isatty():
        print(f"\r{note} {done}/{total}", end="\n" if last else "", file=sys.stderr, flush=True)
    elif last or done % max(1, total // 10) == 0:
        print(f"{note} {done}/{total}", file=sys.stderr, flush=True)


def warm_up(specs: list[dict], device: str, record: Record) -> list[int]:
    """Compiles every spec, several at a time. Specs that do not compile are recorded, and their
    indices are returned."""
    if torch.device(device).type != "cuda":
        return []
    refused = []
    for i, (spec, error) in enumerate(zip(specs, compiled(specs))):
        progress(i + 1, len(specs), "compiled")
        if error:  # a case that uses it will fail and be counted
            refused.append(i)
            print_failure(str(spec), error)
            record.add("not_compiled", {"spec": spec, "error": brief(error)})
    return refused


# ---- programs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """The result of a program. The status is None if it ran longer than its limit."""

    status: int | None
    output: str
    errors: str
    seconds: float


def first_cores(count: int) -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))[:count]


def run(words: list, *, timeout: float = 600, cores: list[int] | None = None, show: bool = False,
        merge: bool = False, **variables: str) -> Ran:
    """Runs a program with these environment variables on these cores. With `show` its output is
    shown and not returned. With `merge` the output contains what it writes to standard error."""
    pipe = None if show else subprocess.PIPE
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [str(word) for word in words], stdout=pipe, text=True, errors="replace",
            stderr=subprocess.STDOUT if merge else pipe, timeout=timeout,
            env=os.environ | variables,
            preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
        )
        status = done.returncode
    except subprocess.TimeoutExpired as late:
        done, status = late, None
    except OSError as error:  # not there, or no program
        return Ran(127, "", str(error), 0.0)
    seconds = time.perf_counter() - start
    texts = (x.decode(errors="replace") if isinstance(x, bytes) else x or ""
             for x in (done.stdout, done.stderr))
    return Ran(status, *texts, seconds)


def run_json(words: list, **how) -> tuple[dict, float]:
    """Gives a program's JSON and its wall seconds, and raises RuntimeError if it fails."""
    done = run(words, **how)
    if done.status != 0:
        why = "ran past its limit" if done.status is None else "failed"
        command = " ".join(map(str, (Path(words[0]).name, *words[1:])))
        raise RuntimeError(f"{command} {why}: {done.errors or done.output}")
    return json.loads(done.output), done.seconds


# ---- errors --------------------------------------------------------------------------------------


def cosine(x: torch.Tensor, reference: torch.Tensor) -> float:
    x, reference = x.double().flatten(), reference.double().flatten()
    norms = float(x.norm() * reference.norm())
    return float(x @ reference) / norms if norms else float("nan")
