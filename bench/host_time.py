"""The CPU time of one call whose work the GPU finishes soon, compared with PyTorch's SDPA.

    python bench/host_time.py                       # B 1, H 8, N 256, D 64
    python bench/host_time.py --rounds 101

Rounds of SDPA's calls and of ours alternate. The program waits for the GPU only between rounds, and
a round launches no more than the GPU's queue holds. `host_us` ends when the last call returns, and
`wall_us` when the GPU is done.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from statistics import median

from harness import Record, parse, parser
from needs_torch import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from experiments.attentions import AttentionChoice, make_attention
from sagebwd.benchmark.timing import in_turn

#: The largest ratio of our CPU time to that of the SDPA that PyTorch chooses, for each pass.
LARGEST_RATIO = 1.5
REFERENCE = "sdpa"
PASSES = ("forward", "forward for a backward", "forward+backward")
REQUIRED = ("forward", "forward+backward")


def candidates(device: str, causal: bool) -> dict:
    """By name, an attention and a context in which each round runs."""
    ours = AttentionChoice(name="sagebwd" if device == "cuda" else "emulated")

    def sdpa(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    def flash():
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device == "cuda" else nullcontext()

    return {
        REFERENCE: (sdpa, nullcontext),
        "fa2": (sdpa, flash),
        ours.name: (make_attention(ours, torch.device(device), causal), nullcontext),
    }


def call_of(which: str, attend, inputs, dout):
    if which == "forward":
        inputs = [t.detach() for t in inputs]
    if which != "forward+backward":
        return lambda: attend(*inputs)
    return lambda: torch.autograd.grad(attend(*inputs), inputs, dout)


def time_round(call, context, calls: int, wait) -> tuple[float, float]:
    """Microseconds of one call: on the host, and with what it started."""
    with context():
        call()  # the first call in the context
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        returned = time.perf_counter()
        wait()
        done = time.perf_counter()
    return (returned - start) / calls * 1e6, (done - start) / calls * 1e6


def figures(samples: list[float]) -> dict:
    middle = median(samples)
    return {"median": round(middle, 3), "mad": round(median(abs(s - middle) for s in samples), 3),
            "least": round(min(samples), 3)}  # fmt: skip


def measure(which: str, options, inputs, dout) -> list[dict]:
    found = {
        name: (call_of(which, attend, inputs, dout), context)
        for name, (attend, context) in candidates(options.device, options.causal).items()
    }
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    samples = in_turn(found, lambda one: time_round(*one, options.calls, wait), options.rounds,
                      options.warmup)
    rows = []
    for name, timed in samples.items():
        host, wall = (figures(list(values)) for values in zip(*timed))
        rows.append({"pass": which, "attention": name, "host_us": host, "wall_us": wall})
    by_name = {row["attention"]: row["host_us"]["median"] for row in rows}
    for row in rows:
        for peer in (REFERENCE, "fa2"):
            row[f"ratio_to_{peer}"] = round(row["host_us"]["median"] / by_name[peer], 4)
    return rows


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "host-time.json")
    for name, value in (("batch", 1), ("heads", 8), ("tokens", 256), ("head-dim", 64)):
        options.add_argument(f"--{name}", type=int, default=value)
    options.add_argument("--causal", action="store_true")
    options.add_argument("--calls", type=int, default=40, help="of a round")
    options.add_argument("--rounds", type=int, default=51)
    options.add_argument("--warmup", type=int, default=5, help="rounds that are not counted")
    options = parse(options, arguments)
    generator = torch.Generator(options.device).manual_seed(options.seed)
    shape = (options.batch, options.heads, options.tokens, options.head_dim)

    def normal():
        return torch.randn(shape, generator=generator, device=options.device).bfloat16()

    inputs = [normal().requires_grad_() for _ in range(3)]
    dout = normal()
    record = Record(
        options.out, batch=options.batch, heads=options.heads, tokens=options.tokens,
        head_dim=options.head_dim, causal=options.causal, dtype="bf16", calls=options.calls,
        rounds=options.rounds, largest_ratio=LARGEST_RATIO,
    )
    print(f"{'':24}{'':10}{'host':>9}{'with the device':>20}{'to sdpa':>9}{'to fa2':>8}")
    passed = True
    for which in PASSES:
        for row in measure(which, options, inputs, dout):
            record.add("rows", row)
            print(f"{which:24}{row['attention']:10}{row['host_us']['median']:6.1f} us"
                  f"{row['wall_us']['median']:17.1f} us{row['ratio_to_sdpa']:8.2f}x"
                  f"{row['ratio_to_fa2']:7.2f}x", flush=True)
            if row["attention"] == "sagebwd" and which in REQUIRED:
                passed &= row["ratio_to_sdpa"] <= LARGEST_RATIO
    return record.finish(passed)


if __name__ == "__main__":
    sys.exit(main())
