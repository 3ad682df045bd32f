"""The time of masks, told by intervals and as expressions, next to that of flex_attention.

    python bench/intervals.py                       # D 128 at 8K and 32K tokens
    python bench/intervals.py --head-dim 64 --tokens 8192 --no-flex

Each mask is one that trainings use: a sliding window, documents, a prefix, and bidirectional spans
in causal text (images). A row has forward, and forward and backward, of all in turns, and of our
attention without a mask of its own, causal, which is what a mask may cost. The error is that of the
outputs and gradients against flex_attention, which computes in bf16. flex_attention's block mask is
made before, and so is that of "block mask"; with intervals and as "expression" ours is made in each
call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from harness import Record, parse, parser
from needs_torch import torch

import sagebwd
from sagebwd import masks
from sagebwd.benchmark.timing import clock_of, time_interleaved
from sagebwd.benchmark.truth import TENSORS, relative_l2

HEADS_TIMES_DIM = 2048
LARGEST_ERROR = 0.04  #: against flex_attention, which has errors of its own
PRECISIONS = "six-of-seven", "gradients16"
EXPRESSIONS = "expression", "block mask"  #: six-of-seven, with the mask as flex_attention has it


@dataclass(frozen=True)
class Mask:
    """A mask as ours and as flex_attention's function of (b, h, q, k)."""

    name: str
    intervals: masks.Intervals
    seen: Callable

    def share(self, tokens: int) -> float:
        """The fraction of all scores that somebody sees."""
        seen = 0
        for first in range(0, tokens, 1024):
            q = torch.arange(first, min(tokens, first + 1024), device="cuda")[:, None]
            seen += int(self.seen(0, 0, q, torch.arange(tokens, device="cuda")).sum())
        return seen / tokens**2


def masks_of(tokens: int, seed: int, device: str) -> list[Mask]:
    window = tokens // 16
    lengths, generator = [], torch.Generator().manual_seed(seed)
    while sum(lengths) < tokens:
        length = int(torch.randint(tokens // 32, tokens // 4, (), generator=generator))
        lengths.append(min(length, tokens - sum(lengths)))
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
    spans = [(first, first + tokens // 32) for first in range(0, tokens, tokens // 8)]
    of_span = torch.full((tokens,), -1)
    for i, (begin, end) in enumerate(spans):
        of_span[begin:end] = i
    of_span = of_span.to(device)
    prefix = tokens // 4
    return [
        Mask("sliding window", masks.window_and_global(tokens, window, device=device),
             lambda b, h, q, k: (q >= k) & (q - k <= window)),
        Mask("documents", masks.documents(lengths=lengths, device=device),
             lambda b, h, q, k: (q >= k) & (number[q] == number[k])),
        Mask("prefix", masks.prefix_lm(prefix, tokens, device=device),
             lambda b, h, q, k: (q >= k) | (k < prefix)),
        Mask("image spans", masks.spans(tokens, spans, device=device),
             lambda b, h, q, k: (q >= k) | ((of_span[q] == of_span[k]) & (of_span[q] >= 0))),
    ]  # fmt: skip


def calls_of(attend: Callable, leaves, dout) -> dict[str, Callable]:
    """The forward, and both passes with their results."""

    def both():
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    def forward():
        with torch.no_grad():
            return attend(*leaves)

    return {"forward": forward, "forward+backward": both}


def measure(options, mask: Mask, tokens: int, head_dim: int) -> dict:
    generator = torch.Generator(options.device).manual_seed(options.seed)
    shape = (1, HEADS_TIMES_DIM // head_dim, tokens, head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator, device=options.device).bfloat16()
                     for _ in range(4))  # fmt: skip
    leaves = [t.requires_grad_() for t in (q, k, v)]
    told = dict(startend_row_indices=mask.intervals.startend_row_indices,
                causal=mask.intervals.causal)  # fmt: skip
    attends = {word: partial(sagebwd.attention, precision=word, **told) for word in PRECISIONS}
    expression = masks.from_flex(mask.seen)
    kept = masks.block_mask(expression, *shape[:3], tokens, device=options.device)
    for name, told in zip(EXPRESSIONS, (expression, kept)):
        attends[name] = partial(sagebwd.attention, precision=PRECISIONS[0], mask=told)
    attends["causal"] = partial(sagebwd.attention, precision=PRECISIONS[0], causal=True)
    if options.flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        block_mask = create_block_mask(mask.seen, None, None, tokens, tokens, options.device)
        torch._dynamo.config.recompile_limit = 64
        attends["flex"] = partial(torch.compile(flex_attention, dynamic=False),
                                  block_mask=block_mask)  # fmt: skip
    calls = {name: calls_of(attend, leaves, dout) for name, attend in attends.items()}
    row = {"mask": mask.name, "tokens": tokens, "head_dim": head_dim,
           "share": round(mask.share(tokens), 4), "correct": True}  # fmt: skip
    if options.flex:
        right = calls["flex"]["forward+backward"]()
        for word in (*PRECISIONS, *EXPRESSIONS):
            found = calls[word]["forward+backward"]()
            errors = {name: relative_l2(x, y) for name, x, y in zip(TENSORS, found, right)}
            row[f"rel_l2_to_flex, {word}"] = errors
            # NaN must not pass, hence the form of the comparison.
            row["correct"] &= all(e <= LARGEST_ERROR for e in errors.values())
    for name in ("forward", "forward+backward"):
        timed = time_interleaved({who: each[name] for who, each in calls.items()},
                                 clock_of(options.device), options.rounds, 2)  # fmt: skip
        row[name] = {who: timing.json() for who, timing in timed.items()}
        ms = {who: timing.median_ms for who, timing in timed.items()}
        row[name]["of causal's time"] = round(ms[PRECISIONS[0]] / ms["causal"], 3)
        if options.flex:
            row[name] |= {f"{word}, times as fast as flex": round(ms["flex"] / ms[word], 3)
                          for word in (*PRECISIONS, *EXPRESSIONS)}  # fmt: skip
    return row


def line(row: dict) -> str:
    text = f"D{row['head_dim']:<4}{row['tokens']:6} {row['mask']:15} {row['share']:6.3f}"
    for name in ("forward", "forward+backward"):
        ms = {who: of["median_ms"] for who, of in row[name].items() if isinstance(of, dict)}
        text += f"  {name} " + " ".join(f"{who} {time:.2f}" for who, time in ms.items())
    return text + ("" if row["correct"] else "  WRONG")


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "intervals.json")
    options.add_argument("--head-dim", type=int, nargs="+", default=[128])
    options.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], metavar="N")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--no-flex", dest="flex", action="store_false",
                         help="without flex_attention, which is compiled for each shape")
    options = parse(options, arguments)
    record = Record(options.out, heads_times_dim=HEADS_TIMES_DIM, rounds=options.rounds,
                    seed=options.seed, largest_error=LARGEST_ERROR, dtype="bf16")  # fmt: skip
    rows = []
    for head_dim in options.head_dim:
        for tokens in options.tokens:
            for mask in masks_of(tokens, options.seed, options.device):
                rows.append(measure(options, mask, tokens, head_dim))
                record.add("rows", rows[-1])
                print(line(rows[-1]), flush=True)
    return record.finish(all(row["correct"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
