"""Finds what is wrong with the results of a drawn case, and what is merely far from exact.

A result is wrong if

- an element is not finite, or is not zero where nothing can be seen: out and dq of a query that
  sees no key, dk and dv of a key that no query sees, and all of tokens that do not count;
- its error differs from that of the emulation of the same spec on the same inputs by more than the
  margins below, over the whole tensor in either direction, or is larger in its worst token;
- it is far from the emulation, which computes gradients from the out and lse of the kernels;
- the emulation itself is farther from FP64 than quantisation explains. The emulation shares no code
  with FP64 here, not even the mask (oracle.py).

A right result may still be far from exact, by design. Errors beyond a stated factor of 16-bit
attention's are listed, with their case, so that they do not pass unseen.
"""

from __future__ import annotations

import math

from frame import torch
from oracle import Truth
from torch import Tensor

#: Kernels and emulation differ by FP32 rounding, by integers that it rounds the other way, and a
#: little by the rounding of outputs (2^-9 for bf16). Neither is much more exact than the other.
WHOLE = (1.1, 0.01)
ROW = (1.5, 0.05)
LSE = (1.5, 2e-3)
#: The largest distance between them. One part holds for every input, because the emulation in FP64
#: and in FP32 differ by up to 0.004. The other grows with the error: if the error is large, few
#: probabilities decide.
TO_EMULATION = (0.02, 0.05)
#: All of these are wider by so much for each unit of `Truth.reach`: scores are rounded to FP32, and
#: those of mma.sync start from 1.5 * 2^23 units, whose product with the unit is rounded once more.
OF_REACH = 2.0**-19
#: This share of the rows does not count in the distance. If all keys are equal, every element of a
#: row is the same tie. The check of the worst row sees an error in a few rows.
TIPPED_OVER = 0.01

#: Quantisation explains so much of the emulation's error, over the whole tensor and in the worst
#: row: the first factor times the error of rough.py, plus the second times that of 16-bit
#: attention, plus the third number. The factors were set on the cases of seeds 0 to 5.
EXPLAINED = (8, 3, 0.02)
EXPLAINED_ROW = (12, 3, 0.1)
#: For lse it explains the factor times the error of rough.py, plus the number.
EXPLAINED_LSE = (3, 2e-3)
#: Results this small lie below what a type holds, or what kernels tell from zero.
LEAST = {torch.bfloat16: 2.0**-116, torch.float16: 2.0**-20}

#: Errors are listed if they exceed this, and this multiple of those of 16-bit attention.
LARGE = (0.05, 16)


def judge(found: dict[str, Tensor], expected: dict[str, Tensor], truth: Truth) -> dict:
    """Per tensor the errors of kernels and emulation, what is wrong, and what is listed."""
    wrong, figures, large = [], {}, []
    least = LEAST[truth.dtype]
    sees = {"O": truth.sees, "dQ": truth.sees, "dK": truth.is_seen, "dV": truth.is_seen}
    for name, scale in truth.scale.items():
        if name not in found:
            continue
        given = (found[name], expected[name], truth.sixteen[name], *(x[name] for x in truth.rough))
        results = torch.stack([x.double() for x in given])
        reference = truth.exact[name]
        # Numbers that overflow the type are not compared, nor those of which an operand does: in
        # 16-bit attention, which knows nothing of the spec, and in the spec's emulation alike.
        left = reference.abs() > 0.9 * torch.finfo(truth.dtype).max
        left |= ~torch.isfinite(results[1]) & ~torch.isfinite(results[2])
        results = results.masked_fill(left, 0)
        reference, scale = (x.masked_fill(left, 0) for x in (reference, scale))
        errors, rows = errors_of(results, reference, scale, least)
        blind = name in sees and found[name].masked_fill(sees[name].unsqueeze(-1), 0).any()
        apart = distance(results[0] - results[1], scale, least)
        kernels, emulation, of_16, *rough = errors.tolist()
        row, row_emulation, row_of_16, *rough_rows = rows.tolist()
        if not math.isfinite(kernels):
            wrong.append(f"{name}: {int((~torch.isfinite(results[0])).sum())} elements not finite")
            continue
        if not math.isfinite(emulation):
            wrong.append(f"{name}: the emulation is not finite")
            continue
        if blind:
            wrong.append(f"{name}: not zero where nothing is seen")
        rounding = OF_REACH * truth.reach
        explained = _explained(EXPLAINED, rough, of_16) + rounding
        row_explained = _explained(EXPLAINED_ROW, rough_rows, row_of_16) + rounding
        figures[name] = {"kernels": kernels, "emulation": emulation, "sixteen_bit": of_16,
                         "worst_row": row, "worst_row_emulation": row_emulation,
                         "kernels_to_emulation": apart, "explained": explained,
                         "worst_row_explained": row_explained}  # fmt: skip
        less, more = sorted((kernels, emulation))
        if not more <= WHOLE[0] * less + WHOLE[1] + rounding:
            wrong.append(f"{name}: error {kernels:.4f}, emulation {emulation:.4f}")
        if not apart <= TO_EMULATION[0] + TO_EMULATION[1] * more + rounding:
            wrong.append(f"{name}: {apart:.4f} off the emulation")
        if not row <= ROW[0] * row_emulation + ROW[1]:
            wrong.append(f"{name}: a row's error {row:.4f}, emulation's worst {row_emulation:.4f}")
        if not emulation <= explained:
            wrong.append(f"{name}: the emulation's error {emulation:.4f}, "
                         f"explained {explained:.4f}")
        elif not row_emulation <= row_explained:
            wrong.append(f"{name}: the emulation's worst row {row_emulation:.4f}, "
                         f"explained {row_explained:.4f}")
        if kernels > LARGE[0] and not kernels <= LARGE[1] * of_16:
            large.append({"tensor": name, "error": kernels, "sixteen_bit": of_16})
    wrong += _judge_lse(found["lse"], expected["lse"], truth, figures)
    return {"wrong": wrong, "figures": figures, "large": large}


