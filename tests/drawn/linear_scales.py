"""Computes sizes that rounding errors of a linear branch are relative to, for sla_cases.py.

Gradients are small differences where features are nearly equal, or where values are. So each is
compared with the size of the terms that it is the sum of. No code of the package is used.
"""

from __future__ import annotations

from frame import torch
from sparse_exact import in_blocks
from torch import Tensor


def linear_scales(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, left: Tensor, sizes: tuple[int, int],
    smooth_k: bool,
) -> dict[str, Tensor]:
    """Computes the sizes for each element of Ol, dQ, dK and dV. `left`: the blocks that the branch
    sees, (batch, heads, blocks of queries, of keys); `dout`: the gradient of Ol."""
    queries, keys = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    k = k.double()
    if smooth_k:
        k = k - k.mean(2, keepdim=True)
    left = left.double()

    def blocks(x: Tensor, size: int) -> Tensor:
        x = x.repeat_interleave(q.shape[1] // x.shape[1], 1)
        return in_blocks(x.flatten(0, 1), size).unflatten(0, x.shape[:2])

    f, do = blocks(q.double().softmax(-1), sizes[0]), blocks(dout, sizes[0])
    g, v = blocks(k.softmax(-1), sizes[1]), blocks(v, sizes[1])

    def summed(x: Tensor, along: Tensor) -> Tensor:
        return (along @ x.flatten(3)).unflatten(3, x.shape[3:])

    def size_of(products: Tensor, squares: Tensor, along: Tensor) -> Tensor:
        """Adds the size of a sum over blocks and that of its terms."""
        return summed(products, along).abs() + summed(squares, along).sqrt()

    h = size_of(g.mT @ v, g.square().mT @ v.square(), left)
    z = summed(g.sum(3), left)
    total = f @ z.unsqueeze(-1)
    w = f / total.masked_fill(total == 0, torch.inf)
    out = w @ summed(g.mT @ v, left)
    inner = (do * out).sum(-1, keepdim=True)
    of_f = (do.square() @ h.square().mT).sqrt() + inner.abs() * z.unsqueeze(3)
    of_f = of_f / total.masked_fill(total == 0, torch.inf)
    a = size_of(w.mT @ do, w.square().mT @ do.square(), left.mT)
    y = size_of((w * inner).sum(3), (w * inner).square().sum(3), left.mT)
    of_g = (v.square() @ a.square().mT).sqrt() + y.unsqueeze(3)

    def through_softmax(p: Tensor, dp: Tensor) -> Tensor:
        return p * (dp + (p * dp).sum(-1, keepdim=True))

    def tokens(x: Tensor, count: int) -> Tensor:
        return x.flatten(2, 3)[:, :, :count]

    def of_keys(x: Tensor) -> Tensor:
        return tokens(x, keys).unflatten(1, (-1, group)).sum(2)

    dk = of_keys(through_softmax(g, of_g))
    if smooth_k:
        dk = dk + dk.mean(2, keepdim=True)
    # Features are positive, and where they are alike so are the errors of all channels.
    return {"Ol": tokens(w @ h, queries),
            "dQ": tokens(through_softmax(f, of_f), queries), "dK": dk,
            "dV": of_keys(g @ a)}  # fmt: skip
