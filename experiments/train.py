"""Trains a language model on a corpus, with attention chosen by name.

    python -m experiments.train --corpus corpus.bin --attention sagebwd --out results
    torchrun --nproc-per-node 2 -m experiments.train --corpus corpus.bin --model 110m
    torchrun --nproc-per-node 2 -m experiments.train --corpus c.bin --context-parallel 2
    python -m experiments.train --corpus corpus.bin --save run.pt --resume run.pt

A seed gives the same weights and the same batches for every attention.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from sagebwd.benchmark.environment import brief, environment, write_json

from . import command, parallel
from .attentions import AttentionChoice, check_runs_on
from .checkpoints import check_is_file, check_save, in_force
from .command import Failure, torch
from .config import (
    CONTEXT_METHODS,
    TrainConfig,
    add_common_arguments,
    add_training_arguments,
    config_of,
    config_of_record,
    differing,
)
from .data import Corpus
from .sharing import check_attention
from .training import Run, Trainer, check

#: By the marks of commands: the ends of what each writes beside its record.
BESIDE = {"processes": (".jsonl",), "stages": (".csv", ".png"), "verdict": (".csv", ".png")}


class Rows:
    """Writes rows as JSON lines and shows one progress line; nothing is lost on an interrupt."""

    def __init__(self, path: Path, before: list[dict], steps: int, title: Callable[[int], str],
                 board) -> None:  # fmt: skip
        self.path, self.file = path, path.open("w")
        self.steps, self.title, self.board = steps, title, board
        self.val_loss = math.nan
        for row in before:
            self._write(row)

    def _write(self, row: dict) -> None:
        # JSON has no NaN.
        finite = {name: str(x) if isinstance(x, float) and not math.isfinite(x) else x
                  for name, x in row.items()}  # fmt: skip
        try:
            self.file.write(json.dumps(finite) + "\n")
            self.file.flush()
        except OSError as error:
            error.filename = str(self.path)
            raise

    def __call__(self, row: dict) -> None:
        self._write(row)
        if self.board:
            self.board.add(row)
        new, last = row["val_loss"] is not None, row["step"] == self.steps
        self.val_loss = row["val_loss"] if new else self.val_loss
        bar = "#" * round(20 * row["step"] / self.steps)
        line = (f"{self.title(row['step'])} [{bar:<20}] {row['step']}/{self.steps} train "
                f"{row['train_loss']:.4f} val {self.val_loss:.4f} "
                f"{row['tokens_per_second']:,.0f} tokens/s")  # fmt: skip
        if sys.stderr.isatty():
            print(f"\r{line}", end="\n" if last else "", file=sys.stderr, flush=True)
        elif last or new:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a row that could not be written, which was said
            self.file.close()
        if self.board:
            self.board.close()


class Board:
    """TensorBoard's log of a run. It ends where it cannot be written, and the training does not."""

    def __init__(self, folder: Path, step: int) -> None:
        """Goes on after a step: what an earlier run wrote after it is hidden."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise Failure(f"--tensorboard needs tensorboard ({error}): pip install tensorboard"
                          ) from error  # fmt: skip
        self.folder = folder
        self.writer = SummaryWriter(folder, purge_step=step + 1 if step else None)

    def add(self, row: dict) -> None:
        for name, value in row.items():
            if value is not None and name not in ("step", "tokens"):
                self._told("add_scalar", name, value, row["step"])

    def close(self) -> None:
        self._told("close")

    def _told(self, what: str, *arguments) -> None:
        if self.writer is None:
            return
        try:
            getattr(self.writer, what)(*arguments)
        except Exception as error:  # such as a disk that is full
            after_progress = "\n" if sys.stderr.isatty() else ""
            print(f"{after_progress}train: --tensorboard {self.folder}: {brief(error)}; this log "
                  "ends here, and the training goes on", file=sys.stderr)  # fmt: skip
            self.writer = None


def origin(config: TrainConfig, choice: AttentionChoice, corpus: Corpus) -> dict:
    """A record's figures come from these settings, corpus and environment."""
    return {"attention": choice.label(), "config": asdict(config), "corpus": corpus.summary(),
            "environment": environment()}  # fmt: skip


def how_to_go_on(
    trainer: Trainer, options, words: list[str], number: int = signal.SIGINT
) -> str:
    """The first process says this of a training that was interrupted; others say nothing."""
    group, config = trainer.group, trainer.config
    if group.rank:
        return ""
    said = f"{command.interrupted_by(number)} at step {trainer.step} of {config.steps}"
    if not options.save:
        return f"{said}; nothing was saved, as there was no --save FILE"
    saved = trainer.saved
    if saved is None:
        return f"{said}; nothing was saved, as a second interrupt does not wait for the step's end"
    words = _without(words, "--resume")
    program = "python"
    if group.world > 1:
        one_machine = int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1
        program = f"torchrun --nproc-per-node {group.world}" if one_machine else "torchrun ..."
    path, step = saved
    return (f"{said}; {path} is the checkpoint of step {step}. To go on:\n    {program} -m "
            f"experiments.train {shlex.join([*words, '--resume', str(path)])}")


