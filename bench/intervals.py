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

from beside_flex import (
    HEADS_TIMES_DIM,
    LARGEST_ERROR,
    PRECISIONS,
    add_options,
    compiled_flex,
    line,
    measure,
)
from harness import Record, parse, parser
from needs_torch import torch

import sagebwd
from sagebwd import masks

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


def measure_mask(options, mask: Mask, tokens: int, head_dim: int) -> dict:
    told = mask.intervals.arguments
    attends = {word: partial(sagebwd.attention, precision=word, **told) for word in PRECISIONS}
    expression = masks.from_flex(mask.seen)
    heads = HEADS_TIMES_DIM // head_dim
    kept = masks.block_mask(expression, 1, heads, tokens, tokens, device=options.device)
    for name, told in zip(EXPRESSIONS, (expression, kept)):
        attends[name] = partial(sagebwd.attention, precision=PRECISIONS[0], mask=told)
    attends["causal"] = partial(sagebwd.attention, precision=PRECISIONS[0], causal=True)
    if options.flex:
        attends["flex"] = compiled_flex(tokens, options.device, mask.seen)
    ours = *PRECISIONS, *EXPRESSIONS
    row = {"mask": mask.name, "share": round(mask.share(tokens), 4)}
    row |= measure(options, attends, ours, tokens, head_dim)
    for name in ("forward", "forward+backward"):
        ms = {who: of["median_ms"] for who, of in row[name].items()}
        row[name]["of causal's time"] = round(ms[PRECISIONS[0]] / ms["causal"], 3)
        if "flex" in ms:
            row[name] |= {f"{word}, times as fast as flex": round(ms["flex"] / ms[word], 3)
                          for word in ours}  # fmt: skip
    return row


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "intervals.json")
    options.add_argument("--head-dim", type=int, nargs="+", default=[128])
    options.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], metavar="N")
    add_options(options, "mask and length")
    options = parse(options, arguments)
    record = Record(options.out, heads_times_dim=HEADS_TIMES_DIM, rounds=options.rounds,
                    seed=options.seed, largest_error=LARGEST_ERROR, dtype="bf16")  # fmt: skip
    rows = []
    for head_dim in options.head_dim:
        for tokens in options.tokens:
            for mask in masks_of(tokens, options.seed, options.device):
                rows.append(measure_mask(options, mask, tokens, head_dim))
                record.add("rows", rows[-1])
                print(line(rows[-1], f"{mask.name:15} {rows[-1]['share']:6.3f}"), flush=True)
    return record.finish(all(row["correct"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
