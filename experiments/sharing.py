"""Sequences that several processes share: each has a part of the tokens of every sequence, and
attention is over all of them (sagebwd.distributed, or PyTorch's own for SDPA)."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from sagebwd.core.options import precision_of

from .attentions import Attend, AttentionChoice, WithFront, make_attention
from .command import torch
from .config import TrainConfig
from .parallel import Group

if TYPE_CHECKING:
    from torch import Tensor

#: PyTorch's ring has chunks of equal length: with this many tokens for each process, or a multiple,
#: those of sagebwd.distributed are the same.
UNIT = 512
#: Scores that `largest_score` holds at once.
SCORES = 1 << 28


def check(config: TrainConfig, processes: int) -> None:
    """ValueError if the processes cannot share sequences of the model so."""
    count, method = config.context_parallel, config.context_method
    if count == 1:
        if method != "ring":
            raise ValueError(f"--context-method {method}: pass --context-parallel, too, which is 1")
        return
    if processes % count:
        raise ValueError(f"--context-parallel {count}: it must divide the number of processes, "
                         f"which is {processes}: start torchrun with a multiple of {count}")
    heads = config.model.dim // config.model.head_dim
    if method == "ulysses" and heads % count:
        raise ValueError(f"--context-method ulysses: {count} processes cannot share the model's "
                         f"{heads} heads: pass a --context-parallel that divides them, or ring")
    least = count if method == "ulysses" else 2 * count
    if config.tokens < least:
        raise ValueError(f"--tokens {config.tokens}: --context-parallel {count} with {method} "
                         f"needs at least {least} in a sequence")  # fmt: skip


def check_attention(config: TrainConfig, choice: AttentionChoice) -> None:
    """ValueError if this attention cannot compute over sequences that processes share."""
    count = config.context_parallel
    if count == 1:
        return
    on_cpu = torch.device(config.device).type == "cpu"
    if choice.name == "emulated" and not on_cpu:
        raise ValueError("--attention emulated: --context-parallel has kernels on a GPU, and the "
                         "emulation on a CPU: pass --attention sagebwd, or --device cpu")
    if choice.name == "emulated" and not precision_of(choice.plan):
        raise ValueError(f"--attention {choice.label()}: with --context-parallel the emulation has "
                         "the precisions of kernels, such as precision=six-of-seven")
    if not is_pytorchs(choice) or config.context_method == "ulysses":
        return
    if on_cpu:
        raise ValueError(f"--attention {choice.name}: PyTorch's ring runs on GPUs alone: pass "
                         "--context-method ulysses, or --attention emulated")
    if config.tokens % (UNIT * count):
        raise ValueError(f"--tokens {config.tokens}: {choice.name} in a ring of {count} processes "
                         f"needs a multiple of {UNIT * count}; --context-method ulysses does not")


def is_pytorchs(choice: AttentionChoice) -> bool:
    return choice.name.startswith("sdpa")


class Whole:
    """The part of a sequence where no other process has one: all of it."""

    positions: Tensor | None = None  #: of this process's tokens, None for all in order
    #: What makes the mean over processes of their own tokens' mean losses that over all tokens.
    weight = 1.0

    def own(self, x: Tensor) -> Tensor:
        """The part of a (sequences, tokens) tensor that this process has."""
        return x

    def all(self, x: Tensor) -> Tensor:
        """A whole (heads, tokens, channels) tensor of which this process has a part."""
        return x

    def step(self):
        """Forward and backward are in this context."""
        return contextlib.nullcontext()


class Shared(Whole):
    """The part that this process has, by a mesh of which the second dimension shares sequences."""

    def __init__(self, config: TrainConfig, choices: list[AttentionChoice], group: Group) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        from sagebwd import distributed

        for choice in choices:
            check_attention(config, choice)
        device = torch.device(config.device)
        mesh = init_device_mesh(device.type, (group.teams, group.sharing),
                                mesh_dim_names=("data", "context"))  # fmt: skip
        self._distributed, self.mesh = distributed, mesh["context"]
        self.method, self.tokens = config.context_method, config.tokens
        places = torch.arange(config.tokens, device=device)
        self.positions = self.own(places[None])[0]
        self.weight = len(self.positions) * group.sharing / config.tokens
        by_pytorch = self.method == "ring" and any(map(is_pytorchs, choices))
        self._pytorchs = torch.empty_like(places) if by_pytorch else None

    def own(self, x: Tensor) -> Tensor:
        return self._distributed.shard(x, self.mesh, dim=1, method=self.method)

    def all(self, x: Tensor) -> Tensor:
        return self._distributed.unshard(x, self.mesh, dim=1, method=self.method)

    @contextlib.contextmanager
    def step(self):
        """PyTorch's ring replaces its attention, in the backward, too, within its own context."""
        if self._pytorchs is None:
            yield
            return
        from torch.distributed.tensor.experimental import context_parallel

        with context_parallel(self.mesh, buffers=[self._pytorchs], buffer_seq_dims=[0]):
            yield

    def attention(self, choice: AttentionChoice) -> Attend:
        """Causal attention of this process's queries, keys and values, over all tokens."""
        attend = self._attention(replace(choice, front=False))
        return WithFront(attend, not is_pytorchs(choice)) if choice.front else attend

    def _attention(self, choice: AttentionChoice) -> Attend:
        if is_pytorchs(choice):
            attend = make_attention(choice, torch.device(self.mesh.device_type))
            return attend if self.method == "ring" else self._by_heads(attend)
        chosen = choice.options()
        if "plan" in chosen:
            chosen["precision"] = precision_of(chosen.pop("plan"))
        return functools.partial(self._distributed.attention, mesh=self.mesh, method=self.method,
                       causal=True, **chosen)  # fmt: skip

    def _by_heads(self, attend: Attend) -> Attend:
        """Ulysses with any attention."""
        from sagebwd.distributed import sharding

        place = sharding.place_of(self.mesh, "ulysses")
        (lengths,) = sharding.lengths_of(self.tokens, place)
        exchange = exchange_function().apply

        def by_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (exchange(x, lengths, place, True) for x in (q, k, v))
            return exchange(attend(q, k, v), lengths, place, False)

        return by_heads


@functools.cache
def exchange_function():
    """The all-to-all of Ulysses as a function with a gradient, which is the exchange back."""
    from sagebwd.distributed import heads

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, lengths, place, to_heads):
            ctx.given = lengths, place, to_heads
            exchange = heads.to_heads if to_heads else heads.to_tokens
            return exchange(x, lengths, place, "bhsd").wait()

        @staticmethod
        def backward(ctx, gradient):
            lengths, place, to_heads = ctx.given
            return Exchange.apply(gradient, lengths, place, not to_heads), None, None, None

    return Exchange


def largest_score(q: Tensor, k: Tensor, positions: Tensor | None) -> Tensor:
    """The largest |score| that a causal mask leaves, of (heads, tokens, head_dim) tensors: q of
    these positions, and all of k."""
    places = torch.arange(k.shape[1], device=k.device)
    positions = places if positions is None else positions
    rows = max(1, SCORES // len(places))
    largest = torch.zeros((), device=k.device)
    with torch.autocast(q.device.type, enabled=False):
        for queries, keys in zip(q.float(), k.float()):
            for some, at in zip(queries.split(rows), positions.split(rows)):
                scores = (some @ keys.mT).masked_fill_(places > at[:, None], 0)
                largest = torch.maximum(largest, scores.abs().max())
    return largest / math.sqrt(q.shape[-1])
