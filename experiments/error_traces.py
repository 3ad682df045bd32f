"""The errors of one attention layer under many settings, beside one exact computation.

`sagebwd.trace` gives the same figures of one setting. Here the exact tensors, which take longest,
are computed once, and bounds and heads are looked at as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median
from typing import TYPE_CHECKING

from sagebwd.core.options import PRODUCTS, plan_of
from sagebwd.numerics.tracing import FIGURES, TENSORS

from .command import torch

if TYPE_CHECKING:
    from torch import Tensor

    from .capture import Captured

SIX = plan_of("six-of-seven")
#: One product in 16 bits, all others of six-of-seven in INT8: s is what qk16 puts back.
PUT_BACK = {f"{product}-in-16": {"precision": tuple(sorted(SIX - {product}))}
            for product in PRODUCTS if product in SIX and product != "s"}  # fmt: skip
SETTINGS = {
    "row": {}, "row,no-rotate": {"rotate": False},
    "block": {"granularity": "block"},
    "block,no-rotate": {"granularity": "block", "rotate": False},
    "qk16": {"precision": "qk16"}, "smooth-q": {"smooth_q": True},
    "smooth-q,no-rotate": {"smooth_q": True, "rotate": False}, **PUT_BACK,
    "16-bit": {"precision": "none"},
}  # fmt: skip
#: A setting for each product that it computes in 16 bits, which `row` does not.
OF_PRODUCT = {"s": "qk16"} | {name.partition("-")[0]: name for name in PUT_BACK}
#: Scores that are computed at once, of which some twenty matrices exist: few on a CPU, where memory
#: that was just used is quick.
SCORES = {"cpu": 1 << 20, "cuda": 1 << 24}
#: The share of q's squares from which on a head counts as one with a common offset.
OFFSET = 0.5


def traced_layer(captured: Captured) -> dict:
    """Errors of every setting, sizes of the exact tensors, and what heads have."""
    from sagebwd.numerics import emulation, exact

    tensors = [t.detach() for t in captured]
    q, k = tensors[:2]
    batch, heads = q.shape[:2]
    rules = {name: emulation.emulation_rules(*tensors[:3], causal=True, **how)
             for name, how in SETTINGS.items()}  # fmt: skip
    tensors = emulation.grouped(k.shape[1], *tensors)
    sums: dict[str, list[Tensor]] = {name: [] for name in SETTINGS}
    rows: list[Tensor] = []
    with torch.no_grad(), emulation.full_precision(q.device):
        for part in _parts(*tensors[:2]):
            chunk = [t[part] for t in tensors]
            reference = exact.exact_chunk(*chunk, rules["row"].mask, rules["row"].scale)
            rows.append(_rows(reference))
            for name, found in sums.items():
                found.append(_sums(_emulated(chunk, rules[name]), reference))
    figures = {name: torch.cat(found, 1).unflatten(1, (batch, heads)).sum(1)
               for name, found in sums.items()}  # of (tensors, heads, six sums)  # fmt: skip
    return {"errors": {name: _figures(x.sum(1)) for name, x in figures.items()},
            "sizes": _sizes(torch.cat(rows)),
            "heads": _heads(q, k, figures)}  # fmt: skip


def _parts(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Heads that are computed at once."""
    step = max(1, SCORES[q.device.type] // max(1, q.shape[1] * q.shape[2] * k.shape[2]))
    return (slice(i, i + step) for i in range(0, q.shape[0], step))


def _emulated(chunk: list[Tensor], rules) -> dict[str, Tensor]:
    from sagebwd.numerics.numerics import backward_chunk, forward_chunk

    q, k, v, dout = chunk
    out, lse, _ = forward_chunk(q, k, v, rules)
    dq, dk, dv, delta, p, dp, ds = backward_chunk(q, k, v, out, lse, dout, None, rules)
    return dict(zip(TENSORS, (delta, p, dp, ds, out, dq, dk, dv)))


def _sums(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> Tensor:
    """(tensors, heads, 6): x.y, x.x, y.y, |x - y|^2, and the sums of x - y and of |y|, for ours x
    and the exact y, in FP64."""
    found = []
    for name in TENSORS:
        x, y = (t[name].double().flatten(1) for t in (ours, exact))
        difference = x - y
        pairs = ((x, y), (x, x), (y, y), (difference, difference))
        products = [(a * b).sum(1) for a, b in pairs]
        found.append(torch.stack([*products, difference.sum(1), y.abs().sum(1)], 1))
    return torch.stack(found)


def _figures(sums: Tensor) -> dict[str, dict[str, float]]:
    """The sums are of shape (tensors, 6)."""
    dot, ours, exact, difference, signed, magnitude = sums.unbind(-1)
    cosine, rel_l2 = dot / (ours * exact).sqrt(), (difference / exact).sqrt()
    of_tensors = zip(cosine.tolist(), rel_l2.tolist(), (signed / magnitude).tolist())
    return {name: dict(zip(FIGURES, of)) for name, of in zip(TENSORS, of_tensors)}


# ---- claim 5: RMS(dS_i) <= RMS(P_i) max |dP_ij - delta_i|, and RMS(P_i) <= 1 / sqrt N ------------


def _rows(exact: dict[str, Tensor]) -> Tensor:
    """(queries of all heads, 5): keys that it sees, sums of squares of P, dS and dP, and the
    largest |dP - delta|, over those keys."""
    p, ds, dp = exact["P"], exact["dS"], exact["dP"]
    seen = torch.ones(p.shape[-2:], dtype=torch.bool, device=p.device).tril()
    dp = dp.masked_fill(~seen, 0)
    largest = (dp - exact["delta"]).masked_fill(~seen, 0).abs().amax(-1)
    keys = seen.sum(-1).double().expand_as(largest)
    squares = [x.square().sum(-1) for x in (p, ds, dp)]
    return torch.stack([keys, *squares, largest], -1).flatten(0, -2)


def _sizes(rows: Tensor) -> dict[str, float]:
    """Root mean squares of a layer, and how near its queries come to the bounds: 1 is equality."""
    keys, p, ds, dp, largest = rows.unbind(-1)
    total = keys.sum()
    of_p = p.sqrt()  # RMS(P_i) sqrt(N)
    bound = (p / keys).sqrt() * largest
    some = bound > 0
    of_ds = ((ds / keys).sqrt()[some] / bound[some]) if some.any() else bound[:0]
    return {
        "rms_p": float((p.sum() / total).sqrt()), "rms_dp": float((dp.sum() / total).sqrt()),
        "rms_ds": float((ds.sum() / total).sqrt()),
        "rms_ds_bound": float((bound.square() * keys).sum().div(total).sqrt()),
        "rms_ds_bound_by_keys": float(largest.square().sum().div(total).sqrt()),
        "ds_to_bound_largest": float(of_ds.amax()) if len(of_ds) else 0.0,
        "ds_to_bound_median": float(of_ds.median()) if len(of_ds) else 0.0,
        "p_to_bound_largest": float(of_p.amax()), "p_to_bound_median": float(of_p.median()),
    }  # fmt: skip


# ---- queries with a common offset ----------------------------------------------------------------


def _offset(x: Tensor) -> Tensor:
    """Which share of a head's squares is the mean of its tokens: (heads,), mean over the batch."""
    x = x.double()
    share = x.mean(2).square().sum(-1) * x.shape[2] / x.square().sum((2, 3)).clamp_min(1e-300)
    return share.mean(0)


def _heads(q: Tensor, k: Tensor, figures: dict[str, Tensor]) -> dict[str, list[float]]:
    """Lists over the heads; errors of O with rotation and without."""
    place = TENSORS.index("O")

    def of_out(setting: str) -> list[float]:
        _, _, exact, difference, _, _ = figures[setting][place].unbind(-1)
        return (difference / exact).sqrt().tolist()

    return {"q_offset": _offset(q).tolist(), "k_offset": _offset(k).tolist(),
            "O": of_out("row"), "O_no_rotate": of_out("row,no-rotate"),
            "O_smooth_q": of_out("smooth-q")}  # fmt: skip


# ---- what is said of several layers --------------------------------------------------------------


def mean_errors(layers: list[dict]) -> dict:
    """The mean of every figure over layers."""
    return {setting: {tensor: {figure: fmean(layer["errors"][setting][tensor][figure]
                                             for layer in layers)
                               for figure in FIGURES}
                      for tensor in TENSORS} for setting in SETTINGS}  # fmt: skip


def best_products(errors: dict) -> dict[str, dict]:
    """For each tensor the product whose return to 16 bits leaves the least error, beside that of
    six-of-seven; none where none helps."""
    found = {}
    for tensor in TENSORS:
        left = {product: errors[setting][tensor]["rel_l2"]
                for product, setting in OF_PRODUCT.items()}  # fmt: skip
        before = errors["row"][tensor]["rel_l2"]
        best = min(left, key=left.get)
        helps = left[best] < before * (1 - 1e-3)  # what is below comes from the order of sums
        found[tensor] = {"product": best if helps else None, "before": before, "left": left}
    return found


def rotation(layers: list[dict]) -> dict:
    """Rotation does this to O, in all heads and in those whose queries share an offset."""
    heads = [head for layer in layers for head in _each_head(layer["heads"])]
    common = [head for head in heads if head["q_offset"] >= OFFSET]
    return {"q_offset_mean": fmean(head["q_offset"] for head in heads),
            "q_offset_largest": max(head["q_offset"] for head in heads),
            "all": _of_rotation(heads), f"q_offset>={OFFSET}": _of_rotation(common)}  # fmt: skip


def _each_head(heads: dict[str, list[float]]) -> Iterator[dict[str, float]]:
    for values in zip(*heads.values()):
        yield dict(zip(heads, values))


def _of_rotation(heads: list[dict]) -> dict | None:
    if not heads:
        return None
    ratios = [head["O"] / head["O_no_rotate"] for head in heads]
    return {"heads": len(heads), "worse_with_rotation": sum(ratio > 1 for ratio in ratios),
            "ratio_median": median(ratios), "ratio_largest": max(ratios),
            "ratio_least": min(ratios)}  # fmt: skip