def _without(words: list[str], option: str) -> list[str]:
    """The words of a command without an option that takes a value."""
    found, skip = [], False
    for word in words:
        if skip or word == option or word.startswith(option + "="):
            skip = word == option
            continue
        found.append(word)
    return found


def summary_of(trainer: Trainer, run: Run) -> dict:
    """A record says this of a run's end."""
    losses = [row["val_loss"] for row in run.rows if row["val_loss"] is not None]
    return {"status": run.status, "diverged": run.diverged, "step": trainer.step,
            "parameters": trainer.model.parameter_count(),
            "final_val_loss": losses[-1] if losses else None}  # fmt: skip


class Signals(command.Signals):
    """Those that wait for the end of a step, for which all processes stop."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.number = 0  #: for which they stop

    def came(self) -> bool:
        """Whether one has come to any process: all must ask."""
        self.number = self.here
        if self.trainer.group.world > 1:
            here = torch.tensor(float(self.here), device=self.trainer.device)
            self.number = int(self.trainer.group.maximum(here))
        return bool(self.number)


def recorded_train(trainer: Trainer, options, stem: str) -> dict:
    """Trains, with STEM.jsonl and STEM.json written as it goes, and checkpoints; the record."""
    config, group = trainer.config, trainer.group
    record = origin(config, trainer.choice, trainer.corpus) | {"processes": group.world}

    def write(status: str, **more) -> None:
        record.update(more, status=status)
        if not group.rank:
            write_json(options.out / f"{stem}.json", record)

    board = None
    if options.tensorboard and not group.rank:
        board = Board(options.tensorboard / stem, trainer.step)
    write("running")
    rows = None
    if not group.rank:
        rows = Rows(options.out / f"{stem}.jsonl", trainer.rows, config.steps,
                    lambda step: in_force(step, config, trainer.choice).label(), board)
    try:
        with Signals(trainer) as signals:
            run = train_with_checkpoints(trainer, rows, signals.came, options)
        if run.status == "cut":
            raise command.Interrupted(signals.number)
    except BaseException as error:
        said = _rescued(trainer, options) if isinstance(error, OSError) else ""
        with contextlib.suppress(OSError):
            write(f"stopped: {brief(error)}")
        if said:
            raise Failure(f"{command.of_file(error)}; {said}") from error
        raise
    finally:
        if rows:
            rows.close()
    write(**summary_of(trainer, run), resumed_at=trainer.resumed_at, seconds=trainer.seconds)
    return record


def _rescued(trainer: Trainer, options) -> str:
    """Saves what was trained before a record could not be written; what is said of that."""
    if not options.save:
        return f"step {trainer.step} is lost, as there was no --save FILE"
    if not trainer.saved or trainer.saved[1] != trainer.step:
        trainer.save(_checkpoint_of(trainer, options))
    path = trainer.saved[0]
    return f"{path} is the checkpoint of step {trainer.step}; --resume {path} goes on from it"


def _checkpoint_of(trainer: Trainer, options) -> Path:
    name = options.save.name.replace("{step}", str(trainer.step))
    return options.save.with_name(name)


def train_with_checkpoints(trainer: Trainer, rows, stop, options) -> Run:
    every = options.save_every or trainer.config.steps
    while True:
        until = min(trainer.config.steps, (trainer.step // every + 1) * every)
        run = trainer.run(until, rows, stop)
        if options.save and run.status != "diverged":
            trainer.save(_checkpoint_of(trainer, options))
        if run.status != "cut" or trainer.step < until:
            return run


def check_record(path: Path, config: TrainConfig, choice: AttentionChoice, corpus: Corpus,
                 mark: str = "processes", **asked) -> None:  # fmt: skip
    """ValueError if there is a record of another run, which this one would replace, or what is no
    part of any. `mark`: what records of this command alone have; `asked`: what must be the same
    besides."""
    if not path.exists():
        for other in map(path.with_suffix, BESIDE.get(mark, ())):
            if other.is_file() and other.stat().st_size:  # a record is written before them
                raise ValueError(f"{other} is there without {path.name}, and would be replaced: "
                                 "pass another --out or --name")  # fmt: skip
        return
    try:
        before = json.loads(path.read_text())
        before[mark]
        wrong = differing(config_of_record(before["config"]), config)
        same_corpus = before["corpus"]["sha256"] == corpus.header["sha256"]
    except Exception:  # whatever is missing in another file
        raise ValueError(f"{path} is there, and no record of this command: pass another --out or "
                         "--name") from None  # fmt: skip
    wrong += [f"{name} {value} (not {before.get(name)})"
              for name, value in {"attention": choice.label(), **asked}.items()
              if value != before.get(name)]  # fmt: skip
    if not same_corpus:
        wrong.append("another corpus")
    if wrong:
        raise ValueError(f"{path} is the record of another run: the options say "
                         f"{', '.join(wrong)}; pass another --out or --name")


def prepared(options, choices: list[AttentionChoice]) -> tuple[TrainConfig, Corpus]:
    """Checks that what the options ask for can run here, and opens it. Nothing is written yet."""
    corpus = Corpus.open(options.corpus)
    config = config_of(options, corpus.vocab)
    check(config, corpus, int(os.environ.get("WORLD_SIZE", "1")))
    command.check_outputs(options)
    if options.save:
        check_save(options.save, options.resume)
    device = command.check_device(config.device)
    for choice in choices:
        check_runs_on(choice, device)
        check_attention(config, choice)
    if options.resume and options.resume != options.save:
        check_is_file(options.resume)
    stem = options.name or choices[0].stem()
    check_record(options.out / f"{stem}.json", config, choices[0], corpus)
    return config, corpus


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser("train", __doc__)
    add_common_arguments(parser)
    add_training_arguments(parser)
    parser.add_argument("--attention", default="sagebwd", metavar="NAME[:OPTION,...]",
                        help="sdpa, sdpa-other, sagebwd or emulated, with options, such as "
                        "sagebwd:granularity=block,no-rotate or "
                        "emulated:precision=s+pv+dv+dp+dq+dk (default: sagebwd)")
    parser.add_argument("--name", help="stem of the files' names (default: from the attention)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a checkpoint at the end, "
                        "and at Ctrl-C or SIGTERM; {step} in FILE becomes the step")  # fmt: skip
    parser.add_argument("--save-every", type=int, default=0, metavar="N",
                        help="and after each N steps (default: 0, which is never)")
    parser.add_argument("--resume", type=Path, metavar="FILE",
                        help="go on from this checkpoint; the options must be those of its run, "
                        "except for --context-parallel, --graph, --device, --log-every and "
                        "--eval-every. The FILE of --save need not be there yet")
    parser.add_argument("--context-parallel", type=int, default=1, metavar="N",
                        help="processes that share each sequence (sagebwd.distributed); it divides "
                        "the number of processes (default: 1)")
    parser.add_argument("--context-method", choices=CONTEXT_METHODS, default="ring",
                        help="how they share it: keys travel around a ring, or ulysses gives each "
                        "process some heads (default: ring)")
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="log to TensorBoard")

    def work(options) -> int:
        with command.wrong_use(parser):
            choices = [AttentionChoice.parse(options.attention)]
            if options.switch_to:
                choices.append(AttentionChoice.parse(options.switch_to))
            if options.save_every < 0 or (options.save_every and not options.save):
                raise ValueError("--save-every needs a number of steps, and --save")
            config, corpus = prepared(options, choices)
        stem = options.name or choices[0].stem()
        written = (contextlib.nullcontext() if parallel.rank()
                   else command.alone(options.out, stem))  # fmt: skip
        with written, parallel.joined(config) as (group, config):
            with command.wrong_use(parser):
                trainer = Trainer(config, choices[0], corpus, group)
                # A job that is queued again has one command, the first time, too.
                begins = options.resume == options.save and not os.path.exists(options.resume or "")
                for note in trainer.load(options.resume) if options.resume and not begins else ():
                    if not group.rank:
                        print(f"train: {note}", file=sys.stderr)
            try:
                record = recorded_train(trainer, options, stem)
            except KeyboardInterrupt as stopped:
                words = sys.argv[1:] if arguments is None else arguments
                number = getattr(stopped, "number", signal.SIGINT)
                raise command.Interrupted(
                    number, how_to_go_on(trainer, options, words, number)) from None  # fmt: skip
        if record["diverged"]:
            step, why = record["diverged"]["step"], record["diverged"]["why"]
            saved = trainer.saved and f"{trainer.saved[0]} is of step {trainer.saved[1]}"
            raise Failure(f"diverged by step {step}: {why}; "
                          f"{saved or 'of a run that diverged no checkpoint is written'}")
        return 0

    return command.run(parser, arguments, work)


if __name__ == "__main__":
    sys.exit(main())
