"""The kernels of ten specs under compute-sanitizer: memcheck, racecheck, synccheck, initcheck.

    python bench/sanitize.py

Exits 1 where a tool reports anything, where a test fails, or where fewer tests ran than expected.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from harness import Record, parse, parser

from sagebwd.experiments.environment import repository

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FILTER = "*Sanitizer.*"
SPECS = 10
#: The library raises for every driver call that fails; those it makes on purpose are no errors.
OPTIONS = ("--report-api-errors", "no", "--print-limit", "20", "--error-exitcode", "9")


def find_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or next(
        (str(path) for path in (Path("/usr/local/cuda/bin/compute-sanitizer"),) if path.exists()),
        None,
    )


def run(words: list, timeout: float) -> tuple[int | None, str, float]:
    """The exit status (None: it ran past its limit), all output, and the seconds."""
    start = time.perf_counter()
    try:
        done = subprocess.run([str(word) for word in words], timeout=timeout, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")  # fmt: skip
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        output = late.stdout or ""
        status, output = None, output if isinstance(output, str) else output.decode(errors="replace")
    return status, output, round(time.perf_counter() - start, 2)


def reported(output: str) -> dict[str, int] | None:
    """Errors and warnings of a tool's summary; None where it wrote none."""
    race = re.search(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)",
                     output)  # fmt: skip
    if race:
        return {"errors": int(race[1]), "warnings": int(race[2])}
    other = re.search(r"ERROR SUMMARY: (\d+) errors?", output)
    return {"errors": int(other[1]), "warnings": 0} if other else None


def passed_tests(output: str) -> list[str]:
    return re.findall(r"^\[       OK \] (\S+)", output, re.MULTILINE)


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0], "sanitizer.json")
    options.add_argument("--binary", type=Path, help="default: build/bin/gpu_tests")
    options.add_argument("--timeout", type=int, default=120, help="seconds for each tool")
    options = parse(options, arguments)
    binary = options.binary or (repository() or Path.cwd()) / "build/bin/gpu_tests"
    sanitizer = find_sanitizer()
    missing = [what for what, there in (("gpu_tests: build it first", binary.exists()),
                                        ("compute-sanitizer: it comes with the CUDA toolkit",
                                         sanitizer)) if not there]  # fmt: skip
    if missing:
        print(*(f"no {what}" for what in missing), sep="\n", file=sys.stderr)
        return 2

    record = Record(options.out, filter=FILTER, tool_options=" ".join(OPTIONS))
    test = [binary, f"--gtest_filter={FILTER}", "--gtest_color=no"]
    # Once without a tool: it compiles the kernels, and shows that the tests pass by themselves.
    status, output, seconds = run(test, options.timeout)
    specs, tests = re.findall(r"^spec: (.*)", output, re.MULTILINE), passed_tests(output)
    good = status == 0 and len(tests) == SPECS
    version = re.search(r"Version (\S+)", run([sanitizer, "--version"], 60)[1])
    record.set(specs=specs, sanitizer=version[1] if version else None,
               plain={"exit_status": status, "passed": len(tests), "seconds": seconds})  # fmt: skip
    if not good:
        print(output[-4000:], file=sys.stderr)
        print(f"without a tool: exit status {status}, {len(tests)} of {SPECS} tests passed",
              file=sys.stderr)  # fmt: skip
        return record.finish(False)

    for tool in TOOLS:
        command = [sanitizer, "--tool", tool, *OPTIONS, *test]
        status, output, seconds = run(command, options.timeout)
        found, tests = reported(output), passed_tests(output)
        clean = (status == 0 and found is not None and not any(found.values())
                 and len(tests) == SPECS)  # fmt: skip
        good &= clean
        record.add("tools", {
            "tool": tool,
            "command": " ".join(Path(word).name if "/" in str(word) else str(word)
                                for word in command),
            "exit_status": status,
            "errors": found and found["errors"],
            "warnings": found and found["warnings"],
            "tests_passed": len(tests),
            "seconds": seconds,
            "clean": clean,
        })  # fmt: skip
        print(f"{tool}: {found}, {len(tests)} of {SPECS} tests passed, {seconds} s", flush=True)
        if not clean:
            print(output[:6000], "...", output[-2000:], sep="\n", file=sys.stderr)
    return record.finish(good)


if __name__ == "__main__":
    sys.exit(main())
