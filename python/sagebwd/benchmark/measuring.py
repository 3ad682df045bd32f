"""Measures one case: every contender's error, memory and time, on the same random inputs."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from sagebwd.benchmark.attentions import BASELINES, Attend, Contender, reason
from sagebwd.benchmark.cases import Case
from sagebwd.benchmark.common import torch
from sagebwd.benchmark.timing import Timing, clock_of, peak_mib, time_interleaved
from sagebwd.benchmark.truth import Slice

FORWARD, BOTH = "forward", "forward+backward"
#: An output with a larger error, on standard normal inputs, is wrong. INT8 costs less than half
#: of it under 'row'.
LARGEST_ERROR = 0.1
#: Timing one pass of one case takes about so long at most, unless three rounds take longer.
SECONDS, FEWEST_ROUNDS = 20.0, 3
Progress = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Row:
    """A row holds what was found for one contender in one case."""

    attention: str  #: 'cudnn', or 'sagebwd gradients16'
    deterministic: bool
    refusal: str = ""  #: why it has no figures
    same_as: str = ""  #: the deterministic contender with the same kernels, and so these figures
    forward: Timing | None = None
    both: Timing | None = None  #: forward and backward
    memory_mib: float | None = None  #: peak of both over the inputs; None without a GPU
    errors: dict | None = None  #: relative L2 of O, dQ, dK and dV
    speed: float | None = None  #: of both, relative to the fastest of PyTorch's of its kind

    @property
    def is_wrong(self) -> bool:
        """Whether an error is too large for any precision here, so that the times mean nothing."""
        return self.errors is not None and not all(
            e <= LARGEST_ERROR for e in self.errors.values())  # fmt: skip

    def json(self) -> dict:
        """The figures that there are."""
        found = {"attention": self.attention, "deterministic": self.deterministic}
        if self.refusal:
            return found | {"refusal": self.refusal}
        found |= {"same_kernels_as": f"{self.same_as}, deterministic"} if self.same_as else {}
        return found | {
            FORWARD: self.forward.json(), BOTH: self.both.json(), "memory_mib": self.memory_mib,
            "rel_l2": {name: float(f"{e:.6g}") if math.isfinite(e) else None
                       for name, e in self.errors.items()},
            "speed": self.speed and round(self.speed, 4), "is_wrong": self.is_wrong,
        }  # fmt: skip


def dtype_of(name: str) -> torch.dtype:
    """PyTorch's type for 'bf16' or 'fp16'."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[name]


def normal(heads: int, tokens: int, batch: int, head_dim: int, dtype: str, layout: str,
           generator: torch.Generator) -> torch.Tensor:  # fmt: skip
    """(batch, heads, tokens, head_dim) standard normal numbers, in memory as `layout` says."""
    swapped = layout == "bshd"
    shape = (batch, *((tokens, heads) if swapped else (heads, tokens)), head_dim)
    x = torch.randn(shape, generator=generator, device=generator.device)
    x = x.to(dtype_of(dtype))
    return x.transpose(1, 2) if swapped else x


def inputs_of(case: Case, seed: int, device) -> tuple:
    """Standard normal q, k and v, which take gradients; dout; and the sinks' logits or None."""
    generator = torch.Generator(device).manual_seed(seed)

    def one(heads, tokens):
        return normal(heads, tokens, case.batch, case.head_dim, case.dtype, case.layout, generator)

    sizes = ((case.heads, case.seq_len), (case.heads_kv, case.seq_kv), (case.heads_kv, case.seq_kv))
    q, k, v = (one(*size).requires_grad_() for size in sizes)
    dout = one(case.heads, case.seq_len)
    sink = torch.randn(case.heads, generator=generator, device=device) if case.sinks else None
    return q, k, v, dout, sink


def passes(attend: Attend, context, q, k, v, dout) -> dict:
    """The two calls that are timed: the forward as in inference, and forward and backward."""

    def forward():
        with torch.no_grad(), context():
            return attend(q, k, v)

    def both():
        with context():
            return torch.autograd.grad(attend(q, k, v), (q, k, v), dout)

    return {FORWARD: forward, BOTH: both}


