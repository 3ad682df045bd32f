"""The one loop that measures: candidates take turns, and a figure is the median of its samples."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from weakref import WeakKeyDictionary

from sagebwd.benchmark.common import torch

#: More than the L2 cache of any GPU that we know. Written between timed calls.
FLUSH_BYTES = 256 << 20

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call."""

    median_ms: float
    mad_ms: float  #: the median absolute deviation from the median
    samples: int

    @staticmethod
    def of(samples: list[float]) -> Timing:
        """The median of at least one sample, and how far the samples are from it."""
        middle = median(samples)
        return Timing(middle, median(abs(s - middle) for s in samples), len(samples))

    def json(self) -> dict:
        """Both numbers rounded to 10 nanoseconds, and the number of samples."""
        return {
            "median_ms": round(self.median_ms, 5),
            "mad_ms": round(self.mad_ms, 5),
            "samples": self.samples,
        }


def in_turn(candidates: dict, measure: Callable, rounds: int, warmup: int) -> dict[str, list]:
    """Lists what `measure(candidate)` gives for each candidate; each round has all of them.

    Clocks and heat change during a run. Taking turns exposes all candidates to the same changes.
    Each round has another order: in a fixed one equal kernels differed by up to 12 % on an H100,
    probably by the clock that the candidate before leaves. The samples of the first `warmup` rounds
    are thrown away.
    """
    samples: dict[str, list] = {name: [] for name in candidates}
    order, shuffle = list(candidates), random.Random(0).shuffle
    for index in range(warmup + rounds):
        shuffle(order)
        for name in order:
            sample = measure(candidates[name])
            if index >= warmup:
                samples[name].append(sample)
    return samples


def time_interleaved(
    candidates: dict[str, Call], clock: Callable[[Call], float], rounds: int = 15, warmup: int = 3
) -> dict[str, Timing]:
    """The time of each candidate by `clock`, which runs one and says how many ms it took."""
    samples = in_turn(candidates, clock, rounds, warmup)
    return {name: Timing.of(times) for name, times in samples.items()}


def clock_of(device: str | torch.device, host_ahead: bool = False) -> Callable[[Call], float]:
    """The clock of time_interleaved() for a device. `host_ahead`: see GpuClock."""
    return GpuClock(device, host_ahead) if torch.device(device).type == "cuda" else host_clock


def host_clock(call: Call) -> float:
    """Milliseconds of wall time."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


class GpuClock:
    """Milliseconds between two events on the current stream of one GPU.

    Before each call the whole L2 cache is overwritten, so that a call finds none of its inputs
    there. Overwriting also takes long enough to hide the time that the host needs for a launch.
    With `host_ahead` it is repeated until the host should have launched all kernels of the call, as
    where a training step keeps the GPU busy.
    """

    def __init__(self, device: str | torch.device, host_ahead: bool = False) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        #: Milliseconds that the host took for each call that lives, the fewest so far.
        self.host_ms: WeakKeyDictionary[Call, float] = WeakKeyDictionary()
        self.host_ahead, self.ms_of_flush = host_ahead, 0.0
        if host_ahead:
            self.ms_of_flush = min(self._timed(lambda: self.flush.fill_(2), 1) for _ in range(3))

    def __call__(self, call: Call) -> float:
        flushes = 1
        if self.host_ahead:  # a half more than the host took
            flushes += int(1.5 * self.host_ms.get(call, 0.0) / self.ms_of_flush)
        return self._timed(call, flushes)

    def _timed(self, call: Call, flushes: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(flushes):
            self.flush.fill_(1)
        start.record()
        taken = host_clock(call)
        end.record()
        torch.cuda.synchronize()
        if self.host_ahead:
            self.host_ms[call] = min(taken, self.host_ms.get(call, taken))
        return start.elapsed_time(end)


def peak_mib(call: Call) -> float:
    """MiB of GPU memory that a call allocates at a time, beyond what is held already."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - held) / 2**20, 1)
