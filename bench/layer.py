"""The time and memory of a layer's attention with QK-norm and RoPE in front, forward and backward.

    python bench/layer.py                       # D 64, 128 (also 4:1) and 256, N 1024 .. 32768
    python bench/layer.py --shape 16x4x128 --tokens 8192

Each row is a front (norm of each head with a gain, then RoPE in halves) and an attention, causal:
`eager` is the front as PyTorch's modules compute it, `compiled` the same under torch.compile,
`liger` Liger-Kernel's norm and RoPE where liger_kernel is installed, `ours` the arguments q_norm,
k_norm and rope, and `none` no front, so that a difference is the front's time. cuDNN and
FlashAttention-2 are PyTorch's, six-of-seven and gradients16 ours.

There are 32K tokens in all. Candidates take turns; times are those of a GPU whose host is ahead of
it. `kept_mib` is what a layer keeps from its forward to its backward, inputs included. Errors are
against FP64 of the last key/value head and the queries that read it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from harness import Record, parse, parser
from needs_torch import torch

import sagebwd
from sagebwd.benchmark.attentions import OF_PYTORCH, of_pytorch
from sagebwd.benchmark.environment import brief, print_failure
from sagebwd.benchmark.measuring import normal
from sagebwd.benchmark.timing import clock_of, peak_mib, time_interleaved
from sagebwd.benchmark.truth import relative_l2
from sagebwd.numerics.exact import exact_attention

TOTAL_TOKENS = 32768
EPS = 1e-6
BASE = 10000.0  #: of RoPE's angles
PASSES = ("forward", "forward+backward")
TENSORS = ("O", "dx of Q", "dx of K", "dV")
#: FP64 of a head has matrices of tokens x tokens.
LONGEST_EXACT = 8192
#: With a larger error a candidate is wrong. INT8's own is 0.02 of normal inputs.
LARGEST_ERROR = 0.05
OURS = ("six-of-seven", "gradients16")


@dataclass(frozen=True)
class Shape:
    """Sizes of one comparison."""

    heads: int
    heads_kv: int
    head_dim: int
    tokens: int

    @staticmethod
    def parse(text: str) -> tuple[int, int, int]:
        """heads, heads_kv and head_dim of a word of the command line."""
        try:
            heads, heads_kv, head_dim = map(int, text.split("x"))
        except ValueError:
            heads = heads_kv = head_dim = 0
        if min(heads, heads_kv, head_dim) < 1 or heads % heads_kv or head_dim % 2:
            raise argparse.ArgumentTypeError(
                f"{text!r}: pass HEADSxHEADS_KVxD, such as 16x4x128, with heads a multiple of "
                "heads_kv and an even D"
            )
        return heads, heads_kv, head_dim

    def batch(self) -> int:
        return max(1, TOTAL_TOKENS // self.tokens)


# ---- fronts --------------------------------------------------------------------------------------


def normed(x, gain):
    """RMSNorm as modules of models compute it: in FP32, rounded, times the gain, rounded."""
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def eager(q, k, q_gain, k_gain, cos, sin):
    """(batch, heads, tokens, head_dim) q and k behind norm and RoPE, step by step."""
    return rotated(normed(q, q_gain), cos, sin), rotated(normed(k, k_gain), cos, sin)


@cache
def compiled(shape: Shape):
    """`eager` compiled for one shape."""
    torch.compiler.reset()
    return torch.compile(eager, fullgraph=True, dynamic=False)


def liger(q, k, q_gain, k_gain, cos, sin):
    """The same by Liger-Kernel's operations, whose tables have a batch."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction

    # Tokens before heads, as projections give them: norms of other layouts copy first.
    q, k = (LigerRMSNormFunction.apply(x.transpose(1, 2), gain, EPS, 0.0, "llama", False)
            for x, gain in ((q, q_gain), (k, k_gain)))  # fmt: skip
    return LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos[None], sin[None])


# ---- candidates ----------------------------------------------------------------------------------


