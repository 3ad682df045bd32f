"""Times of all cases as a picture, by matplotlib where it is installed."""

from __future__ import annotations

import os
from pathlib import Path

from sagebwd.benchmark.common import check_writable
from sagebwd.benchmark.measuring import label


def check(path) -> Path:
    """The path, once it is sure that a picture can be written there.

    ImportError without matplotlib; ValueError for a kind of file that it does not write, and for a
    folder that takes none; FileNotFoundError for a folder that is not there.
    """
    path = Path(os.fsdecode(path))
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"a plot needs matplotlib ({error}): pip install matplotlib, or leave the plot out"
        ) from error
    kinds = Figure().canvas.get_supported_filetypes()
    kind = path.suffix.removeprefix(".").lower()
    if kind not in kinds:
        raise ValueError(f"{path.name!r} is no name of a picture: give a name that ends in "
                         f".png, .svg or .pdf")  # fmt: skip
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is no folder: name a file in one that is there")
    check_writable(path.parent)
    return path


def plot(cases: list, gpu: str, path: Path) -> None:
    """Bars of the time of forward and backward: a panel for each (case, rows)."""
    from matplotlib.figure import Figure

    heights = [max(1, sum(row.both is not None for row in rows)) for _, rows in cases]
    figure = Figure(figsize=(10, 1.2 * len(cases) + 0.28 * sum(heights)))
    panels = figure.subplots(len(cases), 1, squeeze=False, height_ratios=heights)
    for (panel,), (case, rows) in zip(panels, cases):
        shown = [row for row in rows if row.both is not None]
        times = [row.both.median_ms for row in shown]
        colours = ["C0" if row.attention.startswith("sagebwd") else "C7" for row in shown]
        bars = panel.barh(range(len(shown)), times, color=colours,
                          xerr=[row.both.mad_ms for row in shown])  # fmt: skip
        panel.set_yticks(range(len(shown)), [label(row) for row in shown], fontsize="small")
        panel.invert_yaxis()
        panel.bar_label(bars, [f" {time:.3g} ms" for time in times], fontsize="small")
        panel.set_title(str(case), fontsize="small")
        panel.margins(x=0.15)
    panels[-1][0].set_xlabel("ms, forward and backward")
    figure.suptitle(gpu)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
