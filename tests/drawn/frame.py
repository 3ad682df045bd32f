"""The frame of drawn cases, which is that of benchmarks: records, options, progress, and how many
specs are compiled. Whoever imports this finds bench/."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from harness import Record, parse, parser, progress, warm_up
from needs_torch import torch

__all__ = ["Record", "drawn_cases_parser", "parse", "progress", "torch", "warm_up"]


def drawn_cases_parser(
    description: str, result: str, cases: int, log2_scores: int, specs: int | None = None
) -> argparse.ArgumentParser:
    """The options that every benchmark has, and which cases are drawn and run."""
    options = parser(description, result)
    options.add_argument("--cases", type=int, default=cases, help=f"(default {cases})")
    if specs is not None:
        options.add_argument("--specs", type=int, default=specs,
                             help=f"operations, among which cases are drawn (default {specs})")
    options.add_argument("--scores", type=int, default=1 << log2_scores,
                         help=f"queries x keys x heads x batch of a case at most (2^{log2_scores})")
    options.add_argument("--only", type=int, nargs="+", metavar="INDEX", help="run these alone")
    return options