def compiled(specs: list[dict], device=0) -> Iterator[Exception | None]:
    """Compiles what `sagebwd.warmup` compiles for the keywords of each spec, several at a time.

    For each None, or why it failed: whoever uses those kernels meets the same error.
    """
    from sagebwd.core.functional import warmup

    def one(spec: dict) -> Exception | None:
        try:
            warmup(device=device, **spec)
        except Exception as error:
            return error

    with ThreadPoolExecutor(min(16, os.cpu_count() or 4)) as pool:
        yield from pool.map(one, specs)


def measure(
    case: Case, contenders: list[Contender], inputs: tuple, *, rounds: int = 15, device="cuda",
    clock: Callable | None = None, progress: Progress = lambda what, done, total: None,
) -> list[Row]:
    """A row for each contender, in their order. `inputs` are those of inputs_of().

    Each contender runs once for its errors and its memory; one that fails gets a row that says why.
    The others are then timed in turns, so often as `rounds` says, or less often where that would
    take minutes. `clock` is that of time_interleaved(); None for the one of the device.
    """
    *tensors, sink = inputs
    cuda = torch.device(device).type == "cuda"
    truth = Slice(case, *tensors, sink)
    rows, calls = {}, {}
    for index, one in enumerate(contenders):
        progress(f"running {label(one)}", index, len(contenders))
        row = Row(one.name, one.deterministic, one.refusal, one.same_as)
        if one.attend is not None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    found = passes(one.attend, one.context, *tensors)
                    results = found[FORWARD](), *found[BOTH]()
                    row = replace(row, errors=truth.errors(results))
                    results = None
                    row = replace(row, memory_mib=peak_mib(found[BOTH]) if cuda else None)
                    calls[label(one)] = found
                except Exception as error:  # this one is listed with its reason
                    results = None
                    row = replace(row, refusal=reason(error, [str(w.message) for w in caught]))
            if cuda:
                torch.cuda.empty_cache()
        rows[label(one)] = row
    timings = timed(calls, clock or clock_of(device), rounds, progress)
    for name, (forward, both) in timings.items():
        rows[name] = replace(rows[name], forward=forward, both=both)
    return completed(list(rows.values()))


def label(one: Contender | Row) -> str:
    """The name of a contender or a row among all of its case."""
    name = getattr(one, "name", None) or one.attention
    return f"{name}, deterministic" if one.deterministic else name


def timed(calls: dict, clock: Callable, rounds: int, progress: Progress) -> dict:
    """The Timings of both passes of each contender, by its label."""
    found: dict[str, list[Timing]] = {name: [] for name in calls}
    for index, which in enumerate((FORWARD, BOTH)):
        progress(f"timing {which}", index, 2)
        candidates = {name: call[which] for name, call in calls.items()}
        trial = time_interleaved(candidates, clock, rounds=1, warmup=1)
        round_ms = sum(timing.median_ms for timing in trial.values())
        fewer = rounds_within(rounds, round_ms)
        warmup = 2 if fewer == rounds else 0
        for name, timing in time_interleaved(candidates, clock, fewer, warmup).items():
            found[name].append(timing)
    progress("timed", 2, 2)
    return found


def rounds_within(rounds: int, round_ms: float) -> int:
    """`rounds`, or less where they take longer than SECONDS, but not less than FEWEST_ROUNDS."""
    affordable = int(SECONDS * 1e3 / round_ms) if round_ms > 0 else rounds
    return min(rounds, max(FEWEST_ROUNDS, affordable))


def completed(rows: list[Row]) -> list[Row]:
    """The rows with the figures that follow from others: of the same kernels, and speeds."""
    measured = {label(row): row for row in rows}
    shared = []
    for row in rows:
        if row.same_as:
            other = measured[f"{row.same_as}, deterministic"]
            row = replace(other, deterministic=False, same_as="" if other.refusal else row.same_as)
        shared.append(row)
    fastest = {}
    for row in shared:
        if row.attention in BASELINES and row.both and not row.is_wrong:
            best = fastest.setdefault(row.deterministic, row.both.median_ms)
            fastest[row.deterministic] = min(best, row.both.median_ms)
    return [replace(row, speed=fastest[row.deterministic] / row.both.median_ms)
            if row.both and row.deterministic in fastest else row for row in shared]  # fmt: skip
