"""What the benchmarks of masks and of functions of the score share: rows beside flex_attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from needs_torch import torch

from sagebwd.benchmark.timing import clock_of, time_interleaved
from sagebwd.benchmark.truth import TENSORS, relative_l2

HEADS_TIMES_DIM = 2048
LARGEST_ERROR = 0.04  #: against flex_attention, which has errors of its own
PRECISIONS = "six-of-seven", "gradients16"


def add_options(parser, what: str) -> None:
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-flex", dest="flex", action="store_false",
                        help=f"without flex_attention, which is compiled for each {what}")


def compiled_flex(tokens: int, device: str, seen: Callable | None, **given) -> Callable:
    """flex_attention, compiled, with a block mask of what `seen` says, if given."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64
    mask = create_block_mask(seen, None, None, tokens, tokens, device) if seen else None
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask, **given)


def measure(options, attends: dict[str, Callable], against_flex: Iterable[str], tokens: int,
            head_dim: int) -> dict:  # fmt: skip
    """A row: the times of all in turns, and the errors of some against flex_attention, which
    `attends` has as "flex" if it is measured."""
    generator = torch.Generator(options.device).manual_seed(options.seed)
    shape = (1, HEADS_TIMES_DIM // head_dim, tokens, head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator, device=options.device).bfloat16()
                     for _ in range(4))  # fmt: skip
    leaves = [t.requires_grad_() for t in (q, k, v)]
    calls = {name: calls_of(attend, leaves, dout) for name, attend in attends.items()}
    row = {"tokens": tokens, "head_dim": head_dim, "correct": True}
    right = None
    if "flex" in calls:
        try:
            right = calls["flex"]["forward+backward"]()
        except Exception as error:  # its tiles may not fit, and the others are still measured
            row["flex_error"] = str(error).partition("\n")[0]
            del calls["flex"]
    if right:
        for word in against_flex:
            found = calls[word]["forward+backward"]()
            errors = {name: relative_l2(x, y) for name, x, y in zip(TENSORS, found, right)}
            row[f"rel_l2_to_flex, {word}"] = errors
            # NaN must not pass, hence the form of the comparison.
            row["correct"] &= all(e <= LARGEST_ERROR for e in errors.values())
    for name in ("forward", "forward+backward"):
        timed = time_interleaved({who: each[name] for who, each in calls.items()},
                                 clock_of(options.device), options.rounds, 2)  # fmt: skip
        row[name] = {who: timing.json() for who, timing in timed.items()}
    return row


def line(row: dict, *names: str) -> str:
    text = f"D{row['head_dim']:<4}{row['tokens']:6} {' '.join(names)}"
    for name in ("forward", "forward+backward"):
        ms = {who: of["median_ms"] for who, of in row[name].items() if isinstance(of, dict)}
        text += f"  {name} " + " ".join(f"{who} {time:.2f}" for who, time in ms.items())
    return text + ("" if row["correct"] else "  WRONG")


def calls_of(attend: Callable, leaves, dout) -> dict[str, Callable]:
    """The forward, and both passes with their results."""

    def both():
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    def forward():
        with torch.no_grad():
            return attend(*leaves)

    return {"forward": forward, "forward+backward": both}
