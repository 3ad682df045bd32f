"""What plans of bench/balance_runs.py are told beside q, k and v: lists of blocks, or a mask.

Lists are those of bench/sparse.py, and masks those of bench/intervals.py, told by intervals. Of
both there is what is exact for a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import sparse_exact
from intervals import Mask, masks_of
from needs_torch import torch
from sparse_cases import Cell, Shape, mask_of
from sparse_subjects import Lists
from torch import Tensor

from sagebwd import _core
from sagebwd.benchmark.timing import host_clock

DENSITY = "density="
#: The kernel that writes the bits of intervals. A call has it once, ahead of its forward.
PACKING = "interval_bits"
FLEX_BLOCK = 128  #: flex_attention computes blocks of so many queries and keys
ROWS = 1024  #: of a dense mask exist at a time, a multiple of FLEX_BLOCK


def density_of(plan: str) -> float | None:
    """The density of a plan's lists; None without lists."""
    return next((float(word.removeprefix(DENSITY)) for word in plan.split()
                 if word.startswith(DENSITY)), None)  # fmt: skip


class Told(ABC):
    """One of them. The passes read `tensors`, the last of theirs, in this order; `strides` are
    keywords of prepare_forward and prepare_backward, and `about` is for the record."""

    tensors: tuple[Tensor, ...]
    strides: dict
    about: dict

    def pack_before(self, kernels: _core.Attention) -> Callable[[int], None] | None:
        """A function of a stream that launches what each call needs before; None for nothing."""
        return None

    @abstractmethod
    def exact(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
        """FP64 of the last head, whose tensors are (1, tokens, channels)."""


class ToldLists(Told):
    def __init__(self, lists: Lists) -> None:
        self.lists, self.tensors = lists, (lists.bits,)
        self.strides = {"of_lists": lists.bits.stride()[:2]}
        self.about = {"share": lists.share}

    def exact(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
        return sparse_exact.sparse(q, k, v, dout, self.lists.mask[-1, -1:], self.lists.sizes)


class ToldMask(Told):
    """Intervals that all heads share, and their bits, which are wrong until they are packed."""

    def __init__(self, mask: Mask, sizes: tuple[int, int], tokens: int) -> None:
        self.mask, self.tokens = mask, tokens
        self.intervals = mask.intervals.startend_row_indices
        lists, blocks = (-(-tokens // size) for size in sizes)
        self.bits = self.intervals.new_full((1, 1, lists, 2 * (blocks // 32 + 1)), -1)
        self.tensors = self.bits, self.intervals
        self.strides = {"of_lists": (0, 0), "of_intervals": (0, 0)}
        self.about = dict(zip(("share", "share_of_blocks"), self.shares()))

    def pack_before(self, kernels: _core.Attention) -> Callable[[int], None]:
        problem = 1, 1, 1, self.tokens, self.tokens
        places = self.intervals.data_ptr(), (0, 0), self.bits.data_ptr()
        return lambda stream: kernels.pack_intervals(problem, *places, stream)

    def seen(self, first: int, end: int) -> Tensor:
        """Which keys the queries first .. end - 1 see, by the function of the mask."""
        places = torch.arange(self.tokens, device=self.intervals.device)
        return self.mask.seen(0, 0, places[first:end, None], places)

    def shares(self) -> tuple[float, float]:
        """The fraction of all scores that are seen, and that of flex_attention's blocks which have
        such a score."""
        scores = blocks = 0
        for first in range(0, self.tokens, ROWS):
            seen = self.seen(first, first + ROWS)
            scores += int(seen.sum())
            over = (0, -seen.shape[1] % FLEX_BLOCK, 0, -seen.shape[0] % FLEX_BLOCK)
            squares = torch.nn.functional.pad(seen, over)
            squares = squares.unflatten(1, (-1, FLEX_BLOCK)).unflatten(0, (-1, FLEX_BLOCK))
            blocks += int(squares.any(3).any(1).sum())
        return scores / self.tokens**2, blocks / (-(-self.tokens // FLEX_BLOCK)) ** 2

    def exact(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
        return sparse_exact.masked(q, k, v, dout, self.seen)


def told_of(spec: _core.Spec, cell: dict, plan: str, tensors, seed: int) -> Told | None:
    """The random lists of a plan with a density, or the mask of a cell; None without either."""
    sizes = spec.sparse_q, spec.sparse_kv
    if name := cell.get("mask"):
        masks = masks_of(cell["tokens"], seed, tensors.q.device.type)
        mask = next(mask for mask in masks if mask.name == name)
        return ToldMask(mask, sizes, cell["tokens"])
    density = density_of(plan)
    if density is None:
        return None
    shape = Shape(*(cell[name] for name in ("batch", "heads", "tokens", "head_dim")))
    mask = mask_of(Cell(shape, "random", density), sizes, tensors.q, tensors.k, seed)
    return ToldLists(Lists.of(mask, sizes, shape.tokens))


def started(launch: Callable[[], None], on_gpu: bool) -> Callable[[], float]:
    """Launches; a function says how many milliseconds that took on the GPU, once it is done there.
    It does not wait, so that what is launched next finds no idle GPU."""
    if not on_gpu:
        ms = host_clock(launch)
        return lambda: ms
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    launch()
    end.record()
    return lambda: begin.elapsed_time(end)
