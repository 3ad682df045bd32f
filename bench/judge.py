"""What is wrong with the results of a drawn case, and what is merely far from exact.

A result is wrong if

- an element is not finite, or is not zero where nothing can be seen: out and dq of a query that
  sees no key, dk and dv of a key that no query sees, and all of tokens that do not count;
- its error exceeds that of the emulation of the same spec on the same inputs by more than the
  margins below, over the whole tensor or in its worst token, or it is far from the emulation;
- the emulation itself is farther from FP64 than quantisation explains. The emulation shares no code
  with FP64 here, not even the mask (oracle.py).

A right result may still be far from exact, by design. What is beyond a stated factor of 16-bit
attention's error is listed, with its case, so that it does not pass unseen.
"""

from __future__ import annotations

import math

from needs_torch import torch
from oracle import Truth
from torch import Tensor

#: Kernels and emulation differ by FP32 rounding and by integers that it tips over: noise of the
#: same size as the quantisation's own, and a little of the output's rounding (2^-9 for bf16).
WHOLE = (1.3, 0.004)
ROW = (1.5, 0.05)
LSE = (1.5, 2e-3)
#: Their distance itself: a part that every input has, as the emulation in FP64 and in FP32 differ
#: by up to .004; one for each unit of `Truth.crest`, whose neighbours are rounded to so few levels
#: that an integer tipped over stands for more; and one of `Truth.reach`: mma.sync's scores start
#: from 1.5 * 2^23 units, and its product with the unit is rounded to half a unit.
TO_EMULATION = (0.02, 0.002, 2.0**-19)

#: What quantisation explains of the emulation's error: a part that every input has; one for each
#: unit of `Truth.reach` and of `Truth.crest`, which INT8 rounds to 1/127; and some errors of 16-bit
#: attention.
EXPLAINED = {"row": (0.08, 0.016, 0.008, 3), "block": (0.3, 0.016, 0.016, 3)}
#: A token may have so many times what the whole tensor may; beyond such a crest, whose neighbours
#: are rounded away beside it, more in proportion.
EXPLAINED_ROW = (6, 8)
#: Gradients, which delta enters, have so much more for each unit of `Truth.uneven`.
EXPLAINED_UNEVEN = 1 / 8
#: The same of lse, for which nothing but scores is rounded.
EXPLAINED_LSE = (2e-3, 0.014)
#: Results this small lie below what a type holds, or what kernels tell from zero.
LEAST = {torch.bfloat16: 2.0**-116, torch.float16: 2.0**-20}

#: Errors are listed beyond this, and this many times those of 16-bit attention.
LARGE = (0.05, 16)


