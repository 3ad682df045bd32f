"""What `cases.py` runs: specs in which every value of every option occurs, and calls of them.

Every option, by the GPU's own kernels and by those of mma.sync, which other GPUs run; lengths from
1, queries and keys of different number, head dimensions between the kernels' own, of V too, windows
of any size, batches padded to one length and packed ones, strided and padded views, grouped heads,
many scales, runs of zeros among tokens as padding has them, a gradient of lse.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass

from needs_torch import torch
from subjects import DTYPES

from sagebwd.options import PRECISIONS

LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300)
#: By one that each set of kernels is warmed up with: the head dimensions that it serves.
HEAD_DIMS = {40: range(32, 64, 8), 64: (64,), 80: range(72, 128, 8), 128: (128,),
             160: range(136, 256, 8), 256: (256,)}  # fmt: skip
WINDOWS = (0, 1, 30, 63, 64, 65, 128, 200, 600)
#: Options of which not every combination is built.
FORM = ("granularity", "windowed", "packed", "sink_keys", "smooth_q")
CHOICES = {
    "head_dim": tuple(HEAD_DIMS),
    "dtype": ("bf16", "fp16"),
    "causal": ("none", "top-left", "bottom-right"),
    "precision": PRECISIONS,
    "smooth_k": (True, False),
    "rotate": (True, False),
    "group_kv": (64, 128),
    "family": ("", "mma"),  # '' for the GPU's own
    FORM: (
        ("row", False, False, 0, False), ("row", False, False, 1, False),
        ("row", False, False, 1, True), ("row", False, True, 0, False),
        ("row", False, True, 1, False), ("row", True, False, 0, False),
        ("row", True, True, 0, False), ("block", False, False, 0, False),
        ("block", False, False, 0, True), ("block", True, False, 0, False)),
}
#: Of a spec, what tensors and other keywords say.
NOT_OPTIONS = ("head_dim", "dtype", "windowed", "packed", "family")
LAYOUTS = ("bhsd", "bshd", "padded tokens", "slice of qkv")


def draw_specs(count: int, rng: random.Random) -> list[dict]:
    """`count` distinct specs in which every value of every option occurs about equally often."""
    every = [dict(zip(CHOICES, values)) for values in itertools.product(*CHOICES.values())]
    # Only `row` has groups of 128 keys.
    every = [s for s in every if s["group_kv"] == 64 or s[FORM][0] == "row"]
    # Of mma.sync's kernels for 16-bit scores some were refused on an H200, as spilling, in this
    # benchmark and in speed.py. Alone they compile without: why is open.
    every = [s for s in every if s["precision"] != "qk16" or s["family"] != "mma"]
    # And 16-bit queries are not smoothed.
    every = [s for s in every if s["precision"] != "qk16" or not s[FORM][-1]]
    rng.shuffle(every)
    chosen: list[dict] = []
    times: Counter = Counter()
    while len(chosen) < count and every:
        # The next one is the one whose values have been chosen least so far.
        best = min(every, key=lambda spec: sum(times[value] for value in spec.items()))
        every.remove(best)
        chosen.append(best)
        times.update(best.items())
    for spec in chosen:
        spec.update(zip(FORM, spec.pop(FORM)))
    return chosen


@dataclass(frozen=True)
class Case:
    """One call: with its spec and seed it can be run again alone (``--only INDEX``)."""

    index: int
    spec: dict
    head_dim: int
    value_dim: int
    window: tuple[int | None, int | None]
    used: list[tuple[int, int]] | None  #: queries and keys of each sequence that count
    padded: bool  #: these are a batch's, else they are packed
    batch: int
    heads_kv: int
    group: int
    seq_q: int
    seq_kv: int
    layout: str
    sigma: float
    value_scale: float
    dout_scale: float
    softmax_scale: float | None
    key_offset: float
    with_dlse: bool
    zeros: tuple[str, float, float] | None  #: of this tensor the tokens between two shares of all
    seed: int

    def options(self) -> dict:
        """Those that neither tensors nor other keywords say."""
        return {key: value for key, value in self.spec.items() if key not in NOT_OPTIONS}


def draw_case(index: int, specs: list[dict], seed: int) -> Case:
    rng = random.Random(seed * 1_000_003 + index)

    def length() -> int:
        return rng.choice(LENGTHS) if rng.random() < 0.6 else rng.randint(1, 640)

    def run_of_zeros() -> tuple[str, float, float] | None:
        name, edges = rng.choice(("q", "k", "v", "dout")), sorted((rng.random(), rng.random()))
        where = rng.choice(((0.0, edges[1]), (edges[0], 1.0), edges))
        return (name, *where) if rng.random() < 0.3 else None

    spec = specs[index % len(specs)]
    far = (1e-6, 1e6) if spec["dtype"] == "bf16" else ()
    head_dim = rng.choice(HEAD_DIMS[spec["head_dim"]])
    fewer = head_dim not in HEAD_DIMS and rng.random() < 0.3
    left, right = rng.choice((*WINDOWS, None)), rng.choice((*WINDOWS, None))
    if spec["causal"] != "none":
        left, right = left or 0, None
    elif (left, right) == (None, None):
        left = 64
    seq_q = length()
    seq_kv = seq_q if rng.random() < 0.5 else length()
    batch = rng.choice((1, 1, 2, 3, *((4, 5) if spec["packed"] else ())))
    return Case(
        index=index,
        spec=spec,
        head_dim=head_dim,
        value_dim=rng.randrange(32, head_dim + 1, 8) if fewer else head_dim,
        window=(left, right) if spec["windowed"] else (None, None),
        used=[(rng.randint(0, seq_q), rng.choice((0, seq_kv, rng.randint(0, seq_kv))))
              for _ in range(batch)] if spec["packed"] else None,
        padded=rng.random() < 0.5,
        batch=batch,
        heads_kv=rng.choice((1, 2, 3)),
        group=rng.choice((1, 1, 2, 4)),
        seq_q=seq_q,
        seq_kv=seq_kv,
        layout=rng.choice(LAYOUTS),
        sigma=rng.choice((0.05, 0.5, 1.0, 1.0, 2.0, 4.0)),
        value_scale=rng.choice((0.01, 1.0, 1.0, 20.0, *far)),
        dout_scale=rng.choice((1e-3, 1.0, 1.0, 20.0, *far)),
        softmax_scale=rng.choice(
            (None, None, None, 0.05, 0.2, 0.0, 0.1 if spec["precision"] == "qk16" else -0.1)),
        key_offset=rng.choice((0.0, 0.0, 2.0)),
        with_dlse=rng.random() < 0.15,
        zeros=run_of_zeros(),
        seed=rng.randrange(1 << 30),
    )


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same (B, H, S, D) values in other strides; what lies between them is NaN."""
    if layout == "bhsd":
        return x.contiguous()
    if layout == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    b, h, s, d = x.shape
    # Token strides of D + 16 elements, or heads of q, k and v side by side: multiples of 16 bytes.
    shape = (b, h, s + 3, d + 16) if layout == "padded tokens" else (b, s, 3, h, d)
    whole = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
    view = whole[:, :, 2:-1, 8:-8] if layout == "padded tokens" else whole[:, :, 1].transpose(1, 2)
    view.copy_(x)
    return view


