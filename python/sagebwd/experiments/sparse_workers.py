"""The runs of sparse_video, one after another or side by side: each process has a device, the dense
model and the routers."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from .command import Failure
from .environment import replacing
from .sparse_plan import ARMS, Run, SparseConfig, differences
from .sparse_train import Workplace

#: Seconds that a run takes, from its label.
CostOf = Callable[[str], float]


def saved(path: Path, make, device):
    """What `torch.save` wrote there before, or `make()`, which is then written."""
    if path.exists():
        return loaded(path, device)
    found = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        torch.save(found, partial)
    return found


def loaded(path: Path, device):
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # PyTorch has many kinds
        raise Failure(f"{path} is no checkpoint of this experiment ({type(error).__name__}): "
                      "remove it, or name other --checkpoints") from error  # fmt: skip


class Unfinished:
    """The file of a pre-training that has not ended."""

    def __init__(self, path: Path, config: SparseConfig, device: torch.device) -> None:
        self.path, self.config, self.device = path, config.to_dict(), device

    def read(self) -> dict | None:
        if not self.path.exists():
            return None
        found = loaded(self.path, self.device)
        if differing := differences(found["config"], self.config, self._names()):
            raise Failure(f"{self.path} is of another configuration ({differing}): remove it, or "
                          "name other --checkpoints")  # fmt: skip
        return found

    def write(self, state: dict) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as partial:
            torch.save(state | {"config": self.config}, partial)

    def _names(self) -> list[str]:
        """What the dense model depends on: runs may differ in the others."""
        others = ("block_size", "stage_one_steps", "stage_one_lr", "steps", "lr", "evals",
                  "calibration", "densities", "seeds", "temperature", "how", "toy")  # fmt: skip
        return [name for name in self.config if name not in others]


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
        self.model.load_state_dict(saved(checkpoints / "dense.pt", None, device))
        self._routers: dict[float, list] = {}

    def routers(self, density: float) -> list[dict]:
        """Those of (e) by layer, trained unless the checkpoints have them."""
        if density not in self._routers:
            self._routers[density] = saved(
                self.checkpoints / f"routers-{density:g}.pt",
                lambda: self.place.stage_one(self.model, density, self.stage_one_steps),
                self.place.device)  # fmt: skip
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
    devices = context.Queue()
    for number in range(processes):
        devices.put(f"cuda:{number}" if device.type == "cuda" else "cpu")
    densities = dict.fromkeys(t.run.density for t in tasks if ARMS[t.run.arm].router == "learned")
    pool = ProcessPoolExecutor(processes, context, _begin, (devices, given))
    try:
        for done, _ in enumerate(pool.map(_train_router, densities), 1):
            progress("stage 1", done, len(densities))
        futures = {pool.submit(_perform, task): task.run for task in tasks}
        for done, future in enumerate(as_completed(futures), 1):
            progress("runs", done, len(tasks), futures[future].label())
            yield futures[future], future.result()
    finally:  # after an error or an interrupt nobody waits for the runs that go on
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()


#: Makes this process's bench, with its first task: an error of a task has a message.
_make: Callable[[], Bench]


def _begin(devices, given: tuple) -> None:
    global _make
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback
    device = torch.device(devices.get())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    config, checkpoints, stage_one_steps = given
    _make = cache(lambda: Bench(config, device, checkpoints, stage_one_steps, lambda *told: None))


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