def judge(
    found: dict[str, Tensor], expected: dict[str, Tensor], truth: Truth, granularity: str = "row"
) -> dict:
    """Per tensor the errors of kernels and emulation, what is wrong, and what is listed."""
    wrong, figures, large = [], {}, []
    floor, of_reach, of_crest, of_sixteen = EXPLAINED[granularity]
    explained_row = EXPLAINED_ROW[0] * max(1.0, truth.crest / EXPLAINED_ROW[1])
    least = LEAST[truth.dtype]
    sees = {"O": truth.sees, "dQ": truth.sees, "dK": truth.is_seen, "dV": truth.is_seen}
    for name, reference in truth.exact.items():
        if name not in found:
            continue
        given = (found[name], expected[name], truth.sixteen[name])
        results = torch.stack([x.double() for x in given])
        # Where a number leaves the type, there is nothing to compare.
        left = reference.abs() > 0.9 * torch.finfo(truth.dtype).max
        results = results.masked_fill(left, 0)
        reference, scale = (x.masked_fill(left, 0) for x in (reference, truth.scale[name]))
        errors, rows = _errors(results, reference, scale, least)
        blind = name in sees and found[name].masked_fill(sees[name].unsqueeze(-1), 0).any()
        numbers = torch.stack([*errors, *rows, torch.as_tensor(blind, device=rows.device)])
        kernels, emulation, of_16, apart, row, row_emulation, _, blind = numbers.tolist()
        if not math.isfinite(kernels):
            wrong.append(f"{name}: {int((~torch.isfinite(results[0])).sum())} elements not finite")
            continue
        if not math.isfinite(emulation):
            wrong.append(f"{name}: the emulation is not finite")
            continue
        if blind:
            wrong.append(f"{name}: not zero where nothing is seen")
        explained = floor + of_reach * truth.reach + of_crest * truth.crest
        explained += of_sixteen * of_16 if math.isfinite(of_16) else 0
        explained *= 1 + EXPLAINED_UNEVEN * truth.uneven if name in ("dQ", "dK", "dSink") else 1
        figures[name] = {"kernels": kernels, "emulation": emulation, "sixteen_bit": of_16,
                         "worst_row": row, "worst_row_emulation": row_emulation,
                         "kernels_to_emulation": apart, "explained": explained}  # fmt: skip
        rounding = TO_EMULATION[2] * truth.reach
        if not kernels <= WHOLE[0] * emulation + WHOLE[1] + rounding:
            wrong.append(f"{name}: error {kernels:.4f}, emulation {emulation:.4f}")
        # Under a softmax scale of 0 probabilities are ties, which both may round to either side.
        tied = WHOLE[0] * (kernels + emulation) if truth.reach == 0 else 0
        if not apart <= TO_EMULATION[0] + TO_EMULATION[1] * truth.crest + rounding + tied:
            wrong.append(f"{name}: {apart:.4f} off the emulation")
        if not row <= ROW[0] * row_emulation + ROW[1]:
            wrong.append(f"{name}: a row's error {row:.4f}, emulation's worst {row_emulation:.4f}")
        if not emulation <= explained:
            wrong.append(f"{name}: the emulation's error {emulation:.4f}, "
                         f"explained {explained:.4f}")
        elif not row_emulation <= explained * explained_row:
            wrong.append(f"{name}: the emulation's worst row {row_emulation:.4f}, "
                         f"explained {explained * explained_row:.4f}")
        if kernels > LARGE[0] and not kernels <= LARGE[1] * of_16:
            large.append({"tensor": name, "error": kernels, "sixteen_bit": of_16})
    wrong += _judge_lse(found["lse"], expected["lse"], truth, figures)
    return {"wrong": wrong, "figures": figures, "large": large}


def _judge_lse(found: Tensor, expected: Tensor, truth: Truth, figures: dict) -> list[str]:
    seen = truth.lse > -torch.inf
    both = torch.stack([found, expected]).double()
    right = ((both > -torch.inf) == seen).flatten(1).all(1) & ~both.isnan().flatten(1).any(1)
    errors = (both - truth.lse).abs().masked_fill(~seen, 0).flatten(1)
    errors = errors.amax(1) if seen.numel() else errors.sum(1)
    *right, kernels, emulation = torch.cat([right, errors]).tolist()
    for whose, is_right in zip(("", "the emulation's "), right):
        if not is_right:
            return [f"lse: {whose}not -inf just where no key is visible"]
    explained = EXPLAINED_LSE[0] + EXPLAINED_LSE[1] * truth.reach
    figures["lse"] = {"kernels": kernels, "emulation": emulation, "explained": explained}
    wrong = []
    if not kernels <= LSE[0] * emulation + LSE[1]:
        wrong.append(f"lse: off by {kernels:.4f}, emulation by {emulation:.4f}")
    if not emulation <= explained:
        wrong.append(f"lse: the emulation is off by {emulation:.4f}, explained {explained:.4f}")
    return wrong


def _errors(
    results: Tensor, reference: Tensor, scale: Tensor, least: float
) -> tuple[Tensor, Tensor]:
    """Relative errors of the whole of each of three results, and the first's from the second; and
    of the worst token of each.

    A token's is relative to its scale plus that of its head's mean token. The second term is for
    tokens that hardly matter, such as the last keys under a causal mask: their neighbours' maxima
    set the quantisation step.
    """
    errors = results - reference
    together = torch.cat([errors, (results[0] - results[1])[None]]).flatten(1).norm(dim=1)
    whole = together / (scale.norm() + least * max(1, scale.numel()) ** 0.5)
    if not scale.numel():
        return whole, whole[:3]
    rows, scales = errors.norm(dim=-1), scale.norm(dim=-1)
    typical = scales.square().mean(-1, keepdim=True).sqrt()
    rows = rows / (scales + typical + least * scale.shape[-1] ** 0.5)
    return whole, rows.reshape(3, -1).amax(1)
