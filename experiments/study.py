"""Trains the arms of a plan, one on each GPU at a time, and says which leave the band of noise.

    python -m experiments.study pilot --show
    python -m experiments.study pilot --corpus corpus.bin --gpus 4 --minutes 30 --out study
    python -m experiments.study --summary --out study

Arms that --out has are not repeated, and those that were cut go on from their checkpoints.

With --minutes an arm starts if it will end in this time by the estimate, or if no other does and
PART_SECONDS of its steps fit: what runs at the end is cut, and the next call goes on with it.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import sys
import time
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from sagebwd.benchmark.environment import environment

from . import command, runner, study_summary
from .attentions import AttentionChoice, check_runs_on
from .command import Failure, torch
from .config import TrainConfig, add_common_arguments
from .data import Corpus
from .study_plan import PLANS, Arm, stable_rate
from .study_worker import Settings, work

DONE = ("finished", "diverged")
#: Seconds that an arm takes besides its steps, and that are kept for writing what is cut.
START_SECONDS, END_SECONDS = 6, 8
#: An arm that will be cut starts for so many seconds of steps: its start and end take fewer.
PART_SECONDS = 20
#: Speed of an attention that was not measured yet, as a share of SDPA's.
UNMEASURED = {"sagebwd": 0.9, "emulated": 0.06, "sdpa": 1.0, "sdpa-other": 0.9}


class Study:
    """The plan, and what is known of its arms."""

    def __init__(self, arms: list[Arm], out: Path, corpus: dict, compile: bool = False,
                 checkpoints: Path | None = None) -> None:  # fmt: skip
        self.arms = arms
        self.checkpoints = checkpoints or out / "checkpoints"
        self.tried: set[str] = set()
        self.hopeless: set[tuple] = set()
        self.records = {arm.name: record for arm in arms
                        if (record := _record(out / f"{arm.name}.json"))}  # fmt: skip
        for arm in map(self.resolved, arms):
            record = self.records.get(arm.name)
            if record is None or record["status"] not in (*DONE, "cut"):
                continue
            there = {name: record.get(name) for name in ("arm", "corpus", "compile")}
            given = {"arm": vars(arm), "corpus": corpus, "compile": compile}
            if wrong := study_summary.differing(there, given):
                raise ValueError(f"{arm.name}.json in --out is of another run, with {wrong}: name "
                                 "another --out")  # fmt: skip

    def done(self, arm: Arm) -> bool:
        return self.records.get(arm.name, {}).get("status") in DONE

    def resolved(self, arm: Arm) -> Arm:
        """The arm with its rate, where it is known by now."""
        if arm.lr is not None:
            return arm
        sweep = [(a, self.records[a.name] if self.done(a) else None) for a in self.arms if a.sweep]
        try:
            return replace(arm, lr=stable_rate(sweep, arm.family()))
        except ValueError as error:
            if arm.family() not in self.hopeless:
                print(f"{arm.name} and others like it cannot start: {error}", file=sys.stderr)
            self.hopeless.add(arm.family())
            return arm

    def seconds(self, arm: Arm) -> float | None:
        """How long an arm will take, from what others took; None where nothing is known."""
        speed = self._speed(arm)
        steps = arm.steps - self.steps_done(arm)
        return START_SECONDS + steps * arm.tokens_per_step / speed + END_SECONDS if speed else None

    def _speed(self, arm: Arm) -> float:
        """Tokens per second; 0 where nothing is known."""
        def pace(attention):
            return [r["tokens_per_second"] for r in self.records.values()
                    if r.get("tokens_per_second") and r["arm"]["model"] == arm.model
                    and r["arm"]["tokens"] == arm.tokens and r["arm"]["attention"] == attention]

        as_sdpa = UNMEASURED[arm.attention.partition(":")[0]]
        return min(pace(arm.attention), default=0) or min(pace("sdpa"), default=0) * as_sdpa

    def steps_done(self, arm: Arm) -> int:
        """Those of an arm that was cut, which its checkpoint has."""
        record = self.records.get(arm.name, {})
        if record.get("status") != "cut" or not (self.checkpoints / f"{arm.name}.pt").exists():
            return 0
        return record.get("steps_done", 0)

    def least(self, arm: Arm) -> float:
        """Seconds that must be left for an arm to start."""
        around = START_SECONDS + END_SECONDS
        if not (speed := self._speed(arm)):
            return around
        return min(self.seconds(arm), around + max(PART_SECONDS, arm.tokens_per_step / speed))

    def waiting(self) -> list[Arm]:
        """The arms that are to be run and have their rates."""
        left = [arm for arm in self.arms if arm.name not in self.tried and not self.done(arm)]
        return [arm for arm in map(self.resolved, left) if arm.lr is not None]

    def first(self, seconds_left: float | None) -> Arm | None:
        """The first arm of the plan that will end in the time, else the first that may start."""
        arms = self.waiting()
        if seconds_left is None:
            return next(iter(arms), None)
        may = [arm for arm in arms if self.least(arm) <= seconds_left]
        return next((arm for arm in may if (self.seconds(arm) or 0) <= seconds_left),
                    next(iter(may), None))  # fmt: skip

    def next(self, seconds_left: float | None) -> Arm | None:
        """As `first`, and never the same arm twice."""
        if arm := self.first(seconds_left):
            self.tried.add(arm.name)
        return arm

    def rest(self, minutes: float | None) -> str:
        """The text says what is not done and what a further call would do; empty if all is done."""
        undone = [arm for arm in self.arms if not self.done(arm)]
        if not undone:
            return ""
        said = f"not done: {', '.join(map(self._state, undone))}"
        self.tried.clear()
        arms = self.waiting()
        if minutes is None or not arms:
            return said
        if arm := self.first(60 * minutes):
            return f"{said}\nthe same command goes on with {arm.name}, which {self._takes(arm)}"
        arm = min(arms, key=self.least)
        enough = math.ceil((self.least(arm) + 1) / 6) / 10  # a second until it starts
        return (f"{said}\nno arm fits into {minutes:g} minutes: the next, {arm.name}, "
                f"{self._takes(arm)}: pass --minutes {enough:g} or more")

    def _state(self, arm: Arm) -> str:
        if done := self.steps_done(arm):
            return f"{arm.name} (cut at step {done} of {arm.steps})"
        return arm.name

    def _takes(self, arm: Arm) -> str:
        seconds = self.seconds(arm)
        if seconds is None:
            return f"takes more than {START_SECONDS + END_SECONDS} seconds"
        return "takes about " + (
            f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.1f} minutes")


def _record(path: Path) -> dict | None:
    if not path.exists():
        return None
    return study_summary.read_record(path) or study_summary.refuse(path)


def perform(study: Study, gpus: list, settings: Settings, minutes: float | None) -> None:
    """Runs what fits into the time; an interrupt lets running arms write their checkpoints."""
    started = time.monotonic()
    with command.signals_blocked():  # of Python's process that comes with it, too
        stop = multiprocessing.get_context("spawn").Event()

    def left() -> float | None:
        return None if minutes is None else 60 * minutes - (time.monotonic() - started)

    def stopping(signals: command.Signals) -> bool:
        if signals.here or (minutes is not None and left() < END_SECONDS):
            stop.set()
        return stop.is_set()

    def following() -> Arm | None:
        if arm := study.next(left()):
            print(f"{arm.name}: starts, lr {arm.lr:g}", file=sys.stderr)
        return arm

    runner.perform(work, (settings, stop), gpus, following, partial(_heard, study), stopping,
                   lambda workers: _show(study, workers))  # fmt: skip


def _heard(study: Study, arm: Arm, done: bool, found) -> None:
    record = found if done else {"arm": vars(arm), "status": f"failed: {found}"}
    study.records[arm.name] = record
    said = f"{arm.name}: {record['status']}"
    if loss := record.get("final_val_loss"):
        said += f", validation loss {float(loss):.4f}"
    if pace := record.get("tokens_per_second"):
        said += f", {pace:,.0f} tokens/s"
    print(said, file=sys.stderr)


def _show(study: Study, workers: list[runner.Worker]) -> None:
    if sys.stderr.isatty():
        done = sum(map(study.done, study.arms))
        running = ", ".join(f"{w.task.name} {100 * w.row['step'] // w.task.steps} %"
                            for w in workers if w.task and w.row)  # fmt: skip
        print(f"\r\033[K{done}/{len(study.arms)} arms; {running}"[:160], end="", file=sys.stderr)


def chosen(options) -> list[Arm]:
    """The plan's arms, or those of them that --only names, with SDPA's of their regimes, by which
    they are judged, and the sweeps of their rates."""
    arms = PLANS[options.plan]()
    if not options.only:
        return arms
    unknown = [p for p in options.only if not any(fnmatch(arm.name, p) for arm in arms)]
    if unknown:
        raise ValueError(f"--only {' '.join(unknown)}: the plan has no such arm; --show lists "
                         "them")  # fmt: skip
    found = [arm for arm in arms if any(fnmatch(arm.name, p) for p in options.only)]
    regimes = {_without_attention(arm) for arm in found if arm.attention != "sdpa"}
    found = [arm for arm in arms if arm.sweep or arm in found
             or (arm.attention == "sdpa" and _without_attention(arm) in regimes)]  # fmt: skip
    families = {arm.family() for arm in found if not arm.sweep}
    return [arm for arm in found if not arm.sweep or arm.family() in families or not families]


def _without_attention(arm: Arm) -> Arm:
    """Arms must share this to be compared."""
    return replace(arm, name="", attention="", seed=0)


def show(arms: list[Arm]) -> None:
    for arm in arms:
        rate = "of the sweep" if arm.lr is None else f"{arm.lr:g}"
        print(f"{arm.name:44} {arm.attention:52} {arm.steps:5} steps of {arm.tokens_per_step:7} "
              f"tokens, lr {rate}")  # fmt: skip
    print(f"{len(arms)} arms, {sum(arm.trained_tokens for arm in arms) / 1e6:,.0f} million tokens; "
          f"the longest takes {max(arm.trained_tokens for arm in arms) / 1e6:.1f} million")


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser("study", __doc__)
    add_common_arguments(parser, corpus_required=False)
    add = parser.add_argument
    add("plan", nargs="?", choices=PLANS, default="pilot",
        help="which arms: pilot (34 million tokens each), full (200 million), front (33 million; "
        "norm and RoPE in attention beside those of the model), or toy, which shows on a CPU that "
        "everything works (default: pilot)")  # fmt: skip
    add("--only", nargs="+", metavar="NAME", help="only these arms of the plan, with the sweeps "
        "and the arms of SDPA that they need; 'large-*' is a pattern")  # fmt: skip
    add("--gpus", type=int, default=1, metavar="N", help="arms at once (default: 1)")
    add("--minutes", type=float, metavar="X", help="cut what runs at the end of this time, for "
        "the next call to go on with it; an arm starts if it will end in time or, where none will, "
        f"if {PART_SECONDS} seconds of its steps fit")  # fmt: skip
    add("--checkpoints", type=Path, metavar="FOLDER",
        help="of arms that were cut (default: OUT/checkpoints)")  # fmt: skip
    add("--keep", action="store_true", help="keep the checkpoints of finished arms, too")
    add("--compile", action="store_true", help="compile everything except attention")
    add("--graph", action="store_true", help="replay a CUDA graph of each batch's forward and "
        "backward, with the same numbers")  # fmt: skip
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--show", action="store_true", help="only list the arms")
    either.add_argument("--summary", action="store_true", help="train nothing: judge what --out "
                        "has, and write study.json, the curves and their pictures again")

    def run(options) -> int:
        with command.wrong_use(parser):
            arms = chosen(options)
            if options.show:
                show(arms)
                return 0
            if options.summary:
                print(study_summary.write(options.out))
                return 0
            if not options.corpus:
                raise ValueError("--corpus FILE is needed: python -m experiments.corpus "
                                 "makes one")  # fmt: skip
            runner.check_minutes(options.minutes)
            if torch is None:
                raise Failure("this needs PyTorch: pip install torch")
            corpus = Corpus.open(options.corpus)
            for arm in arms:
                corpus.check(arm.trained_tokens // arm.tokens, arm.tokens, arm.val_sequences)
            command.check_outputs(options)
            device = command.check_device(options.device)
            TrainConfig(device=options.device, graph=options.graph)  # refuses what cannot be
            for line in dict.fromkeys(arm.attention for arm in arms):
                check_runs_on(AttentionChoice.parse(line), device)
            gpus = runner.gpus_of(options.device, options.gpus)
        with command.alone(options.out, study_summary.NAME):
            return trained(options, arms, corpus, gpus)

    def trained(options, arms: list[Arm], corpus: Corpus, gpus: list) -> int:
        with command.wrong_use(parser):
            study = Study(arms, options.out, corpus.summary(), options.compile, options.checkpoints)
            with contextlib.suppress(study_summary.NoRecords):  # broken ones are better known now
                study_summary.records_of(options.out)
            study_summary.check_summary(options.out)
        checkpoints, minutes = study.checkpoints, options.minutes
        cpu = torch.device(options.device).type == "cpu"
        settings = Settings(options.corpus, options.out, checkpoints, options.device,
                            options.compile, options.graph, options.keep, environment(),
                            1 if cpu else None)  # fmt: skip
        if all(map(study.done, arms)):
            print(f"all {len(arms)} arms are done already"
                  + ("; --keep keeps the checkpoints of arms that run" if options.keep else ""),
                  file=sys.stderr)  # fmt: skip
        elif study.first(minutes and 60 * minutes):
            checkpoints.mkdir(parents=True, exist_ok=True)
            perform(study, gpus, settings, minutes)
        with contextlib.suppress(study_summary.NoRecords):  # nothing has run
            print(study_summary.write(options.out))
        if rest := study.rest(minutes):
            print(rest, file=sys.stderr)
        return 1 if rest else 0

    return command.run(parser, arguments, run, needs_torch=False,
                       again="the same command goes on from what --out has")


if __name__ == "__main__":
    sys.exit(main())
