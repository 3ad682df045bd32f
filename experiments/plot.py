"""Validation curves as a picture: ``python -m experiments.plot CURVES.csv``."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path

from sagebwd.benchmark.environment import replacing

from . import command


def read_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and loss of each run in a file that study wrote."""
    with Path(path).open(newline="") as file:
        try:
            rows = list(csv.DictReader(file))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no file of comma-separated values: {error}") from None
    if not rows or "step" not in rows[0]:
        raise ValueError(f"{path} holds no validation curves: no 'step' column or no rows")
    steps = [int(row.pop("step")) for row in rows]
    return {label: [(step, float(row[label])) for step, row in zip(steps, rows) if row[label]]
            for label in rows[0]}  # fmt: skip


def plot_curves(path: Path) -> Path:
    """Writes the picture beside the CSV file: the losses, and each one's distance to the first."""
    from matplotlib.figure import Figure

    curves = read_curves(path)
    reference_label = next(iter(curves))
    reference = dict(curves[reference_label])
    figure = Figure(figsize=(8, 8))
    losses, gaps = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for index, (label, points) in enumerate(curves.items()):
        style = dict(color=f"C{index}", linestyle=("-", "--", "-.", ":")[index % 4], label=label)
        losses.plot(*zip(*points), **style)
        if label != reference_label:
            difference = [(s, value - reference[s]) for s, value in points if s in reference]
            gaps.plot(*zip(*difference), **style)
    losses.set_ylabel("validation loss (nats)")
    losses.legend()
    gaps.axhline(0, color="black", linewidth=0.5)
    gaps.set_ylabel(f"difference to {reference_label}")
    gaps.set_xlabel("step")
    for axes in (losses, gaps):
        axes.grid(alpha=0.3)
    return saved_beside(path, figure)


def saved_beside(path: Path, figure) -> Path:
    """Writes the figure as a picture beside the file that it shows."""
    figure.tight_layout()
    picture = Path(path).with_suffix(".png")
    with replacing(picture) as partial:
        figure.savefig(partial, dpi=120, format="png")
    return picture


def draw_if_possible(draw: Callable[[Path], Path], path: Path, words: str) -> None:
    """Draws, or says which command does it where matplotlib is installed."""
    try:
        print(f"wrote {draw(path)}", file=sys.stderr)
    except ImportError:
        print(f"no matplotlib here; elsewhere: python -m experiments.{words} {path}",
              file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser("plot", __doc__)
    parser.add_argument("curves", nargs="+", type=Path, metavar="CURVES.csv",
                        help="study-curves-REGIME.csv, as study writes it")

    def work(options) -> int:
        with command.wrong_use(parser):
            try:
                for path in options.curves:
                    print(plot_curves(path))
            except ImportError as error:
                why = f"this needs matplotlib ({error}): pip install matplotlib"
                raise command.Failure(why) from error
        return 0

    return command.run(parser, arguments, work, needs_torch=False)


if __name__ == "__main__":
    sys.exit(main())
