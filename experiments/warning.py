"""Shows whether sagebwd.Monitor warns before the loss says anything: a run whose logits grow.

    python -m experiments.warning --corpus corpus.bin --model 26m --lr 0.008 --out warning
    python -m experiments.warning --corpus corpus.bin --model toy --device cpu --steps 100

Three runs have the same weights and batches, without QK-norm unless --qk-norm is given: SDPA,
another exact attention, which shows how far rounding alone drives two runs, and --attention with a
Monitor. The record says at which step the Monitor first warns, and from which step on the loss is
above SDPA's. With --remedy a fourth run attends by that from the step after the warning on. If
SDPA diverges before a loss has left SDPA's, nothing can be concluded, and the exit code is 1.
"""

from __future__ import annotations

import csv
import json
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import sagebwd
from sagebwd.benchmark.environment import replacing, write_json

from . import command
from .attentions import AttentionChoice, check_runs_on
from .command import torch
from .config import TrainConfig, add_common_arguments, add_training_arguments, config_of
from .data import Corpus
from .study_summary import PAPER_GAP
from .train import check_record, origin
from .training import Trainer, check

FIGURES = ("O", "dS", "dQ", "dK", "dV", "logit_range", "max_logit", "q_offset")
EXACT, ALSO_EXACT, MONITORED, REMEDIED = "sdpa", "sdpa-other", "monitored", "remedied"
#: Differences of two exact runs that a departure must be above.
TIMES_NOISE = 2.0


def train(config: TrainConfig, choice: AttentionChoice, corpus: Corpus, title: str,
          monitor=None) -> dict:  # fmt: skip
    """One run: the loss of every step, and what the monitor has recorded."""
    trainer = Trainer(config, choice, corpus)
    if monitor is not None:
        monitor.step(0)  # a step may be several forwards and backwards

    def each_row(row: dict) -> None:
        if monitor is not None:
            monitor.step(row["step"])
        command.progress(f"{title:10}", row["step"], config.steps)

    run = trainer.run(None, each_row)
    if run.status != "finished" and sys.stderr.isatty():
        print(file=sys.stderr)
    return {"attention": choice.label(), "status": run.status, "diverged": run.diverged,
            "steps": [row["step"] for row in run.rows],
            "train_loss": [row["train_loss"] for row in run.rows],
            "max_score": [row["max_score"] for row in run.rows],
            "val_loss": [row["val_loss"] for row in run.rows]}  # fmt: skip


def monitored(config: TrainConfig, choice: AttentionChoice, corpus: Corpus, every: int,
              ) -> tuple[dict, dict]:  # fmt: skip
    """The run, and what its monitor said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", sagebwd.MonitorWarning)
        with sagebwd.Monitor(every=every, keep=10**6) as monitor:
            run = train(config, choice, corpus, MONITORED, monitor)
            overhead = monitor.overhead
    messages = []
    for one in caught:
        if issubclass(one.category, sagebwd.MonitorWarning):
            messages.append(str(one.message))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    records = list(monitor.records)
    first: dict[str, int] = {}
    for record in records:
        for name in record["warnings"]:
            first.setdefault(name, record["step"])
    return run, {"thresholds": monitor.thresholds, "overhead": overhead, "messages": messages,
                 "first_warnings": first,
                 "first_warning": min(first.values(), default=None),
                 "records": records}  # fmt: skip


def smoothed(losses: list[float], window: int) -> list[float]:
    """The mean of up to `window` losses, the last of which is the step's."""
    return [sum(some) / len(some) for some in (losses[max(0, i + 1 - window) : i + 1]
                                               for i in range(len(losses)))]  # fmt: skip


def departure(run: dict, exact: dict, other: dict | None, gap: float, window: int) -> int | None:
    """The first step whose smoothed loss is above that of the exact run by more than `gap`, and
    than TIMES_NOISE of the largest difference between two exact runs by then. A run that diverged
    has left at that step at the latest. Nothing is compared once the exact run has diverged."""
    own, reference = (smoothed(one["train_loss"], window) for one in (run, exact))
    noise = smoothed(other["train_loss"], window) if other else reference
    largest = 0.0
    for place, (a, b) in enumerate(zip(own, reference)):
        if not math.isfinite(b):
            return None
        if place < len(noise) and math.isfinite(noise[place]):
            largest = max(largest, abs(noise[place] - b))
        if not a - b <= max(gap, TIMES_NOISE * largest):
            return run["steps"][place]
    if run["status"] == "diverged" and exact["status"] != "diverged":
        return run["steps"][-1]
    return None


def concluded(record: dict) -> bool:
    """False where SDPA diverged before a loss could leave its."""
    return record["leaves_at"] is not None or record["runs"][EXACT]["status"] != "diverged"


