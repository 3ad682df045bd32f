"""A training step, or what it does with a batch, as one CUDA graph: its small kernels may take less
time than their launches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from .command import torch

if TYPE_CHECKING:
    from torch import Tensor


class GraphedStep:
    """Calls `step(*tensors) -> Tensor`, and from the fourth call on replays a graph of it.

    All calls take tensors of the same shapes and types on one CUDA device. The result of a replay
    is overwritten by the next one. `step` must not wait for the GPU. Either it drops gradients
    first, so that the graph has its own, or they stay where they are between calls.
    """

    #: Calls without a graph, which compile kernels and make the optimizer's state.
    EAGER = 3
    #: Replays that the GPU has not ended when a call returns, at most. The launch queue takes a
    #: thousand, and what stops a training would wait for all of them.
    AHEAD = 4

    def __init__(self, step: Callable[..., Tensor]) -> None:
        self._step, self._calls = step, 0
        self._ends: deque[torch.cuda.Event] = deque()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        with torch.cuda.device(tensors[0].device):
            return self._called(tensors)

    def _called(self, tensors: tuple[Tensor, ...]) -> Tensor:
        self._calls += 1
        if self._calls <= self.EAGER:
            return self._beside(tensors)
        if self._graph is None:
            self._given = [tensor.clone() for tensor in tensors]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._result = self._step(*self._given)
            self._graph = graph
        for given, tensor in zip(self._given, tensors, strict=True):
            given.copy_(tensor)
        self._graph.replay()
        if len(self._ends) == self.AHEAD:
            self._ends.popleft().synchronize()
        self._ends.append(torch.cuda.current_stream().record_event(torch.cuda.Event(blocking=True)))
        return self._result

    def _beside(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """On a stream of its own, as PyTorch asks for before a capture."""
        now, beside = torch.cuda.current_stream(), torch.cuda.Stream()
        beside.wait_stream(now)
        with torch.cuda.stream(beside):
            result = self._step(*tensors)
        now.wait_stream(beside)
        return result
