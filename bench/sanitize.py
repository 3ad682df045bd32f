"""Kernels of some twenty specs under compute-sanitizer: memcheck, racecheck, synccheck, initcheck.

    python bench/sanitize.py

The exit code is 1 if a tool reports anything, if a test fails, or if fewer tests ran than expected.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from harness import Ran, Record, parse, parser, run

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FILTER = "*Sanitizer.*:Gpu/Linear.*"
#: The library raises an error for every driver call that fails. Calls that may fail are not errors.
OPTIONS = ("--report-api-errors", "no", "--print-limit", "20", "--error-exitcode", "9")


def find_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or next(
        (str(path) for path in (Path("/usr/local/cuda/bin/compute-sanitizer"),) if path.exists()),
        None,
    )


def reported(output: str) -> dict[str, int] | None:
    """The errors and warnings in the summary of a tool, or None if it wrote no summary."""
    race = re.search(
        r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)", output)
    if race:
        return {"errors": int(race[1]), "warnings": int(race[2])}
    other = re.search(r"ERROR SUMMARY: (\d+) errors?", output)
    return {"errors": int(other[1]), "warnings": 0} if other else None


def passed_tests(output: str) -> list[str]:
    return re.findall(r"^\[       OK \] (\S+)", output, re.MULTILINE)


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "sanitizer.json", "gpu_tests")
    options.add_argument("--timeout", type=int, default=120, help="seconds for each tool")
    parsed = parse(options, arguments)
    if not (sanitizer := find_sanitizer()):
        options.error("no compute-sanitizer: it comes with the CUDA toolkit")

    def ran(*words) -> Ran:
        return run(words, timeout=parsed.timeout, merge=True)

    record = Record(parsed.out, filter=FILTER, tool_options=" ".join(OPTIONS))
    test = [parsed.program, f"--gtest_filter={FILTER}", "--gtest_color=no"]
    listed = ran(*test, "--gtest_list_tests").output
    expected = len(re.findall(r"^  \S", listed, re.MULTILINE))
    # The first run has no tool: it compiles the kernels and shows that the tests pass.
    plain = ran(*test)
    specs = re.findall(r"^spec: (.*)", plain.output, re.MULTILINE)
    tests = passed_tests(plain.output)
    good = plain.status == 0 and 0 < len(tests) == expected
    version = re.search(r"Version (\S+)", ran(sanitizer, "--version").output)
    record.set(specs=specs, sanitizer=version[1] if version else None,
               plain={"exit_status": plain.status, "passed": len(tests),
                      "seconds": round(plain.seconds, 2)})  # fmt: skip
    if not good:
        print(plain.output[-4000:], file=sys.stderr)
        print(f"without a tool: exit status {plain.status}, {len(tests)} of {expected} passed",
              file=sys.stderr)  # fmt: skip
        return record.finish(False)

    for tool in TOOLS:
        command = [sanitizer, "--tool", tool, *OPTIONS, *test]
        one = ran(*command)
        found, tests = reported(one.output), passed_tests(one.output)
        clean = (one.status == 0 and found is not None and not any(found.values())
                 and 0 < len(tests) == expected)  # fmt: skip
        good &= clean
        record.add("tools", {
            "tool": tool,
            "command": " ".join(Path(word).name if "/" in str(word) else str(word)
                                for word in command),
            "exit_status": one.status,
            "errors": found and found["errors"],
            "warnings": found and found["warnings"],
            "tests_passed": len(tests),
            "seconds": round(one.seconds, 2),
            "clean": clean,
        })  # fmt: skip
        print(f"{tool}: {found}, {len(tests)} of {expected} tests passed, {one.seconds:.2f} s",
              flush=True)
        if not clean:
            print(one.output[:6000], "...", one.output[-2000:], sep="\n", file=sys.stderr)
    return record.finish(good)


if __name__ == "__main__":
    sys.exit(main())
