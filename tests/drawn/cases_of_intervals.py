"""`cases.py --intervals` as it is recorded in "cases_of_intervals.json", 1,000 cases over 40 specs.

    python tests/drawn/cases_of_intervals.py   # and the options of cases.py
"""

from __future__ import annotations

import sys

import cases

USUAL = ["--intervals", "--cases", "1000", "--specs", "40"]


def main(arguments: list[str] | None = None) -> int:
    return cases.main([*USUAL, *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
