"""Counts what ran: counts.py CTEST.XML REPORTS PASSED_BEFORE FAILED_BEFORE SKIPPED_BEFORE

Prints which tests failed and were skipped, and last "N passed, N failed, N skipped". Of pytest's
runs, which ctest knows as Python.NAME, the tests in REPORTS/NAME.xml count instead.
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

PREFIX = "Python."
SKIPPED = {"notrun", "disabled"}


def outcome(case):
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"} or case.get("status") == "fail":
        return "failed"
    return "skipped" if "skipped" in kinds or case.get("status") in SKIPPED else "passed"


def cases_of(path):
    """(name, outcome) of each test of a report; nothing for one that is not there or broke off."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return []
    return [("::".join(filter(None, (case.get("classname"), case.get("name")))), outcome(case))
            for case in root.iter("testcase")]  # fmt: skip


def all_cases(ctest, reports):
    found = cases_of(ctest)
    if not found:
        return [(f"{ctest.name} (its run broke off)", "failed")]
    cases = []
    for name, result in found:
        test = name.split("::")[-1]
        if not test.startswith(PREFIX):
            cases.append((test, result))
            continue
        own = cases_of(reports / f"{test.removeprefix(PREFIX)}.xml")
        cases += own
        # Such as one that was killed: what it has reported may all have passed.
        if result == "failed" and all(result != "failed" for _, result in own):
            cases.append((f"{test} (its run broke off)", "failed"))
        elif not own:
            cases.append((test, result))
    if not any(name.split("::")[-1].startswith(PREFIX) for name, _ in found):
        cases.append(("the tests in Python: ctest knows none (is pytest there?)", "failed"))
    return cases


def main(ctest, reports, *before):
    cases = all_cases(Path(ctest), Path(reports))
    for kind in ("skipped", "failed"):
        for name, result in cases:
            if result == kind:
                print(f"  {kind} {name}")
    totals = [int(number) + sum(result == kind for _, result in cases)
              for number, kind in zip(before, ("passed", "failed", "skipped"))]  # fmt: skip
    print()
    print("{} passed, {} failed, {} skipped".format(*totals))
    return 1 if totals[1] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
