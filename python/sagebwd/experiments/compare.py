"""Trains the same model with several attentions, one after another, on the same batches.

    python -m sagebwd.experiments.compare --text a.txt b.txt --out results

A run is written ``NAME[:OPTION,...]``; two options belong to the run, not to the attention:
``seed=N`` (a second seed shows how far noise alone moves the curve) and ``steps=N``.
"""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

from . import command
from .attentions import AttentionChoice
from .config import TrainConfig, add_training_arguments
from .data import Text
from .environment import brief, environment, print_failure, replacing, write_json
from .plot import plot_if_possible
from .train import prepared, read_rows, recorded_train, validation_curve

#: SDPA first, as the reference; then ours, two negative controls, and SDPA under another seed.
DEFAULT_RUNS = ("sdpa", "sagebwd", "sagebwd:no-smooth-k", "emulated:precision=s+pv+dv+dp+dq+dk",
                "sdpa:seed=1")  # fmt: skip


@dataclass(frozen=True)
class PlannedRun(AttentionChoice):
    """One run; a seed or number of steps of None means the comparison's."""

    seed: int = None
    steps: int = None
    known = AttentionChoice.known + ", seed=1, steps=500"

    @property
    def choice(self) -> AttentionChoice:
        return AttentionChoice(name=self.name, **self.options())

    def config(self, common: TrainConfig) -> TrainConfig:
        """A shorter run keeps the schedule of the full one, so that the curves can be compared."""
        if self.steps is not None and not 0 < self.steps <= common.steps:
            raise ValueError(f"steps={self.steps} of {self.label()}: 1 to {common.steps} are there")
        seed = common.seed if self.seed is None else self.seed
        return replace(common, seed=seed, stop_after=self.steps)


class Comparison:
    """Collects finished runs; files are rewritten after each, so that none is lost."""

    def __init__(self, out: Path, planned: list[PlannedRun]) -> None:
        self.out = out
        self.curves: dict[str, dict[int, float]] = {}
        labels = [run.label() for run in planned]
        self.record = {"environment": environment(), "planned": labels, "reference": labels[0],
                       "runs": {}}  # fmt: skip

    def add(self, label: str, rows: list[dict], record: dict) -> None:
        curve = validation_curve(rows)
        self.curves[label] = curve
        reference, runs = self.record["reference"], self.record["runs"]
        against = None
        if label != reference and reference in self.curves:
            same = record["batches_sha256"] == runs[reference]["batches_sha256"]
            against = differences(curve, self.curves[reference]) | {"same_batches": same}
        pace = median(row["ms_per_step"] for row in rows)
        runs[label] = record | {"ms_per_step_median": pace, "against_reference": against}
        runs[label].pop("attention")
        self.write()

    def add_failure(self, label: str, error: Exception) -> None:
        self.record["runs"][label] = {"status": f"stopped: {brief(error)}"}
        self.write()

    def write(self) -> None:
        write_json(self.out / "training.json", self.record)
        steps = sorted({step for curve in self.curves.values() for step in curve})
        curves = self.out / "validation-curves.csv"
        with replacing(curves) as partial, partial.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *self.curves])
            for step in steps:
                values = (curve.get(step) for curve in self.curves.values())
                writer.writerow([step, *("" if v is None else f"{v:.6f}" for v in values)])

    def all_finished(self) -> bool:
        return all("final_val_loss" in run for run in self.record["runs"].values())

    def table(self) -> str:
        lines = [f"{'run':44} {'final val':>10} {'max |d|':>9} {'mean |d|':>9} {'ms/step':>8}"]
        for label, run in self.record["runs"].items():
            if "final_val_loss" not in run:
                lines.append(f"{label:44} {run['status']}")
                continue
            gaps = f"{'-':>9} {'-':>9}"
            if against := run["against_reference"]:
                gaps = f"{against['max_abs']:9.4f} {against['mean_abs']:9.4f}"
            ms = run["ms_per_step_median"]
            lines.append(f"{label:44} {run['final_val_loss']:10.4f} {gaps} {ms:8.1f}")
        return "\n".join(lines)


def differences(curve: dict[int, float], reference: dict[int, float]) -> dict:
    """Of two validation curves, over the steps that both have."""
    steps = sorted(curve.keys() & reference.keys())
    if not steps:
        raise ValueError("the two runs were validated at no common step")
    gaps = [curve[step] - reference[step] for step in steps]
    sizes = [abs(gap) for gap in gaps]
    return {"steps_compared": len(steps), "max_abs": max(sizes), "mean_abs": mean(sizes),
            "mean": mean(gaps), "final": gaps[-1]}  # fmt: skip


def finished_before(stem: Path, config: TrainConfig, text: Text) -> tuple[list[dict], dict] | None:
    """Rows and record of an earlier run of just this configuration on just this text."""
    try:
        record = json.loads(Path(f"{stem}.json").read_text())
        rows = read_rows(Path(f"{stem}.csv"))
    except (OSError, ValueError):
        return None
    same = record["config"] == asdict(config) and record["text"] == list(text.files)
    return (rows, record) if same and record["status"] == "finished" else None


def compare(
    planned: list[PlannedRun], common: TrainConfig, text: Text, out: Path,
    checkpoints: Path | None = None, reuse: bool = False,
) -> Comparison:
    """Trains every planned run; one that fails is recorded and the next one starts.

    With `reuse`, runs that finished in `out` with the same configuration and text count as done.
    """
    comparison = Comparison(out, planned)
    if checkpoints:
        checkpoints.mkdir(parents=True, exist_ok=True)
    for run in planned:
        config = run.config(common)
        if reuse and (done := finished_before(out / run.stem(), config, text)):
            print(f"{run.label()}: finished before", file=sys.stderr)
            comparison.add(run.label(), *done)
            continue
        try:
            save = checkpoints and checkpoints / f"{run.stem()}.pt"
            result, record = recorded_train(config, run.choice, text, out, run.stem(), save)
        except Exception as error:  # one broken attention must not cost the others
            print_failure(run.label(), error)
            comparison.add_failure(run.label(), error)
            continue
        comparison.add(run.label(), result.rows, record)
        del result
    return comparison


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser("compare", __doc__)
    add_training_arguments(parser)
    parser.add_argument("--runs", nargs="+", default=list(DEFAULT_RUNS), metavar="RUN",
                        help="attentions, of which the first is the reference (default: "
                        + " ".join(DEFAULT_RUNS) + ")")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER",
                        help="keep the trained models in this folder")
    parser.add_argument("--reuse", action="store_true",
                        help="do not repeat runs that --out has with the same configuration")

    def work(options) -> int:
        with command.wrong_use(parser):
            planned = [PlannedRun.parse(run) for run in options.runs]
            common, text = prepared(options, [run.choice for run in planned])
            for run in planned:
                run.config(common)
        comparison = compare(planned, common, text, options.out, options.checkpoints, options.reuse)
        print(comparison.table())
        plot_if_possible(options.out / "validation-curves.csv")
        return 0 if comparison.all_finished() else 1

    return command.run(parser, arguments, work)


if __name__ == "__main__":
    sys.exit(main())
