"""Trains the arms of a plan, one on each GPU at a time, and says which leave the band of noise.

    python -m sagebwd.experiments.study pilot --show
    python -m sagebwd.experiments.study pilot --corpus corpus.bin --gpus 4 --minutes 30 --out study
    python -m sagebwd.experiments.study --summary --out study

Arms that --out has are not repeated, and those that were cut go on from their checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from fnmatch import fnmatch
from multiprocessing.connection import wait
from pathlib import Path

from . import command, study_summary
from .attentions import AttentionChoice, check_runs_on
from .command import Failure, torch
from .config import TrainConfig, add_common_arguments
from .data import Corpus
from .environment import environment
from .study_plan import PLANS, Arm, stable_rate
from .study_worker import Settings, work

DONE = ("finished", "diverged")
#: Seconds that an arm takes besides its steps, and that are kept for writing what is cut.
START_SECONDS, END_SECONDS = 6, 8
#: Speed of an attention that was not measured yet, as a share of SDPA's.
UNMEASURED = {"sagebwd": 0.9, "emulated": 0.06, "sdpa": 1.0, "sdpa-other": 0.9}


class Study:
    """The plan, and what is known of its arms."""

    def __init__(self, arms: list[Arm], out: Path, corpus: dict, compile: bool = False) -> None:
        self.arms = arms
        self.tried: set[str] = set()
        self.hopeless: set[tuple] = set()
        self.records = {arm.name: record for arm in arms
                        if (record := _record(out / f"{arm.name}.json"))}  # fmt: skip
        for arm in map(self.resolved, arms):
            record = self.records.get(arm.name)
            if record is None or record["status"] not in DONE:
                continue
            if (record["arm"], record["corpus"], record["compile"]) != (
                vars(arm), corpus, compile):  # fmt: skip
                raise ValueError(f"{arm.name}.json in --out is of another plan, corpus or "
                                 "--compile: name another --out")  # fmt: skip

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
        def pace(attention):
            return [r["tokens_per_second"] for r in self.records.values()
                    if r.get("tokens_per_second") and r["arm"]["model"] == arm.model
                    and r["arm"]["tokens"] == arm.tokens and r["arm"]["attention"] == attention]

        speed = min(pace(arm.attention), default=None)
        if speed is None:
            as_sdpa = UNMEASURED[arm.attention.partition(":")[0]]
            speed = min(pace("sdpa"), default=0) * as_sdpa
        return START_SECONDS + arm.trained_tokens / speed if speed else None

    def next(self, seconds_left: float | None) -> Arm | None:
        """The first arm of the plan that is to be run, has its rate and fits into the time."""
        for arm in self.arms:
            if arm.name in self.tried or self.done(arm):
                continue
            arm = self.resolved(arm)
            takes = self.seconds(arm)
            if arm.lr is not None and (
                seconds_left is None or (takes or 0) + END_SECONDS < seconds_left
            ):
                self.tried.add(arm.name)
                return arm
        return None


def _record(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise ValueError(
            f"{path} is no record of an arm: remove it, or name another --out"
        ) from None


class Worker:
    """A process with a GPU, and the arm that it trains."""

    def __init__(self, gpu: str | None, settings: Settings, stop) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, settings, stop), daemon=True)
        self.gpu, self.arm, self.row = gpu, None, None
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        try:
            self.process.start()
        finally:
            if gpu is not None:
                os.environ.pop("CUDA_VISIBLE_DEVICES")
                if before is not None:
                    os.environ["CUDA_VISIBLE_DEVICES"] = before
        theirs.close()

    def start(self, arm: Arm) -> None:
        self.arm, self.row = arm, None
        self.pipe.send(arm)

    def end(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.pipe.send(None)
        self.process.join(20)
        if self.process.is_alive():
            self.process.terminate()


def perform(study: Study, gpus: list, settings: Settings, minutes: float | None) -> None:
    """Runs what fits into the time; an interrupt lets running arms write their checkpoints."""
    started = time.monotonic()
    stop = multiprocessing.get_context("spawn").Event()

    def left() -> float | None:
        return None if minutes is None else 60 * minutes - (time.monotonic() - started)

    workers = [Worker(gpu, settings, stop) for gpu in gpus]
    interrupted = False
    while True:
        try:
            for index, worker in enumerate(workers):
                if worker.arm is None and not stop.is_set() and (arm := study.next(left())):
                    if not worker.process.is_alive():
                        worker = workers[index] = Worker(worker.gpu, settings, stop)
                    print(f"{arm.name}: starts, lr {arm.lr:g}", file=sys.stderr)
                    worker.start(arm)
            busy = [worker for worker in workers if worker.arm]
            if not busy:
                break
            if minutes is not None and left() < END_SECONDS:
                stop.set()
            for pipe in wait([worker.pipe for worker in busy], timeout=1):
                _hear(study, next(worker for worker in busy if worker.pipe is pipe))
            _show(study, workers)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            stop.set()
    for worker in workers:
        worker.end()
    if interrupted:
        raise KeyboardInterrupt


def _hear(study: Study, worker: Worker) -> None:
    try:
        kind, value = worker.pipe.recv()
    except (EOFError, OSError):
        kind, value = "done", {"arm": vars(worker.arm), "status": "failed: the process ended"}
        worker.process.join(5)
    if kind == "row":
        worker.row = value
        return
    study.records[worker.arm.name] = value
    said = f"{worker.arm.name}: {value['status']}"
    if loss := value.get("final_val_loss"):
        said += f", validation loss {float(loss):.4f}"
    if pace := value.get("tokens_per_second"):
        said += f", {pace:,.0f} tokens/s"
    print(said, file=sys.stderr)
    worker.arm = None
    if value["status"].startswith("failed"):
        worker.process.join(20)  # a new one takes its place


def _show(study: Study, workers: list[Worker]) -> None:
    if sys.stderr.isatty():
        done = sum(map(study.done, study.arms))
        running = ", ".join(f"{w.arm.name} {100 * w.row['step'] // w.arm.steps} %"
                            for w in workers if w.arm and w.row)  # fmt: skip
        print(f"\r\033[K{done}/{len(study.arms)} arms; {running}"[:160], end="", file=sys.stderr)


def chosen(options) -> list[Arm]:
    """The plan's arms, or those of them that --only names."""
    arms = PLANS[options.plan]()
    if not options.only:
        return arms
    found = [arm for arm in arms if arm.sweep or any(fnmatch(arm.name, p) for p in options.only)]
    if all(arm.sweep for arm in found) and not any(fnmatch(arm.name, p) for arm in found
                                                   for p in options.only):  # fmt: skip
        raise ValueError(f"--only {' '.join(options.only)}: the plan has no such arm; --show lists "
                         "them")  # fmt: skip
    families = {arm.family() for arm in found if not arm.sweep}
    return [arm for arm in found if not arm.sweep or arm.family() in families or not families]


