"""The time of functions of the score, next to a call without one and to flex_attention with it.

    python bench/scores.py                       # D 64 and 128 at 8K tokens
    python bench/scores.py --head-dim 256 --no-flex

The functions: soft-capping, ALiBi's slopes from a tensor, and a relative bias for each head and
distance. A row has forward, and forward and backward, of all in turns. The error is that of the
outputs and gradients against flex_attention, which computes in bf16. No tensor requires grad.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Function:
    """A function of the score as ours and as flex_attention's."""

    name: str
    score: object
    score_mod: Callable
    of_flex: dict = field(default_factory=dict)


def functions_of(heads: int, tokens: int, device: str) -> list[Function]:
    slopes = 2.0 ** -(8 * torch.arange(1.0, heads + 1, device=device) / heads)
    generator = torch.Generator(device).manual_seed(0)
    bias = torch.randn((heads, 2 * tokens - 1), generator=generator, device=device)
    return [
        Function("soft-capping", "50.0 * tanh(s / 50.0)",
                 lambda s, b, h, q, k: 50 * torch.tanh(s / 50)),
        Function("ALiBi", masks.trace_score("s - slope[h] * abs(q - k)", {"slope": slopes}),
                 lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()),
        Function("relative bias",
                 masks.trace_score(f"s + bias[h, k - q + {tokens - 1}]", {"bias": bias}),
                 lambda s, b, h, q, k: s + bias[h, k - q + tokens - 1],
                 # With the stages of its own choice it asks for more shared memory than there is.
                 {"kernel_options": {"num_stages": 2}}),
    ]  # fmt: skip


def measure_function(options, function: Function, causal: bool, tokens: int, head_dim: int) -> dict:
    attends = {}
    for word in PRECISIONS:
        plain = partial(sagebwd.attention, precision=word, causal=causal)
        attends |= {f"{word}, plain": plain, word: partial(plain, score=function.score)}
    if options.flex:
        seen = (lambda b, h, q, k: q >= k) if causal else None
        more = {"score_mod": function.score_mod, **function.of_flex}
        attends["flex"] = compiled_flex(tokens, options.device, seen, **more)
    row = {"function": function.name, "causal": causal}
    return row | measure(options, attends, PRECISIONS, tokens, head_dim)


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "scores.json")
    options.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    options.add_argument("--tokens", type=int, default=8192, metavar="N")
    add_options(options, "row")
    options = parse(options, arguments)
    record = Record(options.out, heads_times_dim=HEADS_TIMES_DIM, rounds=options.rounds,
                    seed=options.seed, largest_error=LARGEST_ERROR, dtype="bf16")  # fmt: skip
    rows = []
    for head_dim in options.head_dim:
        functions = functions_of(HEADS_TIMES_DIM // head_dim, options.tokens, options.device)
        for causal in (False, True):
            for function in functions:
                rows.append(measure_function(options, function, causal, options.tokens, head_dim))
                record.add("rows", rows[-1])
                mask = "causal" if causal else "no mask"
                print(line(rows[-1], f"{mask:8}", f"{function.name:14}"), flush=True)
    return record.finish(all(row["correct"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
