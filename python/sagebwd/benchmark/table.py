"""The results of one case as a table of at most 100 columns."""

from __future__ import annotations

import textwrap

from sagebwd.benchmark.attentions import BASELINES
from sagebwd.benchmark.cases import Case
from sagebwd.benchmark.machine import WIDTH
from sagebwd.benchmark.measuring import LARGEST_ERROR, Row
from sagebwd.benchmark.timing import Timing
from sagebwd.benchmark.truth import TENSORS

NAME = 21  #: the width of an attention's name
HEADER = (f"{'':{NAME}}{'forward':>16}{'fwd + backward':>16}{'speed':>7}{'memory':>8}"
          + f"{'error O':>9}" + "".join(f"{name:>7}" for name in TENSORS[1:]))  # fmt: skip
KINDS = {False: "Not deterministic: two runs may differ in their last bits",
         True: "Deterministic: the same bits in every run"}  # fmt: skip


def time_text(timing: Timing) -> str:
    """The median, and the spread in percent of it."""
    spread = 100 * timing.mad_ms / timing.median_ms if timing.median_ms else 0
    digits = 3 if timing.median_ms < 1000 else 1
    return f"{timing.median_ms:9.{digits}f} ±{spread:4.1f}%"


def row_text(row: Row) -> str:
    """One line, or more where a reason is long."""
    if row.refusal:
        indent = " " * (NAME + 1)
        return textwrap.fill(f"{row.attention:{NAME}} {row.refusal}", WIDTH,
                             subsequent_indent=indent, break_on_hyphens=False)  # fmt: skip
    speed = "-" if row.speed is None else f"{row.speed:.2f}x"
    memory = "-" if row.memory_mib is None else f"{row.memory_mib:.0f}"
    errors = "  " + "".join(f"{row.errors[name]:7.4f}" for name in TENSORS)
    mark = ("=" if row.same_as else "") + ("!" if row.is_wrong else "")
    return (f"{row.attention:{NAME}}{time_text(row.forward):>16}{time_text(row.both):>16}"
            f"{speed:>7}{memory:>8}{errors}{mark}")  # fmt: skip


def table(case: Case, rows: list[Row]) -> str:
    """The case, and its rows by whether they promise the same bits in every run."""
    lines = textwrap.wrap(str(case), WIDTH)
    for kind, title in KINDS.items():
        chosen = [row for row in rows if row.deterministic == kind]
        if chosen:
            lines += ["", title, HEADER, *map(row_text, chosen)]
    return "\n".join(lines)


def legend(rows: list[Row]) -> str:
    """Says what the columns mean."""
    samples = sorted({row.both.samples for row in rows if row.both})
    rounds = " to ".join(str(n) for n in dict.fromkeys((samples[0], samples[-1]))) if samples else 0
    text = (
        f"Times are milliseconds: medians of {rounds} rounds in which all attentions took turns, "
        "± the median absolute deviation. Speed is that of forward and backward, relative to the "
        f"fastest of {', '.join(BASELINES)} in the same part of the table. Memory is the peak of "
        "forward and backward in MiB, without the inputs. Errors are relative L2 errors against "
        "FP64 attention, for one key/value head and its query heads; inputs are standard normal."
    )
    if any(row.same_as for row in rows):
        text += " '=' marks the kernels, and so the figures, of the deterministic row."
    if any(row.is_wrong for row in rows):
        text += f" '!' marks results that are wrong: an error above {LARGEST_ERROR}."
    return textwrap.fill(text, WIDTH)