def gpus_of(options) -> list[str | None]:
    """What CUDA_VISIBLE_DEVICES is for each process."""
    if torch.device(options.device).type != "cuda":
        return [None] * options.gpus
    if options.gpus > (count := torch.cuda.device_count()):
        raise ValueError(f"--gpus {options.gpus}: this machine has {count}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(count)]
    return names[: options.gpus]


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
        help="which arms: pilot (34 million tokens each), full (200 million), or toy, which shows "
        "on a CPU that everything works (default: pilot)")  # fmt: skip
    add("--only", nargs="+", metavar="NAME", help="only these arms of the plan, with the sweeps "
        "that they need; 'large-*' is a pattern")  # fmt: skip
    add("--gpus", type=int, default=1, metavar="N", help="arms at once (default: 1)")
    add("--minutes", type=float, metavar="X", help="start no arm that would not end in this time, "
        "and cut what runs at its end")  # fmt: skip
    add("--checkpoints", type=Path, metavar="FOLDER",
        help="of arms that were cut (default: OUT/checkpoints)")  # fmt: skip
    add("--keep", action="store_true", help="keep the checkpoints of finished arms, too")
    add("--compile", action="store_true", help="compile everything except attention")
    add("--graph", action="store_true", help="replay a CUDA graph of each batch's forward and "
        "backward, with the same numbers")  # fmt: skip
    add("--show", action="store_true", help="only list the arms")
    add("--summary", action="store_true", help="only judge what --out has")

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
                raise ValueError("--corpus FILE is needed: python -m sagebwd.experiments.corpus "
                                 "makes one")  # fmt: skip
            if options.gpus < 1:
                raise ValueError(f"--gpus {options.gpus}: it must be at least 1")
            if options.minutes is not None and not options.minutes > 0:
                raise ValueError(f"--minutes {options.minutes}: it must be above 0")
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
            gpus = gpus_of(options)
            study = Study(arms, options.out, corpus.summary(), options.compile)
        checkpoints = options.checkpoints or options.out / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        cpu = torch.device(options.device).type == "cpu"
        settings = Settings(options.corpus, options.out, checkpoints, options.device,
                            options.compile, options.graph, options.keep, environment(),
                            1 if cpu else None)  # fmt: skip
        perform(study, gpus, settings, options.minutes)
        print(study_summary.write(options.out))
        missing = [arm.name for arm in arms if not study.done(arm)]
        if missing:
            print(f"not done: {', '.join(missing)}", file=sys.stderr)
        return 1 if missing else 0

    return command.run(parser, arguments, run, needs_torch=False,
                       again="the same command goes on from what --out has")


if __name__ == "__main__":
    sys.exit(main())
