"""Random calls of attention with QK-norm, RoPE and a gate, the GPU kernels against FP64.

    python tests/drawn/front_cases.py          # 500 cases

Drawn are types, sizes, layouts and strides, masks, packed sequences, the precision, norms with and
without gains, given 1/rms, eps, tables of halves and of neighbours, whole and partial, for all
sequences and of each, of FP32 and of 16 bits, and gates.

Right is the definition in FP64, which shares no code with the package. Beside it stands the
package's attention of queries and keys that FP64 has normed and rotated, with its gradients carried
back in FP64: it has the errors of INT8, and the call that is judged may be little farther away from
right, and from it.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import asdict, dataclass

from cases import counts, outcome_of, poisoned_allocations, summary
from frame import Record, drawn_cases_parser, parse, progress, torch
from torch import Tensor

import sagebwd

#: The most error of a tensor, of that beside it and beyond. Sums of a gain's or of 1/rms's gradient
#: cancel, so that the same errors are larger there.
WHOLE, OF_SUMS = (1.2, 0.01), (1.5, 0.05)
#: The most distance to what stands beside, where a rounding of y may differ.
APART, APART_OF_SUMS = 0.03, 0.15


@dataclass(frozen=True)
class Front:
    """One case."""

    index: int
    seed: int
    dtype: str
    head_dim: int
    heads: int
    heads_kv: int
    lengths: tuple[int, ...]  #: of packed sequences, or of a batch: as many equal ones
    packed: bool
    layout: str
    sliced: bool  #: whether tensors are parts of wider ones
    precision: str
    causal: bool
    norms: tuple[str, str]  #: of q and k: 'no', 'plain', 'gain', 'gain of each head'
    given: tuple[str, str]  #: 1/rms: 'no', 'of a token', 'of a head'
    gain_dtype: str
    eps: float
    style: str  #: 'no', 'halves' or 'interleaved'
    begin: int
    pairs: int
    table: str  #: 'FP32', '16 bits', or 'of each sequence'
    gate: str  #: 'no', 'like out', or 'FP32'
    scale: float


def draw(index: int, seed: int, scores: int) -> Front:
    rng = random.Random(seed * 1_000_003 + index)
    head_dim = rng.choice((32, 40, 64, 64, 72, 96, 128, 128, 192, 256))
    heads_kv, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 4))
    packed = rng.random() < 0.3
    most = max(2, min(700, int(math.sqrt(scores / (heads_kv * group * 2)))))
    lengths = (tuple(rng.randint(0, most // 2) for _ in range(rng.randint(1, 4))) if packed
               else (rng.randint(1, most),) * rng.randint(1, 2))  # fmt: skip
    if not sum(lengths):
        lengths = (17, *lengths)
    style = rng.choice(("no", "halves", "halves", "interleaved"))
    step = 4 if style == "halves" else 2
    pairs = rng.choice((head_dim // 2, step * rng.randint(1, head_dim // (2 * step))))
    pairs = head_dim // 2 // step * step if pairs % step else pairs
    begin = 4 * rng.randint(0, (head_dim - 2 * pairs) // 4) if rng.random() < 0.5 else 0
    norms = tuple(rng.choice(("no", "plain", "gain", "gain", "gain of each head")) for _ in "qk")
    given = tuple(rng.choice(("no", "no", "of a token", "of a head")) for _ in "qk")
    return Front(
        index, rng.randrange(1 << 30), rng.choice(("bf16", "bf16", "fp16")), head_dim,
        heads_kv * group, heads_kv, lengths, packed, "bshd" if packed else rng.choice(
            ("bhsd", "bshd")), rng.random() < 0.3,
        rng.choice(("six-of-seven", "gradients16", "qk16", "dv16")), rng.random() < 0.5, norms,
        given, rng.choice(("FP32", "16 bits")), rng.choice((0.0, 1e-6, 1e-5, 1e-3)), style,
        begin if style != "no" else 0, pairs, rng.choice(("FP32", "16 bits", "of each sequence")),
        rng.choice(("no", "no", "like out", "FP32")), 2.0 ** rng.randint(-3, 3),
    )  # fmt: skip


# ---- inputs --------------------------------------------------------------------------------------

KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def tensors_of(case: Front, device: str) -> dict[str, Tensor | None]:
    """What a call gets: q, k, v, dout and gate in the case's layout, and the front's."""
    generator = torch.Generator(device).manual_seed(case.seed)
    kind, tokens = KINDS[case.dtype], sum(case.lengths) if case.packed else case.lengths[0]
    batch = 1 if case.packed else len(case.lengths)

    def drawn(*shape, scale=1.0, of=torch.float32):
        return (scale * torch.randn(shape, generator=generator, device=device)).to(of)

    def tensor(heads, scale, of=kind):
        shape = (batch, heads, tokens) if case.layout == "bhsd" else (batch, tokens, heads)
        t = drawn(*shape, case.head_dim * (2 if case.sliced else 1), scale=scale, of=of)
        t = t[..., case.head_dim :] if case.sliced else t
        return t[0] if case.packed else t

    found = {"q": tensor(case.heads, case.scale), "k": tensor(case.heads_kv, 1.0),
             "v": tensor(case.heads_kv, 1.0), "dout": tensor(case.heads, 1.0)}  # fmt: skip
    found["gate"] = None if case.gate == "no" else tensor(
        case.heads, 2.0, kind if case.gate == "like out" else torch.float32)  # fmt: skip
    of_gain = torch.float32 if case.gain_dtype == "FP32" else kind
    for name, heads, norm, given in zip("qk", (case.heads, case.heads_kv), case.norms, case.given):
        shape = (heads, case.head_dim) if norm == "gain of each head" else (case.head_dim,)
        found[f"{name}_gain"] = 1 + drawn(*shape, scale=0.2) if norm.startswith("gain") else None
        if found[f"{name}_gain"] is not None:
            found[f"{name}_gain"] = found[f"{name}_gain"].to(of_gain)
        rows = (heads, tokens) if given == "of a head" else (tokens,)
        rows = rows if case.packed else (batch, *rows)
        found[f"{name}_inv_rms"] = None if given == "no" else (0.5 + drawn(*rows).abs()) / (
            case.scale if name == "q" else 1.0)  # fmt: skip
    if case.style != "no":
        each = case.table == "of each sequence" and not case.packed
        angles = 3 * drawn(*((batch,) if each else ()), tokens, case.pairs)
        of = kind if case.table == "16 bits" else torch.float32
        found |= {"cos": angles.cos().to(of), "sin": angles.sin().to(of)}
    return found


LEARNED = ("q", "k", "v", "q_gain", "k_gain", "q_inv_rms", "k_inv_rms", "gate")
SUMS = ("q_gain", "k_gain", "q_inv_rms", "k_inv_rms")


# ---- the definition ------------------------------------------------------------------------------


def heads_first(case: Front, t: Tensor) -> Tensor:
    """(batch, heads, tokens, channels)."""
    t = t.unsqueeze(0) if case.packed else t
    return t.transpose(1, 2) if case.layout == "bshd" else t


def fronted(case: Front, name: str, given: dict[str, Tensor]) -> Tensor:
    """y of q or k, heads first, in FP64."""
    x = heads_first(case, given[name])
    norm, gain = case.norms["qk".index(name)], given[f"{name}_gain"]
    inv_rms = given[f"{name}_inv_rms"]
    if inv_rms is not None:
        inv_rms = inv_rms.unsqueeze(0) if case.packed else inv_rms
        x = x * (inv_rms.unsqueeze(1) if inv_rms.dim() == 2 else inv_rms).unsqueeze(-1)
    elif norm != "no":
        x = x / (x.square().mean(-1, keepdim=True) + case.eps).sqrt()
    if gain is not None:
        x = x * (gain if gain.dim() == 1 else gain.unsqueeze(1))
    if case.style == "no":
        return x
    cos, sin = (t.unsqueeze(-3) for t in (given["cos"], given["sin"]))
    part = x[..., case.begin : case.begin + 2 * case.pairs]
    if case.style == "halves":
        turn = torch.complex(part[..., : case.pairs], part[..., case.pairs :])
    else:
        turn = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous())
    turn = turn * torch.complex(cos, sin)
    turned = (torch.cat([turn.real, turn.imag], -1) if case.style == "halves"
              else torch.view_as_real(turn).flatten(-2))  # fmt: skip
    return torch.cat([x[..., : case.begin], turned, x[..., case.begin + 2 * case.pairs :]], -1)


def attention64(case: Front, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads first, in FP64; a packed sequence sees itself alone."""
    tokens = torch.arange(q.shape[2], device=q.device)
    seen = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=q.device)
    if case.causal:
        seen = tokens[:, None] >= tokens
    if case.packed:
        ends = torch.tensor(case.lengths, device=q.device).cumsum(0)
        sequence = torch.bucketize(tokens, ends, right=True)
        seen = seen & (sequence[:, None] == sequence)
    k, v = (t.repeat_interleave(case.heads // case.heads_kv, 1) for t in (k, v))
    scores = (q @ k.mT / math.sqrt(case.head_dim)).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def gated64(case: Front, out: Tensor, given: dict) -> Tensor:
    return out if given["gate"] is None else out * heads_first(case, given["gate"]).sigmoid()


def differentiated(case: Front, given: dict, attend, kind=None) -> dict[str, Tensor]:
    """The output, heads first, and the gradients of what is learned. `attend` takes leaves."""
    leaves = {name: None if t is None else (t if kind is None else t.to(kind)).detach()
              for name, t in given.items()}  # fmt: skip
    asked = [name for name in LEARNED if leaves[name] is not None]
    for name in asked:
        leaves[name].requires_grad_()
    out = attend(leaves)
    dout = heads_first(case, given["dout"]).to(out.dtype)
    gradients = torch.autograd.grad(out, [leaves[name] for name in asked], dout)
    return {"out": out.detach()} | dict(zip(asked, gradients))


# ---- the package ---------------------------------------------------------------------------------


def plain_options(case: Front, device: str) -> dict:
    told = {"precision": case.precision, "causal": case.causal}
    if not case.packed:
        return told | {"layout": case.layout}
    ends = torch.tensor([0, *case.lengths], device=device).cumsum(0).to(torch.int32)
    return told | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}


def called(case: Front, leaves: dict, device: str) -> Tensor:
    told = plain_options(case, device)
    for name, norm in zip("qk", case.norms):
        gain = leaves[f"{name}_gain"]
        told[f"{name}_norm"] = gain if gain is not None else (True if norm == "plain" else None)
        told[f"{name}_inv_rms"] = leaves[f"{name}_inv_rms"]
    if told["q_norm"] is not None or told["k_norm"] is not None:
        told["norm_eps"] = case.eps
    if case.style != "no":
        told |= {"rope": (leaves["cos"].detach(), leaves["sin"].detach()), "rope_style": case.style,
                 "rope_begin": case.begin}  # fmt: skip
    out = sagebwd.attention(leaves["q"], leaves["k"], leaves["v"], gate=leaves["gate"], **told)
    return heads_first(case, out)


class _Inner(torch.autograd.Function):
    """The package's attention of FP64 tensors, heads first, that are rounded for it."""

    @staticmethod
    def forward(ctx, case, device, q, k, v):
        kind = KINDS[case.dtype]
        turned = [t.transpose(1, 2).contiguous().to(kind) for t in (q, k, v)]
        leaves = [(t[0] if case.packed else t).requires_grad_() for t in turned]
        with torch.enable_grad():
            told = plain_options(case, device)
            told |= {} if case.packed else {"layout": "bshd"}
            out = sagebwd.attention(*leaves, **told)
        ctx.inner = out, leaves, case
        return (out.detach().unsqueeze(0) if case.packed else out.detach()).transpose(1, 2).double()

    @staticmethod
    def backward(ctx, dout):
        out, leaves, case = ctx.inner
        dout = dout.transpose(1, 2).to(out.dtype)
        found = torch.autograd.grad(out, leaves, dout[0] if case.packed else dout)
        found = [(t.unsqueeze(0) if case.packed else t).transpose(1, 2).double() for t in found]
        return None, None, *found


def run_case(case: Front, device: str) -> dict:
    given = tensors_of(case, device)

    def exact(leaves, attend=attention64):
        behind = [fronted(case, name, leaves) for name in "qk"]
        out = attend(case, *behind, heads_first(case, leaves["v"]))
        return gated64(case, out, leaves)

    right = differentiated(case, given, exact, torch.float64)
    beside = differentiated(case, given, lambda leaves: exact(
        leaves, lambda case, *tensors: _Inner.apply(case, device, *tensors)), torch.float64)  # fmt: skip
    found = differentiated(case, given, lambda leaves: called(case, leaves, device))
    return judge(found, beside, right)


def distance(x: Tensor, y: Tensor, of: Tensor) -> float:
    size = float(of.double().norm())
    apart = float((x.double() - y.double()).norm())
    return apart / size if size else (0.0 if apart == 0 else math.inf)


def judge(found: dict, beside: dict, right: dict) -> dict:
    wrong, figures = [], {}
    for name, exact in right.items():
        times, more = OF_SUMS if name in SUMS else WHOLE
        most = APART_OF_SUMS if name in SUMS else APART
        ours, theirs = (distance(t[name], exact, exact) for t in (found, beside))
        apart = distance(found[name], beside[name], exact)
        figures[name] = {"error": ours, "beside": theirs, "apart": apart}
        if not ours <= times * theirs + more:  # NaN is wrong
            wrong.append(f"{name}: error {ours:.4f}, beside it {theirs:.4f}")
        if not apart <= most:
            wrong.append(f"{name}: {apart:.4f} off what stands beside it")
    return {"wrong": wrong, "figures": figures, "large": []}


def prove(options) -> int:
    record = Record(options.out, cases=options.cases, seed=options.seed, scores=options.scores)
    results: list[dict] = []
    indices = options.only or range(options.cases)
    for i in indices:
        case = draw(i, options.seed, options.scores)
        result = outcome_of(case, options.device, run_case)
        results.append(result)
        if result["wrong"]:
            print(f"\ncase {i}: {'; '.join(result['wrong'])}", file=sys.stderr)
            record.add("wrong_cases", asdict(case) | result)
        if options.only:
            print(case, result, sep="\n")
        progress(len(results), len(indices), f"{counts(results)['wrong']} wrong of")
    record.set(ran=len(results), **counts(results), distribution=summary(results))
    print(", ".join(f"{count} {outcome}" for outcome, count in counts(results).items()))
    return record.finish(counts(results)["right"] == len(results) > 0)


def main(arguments: list[str] | None = None) -> int:
    options = drawn_cases_parser(__doc__, "front_cases.json", cases=500, log2_scores=21)
    options = parse(options, arguments)
    with poisoned_allocations():
        return prove(options)


if __name__ == "__main__":
    sys.exit(main())
