"""Attention by name: makes a function of a line such as ``sagebwd:granularity=block,no-rotate``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar

from sagebwd import Spec, qk_norm_rope
from sagebwd.benchmark.attentions import sdpa
from sagebwd.core.options import PRODUCTS, Mask, Options, plan_of, precision_of

from .command import Failure, torch

#: Causal self-attention of (batch, heads, tokens, head_dim) queries, keys and values.
Attend = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]
#: FP32 matrices of queries x keys that the emulation holds at once.
LIVE_MATRICES = 10
_KERNELS = ("precision", "deterministic", "dq_sums", "gradient_kernels")
_NOT_CHOSEN = {*_KERNELS} | {field.name for field in fields(Mask)}
_COMMON = tuple(field.name for field in fields(Options) if field.name not in _NOT_CHOSEN)
OPTIONS_OF = {"sdpa": ("front",), "sdpa-other": ("front",),
              "sagebwd": (*_COMMON, *_KERNELS, "front"),
              "emulated": (*_COMMON, "plan", "front")}  # fmt: skip


@dataclass(frozen=True)
class AttentionChoice(Options):
    """One attention and its options; options that it does not have must keep their defaults."""

    name: str = "sagebwd"
    plan: frozenset = plan_of("six-of-seven")
    front: bool = False  #: whether it norms and rotates queries and keys, in place of the model
    #: The text shows by example what parse() takes.
    known: ClassVar[str] = ("granularity=row, group-q=64, group-kv=64, sink-keys=0, no-smooth-k, "
                            "smooth-q, no-rotate, precision=dv16, no-deterministic, dq-sums=fp16, "
                            "dp-sums=fp16, gradient-kernels=split, front; of emulated "
                            "also precision=s+pv+dv+dq+dk")  # fmt: skip

    def __post_init__(self) -> None:
        if self.name not in OPTIONS_OF:
            raise ValueError(f"unknown attention {self.name!r}; known: {', '.join(OPTIONS_OF)}")
        own = OPTIONS_OF[self.name]
        for option, given in self.changed(AttentionChoice).items():
            if option not in own:
                raise ValueError(f"attention {self.name!r} has no option {option!r} (given: "
                                 f"{given}); its options: {_spelled(own)}")
        Spec(granularity=self.granularity, precision=self.precision,
             deterministic=self.deterministic, dq_sums=self.dq_sums,
             dp_sums=self.dp_sums, gradient_kernels=self.gradient_kernels,
             smooth_q=self.smooth_q)  # fmt: skip  # refuses unknown ones

    def changed(self, kind: type) -> dict:
        """The options among the fields of `kind` that have not their defaults."""
        given = {field.name: getattr(self, field.name) for field in fields(kind)}
        return {name: x for name, x in given.items() if x != getattr(kind, name) and name != "name"}

    @classmethod
    def parse(cls, text: str):
        """``NAME[:OPTION,...]``; an option is ``key=value``, or ``no-rotate``, ``smooth-q``.

        The emulation takes any INT8 products: ``emulated:precision=s+pv+dv+dp+dq+dk``, or
        ``precision=none``. Older records call them ``plan``, which is taken, too.
        """
        name, _, options = text.partition(":")
        if name == "emulated":  # whose products are a field of their own
            options = re.sub(r"(^|,)precision=", r"\1plan=", options)
        given = [cls._parse_option(option) for option in options.split(",") if option]
        if twice := sorted({key for key, _ in given if [k for k, _ in given].count(key) > 1}):
            raise ValueError(f"attention {text!r} has {_spelled(tuple(twice))} twice")
        return cls(name=name, **dict(given))

    @classmethod
    def _parse_option(cls, option: str) -> tuple[str, object]:
        key, _, value = option.partition("=")
        name = key.replace("-", "_")
        # The types of Options are types, those of this module words.
        kinds = {field.name: getattr(field.type, "__name__", field.type) for field in fields(cls)}
        kind = kinds.get(name) if value and name != "name" else None
        switch = name.removeprefix("no_")
        if kinds.get(switch) == "bool" and not value:
            return switch, switch == name
        if kind == "int" and value.isdigit():
            return name, int(value)
        if kind == "frozenset":
            return name, plan_of(value)
        if kind == "str":
            return name, value
        raise ValueError(f"unknown attention option {option!r}; known: {cls.known}")

    def label(self) -> str:
        """The line that parses to this choice."""
        options = []
        for name, value in self.changed(type(self)).items():
            key = name.replace("_", "-")
            if isinstance(value, frozenset):
                products = "+".join(p for p in PRODUCTS if p in value) or "none"
                key, value = "precision", precision_of(value) or products
            switch = {True: key, False: f"no-{key}"}
            options.append(switch[value] if isinstance(value, bool) else f"{key}={value}")
        return ":".join(filter(None, (self.name, ",".join(options))))

    def stem(self) -> str:
        """The names of a run's files have this stem."""
        return "train-" + "".join(c if c.isalnum() or c in "-+" else "-" for c in self.label())

    def options(self) -> dict:
        """The keywords for this attention's function, as callers write them: few, and quick."""
        return {name: x for name, x in self.changed(AttentionChoice).items() if name != "front"}


def _spelled(options: tuple[str, ...]) -> str:
    """As parse() takes them."""
    return ", ".join("precision" if name == "plan" else name.replace("_", "-") for name in options)


def check_runs_on(choice: AttentionChoice, device: torch.device) -> None:
    """Failure where this attention cannot run there: to be known before anything is written."""
    if choice.name == "sagebwd" and device.type != "cuda":
        raise Failure(f"attention {choice.label()!r} needs a CUDA GPU (python -m sagebwd doctor "
                      f"says what is missing): on {device.type} there are sdpa and emulated")


@dataclass(frozen=True)
class WithFront:
    """Attention whose keywords are those of `sagebwd.qk_norm_rope`, which it applies to queries and
    keys; a model's layers ask it to. Without keywords these are normed and rotated already."""

    attend: Attend
    is_inside: bool  #: whether the function has these keywords itself

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **front) -> torch.Tensor:
        if front and not self.is_inside:
            (q, k), front = qk_norm_rope(q, k, **front), {}
        return self.attend(q, k, v, **front)


def make_attention(choice: AttentionChoice, device: torch.device, causal: bool = True) -> Attend:
    """Attention of (batch, heads, tokens, head_dim) tensors on `device`; a `WithFront` if the
    choice says so."""
    attend = _make_attention(choice, device, causal)
    return WithFront(attend, choice.name == "sagebwd") if choice.front else attend


def _make_attention(choice: AttentionChoice, device: torch.device, causal: bool) -> Attend:
    if choice.name == "sdpa":
        return sdpa("FLASH_ATTENTION" if device.type == "cuda" else None, causal)
    if choice.name == "sdpa-other":  # rounds otherwise, and is as exact
        return sdpa("EFFICIENT_ATTENTION" if device.type == "cuda" else "MATH", causal)
    if choice.name == "sagebwd":
        from sagebwd import attention
    else:
        from sagebwd.numerics import emulation
        from sagebwd.numerics.emulation import emulated_attention as attention

        if device.type == "cuda":
            emulation.CHUNK_ELEMENTS = emulation_chunk(torch.cuda.mem_get_info(device)[0])
    return partial(attention, causal=causal, **choice.options())


def emulation_chunk(free_bytes: int) -> int:
    """Scores that the emulation may work on at once: its matrices get a quarter of the memory."""
    return max(1 << 24, min(1 << 28, free_bytes // (4 * 4 * LIVE_MATRICES)))
