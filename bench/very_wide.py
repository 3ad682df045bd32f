"""The time of heads of 512 channels, next to PyTorch's attentions, flex_attention and ffpa-attn.

    python bench/very_wide.py                          # D 512 at 8K and 32K tokens
    python bench/very_wide.py --tokens 8192 --no-flex

A row has forward, and forward and backward, of all in turns, and their TFLOPS. Peers that this
machine or this head dimension lacks have a text that says why in the place of times. Errors are
those of outputs and gradients against PyTorch's math in FP32 on one head of at most 4096 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from beside_flex import LARGEST_ERROR, PRECISIONS, add_options, calls_of, compiled_flex
from harness import Record, parse, parser
from needs_torch import torch

import sagebwd
from sagebwd.benchmark.attentions import sdpa
from sagebwd.benchmark.timing import clock_of, time_interleaved
from sagebwd.benchmark.truth import TENSORS, relative_l2

OF_PYTORCH = {"math": "MATH", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
CHECKED_TOKENS = 4096  #: at most so many are compared with FP32
MOST_OF_MATH = 8192  #: tokens whose scores fit in memory


def ffpa(causal: bool) -> Callable:
    """ffpa-attn, which has large head dimensions (github.com/xlite-dev/ffpa-attn)."""
    import ffpa_attn

    return partial(ffpa_attn.ffpa_attn_func, is_causal=causal)


def peers(options, tokens: int, causal: bool) -> dict[str, Callable]:
    """Functions that make an attention, or raise where there is none."""
    made: dict[str, Callable] = {
        name: partial(sdpa, backend, causal)
        for name, backend in OF_PYTORCH.items()
        if name != "math" or tokens <= MOST_OF_MATH
    }
    if options.flex:
        seen = (lambda b, h, q, k: q >= k) if causal else None
        made["flex"] = partial(compiled_flex, tokens, options.device, seen)
    made["ffpa"] = partial(ffpa, causal)
    return made


def inputs(options, tokens: int, head_dim: int, heads: int) -> tuple[list, torch.Tensor]:
    generator = torch.Generator(options.device).manual_seed(options.seed)
    q, k, v, dout = (
        torch.randn((1, heads, tokens, head_dim), generator=generator, device=options.device)
        .bfloat16() for _ in range(4)
    )  # fmt: skip
    return [t.requires_grad_() for t in (q, k, v)], dout


def errors_of(options, tokens: int, head_dim: int, causal: bool) -> dict[str, dict[str, float]]:
    """Relative L2 errors of ours, by precision, on one head."""
    leaves, dout = inputs(options, min(tokens, CHECKED_TOKENS), head_dim, 1)
    exact = [t.detach().float().requires_grad_() for t in leaves]
    right = calls_of(sdpa("MATH", causal), exact, dout.float())["forward+backward"]()
    found = {}
    for word in PRECISIONS:
        attend = partial(sagebwd.attention, precision=word, causal=causal)
        results = calls_of(attend, leaves, dout)["forward+backward"]()
        found[word] = {name: relative_l2(x, y) for name, x, y in zip(TENSORS, results, right)}
    return found


def works(call: Callable) -> str:
    """Why a call does not work; empty if it does."""
    try:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # whatever another library raises: the others are still measured
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


def measure(options, tokens: int, head_dim: int, causal: bool) -> dict:
    leaves, dout = inputs(options, tokens, head_dim, options.heads)
    calls = {
        word: calls_of(partial(sagebwd.attention, precision=word, causal=causal), leaves, dout)
        for word in PRECISIONS
    }
    row: dict = {"tokens": tokens, "head_dim": head_dim, "causal": causal}
    row["rel_l2"] = errors_of(options, tokens, head_dim, causal)
    # NaN must not pass, hence the form of the comparison.
    row["correct"] = all(e <= LARGEST_ERROR for of in row["rel_l2"].values() for e in of.values())
    lacking: dict[str, dict[str, str]] = {}
    for name, make in peers(options, tokens, causal).items():
        if why := works(make):
            lacking[name] = {"forward": why, "forward+backward": why}
            continue
        calls[name] = calls_of(make(), leaves, dout)
        for which in list(calls[name]):
            if why := works(calls[name][which]):
                lacking.setdefault(name, {})[which] = why
                del calls[name][which]
    row["lacking"] = lacking
    flops = 4 * options.heads * tokens**2 * head_dim / (2 if causal else 1)
    for which, times in (("forward", 1.0), ("forward+backward", 3.5)):
        here = {who: of[which] for who, of in calls.items() if which in of}
        timed = time_interleaved(here, clock_of(options.device), options.rounds, 2)
        row[which] = {who: timing.json() for who, timing in timed.items()}
        row[f"{which} TFLOPS"] = {
            who: round(times * flops / timing.median_ms / 1e9, 1) for who, timing in timed.items()
        }
        theirs = [t.median_ms for who, t in timed.items() if who not in PRECISIONS]
        if theirs:
            row[f"{which}, times as fast as the best of others"] = {
                word: round(min(theirs) / timed[word].median_ms, 3) for word in PRECISIONS
            }
    return row


def line(row: dict) -> str:
    text = f"D{row['head_dim']} {row['tokens']:6} {'causal' if row['causal'] else 'full':6}"
    for which in ("forward", "forward+backward"):
        rates = " ".join(f"{who} {rate}" for who, rate in row[f"{which} TFLOPS"].items())
        text += f"  {which} TFLOPS: {rates}"
    return text + ("" if row["correct"] else "  WRONG")


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "very_wide.json")
    options.add_argument("--head-dim", type=int, nargs="+", default=[512])
    options.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], metavar="N")
    options.add_argument("--heads", type=int, default=4)
    add_options(options, "mask and length")
    options = parse(options, arguments)
    record = Record(options.out, heads=options.heads, rounds=options.rounds, seed=options.seed,
                    largest_error=LARGEST_ERROR, dtype="bf16")  # fmt: skip
    rows = []
    for head_dim in options.head_dim:
        for tokens in options.tokens:
            for causal in (False, True):
                rows.append(measure(options, tokens, head_dim, causal))
                record.add("rows", rows[-1])
                print(line(rows[-1]), flush=True)
    return record.finish(all(row["correct"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
