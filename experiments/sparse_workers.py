"""The runs of sparse_video, one after another or side by side: each process has a device, the dense
model and the routers."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sagebwd.benchmark.environment import write_tensors

from . import runner
from .checkpoints import load_file
from .command import Failure, ignore_signals
from .sparse_plan import ARMS, Run, SparseConfig, differences
from .sparse_train import Workplace

#: Seconds that a run takes, from its label.
CostOf = Callable[[str], float]


#: Neither the dense model nor the routers depend on these values of a configuration.
_OF_RUNS = ("steps", "lr", "evals", "calibration", "densities", "seeds", "toy")
#: The routers depend on these values, and the dense model does not.
_OF_ROUTERS = ("block_size", "stage_one_steps", "stage_one_lr", "temperature", "how")


def of_dense(config: SparseConfig) -> dict:
    """The dense model depends on these values."""
    return {name: value for name, value in config.to_dict().items()
            if name not in (*_OF_RUNS, *_OF_ROUTERS)}  # fmt: skip


def of_routers(config: SparseConfig, density: float) -> dict:
    """The routers depend on this, before it is known how many steps there is time for."""
    found = {name: value for name, value in config.to_dict().items() if name not in _OF_RUNS}
    return found | {"density": density}


def digest_of(dense: dict) -> str:
    """That of a dense model, from the record of its training."""
    return hashlib.sha256(json.dumps(dense, sort_keys=True).encode()).hexdigest()[:16]


def saved(path: Path, config: dict, make, device) -> dict:
    """The checkpoint there, which must be of this configuration, or `make()`, which is then written
    with it."""
    if path.exists():
        return loaded(path, config, device)
    found = make()
    write(path, config, found)
    return found


def write(path: Path, config: dict, state: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, state | {"config": config})


def loaded(path: Path, config: dict, device) -> dict:
    """The checkpoint there; Failure if it is of another configuration."""
    otherwise = "remove it, or name other --checkpoints"
    try:
        found = load_file(path, {"config": dict}, device)
    except ValueError as error:
        raise Failure(f"{error}: {otherwise}") from error
    if wrong := differences(found["config"], config):
        raise Failure(f"{path} is of another configuration ({wrong}): {otherwise}")
    return found


def routers_path(checkpoints: Path, density: float) -> Path:
    return checkpoints / f"routers-{density:g}.pt"


def check(checkpoints: Path, config: SparseConfig) -> int | None:
    """Failure if a checkpoint there is of another configuration, before anything is computed. The
    steps of stage 1 that routers have had, or None if there are none."""
    dense, steps = None, None
    if (path := checkpoints / "dense.pt").exists():
        dense = {"dense_model": digest_of(loaded(path, of_dense(config), "cpu")["record"])}
    for density in config.densities:
        if (path := routers_path(checkpoints, density)).exists():
            if dense is None:
                raise Failure(f"{path} is of a dense model that {checkpoints} does not have: "
                              "remove it, or name other --checkpoints")  # fmt: skip
            found = loaded(path, of_routers(config, density) | dense, "cpu")
            steps = steps or found["config"]["steps_of_stage_one"]
    return steps


class Unfinished:
    """The file of a pre-training that has not ended."""

    def __init__(self, path: Path, config: SparseConfig, device: torch.device) -> None:
        self.path, self.config, self.device = path, of_dense(config), device

    def read(self) -> dict | None:
        return loaded(self.path, self.config, self.device) if self.path.exists() else None

    def write(self, state: dict) -> None:
        write(self.path, self.config, state)


@dataclass(frozen=True)
class Task:
    """A process does it for a run. A task without steps trains only the routers, and keeps them."""

    run: Run
    steps: int
    reports: bool  #: whether its modules are looked at first
    seconds: float = 0.0  #: that it takes
    deadline: float | None = None  #: by time.monotonic(), which processes share

    @property
    def name(self) -> str:
        return self.run.label()


class Bench:
    """The dense model on a device, and what is trained from it."""

    def __init__(self, config: SparseConfig, device: torch.device, checkpoints: Path,
                 stage_one_steps: int, progress) -> None:  # fmt: skip
        self.place, self.checkpoints = Workplace(config, device, progress), checkpoints
        self.stage_one_steps = stage_one_steps
        self.model = self.place.model()
        dense = loaded(checkpoints / "dense.pt", of_dense(config), device)
        self.model.load_state_dict(dense["model"])
        self._made = {"dense_model": digest_of(dense["record"]),
                      "steps_of_stage_one": stage_one_steps}  # fmt: skip
        self._routers: dict[float, list] = {}

    def routers(self, density: float) -> list[dict]:
        """Those of (e) by layer, trained unless the checkpoints have them."""
        if density not in self._routers:
            found = saved(
                routers_path(self.checkpoints, density),
                of_routers(self.place.config, density) | self._made,
                lambda: {"routers": self.place.stage_one(self.model, density,
                                                         self.stage_one_steps)},
                self.place.device)  # fmt: skip
            self._routers[density] = found["routers"]
        return self._routers[density]

    def perform(self, task: Task) -> tuple[dict, list[dict] | None] | None:
        """The run's result, and what stage 1 gave it; None where the time does not suffice."""
        if task.deadline is not None and self.place.wait() + task.seconds > task.deadline:
            return None
        learned = ARMS[task.run.arm].router == "learned"
        if not task.steps:
            self.routers(task.run.density)
            return None
        modules = self.place.arm_modules(task.run, self.model,
                                         self.routers(task.run.density) if learned else None)
        report = self.place.held_out_report(modules, self.model) if task.reports else None
        return self.place.run(task.run, self.model, modules, task.steps), report


