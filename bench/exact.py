"""Exact attention in FP64 on any device, a few heads at a time, so that memory stays bounded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: What the FP64 matrices of (heads x M x N) may take together.
BUDGET_BYTES = 4 << 30
LIVE_MATRICES = 6


@dataclass
class Attended:
    """(B, H, M, D) out and dq, (B, H, M) lse, (B, Hk, N, D) dk and dv."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def named(self) -> dict[str, Tensor]:
        return {"O": self.out, "dQ": self.dq, "dK": self.dk, "dV": self.dv}


def visible(causal: str, seq_q: int, seq_kv: int, device) -> Tensor | None:
    """(M, N) of whether a query sees a key; None where all do."""
    if causal == "none":
        return None
    offset = {"top-left": 0, "bottom-right": seq_kv - seq_q}[causal]
    query = torch.arange(seq_q, device=device)[:, None]
    return torch.arange(seq_kv, device=device) <= query + offset


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: str = "none",
    softmax_scale: float | None = None, dlse: Tensor | None = None,
) -> tuple[Attended, Attended]:
    """The exact results, and beside each element its scale: the root of the sum of the squares of
    the terms that it sums. Independent relative errors e of the terms give it an error of e times
    that, also where the terms cancel: the yardstick where a result itself is (nearly) zero.

    A query that sees no key has out = 0, lse = -inf and zero gradients.
    """
    batch, heads, seq_q, head_dim = q.shape
    heads_kv, seq_kv = k.shape[1:3]
    tau = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    mask = visible(causal, seq_q, seq_kv, q.device)

    def per_head(x: Tensor, repeat: int = 1) -> Tensor:
        return x.repeat_interleave(repeat, dim=1).flatten(0, 1)

    group = heads // heads_kv
    operands = [per_head(q), per_head(k, group), per_head(v, group), per_head(dout)]
    operands.append(per_head(torch.zeros_like(q[..., 0]) if dlse is None else dlse))
    at_once = max(1, BUDGET_BYTES // (8 * seq_q * seq_kv * LIVE_MATRICES))
    parts = [
        _heads(*(x.double() for x in part), mask, tau)
        for part in zip(*(x.split(at_once) for x in operands))
    ]

    def gathered(index: int, which: int, kv: bool = False, root: bool = False) -> Tensor:
        x = torch.cat([part[which][index] for part in parts]).unflatten(0, (batch, heads))
        x = x.unflatten(1, (heads_kv, group)).sum(2) if kv else x
        return x.sqrt() if root else x

    results = [
        Attended(
            gathered(0, which, root=which == 1),
            gathered(1, 0),
            gathered(2, which, root=which == 1),
            gathered(3, which, True, which == 1),
            gathered(4, which, True, which == 1),
        )
        for which in (0, 1)
    ]
    return results[0], results[1]


def _heads(q, k, v, dout, dlse, mask, tau) -> tuple[tuple, tuple]:
    """Of (heads, M or N, D): the results, and the squares of their scales."""
    s = (q @ k.mT).mul_(tau)
    if mask is not None:
        s.masked_fill_(~mask, -math.inf)
    lse = s.logsumexp(dim=-1)
    seen = lse > -math.inf
    # Rows without a visible key must not meet exp(-inf + inf).
    p = s.sub_(torch.where(seen, lse, 0.0)[..., None]).exp_()
    out = p @ v
    delta = (dout * out).sum(-1) - dlse
    dp = dout @ v.mT
    ds = p * (dp - delta[..., None])
    results = (out, lse, tau * (ds @ k), tau * (ds.mT @ q), p.mT @ dout)
    terms = dp.square_().add_(delta.square()[..., None]).mul_(p).mul_(p)
    p.square_()
    scales = (
        p @ v.square(), lse,
        tau**2 * (terms @ k.square()), tau**2 * (terms.mT @ q.square()), p.mT @ dout.square(),
    )
    return results, scales
