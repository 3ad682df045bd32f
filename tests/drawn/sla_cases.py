"""Random calls of sparse_linear_attention (SLA2), the GPU kernels against FP64.

    python tests/drawn/sla_cases.py        # 300 cases over 24 specs

Specs, lists and tensors are those of `cases.py --lists`, without causal masks and without the
smallest magnitudes. Drawn besides are alpha (a number, or learned for each head, block or query, or
estimated with beta and without), the keys of the linear branch, and whether the branches are
returned and differentiated, too.

Right is the definition, in FP64 and with all scores at once: it shares no code with the package.
Beside it stands the same with the emulation's sparse branch in its place, and the kernels may be
little farther from FP64 than that. Without a GPU the package's own products in 16 bits
(precision='exact') are compared.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import cases
import judge as judging
import oracle
from cases import counts, doors_of, poisoned_allocations, summary, warm_up_all
from doors import Emulated, Kernels
from draw import Case, draw_case
from drawn_inputs import Given, inputs_of
from frame import Record, drawn_cases_parser, parse, progress, torch
from linear_scales import linear_scales
from specs import draw_specs
from torch import Tensor

import sagebwd
from sagebwd.core import forms

ALPHAS = ("number", "head", "block", "query", "one for all heads", "estimated", "estimated, beta")
NUMBERS = (0.0, 0.25, 0.9, 1.0)
#: Other magnitudes, and huge tokens in Q and K, are those of cases.py alone: it computes gradients
#: from the kernels' own out, which matters where few keys have all weight.
SCALES = {"q": (0.05, 2.0), "k": (0.05, 2.0), "v": (0.01, 20.0), "dout": (1e-3, 20.0)}
#: The most error, of the emulation's and beyond: gradients are not emulated from the kernels' own
#: out here, as in cases.py, and the linear branch has 16-bit products, which stand beside FP64.
WHOLE = (1.5, 0.02)


@dataclass(frozen=True)
class Mix:
    """A case has these choices beyond one of cases.py."""

    alpha: str
    linear: str
    branches: bool  #: whether out_sparse, out_linear and lse are returned, and have gradients


def draw(index: int, specs: list[dict], seed: int, scores: int) -> tuple[Case, Mix]:
    case = draw_case(index, specs, seed, scores)
    rng = random.Random(seed * 1_000_003 + index + 0.5)
    values = {name: ("gaussian" if name in "qk" and kind == "one huge token" else kind,
                     min(max(scale, SCALES[name][0]), SCALES[name][1]))
              for name, (kind, scale) in case.values.items()}  # fmt: skip
    case = replace(case, values=values, dlse="with dout" if case.dlse == "alone" else case.dlse)
    mix = Mix(rng.choice(ALPHAS), rng.choice(("complement", "all")), rng.random() < 0.3)
    return case, mix


def draw_mixed_specs(count: int, seed: int) -> list[dict]:
    """Those of lists, without causal masks."""
    specs = draw_specs(count, random.Random(seed), kind="lists")
    return [spec | {"causal": "none"} for spec in specs]


# ---- the definition ------------------------------------------------------------------------------


def alpha_of(case: Case, mix: Mix, q: Tensor) -> tuple[float | str | Tensor, Tensor | None]:
    """alpha, and beta or None, as the call takes them."""
    generator = torch.Generator(q.device).manual_seed(case.seed + 1)
    batch, heads, queries = q.shape[:3]
    if mix.alpha == "number":
        return NUMBERS[case.seed % len(NUMBERS)], None
    if mix.alpha.startswith("estimated"):
        beta = torch.randn(heads, generator=generator, device=q.device)
        return "estimated", beta if mix.alpha.endswith("beta") else None
    shape = {"head": (heads,), "block": (heads, -(-queries // case.spec["sparse_q"])),
             "query": (batch, heads, queries), "one for all heads": (1, 1, queries)}[mix.alpha]
    return torch.rand(shape, generator=generator, device=q.device), None


def rows_of(alpha: float | Tensor, q: Tensor, size: int) -> Tensor:
    """alpha of each query, (batch, heads, queries), from `alpha` of a documented shape."""
    batch, heads, queries = q.shape[:3]
    if not isinstance(alpha, Tensor):
        return q.new_full((batch, heads, queries), alpha)
    if alpha.dim() == 1:
        alpha = alpha[None, :, None]
    elif alpha.dim() == 2:
        alpha = alpha[:, torch.arange(queries, device=q.device) // size][None]
    return alpha.expand(batch, heads, queries)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float):
    """(out, lse) of the keys that are seen; 0 and -inf where there are none."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    blind = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0)
    out = (scores.softmax(-1) @ v).masked_fill(blind, 0)
    return out, scores.logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, left: Tensor, smooth_k: bool) -> Tensor:
    """Each key in `left` weighs softmax(q) softmax(k - mean), both over channels."""
    if smooth_k:
        k = k - k.mean(2, keepdim=True)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    weights = (q.softmax(-1) @ k.softmax(-1).mT).masked_fill(~left, 0)
    total = weights.sum(-1, keepdim=True)
    return weights @ v / total.masked_fill(total == 0, 1)


