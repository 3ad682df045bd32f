"""The specs that `cases.py` compiles: every value of every option, and most pairs of values.

One compiled spec takes lengths, layouts, window sizes and packing at run time. draw.py draws them
for each case.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

from frame import torch

from sagebwd.core.options import PRECISIONS

#: The head dimensions that each set of kernels serves, by the one that warms it up.
HEAD_DIMS = {40: range(32, 64, 8), 64: (64,), 80: range(72, 128, 8), 128: (128,),
             160: range(136, 256, 8), 256: (256,)}  # fmt: skip
#: Options that are chosen together, because few combinations of them are built.
FORM = ("granularity", "window", "packed", "sink_keys", "smooth_q")
PLAN = ("precision", "deterministic", "dq_sums", "gradient_kernels")
CHOICES = {
    "head_dim": tuple(HEAD_DIMS),
    "dtype": ("bf16", "fp16"),
    "causal": ("none", "top-left", "bottom-right"),
    "smooth_k": (True, False),
    "rotate": (True, False),
    "group_kv": (64, 128),
    "family": ("", "mma"),  # '' means the GPU's own family
    "dp_sums": ("fp32", "fp16"),
    PLAN: (*itertools.product(PRECISIONS, (True, False), ("fp32",), ("any",)),
           ("gradients16", False, "fp16", "any"), ("six-of-seven", True, "fp32", "fused"),
           ("qk16", False, "fp32", "fused")),
    # window: 'left' has a bound on the left, and perhaps one on the right; 'right' has only that.
    FORM: (
        ("row", "", False, 0, False), ("row", "", False, 1, False), ("row", "", False, 1, True),
        ("row", "", True, 0, False), ("row", "", True, 1, False), ("row", "left", False, 0, False),
        ("row", "left", False, 0, True), ("row", "left", True, 0, False),
        ("row", "right", False, 1, False), ("row", "right", True, 0, False),
        ("block", "", False, 0, False), ("block", "", False, 0, True),
        ("block", "left", False, 0, False), ("block", "right", False, 0, False)),
}  # fmt: skip
#: Attention to lists of blocks has fewer options. These are chosen together: the granularity, and
#: queries and keys of a block.
BLOCKS = ("granularity", "sparse_q", "sparse_kv")
CHOICES_OF_LISTS = {name: values for name, values in CHOICES.items() if name != FORM} | {
    PLAN: tuple(itertools.product(PRECISIONS, (True, False), ("fp32",), ("any",))),
    BLOCKS: (*itertools.product(("row",), (64, 128), (64, 128)), ("block", 128, 64),
             ("block", 128, 128)),
    ("window", "packed", "sink_keys", "smooth_q"): (("", False, 0, False),),
}  # fmt: skip
#: And so has attention with intervals of hidden queries per key. The mask and the number of columns
#: are chosen together.
MASK = ("causal", "intervals")
CHOICES_OF_INTERVALS = {
    name: values for name, values in CHOICES.items() if name not in (FORM, "causal")} | {
    PLAN: CHOICES_OF_LISTS[PLAN],
    MASK: (("none", 2), ("none", 4), ("top-left", 1), ("top-left", 2), ("bottom-right", 1),
           ("bottom-right", 2)),
    ("granularity", "window", "packed", "sink_keys", "smooth_q"): (
        ("row", "", False, 0, False), ("block", "", False, 0, False)),
}  # fmt: skip
#: What is drawn, by what the masks are told in.
KINDS = {"": CHOICES, "lists": CHOICES_OF_LISTS, "intervals": CHOICES_OF_INTERVALS}
#: Fields of a spec that follow from tensors or other keywords.
NOT_OPTIONS = ("head_dim", "dtype", "window", "packed", "family", "intervals")
#: How many combinations are tried per spec, of about 100,000.
CANDIDATES = 400


def is_built(spec: dict) -> bool:
    """Whether some GPU has kernels of a spec."""
    if spec["group_kv"] != 64 and spec["granularity"] != "row":
        return False
    if spec.get("sparse_kv", spec["group_kv"]) < spec["group_kv"]:  # a group lies in one block
        return False
    if spec["smooth_q"] and spec["precision"] == "qk16":  # its queries are not quantised
        return False
    if (spec["family"] and spec["precision"] == "qk16" and spec["granularity"] == "block"
            and spec["head_dim"] > 128):  # there are not enough registers  # fmt: skip
        return False
    if spec["gradient_kernels"] == "fused" and (
            spec["head_dim"] > 128 or spec["granularity"] == "block" or spec["group_kv"] != 128
            or spec["family"] != "mma"):  # others have no such kernel  # fmt: skip
        return False
    if spec["dp_sums"] == "fp16" and spec["family"] != "mma":  # sm_90a's own kernels have none
        return False
    # Only a kernel of sm_90a sums dQ in FP16, up to 128 channels.
    return spec["dq_sums"] == "fp32" or (
        spec["head_dim"] <= 128 and not spec["family"] and not spec["smooth_q"])


def draw_specs(
    count: int, rng: random.Random, fp16_sums: bool = True, kind: str = ""
) -> list[dict]:
    """`count` distinct specs in which every value of every choice occurs about equally often, and
    so do pairs of values. `fp16_sums`: whether the GPU has the kernel with dq_sums='fp16'. `kind`:
    one of KINDS."""
    choices = KINDS[kind]
    specs: list[dict] = []
    times: Counter = Counter()

    def seldom(choice: tuple) -> int:
        """How often the values, and their pairs, have been chosen so far."""
        pairs = itertools.combinations(choice, 2)
        return 10 * sum(times[item] for item in choice) + sum(times[pair] for pair in pairs)

    while len(specs) < count:
        drawn = (tuple((name, rng.choice(values)) for name, values in choices.items())
                 for _ in range(CANDIDATES))  # fmt: skip
        built = [choice for choice in drawn if is_built(spec := spec_of(choice))
                 and spec not in specs and (fp16_sums or spec["dq_sums"] != "fp16")]  # fmt: skip
        best = min(built, key=seldom)
        specs.append(spec_of(best))
        times.update([*best, *itertools.combinations(best, 2)])
    return specs


def spec_of(choice: tuple) -> dict:
    """The spec of (name, value) pairs, some of them of several options."""
    spec: dict = {}
    for name, value in choice:
        spec |= dict(zip(name, value)) if isinstance(name, tuple) else {name: value}
    return spec


def has_fp16_sums(device: str) -> bool:
    """Whether dq_sums='fp16' has a kernel on the device; the emulation runs anywhere."""
    if torch.device(device).type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) == (9, 0)


def warm_spec(spec: dict) -> dict:
    """`spec` as sagebwd.warmup() takes it."""
    spec = {key: value for key, value in spec.items() if key != "family"}
    window = spec.pop("window")
    return spec | ({f"window_{window}": 64} if window else {})
