"""`cases.py` draws this for each case: how a spec's kernels are called, and on which tensors.

Lengths are from 1 to 2000. There are up to 70 heads, and head dimensions between those of the
kernels, for V too. Further choices are windows of any size, padded batches, packed sequences with
and without gaps, layouts and strides of each tensor, distributions and magnitudes, calls by
separate passes, by autograd or in parts of the keys, sinks, means of keys, and gradients of lse
with those of out and without.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from draw_intervals import Intervals, draw_intervals
from draw_lists import NOT_WITH_LISTS, Lists, draw_lists, more_blocks
from specs import HEAD_DIMS, NOT_OPTIONS

LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300)
MOST_TOKENS, MOST_HEADS = 2000, 70
WINDOWS = (0, 1, 30, 63, 64, 65, 128, 200, 600)
TENSORS = ("q", "k", "v", "dout")
#: Layouts in memory: whole tensors in either order, with room between tokens, as slices of others,
#: and with strides of zero.
STRIDES = ("heads first", "tokens first", "room between tokens", "slice of qkv", "one head for all",
           "one batch for all")  # fmt: skip
#: Further layouts of gradients, which autograd passes with any strides.
STRIDES_OF_DOUT = (*STRIDES, "channels apart", "one number for all")
VALUES = ("gaussian", "one-hot", "duplicates", "alternating", "one huge token", "few tokens",
          "few numbers", "common offset")  # fmt: skip
DOORS = ("halves", "autograd", "parts")
#: How the backward of a part of the keys takes the others into account: `part=`, a shared mean,
#: `merge` and autograd, or nothing, if keys are not smoothed.
TOLD = ("part", "mean", "autograd", "nothing")
DLSE = ("none", "with dout", "alone")
MEANS = ("own", "near", "far", "zero")
#: Tokens that belong to no sequence hold one of these.
UNUSED = ("nan", "inf", "numbers")
TINY, SMALL = 1e-30, 1e-20
SUBNORMAL = {"bf16": 1e-39, "fp16": 1e-6}
#: Kernels take smaller products of V and dO for zero.
LEAST_GRADIENT = 1e-31


@dataclass(frozen=True)
class Sequences:
    """This says where the sequences of a call lie, and how many of their tokens are used."""

    said_by: str  #: 'seqused' of a padded batch; 'cu_seqlens' of packed ones; 'both'
    used: tuple[tuple[int, int], ...]  #: queries and keys of each that count
    rooms: tuple[tuple[int, int], ...]  #: the number of tokens from one to the next
    before: tuple[int, int]  #: queries and keys before the first
    behind: tuple[int, int]  #: and after the last
    beyond: int  #: how far the last cu_seqlens points past the tensors
    #: 'q' or 'k': in a padded batch all its tokens count, and no seqused is passed for it
    without: str


@dataclass(frozen=True)
class Case:
    """One call: with its spec and seed it can be run again alone (``--only INDEX``)."""

    index: int
    spec: dict
    head_dim: int
    value_dim: int
    window: tuple[int | None, int | None]
    sequences: Sequences | None
    batch: int
    heads_kv: int
    group: int
    seq_q: int
    seq_kv: int
    layout: str  #: the keyword, for calls that are not packed
    strides: dict[str, str]  #: for each tensor, and for dlse
    values: dict[str, tuple[str, float]]  #: the distribution and scale for each tensor
    key_offset: float
    #: a tensor, and the shares of its length between which its tokens are zeros
    zeros: tuple[str, float, float] | None
    unused: str
    softmax_scale: float | None
    door: str
    ends_of_parts: tuple[int, ...]  #: how many parts the keys have, if the door is 'parts'
    told: str  #: how the backward of a part takes the others into account; see TOLD
    dlse: str
    k_mean: str | None
    sinks: str | None  #: 'logits', or 'some off', where some heads have -inf
    says_group_q: bool
    again: bool  #: whether it is called a second time, when its form is known
    seed: int
    lists: Lists | None = None  #: which blocks of keys each block of queries sees
    intervals: Intervals | None = None  #: which queries do not see a key

    def options(self) -> dict:
        """The options that follow neither from the tensors nor from other keywords."""
        options = {key: value for key, value in self.spec.items() if key not in NOT_OPTIONS}
        if self.lists:
            options = {key: value for key, value in options.items() if key not in NOT_WITH_LISTS}
            sizes = self.spec["sparse_q"], self.spec["sparse_kv"]
            return options | {"block_size": sizes, "softmax_scale": self.softmax_scale}
        if not self.intervals:
            options |= dict(zip(("window_left", "window_right"), self.window))
        if self.says_group_q:
            options["group_q"] = 64 if self.spec["granularity"] == "row" else 128
        return options | {"softmax_scale": self.softmax_scale}

    @property
    def is_packed(self) -> bool:
        """Whether tensors are (tokens, heads, channels)."""
        return self.sequences is not None and self.sequences.said_by != "seqused"


def draw_case(index: int, specs: list[dict], seed: int, scores: int = 1 << 24) -> Case:
    """`scores`: the most scores of a case, over all its heads."""
    rng = random.Random(seed * 1_000_003 + index)
    spec = specs[index % len(specs)]
    listed, hidden = "sparse_q" in spec, "intervals" in spec
    masked = listed or hidden
    head_dim = rng.choice(HEAD_DIMS[spec["head_dim"]])
    fewer = head_dim not in HEAD_DIMS and rng.random() < 0.5
    batch, heads_kv, group, seq_q, seq_kv = _sizes(rng, spec, scores)
    if masked:
        batch, heads_kv, group, seq_q, seq_kv = more_blocks(
            rng, (batch, heads_kv, group, seq_q, seq_kv), scores)
    door = rng.choices(DOORS, (3, 3, 0 if spec["window"] or masked else 2))[0]
    if door == "parts" and spec["causal"] != "none":
        seq_kv = seq_q
    sequences = _sequences(rng, batch, seq_q, seq_kv, door, spec) if spec["packed"] else None
    ends = ()
    if door == "parts":
        count = 2 if spec["causal"] != "none" else rng.choice((1, 2, 3, 4))
        ends = (*sorted(rng.randint(0, seq_kv) for _ in range(count - 1)), seq_kv)
    dlse = rng.choices(DLSE, (5, 2, 1))[0]
    mean = rng.choice((None, None, *MEANS)) if spec["smooth_k"] and not masked else None
    told = [] if door != "parts" else ["part", "autograd"]
    if door == "parts" and not spec["smooth_k"]:
        told.append("nothing")
    elif door == "parts" and mean and dlse == "none":
        told.append("mean")
    sinks = rng.choice((None, "logits", "some off")) if door == "autograd" and not listed else None
    strides = {name: rng.choice(STRIDES_OF_DOUT if name[0] == "d" else STRIDES)
               for name in (*TENSORS, "dlse")}  # fmt: skip
    if sinks:  # every token gets a gradient, also one that does not count
        strides["dlse"] = "heads first"
    return Case(
        index=index,
        spec=spec,
        head_dim=head_dim,
        value_dim=rng.randrange(32, head_dim + 1, 8) if fewer else head_dim,
        window=_window(rng, spec, min(seq_q, seq_kv)),
        sequences=sequences,
        batch=batch,
        heads_kv=heads_kv,
        group=group,
        seq_q=seq_q,
        seq_kv=seq_kv,
        layout=rng.choice(("bhsd", "bhsd", "bshd")),
        strides=strides,
        values=_within_type(_values(rng, spec["dtype"]), spec) if masked else (
            _values(rng, spec["dtype"])),
        key_offset=rng.choice((0.0, 0.0, 2.0)),
        zeros=_run_of_zeros(rng),
        unused=rng.choice(UNUSED),
        softmax_scale=rng.choice(
            (None, None, None, 0.05, 0.2, 0.0, 0.1 if spec["precision"] == "qk16" else -0.1)),
        door=door,
        ends_of_parts=ends,
        told=rng.choice(told) if told else "",
        dlse=dlse,
        k_mean=mean,
        sinks=sinks,
        says_group_q=rng.random() < 0.3,
        again=rng.random() < 0.3,
        seed=rng.randrange(1 << 30),
        lists=draw_lists(rng) if listed else None,
        intervals=draw_intervals(rng) if hidden else None,
    )  # fmt: skip


def _sizes(rng: random.Random, spec: dict, scores: int) -> tuple[int, ...]:
    """Batch, heads of keys, queries' heads for each, queries and keys.

    Most cases are small. Some of the others are long and have few heads, and some have many heads.
    """
    batch = rng.choice((1, 1, 2, 3, *((4, 5) if spec["packed"] else ())))
    heads_kv, group, most = rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 4)), 640
    kind = rng.random()
    if kind < 0.05:
        batch, heads_kv, group, most = 1, 1, rng.choice((1, 2)), MOST_TOKENS
    elif kind < 0.1:
        heads_kv = rng.choice((1, 5, 7, 10, 35, MOST_HEADS))
        batch, group, most = min(batch, 2), rng.randint(1, MOST_HEADS // heads_kv), 130
    elif kind < 0.12 and spec["packed"]:
        batch, most = 24, 40

    def length() -> int:
        near = [n for n in LENGTHS if n <= most]
        if most == MOST_TOKENS:
            return rng.randint(640, most)
        return rng.choice(near) if rng.random() < 0.6 else rng.randint(1, most)

    seq_q = length()
    seq_kv = seq_q if rng.random() < 0.5 else length()
    shrink = math.sqrt(max(1.0, batch * heads_kv * group * seq_q * seq_kv / scores))
    return batch, heads_kv, group, *(max(1, int(n / shrink)) for n in (seq_q, seq_kv))


def _sequences(
    rng: random.Random, count: int, seq_q: int, seq_kv: int, door: str, spec: dict
) -> Sequences:
    """Sequences of at most `seq_q` queries and `seq_kv` keys."""
    said_by = "seqused" if door == "parts" else rng.choice(("seqused", "cu_seqlens", "both"))
    used = [(rng.choice((0, seq_q, *(rng.randint(0, seq_q) for _ in range(4)))),
             rng.choice((0, seq_kv, rng.randint(0, seq_kv)))) for _ in range(count)]
    if door == "parts" and spec["causal"] != "none":
        used = [(n, n) for _, n in used]
    without = rng.choice(("", "", "q", "k")) if said_by == "seqused" else ""
    if door == "parts" and spec["causal"] != "none":
        without = ""
    if without:
        used = [(seq_q if without == "q" else m, seq_kv if without == "k" else n)
                for m, n in used]
    rooms = [(seq_q, seq_kv)] * count
    before = behind = 0, 0
    if said_by != "seqused":
        gaps = (0, 1, 7, 64, 100) if said_by == "both" else (0,)
        rooms = [(m + rng.choice(gaps), n + rng.choice(gaps)) for m, n in used]
        before, behind = ((rng.choice((0, 0, 5, 70)), rng.choice((0, 0, 5, 70)))
                          for _ in range(2))
    beyond = 1000 if said_by != "seqused" and behind == (0, 0) and rng.random() < 0.2 else 0
    return Sequences(said_by, tuple(used), tuple(rooms), before, behind, beyond, without)


def _window(rng: random.Random, spec: dict, tokens: int) -> tuple[int | None, int | None]:
    """A window at the ends of tiles, or any other that hides a key from some query."""

    def size() -> int:
        return rng.choice(WINDOWS) if rng.random() < 0.5 else rng.randint(0, tokens)

    left, right = size(), size() if rng.random() < 0.9 else None
    if spec["window"] == "right":
        return None, size()
    if spec["window"] == "left":
        return left, right
    # Under a causal mask a query sees no key after its own, so that this bound has no effect.
    return None, right if spec["causal"] != "none" and rng.random() < 0.3 else None


def _values(rng: random.Random, dtype: str) -> dict[str, tuple[str, float]]:
    least = SUBNORMAL[dtype]
    tiny = (TINY, least) if dtype == "bf16" else (least,)
    far = (1e-6, 1e6, *tiny) if dtype == "bf16" else tiny

    def one(*scales: float) -> tuple[str, float]:
        kind = "gaussian" if rng.random() < 0.7 else rng.choice(VALUES)
        return kind, rng.choice(scales)

    sigma = rng.choice((0.05, 0.05, 0.5, 1.0, 1.0, 2.0, 4.0))
    q, k = (one(*[sigma] * 20, 8.0, *tiny) for _ in "qk")
    v = one(0.01, *[1.0] * 6, 20.0, *far)
    dout = one(1e-3, *[1.0] * 6, 20.0, *far)
    if v[1] * dout[1] < LEAST_GRADIENT:
        dout = dout[0], 1.0
    if min(q[1], k[1]) < TINY:  # so are their gradients, at most
        v, dout = (v[0], min(v[1], 1.0)), (dout[0], min(dout[1], 1.0))
    return {"q": q, "k": k, "v": v, "dout": dout}


def _within_type(values: dict, spec: dict) -> dict:
    """With a huge token in Q or K, INT8 may choose another key for a query than FP64 does. So that
    its gradient does not leave the range of FP16, dO is no larger than usual."""
    huge = "one huge token" in (values["q"][0], values["k"][0])
    kind, scale = values["dout"]
    if huge and spec["dtype"] == "fp16":
        values["dout"] = kind, min(scale, 1.0)
    return values


def _run_of_zeros(rng: random.Random) -> tuple[str, float, float] | None:
    """Values as padding has them."""
    name, edges = rng.choice(TENSORS), sorted((rng.random(), rng.random()))
    where = rng.choice(((0.0, edges[1]), (edges[0], 1.0), edges))
    return (name, *where) if rng.random() < 0.3 else None
