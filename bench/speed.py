"""Speed of forward, backward and both, every quantisation pass included, beside PyTorch's SDPA.

    python bench/speed.py                  # N 8192, D 64 and 128, causal and not
    python bench/speed.py --sweep          # N 1024 .. 16384

32K tokens in all, heads x D = 2048. TFLOPS count 4 B H M N D operations for the forward, 2.5 times
that for the backward, half of it when causal: what FlashAttention-2 reports.
"""

from __future__ import annotations

import sys

import torch
from harness import Record, parse, parser, relative_l2, time_interleaved

from sagebwd.experiments.attentions import AttentionChoice, make_attention, sdpa
from sagebwd.experiments.environment import brief, print_failure

TOTAL_TOKENS = 32768
HEADS_TIMES_DIM = 2048
PASSES = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}
PEERS = {"fa2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
#: Of any output against FlashAttention-2's, on unit normal inputs: more is a wrong kernel, whose
#: speed means nothing. By the emulation INT8 itself costs .018 under `row`, .059 under `block`.
LARGEST_ERROR = {"row": 0.03, "block": 0.08}


def attentions(options, causal: bool) -> dict:
    """By label: FlashAttention-2 first, the reference of every ratio."""
    cuda = options.device == "cuda"
    found = {
        name: sdpa(backend if cuda else None, causal)
        for name, backend in PEERS.items()
        if name == "fa2" or name in options.peers
    }
    for label in options.ours:
        choice = AttentionChoice.parse(label)
        found[choice.label()] = make_attention(choice, torch.device(options.device), causal)
    return found


def passes(attend, q, k, v, dout) -> dict:
    """The three timed calls of one attention, its backward on a graph made once."""
    inputs = (q, k, v)
    out = attend(*inputs)

    def forward():
        with torch.no_grad():
            return attend(*inputs)

    def backward():
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    def both():
        return torch.autograd.grad(attend(*inputs), inputs, dout)

    return {"forward": forward, "backward": backward, "forward+backward": both}


def measure(options, head_dim: int, causal: bool, tokens: int, record: Record) -> list[dict]:
    batch, heads = max(1, options.total_tokens // tokens), HEADS_TIMES_DIM // head_dim
    generator = torch.Generator(options.device).manual_seed(options.seed)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]

    def normal():
        shape = (batch, heads, tokens, head_dim)
        return torch.randn(shape, generator=generator, device=options.device).to(dtype)

    q, k, v = (normal().requires_grad_() for _ in range(3))
    dout = normal()
    calls, errors, refused = {}, {}, {}
    granularities = {c.label(): c.granularity for c in map(AttentionChoice.parse, options.ours)}
    reference = None
    for label, attend in attentions(options, causal).items():
        try:
            calls[label] = passes(attend, q, k, v, dout)
            results = (calls[label]["forward"](), *calls[label]["forward+backward"]())
            reference = reference or results
            errors[label] = {
                name: relative_l2(x.detach(), y.detach())
                for name, x, y in zip(("O", "dQ", "dK", "dV"), results, reference)
            }
        except Exception as error:  # recorded, and the others are still measured
            if label == "fa2":
                raise
            calls.pop(label, None)
            print_failure(label, error)
            refused[label] = brief(error)
        torch.cuda.empty_cache() if options.device == "cuda" else None
    del reference

    timings = {
        name: time_interleaved({label: c[name] for label, c in calls.items()}, options.device,
                               options.rounds)
        for name in PASSES
    }
    operations = 4 * batch * heads * tokens * tokens * head_dim * (0.5 if causal else 1)
    rows = []
    for label in calls:
        row = {
            "attention": label, "head_dim": head_dim, "causal": causal, "tokens": tokens,
            "batch": batch, "heads": heads, "dtype": options.dtype,
            "rel_l2_to_fa2": errors[label],
            # NaN must not pass, hence the form of the comparison.
            "correct": all(e <= LARGEST_ERROR[granularities.get(label, "row")]
                           for e in errors[label].values()),
        }
        for name, factor in PASSES.items():
            timing = timings[name][label]
            row[name] = timing.json() | {
                "tflops": round(factor * operations / timing.median_ms / 1e9, 2),
                "ratio_to_fa2": round(timings[name]["fa2"].median_ms / timing.median_ms, 4),
            }
        rows.append(row)
        record.add("rows", row)
    for label, reason in refused.items():
        row = {"attention": label, "head_dim": head_dim, "causal": causal, "tokens": tokens,
               "error": reason, "correct": False, "peer": label in PEERS}
        rows.append(row)
        record.add("rows", row)
    return rows


def line(row: dict) -> str:
    shape = f"D{row['head_dim']:<4}{'causal' if row['causal'] else '':7}N{row['tokens']:<6}"
    if "error" in row:
        return f"{shape} {row['attention']:32} {row['error']}"
    cells = "".join(
        f"{one['median_ms']:9.3f} ms {one['tflops']:6.0f} {one['ratio_to_fa2']:5.2f}x"
        for one in (row[name] for name in PASSES)
    )
    return f"{shape} {row['attention']:32}{cells}{'' if row['correct'] else '  WRONG'}"


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "speed.json")
    options.add_argument("--ours", nargs="*", default=["sagebwd"], metavar="NAME[:OPTION,...]",
                         help="e.g. sagebwd sagebwd:granularity=block (default: sagebwd)")
    options.add_argument("--peers", nargs="*", default=["cudnn"], choices=["cudnn"])
    options.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    options.add_argument("--tokens", type=int, nargs="+", default=[8192], help="N")
    options.add_argument("--sweep", action="store_true", help="N 1024, 2048 .. 16384")
    options.add_argument("--causal", choices=["no", "yes", "both"], default="both")
    options.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--total-tokens", type=int, default=TOTAL_TOKENS)
    options = parse(options, arguments)
    lengths = [1024 << i for i in range(5)] if options.sweep else options.tokens
    causals = {"no": [False], "yes": [True], "both": [False, True]}[options.causal]
    record = Record(
        options.out, total_tokens=options.total_tokens, heads_times_dim=HEADS_TIMES_DIM,
        rounds=options.rounds, dtype=options.dtype, seed=options.seed, flops_factor=PASSES,
        required_ratio=1.0, wanted_ratio=1.25,
    )
    print(f"{'':21}{'':32}" + "".join(f"{name + ', TFLOPS, to fa2':>27}" for name in PASSES))
    rows = []
    for head_dim in options.head_dim:
        for causal in causals:
            for tokens in lengths:
                measured = measure(options, head_dim, causal, tokens, record)
                print("\n".join(map(line, measured)), flush=True)
                rows += measured
    ours = [row for row in rows if row["attention"] not in PEERS]
    required = [row for row in ours if row["tokens"] == 8192 and "error" not in row]
    record.set(
        lowest_ratio_at_8192=min((r["forward+backward"]["ratio_to_fa2"] for r in required),
                                 default=None),
    )
    return record.finish(all(row["correct"] for row in ours) and all(
        r["forward+backward"]["ratio_to_fa2"] >= 1.0 for r in required
        if r["attention"] == "sagebwd"))


if __name__ == "__main__":
    sys.exit(main())
