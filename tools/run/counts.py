"""Counts what ran: counts.py CTEST.XML REPORTS PASSED_BEFORE FAILED_BEFORE SKIPPED_BEFORE

Prints which tests failed, why others were skipped, and last "N passed, N failed, N skipped". The
names of those that were skipped go into skipped.txt beside CTEST.XML. For ctest a run of pytest is
Python.NAME, and the tests in REPORTS/NAME.xml count instead of it. Those in REPORTS/alone ran
without ctest. With PyTorch, whose runs are Python.torch_NAME, a test that is skipped for a reason
that tests/python/expected_skips.txt does not have counts as failed.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

PREFIX = "Python."
WITH_TORCH = "torch_"
EXPECTED = Path(__file__).parents[2] / "tests/python/expected_skips.txt"
SKIPPED = {"notrun", "disabled"}


def outcome(case):
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"} or case.get("status") == "fail":
        return "failed"
    return "skipped" if "skipped" in kinds or case.get("status") in SKIPPED else "passed"


def reason(case):
    """Why a test was skipped, in the words that many tests share."""
    given = re.search(r": Skipped\n(.+)", case.findtext("system-out") or "")  # GoogleTest's
    skipped = case.find("skipped")
    text = given[1] if given else "" if skipped is None else skipped.get("message", "")
    if text == "collection skipped":  # a whole file: (path, line, 'Skipped: why')
        text = (skipped.text or "").partition("Skipped: ")[2].rstrip("')\"") or text
    return re.sub(r"^(\S+:\d+(: |\n)|not run: )*", "", text).partition(": ")[0] or "no reason given"


def cases_of(path):
    """(name, outcome, reason to skip) of each test of a report; nothing for one that is not there
    or broke off."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return []
    return [("::".join(filter(None, (case.get("classname"), case.get("name")))), outcome(case),
             reason(case)) for case in root.iter("testcase")]  # fmt: skip


def expected_skips(text):
    """Regular expressions, one a line, each before " # " and why such tests are skipped."""
    rows = (line.partition(" # ")[0].strip() for line in text.splitlines())
    return [re.compile(row) for row in rows if row and not row.startswith("#")]


def with_torch(cases, expected):
    """Those of a run with PyTorch: what is skipped for another reason than expected has failed."""
    for name, result, why in cases:
        if result == "skipped" and not any(pattern.match(why) for pattern in expected):
            yield f"{name} (with PyTorch it was skipped, unexpectedly: {why})", "failed", why
        else:
            yield f"{name} (with PyTorch)", result, why


def all_cases(ctest, reports):
    found = cases_of(ctest)
    if not found:
        return [(f"{ctest.name} (its run broke off)", "failed", "")]
    expected = expected_skips(EXPECTED.read_text()) if EXPECTED.exists() else []
    cases = [case for file in sorted(reports.glob("alone/*.xml")) for case in cases_of(file)]
    for name, result, why in found:
        test = name.split("::")[-1]
        if not test.startswith(PREFIX):
            cases.append((test, result, why))
            continue
        own = cases_of(reports / f"{test.removeprefix(PREFIX)}.xml")
        if test.startswith(PREFIX + WITH_TORCH):
            own = list(with_torch(own, expected))
        cases += own
        # Such as one that was killed: what it has reported may all have passed.
        if result == "failed" and all(result != "failed" for _, result, _ in own):
            cases.append((f"{test} (its run broke off)", "failed", ""))
        elif not own and test.startswith(PREFIX + WITH_TORCH):
            cases.append((f"{test} (it reported no test)", "failed", ""))
        elif not own:
            cases.append((test, result, why))
    if not any(name.split("::")[-1].startswith(PREFIX) for name, _, _ in found):
        cases.append(("the tests in Python: ctest knows none (is pytest there?)", "failed", ""))
    return cases


def main(ctest, reports, *before):
    cases = all_cases(Path(ctest), Path(reports))
    skipped = [(why, name) for name, result, why in cases if result == "skipped"]
    for why, count in Counter(why for why, _ in skipped).most_common():
        print(f"  skipped {count:5}: {why}")
    if skipped:
        names = Path(ctest).with_name("skipped.txt")
        names.write_text("".join(f"{why}: {name}\n" for why, name in sorted(skipped)))
        print(f"  which these are: {names}")
    for name, result, _ in cases:
        if result == "failed":
            print(f"  failed {name}")
    totals = [int(number) + sum(result == kind for _, result, _ in cases)
              for number, kind in zip(before, ("passed", "failed", "skipped"))]  # fmt: skip
    print()
    print("{} passed, {} failed, {} skipped".format(*totals))
    return 1 if totals[1] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