def _explained(margins: tuple, rough: list[float], of_16: float) -> float:
    of_rough, of_sixteen, always = margins
    found = always + of_rough * max(rough)
    return found + of_sixteen * of_16 if math.isfinite(of_16) else found


def _judge_lse(found: Tensor, expected: Tensor, truth: Truth, figures: dict) -> list[str]:
    exact = truth.exact["lse"]
    seen = exact > -torch.inf
    results = torch.stack([found, expected, *(x["lse"] for x in truth.rough)]).double()
    both = results[:2]
    right = ((both > -torch.inf) == seen).flatten(1).all(1) & ~both.isnan().flatten(1).any(1)
    errors = (results - exact).abs().masked_fill(~seen, 0).flatten(1)
    errors = errors.amax(1) if seen.numel() else errors.sum(1)
    for whose, is_right in zip(("", "the emulation's "), right.tolist()):
        if not is_right:
            return [f"lse: {whose}not -inf just where no key is visible"]
    kernels, emulation, *rough = errors.tolist()
    explained = EXPLAINED_LSE[0] * max(rough) + EXPLAINED_LSE[1] + OF_REACH * truth.reach
    figures["lse"] = {"kernels": kernels, "emulation": emulation, "explained": explained}
    wrong = []
    if not kernels <= LSE[0] * emulation + LSE[1]:
        wrong.append(f"lse: off by {kernels:.4f}, emulation by {emulation:.4f}")
    if not emulation <= explained:
        wrong.append(f"lse: the emulation is off by {emulation:.4f}, explained {explained:.4f}")
    return wrong


def errors_of(
    results: Tensor, reference: Tensor, scale: Tensor, least: float
) -> tuple[Tensor, Tensor]:
    """Relative errors of each of several results, over the whole and in its worst token.

    A token's is relative to its scale plus that of its head's mean token. The second term is for
    tokens that hardly matter, such as the last keys under a causal mask: their neighbours' maxima
    set the quantisation step.
    """
    errors = results - reference
    whole = errors.flatten(1).norm(dim=1) / _size(scale, least)
    if not scale.numel():
        return whole, whole
    rows, scales = errors.norm(dim=-1), scale.norm(dim=-1)
    typical = scales.square().mean(-1, keepdim=True).sqrt()
    rows = rows / (scales + typical + least * scale.shape[-1] ** 0.5)
    return whole, rows.reshape(len(results), -1).amax(1)


def distance(difference: Tensor, scale: Tensor, least: float) -> float:
    """The distance of two results, without the rows that were rounded the other way."""
    rows = difference.norm(dim=-1).flatten()
    rows = rows.sort().values[: len(rows) - int(TIPPED_OVER * len(rows))]
    return float(rows.norm() / _size(scale, least))


def _size(scale: Tensor, least: float) -> Tensor:
    return scale.norm() + least * max(1, scale.numel()) ** 0.5