def inputs_of(case: Case, device: str) -> dict:
    generator = torch.Generator(device).manual_seed(case.seed)
    dtype = DTYPES[case.spec["dtype"]]

    def normal(heads: int, tokens: int, channels: int, scale: float, offset: float = 0.0):
        shape = (case.batch, heads, tokens, channels)
        x = torch.randn(shape, generator=generator, device=device)
        channel = torch.randn(shape[-1], generator=generator, device=device)
        return laid_out((x * scale + offset * channel).to(dtype), case.layout)

    heads = case.heads_kv * case.group
    given = {
        "q": normal(heads, case.seq_q, case.head_dim, case.sigma),
        "k": normal(case.heads_kv, case.seq_kv, case.head_dim, case.sigma, case.key_offset),
        "v": normal(case.heads_kv, case.seq_kv, case.value_dim, case.value_scale),
        "dout": normal(heads, case.seq_q, case.value_dim, case.dout_scale),
        "dlse": None,
    }
    if case.zeros:
        name, first, end = case.zeros
        tokens = given[name].shape[2]
        given[name][:, :, round(first * tokens) : round(end * tokens)] = 0
    if case.with_dlse:
        scale = case.dout_scale * case.value_scale
        given["dlse"] = scale * torch.randn(
            given["q"].shape[:3], generator=generator, device=device)
    return given
