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

from harness import Record, parse, parser
from needs_torch import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sagebwd
from sagebwd.benchmark.cases import Case
from sagebwd.benchmark.timing import clock_of, time_interleaved
from sagebwd.benchmark.truth import exact, relative_l2

HEADS_TIMES_DIM = 3072  #: as Flux and Wan have it
INPUTS = ("gaussian", "gaussian + mean", "outlier-channels", "common-offset", "qk-norm-unit")
LARGEST_ERROR = 0.05


def subjects() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The attentions by name; comfy-kitchen where it can be imported and takes this GPU."""

    def of_pytorch(backend):
        def attend(q, k, v):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        return attend

    found = {"sagebwd": sagebwd.attention, "cudnn": of_pytorch(SDPBackend.CUDNN_ATTENTION),
             "fa2": of_pytorch(SDPBackend.FLASH_ATTENTION)}  # fmt: skip
    try:
        import comfy_kitchen
    except ImportError as error:
        print(f"without comfy-kitchen: {error}", file=sys.stderr)
        return found
    if comfy_kitchen.int8_attention_is_available():
        found["comfy-kitchen"] = comfy_kitchen.int8_attention
    return found


def tensors(name: str, tokens: int, head_dim: int, options) -> list[Tensor]:
    kind, _, mean = name.partition(" + ")
    heads = HEADS_TIMES_DIM // head_dim
    drawn = sagebwd.named_inputs(kind, seq_q=tokens, heads=heads, head_dim=head_dim,
                                 seed=options.seed, device=options.device)  # fmt: skip
    q, k, v = (torch.as_tensor(t, device=options.device) for t in drawn[:3])
    return [t.to(torch.bfloat16).contiguous() for t in (q, k, v + 1 if mean else v)]


def figures(out: Tensor, expected: Tensor) -> dict[str, float]:
    errors = out.double() - expected
    return {"rel_l2": relative_l2(out, expected),
            "bias": float(errors.sum() / expected.abs().sum())}  # fmt: skip


def measure(name: str, tokens: int, head_dim: int, options) -> dict:
    q, k, v = tensors(name, tokens, head_dim, options)
    attends = subjects()
    with torch.no_grad():
        outs = {who: attend(q, k, v) for who, attend in attends.items()}
        case = Case(seq_len=tokens, seq_kv=tokens, head_dim=head_dim, heads=1)
        expected = exact(case, q[0, -1:].double(), k[0, -1].double(), v[0, -1].double(),
                         torch.zeros_like(q[0, -1:], dtype=torch.float64))["O"]  # fmt: skip
        of_head = {who: out[0, -1:] for who, out in outs.items()}
        row = {"inputs": name, "tokens": tokens, "head_dim": head_dim, "heads": q.shape[1],
               "errors": {who: figures(out, expected) for who, out in of_head.items()}}  # fmt: skip
        if "comfy-kitchen" in outs:
            row["sagebwd to comfy-kitchen"] = relative_l2(outs["sagebwd"], outs["comfy-kitchen"])
        row["correct"] = row["errors"]["sagebwd"]["rel_l2"] < LARGEST_ERROR
        calls = {who: (lambda attend=attend: attend(q, k, v)) for who, attend in attends.items()}
        timed = time_interleaved(calls, clock_of(options.device), options.rounds, 2)
    return row | {"forward": {who: timing.json() for who, timing in timed.items()}}


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
                    seed=options.seed, dtype="bf16", comfy_kitchen=version())  # fmt: skip
    rows = []
    for head_dim in options.head_dim:
        for tokens in options.tokens:
            for name in options.inputs:
                rows.append(measure(name, tokens, head_dim, options))
                record.add("rows", rows[-1])
                print(line(rows[-1]), flush=True)
    return record.finish(all(row["correct"] for row in rows))


def version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("comfy-kitchen")
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
