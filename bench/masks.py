"""The time of sliding windows and of packed sequences, compared with their share of the work.

    python bench/masks.py                  # D 64, 128, 256 at 32K tokens
    python bench/masks.py --head-dim 96 --tokens 8192

The share of a window is the fraction of all scores that it lets through. A window's row has the
time as a multiple of that share of the unmasked time. Packed sequences are compared with one call
for each sequence, in a CUDA graph, so that the host does not count. If all have the same
length, they are compared with one call of a dense batch. FlashAttention-2 (PyTorch's, with its
windows and cu_seqlens) is measured in the same run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from harness import Record, parse, parser
from needs_torch import torch

import sagebwd
from sagebwd.benchmark.attentions import Flash2
from sagebwd.benchmark.timing import clock_of, time_interleaved
from sagebwd.benchmark.truth import TENSORS, relative_l2
from sagebwd.numerics.exact import exact_attention

HEADS_TIMES_DIM = 2048
LARGEST_ERROR = 0.03  #: the largest error against FlashAttention-2, as in speed.py


@dataclass(frozen=True)
class Case:
    """One mask over sequences that follow each other."""

    name: str
    lengths: tuple[int, ...]
    causal: str = "top-left"
    window: tuple[int | None, int | None] = (None, None)

    def mask(self) -> dict:
        return {"causal": self.causal, "window_left": self.window[0],
                "window_right": self.window[1]}  # fmt: skip

    def share(self) -> float:
        """The fraction of the scores of one sequence that the mask lets through."""
        (n,) = self.lengths
        left, right = (n if w is None else w for w in self.window)
        right = right if self.causal == "none" else 0
        return sum(min(i, left) + 1 + min(n - 1 - i, right) for i in range(n)) / n**2


def cases_of(tokens: int, seed: int) -> list[Case]:
    whole, window = (tokens,), tokens // 32
    halves = [max(1, tokens >> i) for i in range(1, 32) if tokens >> i]
    halves.append(tokens - sum(halves))
    rng, documents = random.Random(seed), []
    while sum(documents) < tokens:
        length = max(1, round(rng.lognormvariate(6, 1.2)))
        documents.append(min(tokens // 2, tokens - sum(documents), length))
    packed = {"halves": halves, "documents": documents, "equal": [window] * 32}
    return [
        Case("dense", whole, "none"),
        Case("causal", whole),
        Case("window", whole, window=(window - 1, None)),
        Case("window, both sides", whole, "none", (window // 2, window // 2 - 1)),
        Case("window, four times", whole, window=(4 * window - 1, None)),
        *(Case(f"packed, {name}", tuple(lengths), causal)
          for name, lengths in packed.items() for causal in ("none", "top-left")),
    ]  # fmt: skip


@dataclass(frozen=True)
class Halves:
    """The explicit forward, and the backward of its results."""

    forward: Callable[[], tuple]
    backward: Callable[..., tuple]

    def both(self) -> tuple:
        out, *saved = self.forward()
        return out, *self.backward(out, *saved)


def ours(case: Case, q, k, v, dout) -> Halves:
    """Takes (tokens, heads, head_dim) tensors. One sequence is a batch of one."""
    if len(case.lengths) == 1:
        q, k, v, dout = (t[None] for t in (q, k, v, dout))
        chosen = {"layout": "bshd", **case.mask()}
    else:
        firsts = firsts_of(case, q.device)
        chosen = {"cu_seqlens_q": firsts, "cu_seqlens_k": firsts, **case.mask()}
    return Halves(lambda: sagebwd.attention_forward(q, k, v, **chosen),
                  lambda out, lse: sagebwd.attention_backward(dout, q, k, v, out, lse, **chosen))


def firsts_of(case: Case, device) -> torch.Tensor:
    return torch.tensor([0, *case.lengths], device=device).cumsum(0).to(torch.int32)


def parts(case: Case, *tensors) -> Halves:
    """Each sequence by itself; those of one length as a batch."""
    if len(set(case.lengths)) == 1:
        spans = [[t.view(len(case.lengths), -1, *t.shape[1:]) for t in tensors]]
    else:
        spans = zip(*([part[None] for part in t.split(case.lengths)] for t in tensors))
    chosen = {"layout": "bshd", **case.mask()}
    each = [(lambda s=s: sagebwd.attention_forward(*s[:3], **chosen),
             lambda out, lse, s=s: sagebwd.attention_backward(s[3], *s[:3], out, lse, **chosen))
            for s in spans]  # fmt: skip
    return Halves(lambda: ([forward() for forward, _ in each],),
                  lambda saved: tuple(back(*given) for (_, back), given in zip(each, saved)))


def flash_attention(case: Case, q, k, v, dout) -> Halves:
    """FlashAttention-2 of PyTorch; windows and sequences as it takes them, causal as its own."""
    longest, firsts = max(case.lengths), None
    if len(case.lengths) == 1:
        q, k, v, dout = (t[None] for t in (q, k, v, dout))
    else:
        firsts = firsts_of(case, q.device)
    flash = Flash2(longest, longest, case.causal != "none", case.window, firsts)
    return Halves(lambda: flash.forward(q, k, v),
                  lambda out, *rest: flash.backward(dout, q, k, v, out, *rest))


def exact(case: Case, *tensors) -> Halves:
    """Attention in FP64, for trying the script without a GPU."""
    def all_of(t):
        return torch.cat([part for part in t], 1)

    def forward():
        spans = zip(*([part[None] for part in t.split(case.lengths)] for t in tensors))
        found = [exact_attention(*s, layout="bshd", **case.mask()) for s in spans]
        return all_of(f.out for f in found), found

    return Halves(forward, lambda out, found: tuple(
        all_of(getattr(f, name) for f in found) for name in ("dq", "dk", "dv")))


def replayed(call: Callable) -> Callable:
    """Captures the call in a CUDA graph; without a GPU gives the call itself."""
    if not torch.cuda.is_available():
        return call
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(options, case: Case, head_dim: int, dense: dict) -> dict:
    """A row. `dense`: the times without a mask, which the first case gives."""
    generator = torch.Generator(options.device).manual_seed(options.seed)
    shape = (sum(case.lengths), HEADS_TIMES_DIM // head_dim, head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator, device=options.device).bfloat16()
                     for _ in range(4))  # fmt: skip
    cuda = options.device == "cuda"
    peer = (flash_attention if cuda else exact)(case, q, k, v, dout)
    mine = ours(case, q, k, v, dout)
    row = {"case": case.name, "head_dim": head_dim, **asdict(case), "sequences": len(case.lengths)}
    row["lengths"] = list(case.lengths[:16])
    row["rel_l2_to_fa2"] = {
        name: relative_l2(x.view(shape), reference.view(shape))
        for name, x, reference in zip(TENSORS, mine.both(), peer.both())
    }
    # NaN must not pass, hence the form of the comparison.
    row["correct"] = all(e <= LARGEST_ERROR for e in row["rel_l2_to_fa2"].values())
    saved = {"sagebwd": mine.forward(), "fa2": peer.forward()}
    calls = {
        "forward": {"sagebwd": mine.forward, "fa2": peer.forward},
        "backward": {"sagebwd": lambda: mine.backward(*saved["sagebwd"]),
                     "fa2": lambda: peer.backward(*saved["fa2"])},
    }  # fmt: skip
    if len(case.lengths) > 1:
        alone = parts(case, q, k, v, dout)
        kept = alone.forward()
        calls["forward"]["parts"] = replayed(alone.forward)
        calls["backward"]["parts"] = replayed(lambda: alone.backward(*kept))
    clock = clock_of(options.device)
    times = {name: time_interleaved(of, clock, options.rounds, 2)
             for name, of in calls.items()}  # fmt: skip
    totals = {who: sum(times[name][who].median_ms for name in calls) for who in calls["forward"]}
    for name in calls:
        row[name] = {who: timing.json() for who, timing in times[name].items()}
        one = {who: timing.median_ms for who, timing in times[name].items()}
        row[name] |= ratios(one, case, dense.setdefault(name, one["sagebwd"]))
    row["forward+backward"] = ratios(totals, case, dense["forward"] + dense["backward"])
    return row


def ratios(ms: dict, case: Case, dense_ms: float) -> dict:
    found = {"ratio_to_fa2": round(ms["fa2"] / ms["sagebwd"], 3)}
    if "parts" in ms:
        return found | {"times_parts": round(ms["sagebwd"] / ms["parts"], 3)}
    return found | {"times_share": round(ms["sagebwd"] / (dense_ms * case.share()), 3)}


def line(row: dict) -> str:
    cells = ""
    for name in ("forward", "forward+backward"):
        beside = next(key for key in row[name] if key.startswith("times_"))
        cells += (f"  {name} {row[name]['ratio_to_fa2']:5.2f} x fa2, "
                  f"{row[name][beside]:5.2f} {beside.replace('_', ' ')}")  # fmt: skip
    errors = " ".join(f"{e:.4f}" for e in row["rel_l2_to_fa2"].values())
    return (f"D{row['head_dim']:<4}{row['case']:20}{row['causal']:9}{cells}  {errors}"
            + ("" if row["correct"] else "  WRONG"))  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "masks.json")
    options.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    options.add_argument("--tokens", type=int, default=32768, metavar="N")
    options.add_argument("--rounds", type=int, default=9)
    options = parse(options, arguments)
    record = Record(options.out, tokens=options.tokens, heads_times_dim=HEADS_TIMES_DIM,
                    rounds=options.rounds, seed=options.seed, largest_error=LARGEST_ERROR,
                    dtype="bf16")  # fmt: skip
    rows = []
    for head_dim in options.head_dim:
        dense = {}
        for case in cases_of(options.tokens, options.seed):
            rows.append(measure(options, case, head_dim, dense))
            record.add("rows", rows[-1])
            print(line(rows[-1]), flush=True)
    return record.finish(all(row["correct"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