def verdict(record: dict) -> str:
    warned, left = record["monitor"]["first_warning"], record["leaves_at"]
    exact, count = record["runs"][EXACT], len(record["monitor"]["records"])
    samples = f"{count} sample{'s' * (count != 1)}"
    if not concluded(record):
        monitor = (f"does not warn in {samples}" if warned is None
                   else f"warns at step {warned}")  # fmt: skip
        return (f"nothing can be concluded: SDPA itself diverges at step {exact['steps'][-1]}, and "
                f"no loss has left that of SDPA by then; the monitor {monitor}; pass a lower --lr")
    if warned is None and left is None:
        said = f"neither does the monitor warn, in {samples}, nor does the loss leave SDPA's"
    elif left is None:
        said = f"the monitor warns at step {warned}; the loss does not leave SDPA's"
    elif warned is None:
        said = f"the loss leaves SDPA's at step {left}, and the monitor does not warn in {samples}"
    else:
        when = "before" if warned < left else "not before"
        said = f"the monitor warns at step {warned}, {when} the loss leaves SDPA's at step {left}"
    if exact["status"] == "diverged":
        said += f"; SDPA itself diverges at step {exact['steps'][-1]}"
    return said


# ---- what is written -----------------------------------------------------------------------------


def write_csv(path: Path, record: dict) -> None:
    """The training loss of every run by step, and the figures of the monitor."""
    losses = {name: dict(zip(run["steps"], run["train_loss"]))
              for name, run in record["runs"].items()}  # fmt: skip
    figures = {one["step"]: one for one in record["monitor"]["records"]}
    with replacing(path) as partial, partial.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *losses, *FIGURES])
        for step in sorted(set().union(*losses.values())):
            of_step = figures.get(step, {})
            values = [*(run.get(step) for run in losses.values()), *map(of_step.get, FIGURES)]
            writer.writerow([step, *("" if x is None else f"{x:.6g}" for x in values)])


def draw(path: Path, record: dict) -> None:
    """Losses, their distance to SDPA's, and the monitor's figures, over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 10))
    losses, gaps, errors = figure.subplots(3, 1, sharex=True)
    exact = smoothed(record["runs"][EXACT]["train_loss"], record["window"])
    for index, (name, run) in enumerate(record["runs"].items()):
        loss = smoothed(run["train_loss"], record["window"])
        label = name if name == run["attention"] else f"{name}: {run['attention']}"
        style = {"color": f"C{index}", "label": label}
        losses.plot(run["steps"], loss, **style)
        if name != EXACT:
            gaps.plot(run["steps"][: len(exact)], [a - b for a, b in zip(loss, exact)], **style)
    records, limits = record["monitor"]["records"], record["monitor"]["thresholds"]
    for index, name in enumerate(("O", "dS", "dQ", "dK", "dV", "logit_range")):
        # Errors and logits have limits of other sizes: each is shown as a share of its own.
        points = [(one["step"], one[name] / limits[name]) for one in records
                  if limits[name] and math.isfinite(one[name])]  # fmt: skip
        if points:
            errors.plot(*zip(*points), ".", color=f"C{index}", label=name)
    errors.axhline(1, color="black", linewidth=0.8)
    errors.set_yscale("log")
    losses.set_ylabel("training loss (nats)")
    gaps.set_ylabel("difference to SDPA")
    errors.set_ylabel("Monitor: share of the limit")
    errors.set_xlabel("step")
    for axes in (losses, gaps, errors):
        axes.grid(alpha=0.3)
        for step, color, label in ((record["monitor"]["first_warning"], "C3", "first warning"),
                                   (record["leaves_at"], "black", "loss leaves SDPA's")):
            if step is not None:
                axes.axvline(step, color=color, linestyle="--", linewidth=1, label=label)
        axes.legend(fontsize=8)
    figure.tight_layout()
    with replacing(path) as partial:
        figure.savefig(partial, dpi=110, format="png")


def write(out: Path, name: str, record: dict) -> list[Path]:
    paths = [out / f"{name}.json", out / f"{name}.csv", out / f"{name}.png"]
    write_json(paths[0], record)
    write_csv(paths[1], record)
    try:
        draw(paths[2], record)
    except ImportError:
        print("no matplotlib here, and so no picture: pip install matplotlib", file=sys.stderr)
        return paths[:2]
    return paths


def _arguments():
    parser = command.parser("warning", __doc__)
    add_common_arguments(parser)
    # It writes a row for each step, --remedy switches, and a Monitor sees no calls of CUDA graphs.
    add_training_arguments(parser, qk_norm=False, without=(
        "log_every", "switch_at", "switch_to", "graph", "parallel"))  # fmt: skip
    add = parser.add_argument
    add("--attention", metavar="NAME[:OPTION,...]", help="the attention that is watched: sagebwd "
        "or emulated (default: sagebwd on a GPU, else emulated)")  # fmt: skip
    add("--every", type=int, default=10, metavar="N",
        help="steps from one sample of the monitor to the next (default: 10)")  # fmt: skip
    add("--gap", type=float, default=PAPER_GAP, metavar="X", help="nats above SDPA's loss at which "
        f"a run has left it, if exact runs do not differ by half as much (default: {PAPER_GAP})")
    add("--window", type=int, default=10, metavar="N",
        help="steps whose losses are averaged (default: 10)")  # fmt: skip
    add("--remedy", metavar="NAME[:OPTION,...]", help="another run, which attends by this from the "
        "warning on, such as sagebwd:precision=qk16")  # fmt: skip
    add("--name", default="warning", help="stem of the files' names (default: warning)")
    add("--json", action="store_true", help="print the record, not the sentence")
    return parser


def _prepared(options) -> tuple[TrainConfig, Corpus, AttentionChoice, AttentionChoice | None]:
    """Checks that what the options ask for can run here, and opens it."""
    for name in ("every", "window"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: it must be at least 1")
    if not 0 <= options.gap < math.inf:
        raise ValueError(f"--gap {options.gap}: it must be at least 0 and finite")
    corpus = Corpus.open(options.corpus)
    config = replace(config_of(options, corpus.vocab), log_every=1)
    check(config, corpus, 1)
    command.check_outputs(options)
    device = command.check_device(config.device)
    watched = AttentionChoice.parse(
        options.attention or ("sagebwd" if device.type == "cuda" else "emulated"))
    if watched.name not in ("sagebwd", "emulated"):
        raise ValueError(f"--attention {options.attention}: a monitor sees sagebwd and emulated")
    remedy = options.remedy and AttentionChoice.parse(options.remedy)
    for choice in filter(None, (watched, remedy)):
        check_runs_on(choice, device)
    check_record(options.out / f"{options.name}.json", config, watched, corpus, "verdict",
                 **_asked(options, remedy))  # fmt: skip
    return config, corpus, watched, remedy


def _asked(options, remedy: AttentionChoice | None) -> dict:
    """A record says this of the options beside the training's."""
    return {"remedy": remedy and remedy.label(), "every": options.every, "gap": options.gap,
            "window": options.window, "times_noise": TIMES_NOISE}  # fmt: skip