@dataclass
class Inputs:
    """What a layer is given. Tables are (tokens, head_dim / 2) in FP32, and twice that wide in 16
    bits for the fronts of PyTorch and Liger."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_gain: torch.Tensor
    k_gain: torch.Tensor
    dout: torch.Tensor
    table: tuple
    wide_table: tuple

    def leaves(self) -> list:
        return [self.q, self.k, self.v, self.q_gain, self.k_gain]

    @staticmethod
    def of(shape: Shape, device: str, seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)

        def one(heads):
            return normal(heads, shape.tokens, shape.batch(), shape.head_dim, "bf16", "bshd",
                          generator)  # fmt: skip

        q, k, v, dout = map(one, (shape.heads, shape.heads_kv, shape.heads_kv, shape.heads))
        gains = [(torch.rand(shape.head_dim, generator=generator, device=device) + 0.5).bfloat16()
                 for _ in range(2)]  # fmt: skip
        angles = torch.outer(torch.arange(shape.tokens, device=device), BASE ** -(
            torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim))  # fmt: skip
        table = angles.cos(), angles.sin()
        wide = tuple(torch.cat((t, t), -1).bfloat16() for t in table)
        leaves = [t.requires_grad_() for t in (q, k, v, *gains)]
        return Inputs(*leaves, dout, table, wide)


Layer = Callable[..., "torch.Tensor"]


def attentions(device: str) -> dict[str, Layer]:
    """Functions of q, k and v behind a front, causal."""
    found = {name: of_pytorch(name, device, causal=True) for name in ("cudnn", "fa2")
             if name in OF_PYTORCH}  # fmt: skip
    return found | {name: partial(sagebwd.attention, causal=True, precision=name) for name in OURS}


def candidates(shape: Shape, given: Inputs, device: str) -> dict[tuple[str, str], Layer]:
    """By (front, attention), functions of the five leaves."""
    plain = attentions(device)
    fronts = {"eager": eager, "compiled": compiled(shape)}
    try:
        import liger_kernel  # noqa: F401

        fronts["liger"] = liger
    except ImportError:
        pass

    def behind(front, attend):
        def layer(q, k, v, q_gain, k_gain):
            return attend(*front(q, k, q_gain, k_gain, *given.wide_table), v)

        return layer

    def alone(attend):
        return lambda q, k, v, *_: attend(q, k, v)

    def inside(attend):
        def layer(q, k, v, q_gain, k_gain):
            return attend(q, k, v, q_norm=q_gain, k_norm=k_gain, norm_eps=EPS, rope=given.table)

        return layer

    found = {("none", name): alone(attend) for name, attend in plain.items()}
    found |= {(front, name): behind(fronts[front], plain[name]) for front, name in (
        ("eager", "cudnn"), ("compiled", "cudnn"), ("liger", "cudnn"),
        *(("compiled", name) for name in OURS)) if front in fronts}  # fmt: skip
    return found | {("ours", name): inside(plain[name]) for name in OURS}


# ---- one shape -----------------------------------------------------------------------------------


def exact(shape: Shape, given: Inputs) -> dict:
    """FP64 of the last key/value head of the last of the batch. Gradients of gains are sums over all
    heads, and left out."""
    group = shape.heads // shape.heads_kv
    q, k, v, dout = (t.detach()[-1:, -n:].double() for t, n in
                     ((given.q, group), (given.k, 1), (given.v, 1), (given.dout, group)))
    gains = [t.detach().double() for t in (given.q_gain, given.k_gain)]
    tables = [torch.cat((t, t), -1).double() for t in given.table]
    x = [q.requires_grad_(), k.requires_grad_()]
    behind = eager_of_doubles(*x, *gains, *tables)
    found = exact_attention(*(t.detach() for t in behind), v, dout, causal="top-left").named()
    dq, dk = torch.autograd.grad(behind, x, (found["dQ"].double(), found["dK"].double()))
    return {"O": found["O"], "dx of Q": dq, "dx of K": dk, "dV": found["dV"]}


def eager_of_doubles(q, k, q_gain, k_gain, cos, sin):
    def norm(x, gain):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * gain

    return rotated(norm(q, q_gain), cos, sin), rotated(norm(k, k_gain), cos, sin)


def passes(layer: Layer, given: Inputs, front: str) -> dict:
    leaves = given.leaves()[:3] if front == "none" else given.leaves()

    def forward():
        with torch.no_grad():
            return layer(*given.leaves())

    def both():
        return torch.autograd.grad(layer(*given.leaves()), leaves, given.dout)

    return dict(zip(PASSES, (forward, both)))


def kept_mib(layer: Layer, given: Inputs) -> float:
    """MiB that a forward leaves allocated for its backward, the output left out and inputs that
    the layer has to keep included."""
    torch.cuda.synchronize()
    held, kept = torch.cuda.memory_allocated(), set()

    def pack(t):
        kept.add((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(*given.leaves())
    torch.cuda.synchronize()
    more = torch.cuda.memory_allocated() - held - out.untyped_storage().nbytes()
    mine = {t.untyped_storage().data_ptr() for t in given.leaves()[:3]}
    inputs = sum(size for address, size in kept if address in mine)
    return round((more + inputs) / 2**20, 1)


def tried(layer: Layer, given: Inputs, front: str, right: dict, shape: Shape) -> dict:
    """Errors and memory of a candidate. It raises what the candidate raises."""
    calls = passes(layer, given, front)
    found, results = {}, dict(zip(TENSORS, (calls[PASSES[0]](), *calls[PASSES[1]]())))
    if front != "none" and right:
        group = shape.heads // shape.heads_kv
        found["rel_l2"] = {
            name: relative_l2(results[name].detach()[-1:, -(1 if name in ("dx of K", "dV")
                                                            else group):], right[name])
            for name in right}  # fmt: skip
        found["correct"] = all(e <= LARGEST_ERROR for e in found["rel_l2"].values())
    del results
    if given.q.is_cuda:
        found |= {"peak_mib": peak_mib(calls[PASSES[1]]), "kept_mib": kept_mib(layer, given)}
    return found


def measure(options, shape: Shape, record: Record) -> list[dict]:
    given = Inputs.of(shape, options.device, options.seed)
    right = exact(shape, given) if shape.tokens <= LONGEST_EXACT else {}
    rows, calls = {}, {}
    for (front, attention), layer in candidates(shape, given, options.device).items():
        row = rows[front, attention] = {"front": front, "attention": attention, **vars(shape),
                                        "batch": shape.batch(), "correct": True}  # fmt: skip
        try:
            row |= tried(layer, given, front, right, shape)
            calls[front, attention] = passes(layer, given, front)
        except Exception as error:  # it is recorded, and the others are still measured
            print_failure(f"{front}, {attention}", error)
            row |= {"error": brief(error), "correct": front != "ours"}
    clock = clock_of(options.device, host_ahead=True)
    for name in PASSES:
        of_pass = {key: of[name] for key, of in calls.items()}
        for key, timing in time_interleaved(of_pass, clock, options.rounds, options.warmup).items():
            host = getattr(clock, "host_ms", {}).get(of_pass[key], 0.0)
            rows[key][name] = timing.json() | {"host_ms": round(host, 4)}
    for row in rows.values():
        record.add("rows", row)
    return list(rows.values())


def ratios(rows: list[dict]) -> dict:
    """The figures by which the front end is judged, of one shape."""
    ms = {(r["front"], r["attention"], name): r[name]["median_ms"]
          for r in rows for name in PASSES if name in r}  # fmt: skip
    both, found = PASSES[1], {}

    def ratio(name, over, under):
        if over in ms and under in ms:
            found[name] = round(ms[over] / ms[under], 4)

    for one in OURS:
        ratio(f"forward with / without the front, {one}", ("ours", one, PASSES[0]),
              ("none", one, PASSES[0]))
        ratio(f"ours / behind the compiled front, {one}", ("ours", one, both),
              ("compiled", one, both))
        ratio(f"speed of the layer, of compiled and cuDNN's, {one}", ("compiled", "cudnn", both),
              ("ours", one, both))
        ratio(f"speed of the layer, of eager and cuDNN's, {one}", ("eager", "cudnn", both),
              ("ours", one, both))
        ratio(f"speed alone, of cuDNN's, {one}", ("none", "cudnn", both), ("none", one, both))
    return found


def line(row: dict) -> str:
    start = (f"H{row['heads']}:{row['heads_kv']} D{row['head_dim']} N{row['tokens']:<6} "
             f"{row['front'] + ', ' + row['attention']:26}")  # fmt: skip
    if "error" in row:
        return f"{start} {row['error']}"
    times = "".join(f"{row[name]['median_ms']:9.3f} ms" for name in PASSES)
    memory = f" {row['kept_mib']:8.0f} MiB" if "kept_mib" in row else ""
    errors = " ".join(f"{e:.4f}" for e in row.get("rel_l2", {}).values())
    return f"{start}{times}{memory}  {errors}" + ("" if row["correct"] else "  WRONG")


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "layer.json")
    shapes = ["32x32x64", "16x16x128", "16x4x128", "8x8x256"]
    lengths = [1024, 4096, 8192, 32768]
    options.add_argument("--shape", nargs="+", metavar="HEADSxHEADS_KVxD", type=Shape.parse,
                         default=list(map(Shape.parse, shapes)),
                         help=f"query heads, key heads and head dimension (default {shapes})")
    options.add_argument("--tokens", type=int, nargs="+", default=lengths, metavar="N",
                         help=f"tokens of a sequence (default {lengths})")
    options.add_argument("--rounds", type=int, default=11, help="that are counted (default 11)")
    options.add_argument("--warmup", type=int, default=2, help="rounds that are not counted")
    parsed = parse(options, arguments)
    if parsed.rounds < 1 or min(parsed.tokens) < 1 or parsed.warmup < 0:
        options.error("--rounds and --tokens are at least 1, and --warmup at least 0")
    options = parsed
    record = Record(options.out, rounds=options.rounds, seed=options.seed, eps=EPS,
                    total_tokens=TOTAL_TOKENS, largest_error=LARGEST_ERROR)
    print(f"{'':48}" + "".join(f"{name:>12}" for name in PASSES)
          + "      kept   errors of " + ", ".join(TENSORS))
    rows = []
    for sizes in options.shape:
        for tokens in options.tokens:
            shape = Shape(*sizes, tokens)
            found = measure(options, shape, record)
            print("\n".join(map(line, found)))
            record.add("ratios", {**vars(shape), **ratios(found)})
            for name, value in ratios(found).items():
                print(f"  {name}: {value}", flush=True)
            rows += found
    return record.finish(all(row["correct"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