def rest_of(q: Tensor, k: Tensor, mask: Tensor, sizes: tuple[int, int], scale: float) -> Tensor:
    """The logarithm of what the keys of unlisted blocks weigh if each is its block's mean; 0 where
    every block is listed."""
    parts = k.split(sizes[1], 2)
    means = torch.cat([part.mean(2, keepdim=True) for part in parts], 2)
    counts = torch.tensor([part.shape[2] for part in parts], device=q.device).double()
    left = ~mask[:, :, torch.arange(q.shape[2], device=q.device) // sizes[0]]
    scores = q @ means.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale + counts.log()
    none = ~left.any(-1, keepdim=True)
    return scores.masked_fill(~left, -torch.inf).masked_fill(none, 0).logsumexp(-1)


@dataclass
class Mixture:
    """All in FP64, differentiated once."""

    results: dict[str, Tensor]  #: O, Os, Ol (those of the branches) and lse
    rows: Tensor  #: alpha of each query
    gradients: dict[str, Tensor]  #: dQ, dK, dV, dAlpha, dBeta
    within: dict[str, Tensor]  #: those of Os, Ol, lse and rows
    spread: Callable[[Tensor], dict[str, Tensor]]  #: from gradients of rows, dAlpha and dBeta


def mixture(given: Given, case: Case, mix: Mix, alpha, beta, sparse) -> Mixture:
    """`sparse` gives out and lse of the listed keys, from q, k, v, what is seen, and the scale."""
    sizes = case.spec["sparse_q"], case.spec["sparse_kv"]
    q, k, v = (x.detach().double().requires_grad_() for x in (given.q, given.k, given.v))
    scale = scale_of(case, given)
    seen = oracle.listed(given.mask, sizes, q.shape[2], k.shape[2])
    none, every = ~seen.any(-1), seen.all(-1)
    out_sparse, lse = sparse(q, k, v, seen, scale)
    left = torch.ones_like(seen) if mix.linear == "all" else ~seen
    out_linear = linear_attention(q, k, v, left, case.spec["smooth_k"])
    learned = {}
    if isinstance(alpha, str):
        chosen = ~none & ~every
        rest = rest_of(q, k, given.mask, sizes, scale)
        logit = lse.masked_fill(~chosen, 0) - rest.masked_fill(~chosen, 0)
        if beta is not None:
            learned["dBeta"] = beta.double().requires_grad_()
            logit = logit - learned["dBeta"][:, None]
        rows = logit.sigmoid().masked_fill(every, 1)  # as nothing is left
    else:
        if isinstance(alpha, Tensor):
            learned["dAlpha"] = alpha = alpha.double().requires_grad_()
        rows = rows_of(alpha, q, sizes[0])
        if mix.linear == "complement":
            rows = rows.masked_fill(every, 1)
    rows = rows.masked_fill(none, 0)
    out = rows[..., None] * out_sparse + (1 - rows[..., None]) * out_linear
    results = {"O": out, "Os": out_sparse, "Ol": out_linear, "lse": lse}
    inner = {"Os": out_sparse, "Ol": out_linear, "lse": lse, "rows": rows}
    leaves = {"dQ": q, "dK": k, "dV": v}
    found = gradients_of(results, given, mix, leaves | learned | inner)

    def spread(of_rows: Tensor) -> dict[str, Tensor]:
        return _grad([rows], learned, [of_rows]) if learned else {}

    return Mixture({name: x.detach() for name, x in results.items()}, rows.detach(),
                   {name: found[name] for name in leaves | learned},
                   {name: found[name] for name in inner}, spread)  # fmt: skip


def gradients_of(results: dict, given: Given, mix: Mix, leaves: dict) -> dict[str, Tensor]:
    """By name. A branch that is returned has a gradient like that of out, and lse has dlse."""
    asked = [(results["O"], given.dout)]
    if mix.branches:
        asked += [(results["Os"], given.dout), (results["Ol"], -given.dout)]
        if given.dlse is not None:
            lse = results["lse"]
            asked.append((lse.masked_fill(lse == -torch.inf, 0), given.dlse))
    outs, gradients = zip(*((x, dx.to(x.dtype)) for x, dx in asked))
    return _grad(outs, leaves, gradients)


def _grad(outs, leaves: dict, gradients) -> dict[str, Tensor]:
    found = [None] * len(leaves)
    needed = [i for i, x in enumerate(leaves.values()) if x.requires_grad]
    named = [list(leaves.values())[i] for i in needed]
    for i, dx in zip(needed, torch.autograd.grad(
            outs, named, gradients, allow_unused=True, retain_graph=True)):  # fmt: skip
        found[i] = dx
    return {name: torch.zeros_like(x) if dx is None else dx
            for (name, x), dx in zip(leaves.items(), found)}  # fmt: skip


def scale_of(case: Case, given: Given) -> float:
    return given.q.shape[3] ** -0.5 if case.softmax_scale is None else case.softmax_scale


# ---- what is compared ----------------------------------------------------------------------------


def called(case: Case, mix: Mix, given: Given, alpha, beta, device: str) -> dict[str, Tensor]:
    """The package's results and gradients."""
    options = case.options() | given.lists
    del options["causal"]
    if doors_of(device) is not Kernels:
        options["precision"] = "exact"
    leaves = {f"d{name.upper()}": getattr(given, name).detach().requires_grad_() for name in "qkv"}

    def in_layout(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if case.layout == "bshd" else x

    tensors = [in_layout(x) for x in leaves.values()]
    if isinstance(alpha, Tensor):
        leaves["dAlpha"] = alpha = alpha.detach().requires_grad_()
    if beta is not None:
        leaves["dBeta"] = beta = beta.detach().requires_grad_()
    results = sagebwd.sparse_linear_attention(
        *tensors, alpha=alpha, beta=beta, linear=mix.linear, layout=case.layout,
        return_branches=mix.branches, **options)
    names = ("O", "Os", "Ol", "lse") if mix.branches else ("O",)
    results = results if mix.branches else (results,)
    results = {name: x if name == "lse" else in_layout(x) for name, x in zip(names, results)}
    return {name: x.detach() for name, x in results.items()} | gradients_of(
        results, given, mix, leaves)


def sparse_of(case: Case, given: Given, device: str):
    """The emulation's sparse branch. If no kernels run, it has no INT8 products, and operands are
    bfloat16 for float16, too, as under 'exact'."""
    low, options = given.q.dtype, case.options() | given.lists
    if doors_of(device) is not Kernels:
        low, options = torch.bfloat16, options | {"precision": (), "dp_sums": "fp32"}

    def emulated(q, k, v, seen, scale):
        out, lse = Emulated.attention(q.to(low), k.to(low), v.to(low), layout="bhsd",
                                      sink_logits=None, return_lse=True, **options)  # fmt: skip
        return out.double(), lse.double()

    return emulated


def scales_of(
    exact: Mixture, case: Case, mix: Mix, given: Given
) -> tuple[dict[str, Tensor], float]:
    """For each element what its error is relative to (oracle.Truth.scale), and the reach."""
    sizes = case.spec["sparse_q"], case.spec["sparse_kv"]
    seen = oracle.listed(given.mask, sizes, given.q.shape[2], given.k.shape[2])
    mean = given.k.double().mean(2) if case.spec["smooth_k"] else None
    within, scale, q, k, v = exact.within, scale_of(case, given), given.q, given.k, given.v
    left = torch.ones_like(given.mask) if mix.linear == "all" else ~given.mask
    linear = linear_scales(q, k, v, within["Ol"], left, sizes, case.spec["smooth_k"])
    truth = oracle.attention(q, k, v, within["Os"], within["lse"], seen, scale, None, mean)
    of_sparse, of_linear, rows = truth.scale["O"], linear["Ol"], exact.rows[..., None]
    # An alpha's gradient is the sum over channels of dO (Os - Ol), which may cancel. Rows that
    # share it may have the same error: values have one scale, and their sums one rounding.
    squares = (given.dout.double().square() * (of_sparse.square() + of_linear.square())).sum(-1)
    parts = [truth.scale, linear]
    if mix.alpha.startswith("estimated"):
        squares = squares * (exact.rows * (1 - exact.rows)).square()
        of_lse, none = squares.sqrt() + within["lse"].abs(), torch.zeros_like(within["Os"])
        means = torch.cat([part.double().mean(2, keepdim=True).expand_as(part)
                           for part in k.split(sizes[1], 2)], 2)  # fmt: skip
        parts += [oracle.attention(q, keys, v, none, of_lse, those, scale, None, mean).scale
                  for keys, those in ((k, seen), (means, ~seen))]  # fmt: skip
    scales = {"O": rows * of_sparse + (1 - rows) * of_linear, "Os": of_sparse, "Ol": of_linear}
    scales |= {name: sum(part[name] for part in parts) for name in ("dQ", "dK", "dV")}
    if "dBeta" in exact.gradients:
        return scales | {"dBeta": squares.sqrt().sum((0, 2))}, truth.reach
    return scales | exact.spread(squares.sqrt()), truth.reach


def judge(found: dict, beside: Mixture, exact: Mixture, scales: dict, reach: float,
          dtype: torch.dtype) -> dict:  # fmt: skip
    wrong, figures, least = [], {}, judging.LEAST[dtype]
    rounding = judging.OF_REACH * reach
    expected, right = beside.results | beside.gradients, exact.results | exact.gradients
    for name, scale in scales.items():
        if name not in found:
            continue
        pair = torch.stack([found[name].double(), expected[name].double()])
        errors, rows = judging.errors_of(pair, right[name], scale, least)
        (ours, theirs), (row, their_row) = errors.tolist(), rows.tolist()
        if not math.isfinite(ours):
            wrong.append(f"{name}: not finite")
            continue
        apart = judging.distance(pair[0] - pair[1], scale, least)
        figures[name] = {"kernels": ours, "emulation": theirs, "worst_row": row,
                         "worst_row_emulation": their_row, "kernels_to_emulation": apart}
        if not ours <= WHOLE[0] * theirs + WHOLE[1] + rounding:
            wrong.append(f"{name}: error {ours:.4f}, emulation {theirs:.4f}")
        if not apart <= judging.TO_EMULATION[0] + judging.TO_EMULATION[1] * theirs + rounding:
            wrong.append(f"{name}: {apart:.4f} off the emulation")
        if not row <= judging.ROW[0] * their_row + judging.ROW[1]:
            wrong.append(f"{name}: a row's error {row:.4f}, emulation's worst {their_row:.4f}")
    if "lse" in found and not torch.equal(found["lse"] == -torch.inf,
                                          exact.results["lse"] == -torch.inf):  # fmt: skip
        wrong.append("lse: not -inf just where nothing is listed")
    return {"wrong": wrong, "figures": figures, "large": []}


def run_case(case: Case, mix: Mix, device: str) -> dict:
    given = inputs_of(case, device)
    alpha, beta = alpha_of(case, mix, given.q)
    exact = mixture(given, case, mix, alpha, beta, softmax_attention)
    beside = mixture(given, case, mix, alpha, beta, sparse_of(case, given, device))
    with forms.kernels_of(case.spec["family"]):
        found = called(case, mix, given, alpha, beta, device)
    return judge(found, beside, exact, *scales_of(exact, case, mix, given), given.q.dtype)


def outcome_of(case: Case, mix: Mix, device: str) -> dict:
    return cases.outcome_of(case, device, lambda case, device: run_case(case, mix, device))


def prove(options) -> int:
    specs = draw_mixed_specs(options.specs, options.seed)
    record = Record(options.out, cases=options.cases, seed=options.seed, scores=options.scores,
                    specs=specs, subject=doors_of(options.device).__name__)
    refused = warm_up_all(specs, options.device, record)
    results: list[dict] = []
    indices = options.only or range(options.cases)
    for i in indices:
        case, mix = draw(i, specs, options.seed, options.scores)
        result = {"outcome": "refused", "wrong": [], "figures": {}}
        if case.spec not in refused:
            result = outcome_of(case, mix, options.device)
        results.append(result)
        if result["wrong"]:
            print(f"\ncase {i}: {'; '.join(result['wrong'])}", file=sys.stderr)
            record.add("wrong_cases", asdict(case) | asdict(mix) | result)
        if options.only:
            print(case, mix, result, sep="\n")
        progress(len(results), len(indices), f"{counts(results)['wrong']} wrong of")
    record.set(ran=len(results), **counts(results), distribution=summary(results))
    return record.finish(counts(results)["right"] == len(results) > 0)


def main(arguments: list[str] | None = None) -> int:
    options = drawn_cases_parser(__doc__, "sla_cases.json", cases=300, specs=24, log2_scores=22)
    options = parse(options, arguments)
    with poisoned_allocations():
        return prove(options)


if __name__ == "__main__":
    sys.exit(main())
