"""Attention by name: a line such as ``sagebwd:granularity=block,no-rotate`` to a function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING

from sagebwd import Spec
from sagebwd.options import PRODUCTS, plan_of

from .command import Failure, torch

if TYPE_CHECKING:
    from torch import Tensor

#: Causal self-attention of (batch, heads, tokens, head_dim) queries, keys and values.
Attend = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
#: FP32 matrices of queries x keys that the emulation holds at once.
LIVE_MATRICES = 10


@dataclass(frozen=True)
class AttentionChoice:
    """One attention and its options; options that it does not have must keep their defaults."""

    name: str = "sagebwd"
    granularity: str = "row"
    group_q: int | None = None
    group_kv: int | None = None
    smooth_k: bool = True
    rotate: bool = True
    precision: str = "six-of-seven"
    plan: frozenset[str] = plan_of("six-of-seven")

    def __post_init__(self) -> None:
        if self.name not in OPTIONS_OF:
            raise ValueError(f"unknown attention {self.name!r}; known: {', '.join(OPTIONS_OF)}")
        for field in fields(self):
            given = getattr(self, field.name)
            if given != field.default and field.name not in ("name", *OPTIONS_OF[self.name]):
                raise ValueError(
                    f"attention {self.name!r} has no option {field.name!r} (given: {given}); "
                    f"its options: {', '.join(OPTIONS_OF[self.name]) or 'none'}"
                )
        Spec(granularity=self.granularity, precision=self.precision)  # refuses unknown ones

    @staticmethod
    def parse(text: str) -> AttentionChoice:
        """``NAME[:OPTION,...]``; an option is ``key=value``, ``no-smooth-k`` or ``no-rotate``.

        A plan lists the INT8 products: ``emulated:plan=s+pv+dv+dp+dq+dk``, or ``plan=none``.
        """
        name, _, options = text.partition(":")
        choice = AttentionChoice(name)
        for option in filter(None, options.split(",")):
            key, _, value = option.partition("=")
            choice = replace(choice, **_parse_option(key, value))
        return choice

    def label(self) -> str:
        """The line that parses to this choice."""
        options = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or value == field.default:
                continue
            key = field.name.replace("_", "-")
            if isinstance(value, bool):
                options.append(f"no-{key}")
            elif isinstance(value, frozenset):
                listed = [p for p in PRODUCTS if p in value]
                options.append(f"{key}={'+'.join(listed) or 'none'}")
            else:
                options.append(f"{key}={value}")
        return ":".join(filter(None, (self.name, ",".join(options))))

    def stem(self) -> str:
        return file_stem(self.label())

    def options(self) -> dict:
        """The keywords that this attention's function takes."""
        return {key: value for key, value in asdict(self).items() if key in OPTIONS_OF[self.name]}


def file_stem(label: str) -> str:
    """Of the files of a run, without a suffix."""
    return "train-" + "".join(c if c.isalnum() or c in "-+" else "-" for c in label)


_COMMON = ("granularity", "group_q", "group_kv", "smooth_k", "rotate")
OPTIONS_OF = {"sdpa": (), "sagebwd": (*_COMMON, "precision"), "emulated": (*_COMMON, "plan")}


def _parse_option(key: str, value: str) -> dict:
    name = key.replace("-", "_")
    if name in ("no_smooth_k", "no_rotate") and not value:
        return {name.removeprefix("no_"): False}
    if name in ("group_q", "group_kv") and value.isdigit():
        return {name: int(value)}
    if name in ("granularity", "precision") and value:
        return {name: value}
    if name == "plan" and value:
        return {name: plan_of(() if value == "none" else value.split("+"))}
    raise ValueError(
        f"unknown attention option {key!r}{'=' + value if value else ''}; known: granularity=row, "
        "group-q=64, group-kv=64, no-smooth-k, no-rotate, precision=qk16, plan=s+pv+dv+dq+dk"
    )


def check_runs_on(choice: AttentionChoice, device: torch.device) -> None:
    """Failure where this attention cannot run there: to be known before anything is written."""
    if choice.name == "sagebwd" and device.type != "cuda":
        raise Failure(f"attention {choice.label()!r} needs a CUDA GPU (python -m sagebwd.doctor "
                      f"says what is missing): on {device.type} there are sdpa and emulated")


def make_attention(
    choice: AttentionChoice, device: torch.device, causal: bool = True
) -> Attend:
    """Attention of (batch, heads, tokens, head_dim) tensors on `device`."""
    if choice.name == "sdpa":
        return sdpa("FLASH_ATTENTION" if device.type == "cuda" else None, causal)
    options = choice.options()
    if choice.name == "sagebwd":
        from sagebwd import attention

        return lambda q, k, v: attention(q, k, v, causal=causal, **options)
    from sagebwd import emulation

    if device.type == "cuda":
        emulation.CHUNK_ELEMENTS = emulation_chunk(torch.cuda.mem_get_info(device)[0])
    return lambda q, k, v: emulation.emulated_attention(q, k, v, causal=causal, **options)


def emulation_chunk(free_bytes: int) -> int:
    """Scores that the emulation may work on at once: its matrices get a quarter of the memory."""
    return max(1 << 24, min(1 << 28, free_bytes // (4 * 4 * LIVE_MATRICES)))


def sdpa(backend: str | None, causal: bool) -> Attend:
    """PyTorch's attention, by the named member of SDPBackend or not at all; None: any."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    forced = nullcontext if backend is None else partial(sdpa_kernel, getattr(SDPBackend, backend))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with forced():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend
