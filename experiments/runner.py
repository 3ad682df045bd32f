"""Commands that train by a plan of many arms share this code: their records, and processes that
each have a GPU and train one arm after another."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from sagebwd.benchmark.environment import brief, print_failure

from . import command
from .command import Failure, torch

#: For processes that have nothing more to do, before they are killed.
EXIT_SECONDS = 5


# ---- records -------------------------------------------------------------------------------------


def read_object(path: Path) -> dict | None:
    """The JSON object in a file; None for a file of something else."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def differing(there: dict, given: dict, said: str) -> list[str]:
    """The values in which a record's run is not the one that is asked for, said in this form."""
    first, second = _flat(there), _flat(given)
    return [said.format(name=name, there=first.get(name), given=second.get(name))
            for name in {**first, **second}
            if first.get(name) != second.get(name)]  # fmt: skip


def _flat(record: dict, prefix: str = "") -> dict:
    found = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= _flat(value, "" if name == "arm" else f"{name} ")
        else:
            found[prefix + name] = value
    return found


# ---- the options of the command line -------------------------------------------------------------


def gpus_of(device: str, count: int) -> list[str | None]:
    """Each of so many processes gets this CUDA_VISIBLE_DEVICES, None where it stays as it is;
    ValueError where they cannot have a GPU each."""
    if count < 1:
        raise ValueError(f"--gpus {count}: it must be at least 1")
    given = torch.device(device)
    if given.type != "cuda" or (count == 1 and given.index is not None):
        return [None] * count
    if given.index is not None:
        raise ValueError(f"--gpus {count} takes GPUs from the first one on: pass --device cuda, or "
                         "set CUDA_VISIBLE_DEVICES")  # fmt: skip
    if count > (there := torch.cuda.device_count()):
        raise ValueError(f"--gpus {count}: this machine has {there}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(there)]
    return names[:count]


def check_minutes(minutes: float | None) -> None:
    if minutes is not None and not 0 < minutes < math.inf:
        raise ValueError(f"--minutes {minutes:g}: pass a positive number, or leave it out")


# ---- processes -----------------------------------------------------------------------------------


class Worker:
    """A process with a GPU, its task, and the last row that it reported of the task."""

    def __init__(self, work: Callable, gpu: str | None, given: tuple) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, *given), daemon=True)
        self.gpu, self.task, self.row = gpu, None, None
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        try:
            with command.signals_blocked():
                self.process.start()
        finally:
            if gpu is not None:
                os.environ.pop("CUDA_VISIBLE_DEVICES")
                if before is not None:
                    os.environ["CUDA_VISIBLE_DEVICES"] = before
        theirs.close()

    def start(self, task) -> None:
        self.task, self.row = task, None
        with contextlib.suppress(OSError):  # it has ended, which `hear` finds
            self.pipe.send(task)

    def hear(self) -> tuple[Any, bool, Any] | None:
        """(task, whether it was done, what came of it), or None if it goes on."""
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            kind, value = "failed", "the process ended"
        if kind == "row":
            self.row = value
            return None
        if kind == "failed":
            self.process.join(EXIT_SECONDS)  # a new one takes its place
        task, self.task = self.task, None
        return task, kind == "done", value

    def end(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.pipe.send(None)


def perform(
    work: Callable, given: tuple, gpus: list[str | None], following: Callable[[], Any],
    heard: Callable[[Any, bool, Any], None],
    stopping: Callable[[command.Signals], Any] = command.Signals.check,
    show: Callable[[list[Worker]], None] = lambda workers: None,
) -> None:  # fmt: skip
    """Has a process for each GPU, in which `work(pipe, *given)` calls `do_tasks`, do the tasks that
    come from `following`, until it gives None and all are done. `heard` gets each result. While
    `stopping` is true none is given."""
    workers: list[Worker] = []
    try:
        with command.Signals() as signals:
            for gpu in gpus:
                workers.append(Worker(work, gpu, given))
            while True:
                stops = stopping(signals)
                for index, worker in enumerate(workers):
                    if worker.task is None and not stops and (task := following()):
                        if not worker.process.is_alive():
                            worker = workers[index] = Worker(work, worker.gpu, given)
                        worker.start(task)
                busy = {worker.pipe: worker for worker in workers if worker.task}
                if not busy:
                    break
                for pipe in wait([*busy], timeout=1):
                    if told := busy[pipe].hear():
                        heard(*told)
                show(workers)
            for worker in workers:
                worker.end()
            deadline = time.monotonic() + EXIT_SECONDS
            for worker in workers:
                worker.process.join(max(0.0, deadline - time.monotonic()))
    finally:  # an error and a second Ctrl-C do not wait
        for worker in workers:
            worker.process.kill()  # they ignore SIGTERM
    signals.check()


def do_tasks(pipe, do: Callable[[Any, Callable], Any]) -> None:
    """In the process: does tasks from the pipe until None comes or the one that started it has
    gone. `do` gives what came of a task, and may tell rows. After an error a GPU may be unusable:
    the process ends."""

    def given():
        with contextlib.suppress(EOFError, OSError):  # the other process has gone
            return pipe.recv()

    def tell(kind: str, what) -> None:
        with contextlib.suppress(OSError):  # the same
            pipe.send((kind, what))

    while task := given():
        try:
            found = do(task, lambda row: tell("row", row))
        except Exception as error:
            # The command prints this of a Failure or a full disk; records name no folders.
            said = command.of_file(error) if isinstance(error, OSError) else str(error)
            if not isinstance(error, (Failure, OSError)):
                said = brief(error)
                print_failure(task.name, error)
            tell("failed", said)
            return
        tell("done", found)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