def performed(config: TrainConfig, corpus: Corpus, watched: AttentionChoice,
              remedy: AttentionChoice | None, options, record: dict) -> None:  # fmt: skip
    """Fills the record with the runs."""
    runs = record["runs"] = {}
    for name in (EXACT, ALSO_EXACT):
        runs[name] = train(config, AttentionChoice.parse(name), corpus, name)
    runs[MONITORED], record["monitor"] = monitored(config, watched, corpus, options.every)
    compared = runs[EXACT], runs[ALSO_EXACT], options.gap, options.window
    record["leaves_at"] = departure(runs[MONITORED], *compared)
    warned = record["monitor"]["first_warning"]
    if remedy and warned is not None and warned < config.steps:
        switched = replace(config, switch_at=warned, switch_to=remedy.label())
        runs[REMEDIED] = train(switched, watched, corpus, REMEDIED)
        runs[REMEDIED]["attention"] += f", then {remedy.label()}"
        if runs[REMEDIED]["steps"][-1] > warned:
            record["remedied_leaves_at"] = departure(runs[REMEDIED], *compared)
        else:
            record["no_remedy"] = f"the run diverged at step {warned}, before it"
    elif remedy:
        record["no_remedy"] = ("the monitor does not warn" if warned is None else
                               f"the monitor warns at the last step, {warned}")  # fmt: skip
    record["verdict"] = verdict(record)


def main(arguments: list[str] | None = None) -> int:
    parser = _arguments()

    def work(options) -> int:
        with command.wrong_use(parser):
            config, corpus, watched, remedy = _prepared(options)
        record = origin(config, watched, corpus) | _asked(options, remedy)
        with command.alone(options.out, options.name):
            performed(config, corpus, watched, remedy, options, record)
            paths = write(options.out, options.name, record)
        if options.json:
            print(json.dumps(json.loads(paths[0].read_text()), indent=1))
        else:
            print(record["verdict"])
            for message in record["monitor"]["messages"]:
                print(f"  {message}")
            if "no_remedy" in record:
                print(f"--remedy {remedy.label()} did not attend: {record['no_remedy']}")
            elif remedy and concluded(record):
                left = record["remedied_leaves_at"]
                print(f"with {remedy.label()} from the warning on the loss "
                      + ("does not leave SDPA's" if left is None else f"leaves it at step {left}"))
        print(f"written: {', '.join(map(str, paths))}", file=sys.stderr)
        return 0 if concluded(record) else 1

    return command.run(parser, arguments, work)


if __name__ == "__main__":
    sys.exit(main())
