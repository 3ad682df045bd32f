"""The speed of forward, backward and both, with all quantisation passes, beside PyTorch's SDPA.

    python bench/speed.py                  # N 8192, D 64, 96, 128, 256, causal and not; N 1024
    python bench/speed.py --sweep          # N 1024 .. 16384
    python bench/speed.py --ours sagebwd sagebwd-mma:precision=dv16 --tokens 4096

`sagebwd` runs the kernel family of the GPU with tuned tiles. `sagebwd-mma` and `sagebwd-wgmma` run
that family with its default tiles. A row has times and two errors of each tensor: over all heads
against FlashAttention-2, which shows a wrong element anywhere, and over a few heads against FP64.
There are 32K tokens in all, and heads x D = 2048. TFLOPS count 4 B H M N D operations for the
forward, 2.5 times as many for the backward, and half of that with a causal mask, as
FlashAttention-2 does.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass

from harness import Record, parse, parser, warm_up
from needs_torch import torch

from experiments.attentions import AttentionChoice, make_attention
from sagebwd.benchmark import measuring
from sagebwd.benchmark.attentions import deterministic_algorithms, of_pytorch
from sagebwd.benchmark.environment import brief, print_failure
from sagebwd.benchmark.measuring import normal
from sagebwd.benchmark.timing import clock_of, peak_mib, time_interleaved
from sagebwd.benchmark.truth import TENSORS, relative_l2
from sagebwd.core import forms
from sagebwd.core.options import PRECISIONS
from sagebwd.numerics.exact import Attended, exact_attention

TOTAL_TOKENS = 32768
HEADS_TIMES_DIM = 2048
PASSES = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}
PEERS = ("fa2", "cudnn")
FAMILIES = ("mma", "wgmma", "ws", "pair")
DETERMINISTIC = ", deterministic"  #: comes after the name of a peer
#: Tokens of the longest sequences that are compared with FP64; others are compared only with FA2.
LONGEST_EXACT = 8192
#: The largest error of an output against FlashAttention-2, for standard normal inputs. With more a
#: kernel is wrong, and its speed means nothing. By the emulation the error of INT8 is 0.018 under
#: `row` and 0.059 under `block`.
LARGEST_ERROR = {"row": 0.03, "block": 0.08}


# ---- what is measured ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """Sizes and mask of one comparison."""

    head_dim: int
    causal: bool
    tokens: int
    batch: int
    heads: int
    heads_kv: int = 0  #: 0: as many as heads
    dtype: str = "bf16"
    layout: str = "bhsd"  #: in memory; "bshd": tokens before heads


LONG = [Cell(dim, causal, 8192, 4, HEADS_TIMES_DIM // dim)
        for dim in (64, 128) for causal in (False, True)]  # fmt: skip
#: The size at which launches and quantisation passes matter most.
SHORT = Cell(64, True, 1024, 16, 16)
ALSO_SHORT = [Cell(dim, False, 1024, 32, HEADS_TIMES_DIM // dim) for dim in (64, 128, 256)]
#: A head dimension that is not the width of a kernel.
PART = [Cell(96, causal, 8192, 4, HEADS_TIMES_DIM // 96) for causal in (False, True)]
#: Our targets for the speed of six-of-seven, forward + backward, relative to FA2 on an H200.
MUSTS = {
    "own": dict(zip((*LONG, SHORT), (1.25, 1.2, 1.5, 1.4, 1.0))),
    "mma": dict(zip(LONG, (1.05, 1.03, 1.05, 1.03))),
}
#: The families that the GPU uses by itself decide about the exit code. For the others it is only
#: recorded whether the targets are reached.
JUDGED = "own"


@dataclass(frozen=True)
class Ours:
    """One attention of ours (or the emulation) by its label, such as `sagebwd-mma:no-rotate`."""

    choice: AttentionChoice
    family: str  #: '' means the family that the GPU uses by itself

    @classmethod
    def parse(cls, label: str) -> Ours:
        name, colon, rest = label.partition(":")
        plain, _, family = name.partition("-")
        if family and (plain != "sagebwd" or family not in FAMILIES):
            known = ", ".join(f"sagebwd-{family}" for family in FAMILIES)
            raise ValueError(f"unknown attention {name!r}; with a family there are {known}")
        return cls(AttentionChoice.parse(plain + colon + rest), family)

    def label(self) -> str:
        name, colon, rest = self.choice.label().partition(":")
        return name + (f"-{self.family}" if self.family else "") + colon + rest

    def context(self):
        """The context in which its calls run, also those in the threads of autograd."""
        return forms.kernels_of(self.family) if self.family else nullcontext()

    def must(self, cell: Cell, device: str) -> float | None:
        if device != "cuda" or torch.cuda.get_device_capability() != (9, 0):
            return None
        if self.choice != AttentionChoice():
            return None
        return MUSTS.get(self.family or JUDGED, {}).get(cell)


def default_ours() -> list[str]:
    """The families of the GPU and mma, each under every precision, with fused backwards, and with
    smoothed queries."""
    plans = ["" if p == PRECISIONS[0] else f":precision={p}" for p in PRECISIONS]
    return [*(name + plan for name in ("sagebwd", "sagebwd-mma") for plan in plans),
            "sagebwd-mma:no-deterministic", "sagebwd-mma:precision=gradients16,no-deterministic",
            "sagebwd:precision=gradients16,no-deterministic", "sagebwd:smooth-q"]


def cells_of(options) -> list[Cell]:
    lengths = [1024 << i for i in range(5)] if options.sweep else options.tokens or [8192]
    causals = {"no": [False], "yes": [True], "both": [False, True]}[options.causal]
    cells = [
        Cell(head_dim, causal, tokens, max(1, options.total_tokens // tokens),
             HEADS_TIMES_DIM // head_dim, dtype=options.dtype)
        for head_dim in options.head_dim for causal in causals for tokens in lengths
    ]  # fmt: skip
    return cells if options.sweep or options.tokens else [*cells, SHORT, *ALSO_SHORT, *PART]


def passes(attend, context, q, k, v, dout) -> dict:
    """The three timed calls of one attention. The backward runs on a graph that is made once."""
    inputs = (q, k, v)
    with context():
        attend(*inputs)  # its form is known from here on: its backward is of that family
        out = attend(*inputs)

    def backward():
        with context():
            return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    timed = measuring.passes(attend, context, *inputs, dout)
    return {name: timed.get(name, backward) for name in PASSES}


def exact_heads(q, k, v, dout, causal: bool, heads: int) -> Attended:
    """FP64 of the last heads of the last sequence, or of those that share the last keys."""
    group = q.shape[1] // k.shape[1]
    heads = max(1, min(heads, q.shape[1]) // group) * group
    parts = (x.detach()[-1:, -n:] for x, n in
             ((q, heads), (k, heads // group), (v, heads // group), (dout, heads)))
    return exact_attention(*parts, causal="top-left" if causal else "none")


def inputs_of(cell: Cell, options) -> tuple:
    """Standard normal q, k and v, which require gradients, and dout."""
    generator = torch.Generator(options.device).manual_seed(options.seed)

    def one(heads):
        return normal(heads, cell.tokens, cell.batch, cell.head_dim, cell.dtype, cell.layout,
                      generator)  # fmt: skip

    heads_kv = cell.heads_kv or cell.heads
    q, k, v = (one(n).requires_grad_() for n in (cell.heads, heads_kv, heads_kv))
    return q, k, v, one(cell.heads)


# ---- one cell ------------------------------------------------------------------------------------


def measure(options, cell: Cell, ours: list[Ours], record: Record) -> list[dict]:
    cuda = options.device == "cuda"
    q, k, v, dout = inputs_of(cell, options)
    attentions = {
        name + also: (of_pytorch(name, options.device, cell.causal), context)
        for name in PEERS if name == "fa2" or name in options.peers
        for also, context in {"": nullcontext, DETERMINISTIC: deterministic_algorithms}.items()
        if not also or options.deterministic_peers
    }  # fmt: skip
    for one in ours:
        attend = make_attention(one.choice, torch.device(options.device), cell.causal)
        attentions[one.label()] = attend, one.context

    exact = {}
    if cell.tokens <= LONGEST_EXACT:
        exact = exact_heads(q, k, v, dout, cell.causal, options.exact_heads).named()
    calls, errors, refused, peaks = {}, {}, {}, {}
    reference = None
    for label, (attend, context) in attentions.items():
        try:
            calls[label] = passes(attend, context, q, k, v, dout)
            results = [x.detach() for x in (calls[label]["forward"](),
                                            *calls[label]["forward+backward"]())]
            reference = reference or results
            errors[label] = {
                "rel_l2": {name: relative_l2(x[-1:, -exact[name].shape[1]:], exact[name])
                           for name, x in zip(TENSORS, results) if exact},
                "rel_l2_to_fa2": dict(zip(TENSORS, map(relative_l2, results, reference))),
            }  # fmt: skip
        except Exception as error:  # it is recorded, and the others are still measured
            if label == "fa2":
                raise
            calls.pop(label, None)
            print_failure(label, error)
            refused[label] = brief(error)
        results = None
        if cuda and label in calls:
            peaks[label] = peak_mib(calls[label]["forward+backward"])
        torch.cuda.empty_cache() if cuda else None
    del reference

    clock = clock_of(options.device)
    timings = {
        name: time_interleaved({label: c[name] for label, c in calls.items()}, clock,
                               options.rounds, options.warmup)
        for name in PASSES
    }
    operations = 4 * cell.batch * cell.heads * cell.tokens**2 * cell.head_dim
    operations *= 0.5 if cell.causal else 1
    by_label = {one.label(): one for one in ours}
    rows = []
    for label in attentions:
        row = {"attention": label, **vars(cell)}
        one = by_label.get(label)
        if label in refused:
            row |= {"error": refused[label], "correct": False, "peer": label not in by_label}
        else:
            largest = LARGEST_ERROR[one.choice.granularity if one else "row"]
            # NaN must not pass, hence the form of the comparison.
            row |= {"peak_mib": peaks[label]} if label in peaks else {}
            row |= errors[label] | {"correct": all(
                e <= largest for of in errors[label].values() for e in of.values())}
            for name, factor in PASSES.items():
                timing = timings[name][label]
                row[name] = timing.json() | {
                    "tflops": round(factor * operations / timing.median_ms / 1e9, 2),
                    "ratio_to_fa2": round(timings[name]["fa2"].median_ms / timing.median_ms, 4),
                }
        if one and (must := one.must(cell, options.device)):
            ratio = row.get("forward+backward", {}).get("ratio_to_fa2", 0)
            row |= {"must": must, "reached": ratio >= must,
                    "judged": (one.family or JUDGED) == JUDGED}  # fmt: skip
        rows.append(row)
        record.add("rows", row)
    return rows


def line(row: dict) -> str:
    shape = f"D{row['head_dim']:<4}{'causal' if row['causal'] else '':7}N{row['tokens']:<6}"
    if "error" in row:
        return f"{shape} {row['attention']:32} {row['error']}"
    cells = "".join(
        f"{one['median_ms']:9.3f} ms {one['tflops']:6.0f} {one['ratio_to_fa2']:5.2f}x"
        for one in (row[name] for name in PASSES)
    )
    errors = " ".join(f"{row['rel_l2'].get(name, float('nan')):.4f}" for name in TENSORS)
    notes = "" if row["correct"] else "  WRONG"
    if not row.get("reached", True):
        notes += f"  below {row['must']}"
    return f"{shape} {row['attention']:32}{cells}  {errors}{notes}"


def warm(ours: list[Ours], cells: list[Cell], options, record: Record) -> None:
    """Compiles all kernels that will run, one family at a time."""
    for family in dict.fromkeys(one.family for one in ours):
        specs = [
            one.choice.options() | {"head_dim": head_dim, "causal": causal, "dtype": dtype}
            for one in ours if one.family == family and one.choice.name == "sagebwd"
            for head_dim, causal, dtype in dict.fromkeys(
                (c.head_dim, "top-left" if c.causal else "none", c.dtype) for c in cells)
        ]  # fmt: skip
        with forms.kernels_of(family):
            warm_up(specs, options.device, record)


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "speed.json")
    options.add_argument("--ours", nargs="*", default=default_ours(), metavar="NAME[:OPTION,...]",
                         help="e.g. sagebwd sagebwd-mma sagebwd:granularity=block (default: both "
                              "families under every precision, and mma's fused backward)")
    options.add_argument("--peers", nargs="*", default=["cudnn"], choices=["cudnn"])
    options.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    options.add_argument("--tokens", type=int, nargs="+", metavar="N",
                         help="default: 8192, and 1024 for some shapes more")
    options.add_argument("--sweep", action="store_true", help="N 1024, 2048 .. 16384")
    options.add_argument("--causal", choices=["no", "yes", "both"], default="both")
    options.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--warmup", type=int, default=3, help="rounds that are not counted")
    options.add_argument("--deterministic-peers", action="store_true",
                         help="also under torch.use_deterministic_algorithms")
    options.add_argument("--total-tokens", type=int, default=TOTAL_TOKENS)
    options.add_argument("--exact-heads", type=int, default=2, help="compared with FP64")
    options = parse(options, arguments)
    ours, cells = list(map(Ours.parse, options.ours)), cells_of(options)
    record = Record(
        options.out, total_tokens=options.total_tokens, heads_times_dim=HEADS_TIMES_DIM,
        rounds=options.rounds, dtype=options.dtype, seed=options.seed, flops_factor=PASSES,
        exact_heads=options.exact_heads, largest_error=LARGEST_ERROR, judged_family=JUDGED,
    )
    warm(ours, cells, options, record)
    print(f"{'':21}{'':32}" + "".join(f"{name + ', TFLOPS, to fa2':>27}" for name in PASSES)
          + f"  rel. L2 to FP64: {', '.join(TENSORS)}")
    rows = []
    for cell in cells:
        measured = measure(options, cell, ours, record)
        print("\n".join(map(line, measured)), flush=True)
        rows += measured
    mine = [row for row in rows if row["attention"] not in PEERS and not row.get("peer")]
    missed = [row for row in mine if not row.get("reached", True)]
    record.set(not_reached=[
        {key: row[key] for key in ("attention", "head_dim", "causal", "tokens", "must", "judged")}
        for row in missed
    ])  # fmt: skip
    return record.finish(all(row["correct"] for row in mine)
                         and not any(row["judged"] for row in missed))


if __name__ == "__main__":
    sys.exit(main())
