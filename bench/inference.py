"""Our forward next to INT8 attention for inference (comfy-kitchen) and PyTorch's, on one input.

    python bench/inference.py                    # D 64 and 128, 4096 and 16384 tokens
    python bench/inference.py --inputs qk-norm

The errors of the outputs are those of one head against FP64, in relative L2 and as a bias, the sum
of signed errors over that of magnitudes. With `+ mean` V has a mean of a deviation besides.
comfy-kitchen is measured where it is installed. No tensor requires grad.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import metadata

from harness import Record, parse, parser
from needs_torch import torch
from torch import Tensor

import sagebwd
from sagebwd.benchmark.attentions import of_pytorch
from sagebwd.benchmark.cases import Case
from sagebwd.benchmark.timing import clock_of, time_interleaved
from sagebwd.benchmark.truth import exact, relative_l2

HEADS_TIMES_DIM = 3072  #: as Flux and Wan have it
INPUTS = ("gaussian", "gaussian + mean", "outlier-channels", "common-offset", "qk-norm-unit")
LARGEST_ERROR = 0.05


def subjects(device, causal: bool = False) -> dict[str, Callable[..., Tensor]]:
    """The attentions by name; comfy-kitchen where it can be imported and takes this GPU."""
    found = {"sagebwd": partial(sagebwd.attention, causal=causal),
             **{name: of_pytorch(name, device, causal) for name in ("cudnn", "fa2")}}  # fmt: skip
    try:
        import comfy_kitchen
    except ImportError as error:
        print(f"without comfy-kitchen: {error}", file=sys.stderr)
        return found
    if comfy_kitchen.int8_attention_is_available():
        found["comfy-kitchen"] = partial(masked, comfy_kitchen.int8_attention, causal)
    return found


def masked(attend, causal: bool, q: Tensor, k: Tensor, v: Tensor, **more) -> Tensor:
    """By an attention that is told what is causal by a tensor alone."""
    mask = below_diagonal(q.shape[2], q.device) if causal else None
    return attend(q, k, v, attn_mask=mask, **more)


@cache
def below_diagonal(tokens: int, device) -> Tensor:
    return torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device).tril()


def tensors(name: str, tokens: int, head_dim: int, options) -> list[Tensor]:
    kind, _, mean = name.partition(" + ")
    heads = HEADS_TIMES_DIM // head_dim
    drawn = sagebwd.named_inputs(kind, seq_q=tokens, heads=heads, head_dim=head_dim,
                                 seed=options.seed, device=options.device)  # fmt: skip
    q, k, v = (torch.as_tensor(t, device=options.device) for t in drawn[:3])
    return [t.to(torch.bfloat16).contiguous() for t in (q, k, v + 1 if mean else v)]


def in_fp64(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The output of one sequence's (heads, tokens, head_dim)."""
    queries = q.double().unflatten(0, (len(k), -1))
    case = Case(seq_len=q.shape[1], seq_kv=k.shape[1], head_dim=q.shape[2], heads=queries.shape[1],
                heads_kv=1, causal="top-left" if causal else "none")  # fmt: skip
    outs = [exact(case, of_head, *keys_and_values, torch.zeros_like(of_head))["O"]
            for of_head, *keys_and_values in zip(queries, k.double(), v.double())]  # fmt: skip
    return torch.cat(outs)


def figures(out: Tensor, expected: Tensor) -> dict[str, float]:
    errors = out.double() - expected
    return {"rel_l2": relative_l2(out, expected),
            "bias": float(errors.sum() / expected.abs().sum())}  # fmt: skip


def compared(q: Tensor, k: Tensor, v: Tensor, attends: dict, first: int, causal: bool) -> dict:
    """Errors in a sequence's key/value heads from `first` on, and those of INT8 to each other."""
    outs = {who: attend(q, k, v) for who, attend in attends.items()}
    of_queries = first * (q.shape[1] // k.shape[1])
    expected = in_fp64(q[0, of_queries:], k[0, first:], v[0, first:], causal)
    row = {"errors": {who: figures(out[0, of_queries:], expected) for who, out in outs.items()}}
    if "comfy-kitchen" in outs:
        row["sagebwd to comfy-kitchen"] = relative_l2(outs["sagebwd"], outs["comfy-kitchen"])
    return row


def timed(q: Tensor, k: Tensor, v: Tensor, attends: dict, options) -> dict[str, dict]:
    """Milliseconds of each forward."""
    calls = {who: partial(attend, q, k, v) for who, attend in attends.items()}
    times = time_interleaved(calls, clock_of(options.device), options.rounds, 2)
    return {who: timing.json() for who, timing in times.items()}


@torch.no_grad()
def measure(name: str, tokens: int, head_dim: int, options) -> dict:
    given = (*tensors(name, tokens, head_dim, options), subjects(options.device))
    row = {"inputs": name, "tokens": tokens, "head_dim": head_dim, "heads": given[0].shape[1],
           **compared(*given, -1, False)}  # fmt: skip
    row["correct"] = row["errors"]["sagebwd"]["rel_l2"] < LARGEST_ERROR
    return row | {"forward": timed(*given, options)}


def line(row: dict) -> str:
    text = f"D{row['head_dim']:<4}{row['tokens']:6} {row['inputs']:16}"
    for who, error in row["errors"].items():
        text += (f"  {who} {row['forward'][who]['median_ms']:.2f} ms, {error['rel_l2']:.4f}, "
                 f"{error['bias']:+.4f}")  # fmt: skip
    return text


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "inference.json")
    options.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    options.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    options.add_argument("--inputs", nargs="+", default=list(INPUTS), metavar="NAME")
    options.add_argument("--rounds", type=int, default=9)
    options = parse(options, arguments)
    record = Record(options.out, heads_times_dim=HEADS_TIMES_DIM, rounds=options.rounds,
                    seed=options.seed, dtype="bf16",
                    comfy_kitchen=version_of("comfy-kitchen"))  # fmt: skip
    rows = []
    for head_dim in options.head_dim:
        for tokens in options.tokens:
            for name in options.inputs:
                rows.append(measure(name, tokens, head_dim, options))
                record.add("rows", rows[-1])
                print(line(rows[-1]), flush=True)
    return record.finish(all(row["correct"] for row in rows))


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
