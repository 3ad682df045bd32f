"""The runs of sparse_video, one after another or side by side: each process has a device, the dense
model and the routers."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from sagebwd.benchmark.environment import write_tensors

from .command import Failure, Signals, ignore_signals, signals_blocked
from .sparse_plan import ARMS, Run, SparseConfig, differences
from .sparse_train import Workplace

#: Seconds that a run takes, from its label.
CostOf = Callable[[str], float]


#: What of a configuration neither the dense model nor the routers depend on.
_OF_RUNS = ("steps", "lr", "evals", "calibration", "densities", "seeds", "toy")
#: What the routers depend on, and the dense model does not.
_OF_ROUTERS = ("block_size", "stage_one_steps", "stage_one_lr", "temperature", "how")


def of_dense(config: SparseConfig) -> dict:
    """What the dense model depends on."""
    return {name: value for name, value in config.to_dict().items()
            if name not in (*_OF_RUNS, *_OF_ROUTERS)}  # fmt: skip


def of_routers(config: SparseConfig, density: float) -> dict:
    """What the routers depend on, before it is known how many steps there are time for."""
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
        found = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # PyTorch has many kinds
        raise Failure(f"{path} is no checkpoint of this experiment ({type(error).__name__}): "
                      f"{otherwise}") from error  # fmt: skip
    if not isinstance(found, dict) or not isinstance(found.get("config"), dict):
        raise Failure(f"{path} does not say of which configuration it is, as checkpoints of this "
                      f"version do: {otherwise}")  # fmt: skip
    if differing := differences(found["config"], config, config):
        raise Failure(f"{path} is of another configuration ({differing}): {otherwise}")
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
    """What is done for a run."""

    run: Run
    steps: int
    reports: bool  #: whether its modules are looked at first
    seconds: float = 0.0  #: that it takes
    deadline: float | None = None  #: by time.monotonic(), which processes share


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
        modules = self.place.arm_modules(task.run, self.model,
                                         self.routers(task.run.density) if learned else None)
        report = self.place.held_out_report(modules, self.model) if task.reports else None
        return self.place.run(task.run, self.model, modules, task.steps), report


def one_by_one(bench: Bench, tasks: list[Task]) -> Iterator[tuple[Run, tuple | None]]:
    for task in tasks:
        yield task.run, bench.perform(task)


def side_by_side(processes: int, device: torch.device, given: tuple, tasks: list[Task],
                 progress) -> Iterator[tuple[Run, tuple | None]]:  # fmt: skip
    """The same as they end. `given` is what a Bench takes except for device and progress. The first
    to need a router trains it while the others wait."""
    context = multiprocessing.get_context("spawn")
    with signals_blocked():  # of Python's process that comes with it, too
        devices = context.Queue()
    for number in range(processes):
        devices.put(f"cuda:{number}" if device.type == "cuda" else "cpu")
    densities = dict.fromkeys(t.run.density for t in tasks if ARMS[t.run.arm].router == "learned")
    pool = ProcessPoolExecutor(processes, context, _begin, (devices, given))
    try:
        # The pool starts processes as it gets tasks; an interrupt would leave them half started.
        with Signals() as signals, signals_blocked():
            trained = pool.map(_train_router, densities)
        signals.check()
        for done, _ in enumerate(trained, 1):
            progress("stage 1", done, len(densities))
        with Signals() as signals, signals_blocked():
            futures = {pool.submit(_perform, task): task.run for task in tasks}
        signals.check()
        for done, future in enumerate(as_completed(futures), 1):
            progress("runs", done, len(tasks), futures[future].label())
            yield futures[future], future.result()
    finally:  # after an error or an interrupt nobody waits for the runs that go on
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()  # they ignore SIGTERM


#: Makes this process's bench, with its first task: an error of a task has a message.
_make: Callable[[], Bench]


def _begin(devices, given: tuple) -> None:
    global _make
    ignore_signals()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    device = torch.device(devices.get())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    config, checkpoints, stage_one_steps = given
    _make = cache(lambda: Bench(config, device, checkpoints, stage_one_steps, lambda *told: None))


def _end_with_parent() -> None:
    """A pool's process would wait for further tasks after its parent was killed."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _train_router(density: float) -> None:
    _make().routers(density)


def _perform(task: Task) -> tuple | None:
    return _make().perform(task)


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