def one_by_one(bench: Bench, tasks: list[Task], heard: Callable[[Run, Any], None]) -> None:
    """Calls `heard` with each run and its result."""
    for task in tasks:
        heard(task.run, bench.perform(task))


def side_by_side(gpus: list, given: tuple, tasks: list[Task], progress,
                 heard: Callable[[Run, Any], None]) -> None:  # fmt: skip
    """Processes do the tasks, and `heard` gets each run with its result as it ends. `given` is
    what a Bench takes except for progress. Runs wait for the routers of all densities."""
    densities = dict.fromkeys(t.run.density for t in tasks if ARMS[t.run.arm].router == "learned")
    waiting = [*(Task(Run("e", density, 0), 0, False) for density in densities), *tasks]
    done = []

    def following() -> Task | None:
        if waiting and (not waiting[0].steps or len(done) >= len(densities)):
            return waiting.pop(0)

    def told(task: Task, is_done: bool, found) -> None:
        if not is_done:
            raise Failure(found)
        done.append(task)
        if task.steps:
            progress("runs", len(done) - len(densities), len(tasks), task.name)
            heard(task.run, found)
        else:
            progress("stage 1", len(done), len(densities))

    runner.perform(work, given, gpus, following, told)


def work(pipe, *given) -> None:
    """A process of them. The first task makes the bench, as errors of a task have a message."""
    ignore_signals()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if given[1].type == "cpu":
        torch.set_num_threads(1)
    bench = cache(lambda: Bench(*given, lambda *told: None))
    runner.do_tasks(pipe, lambda task, tell: bench().perform(task))


def _end_with_parent() -> None:
    """A training would go on after its parent was killed."""
    multiprocessing.parent_process().join()
    os._exit(1)


def tasks_of(
    runs: list[Run], steps: int, reported: Callable[[Run], bool], seconds_of: CostOf | None,
    left: float | None,
) -> list[Task]:  # fmt: skip
    """A task for each run; the first of an arm at a density reports, if it has both branches."""
    deadline = None if left is None else time.monotonic() + left
    asked: set[tuple] = set()
    tasks = []
    for run in runs:
        key = run.arm, run.density
        reports = ARMS[run.arm].branches == "both" and key not in asked and not reported(run)
        asked.add(key)
        tasks.append(Task(run, steps, reports))
        if seconds_of and deadline is not None:
            tasks[-1] = replace(tasks[-1], seconds=seconds_of(run.label()), deadline=deadline)
    return tasks
