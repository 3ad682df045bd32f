"""Sparse, masked and linear attention and their gradients in FP64, for bench/sparse.py and
bench/balance_masks.py.

It shares no code with the package. Tensors are (heads, tokens, channels), one key head for each
query head; `listed` is bool of (heads, query blocks, key blocks).
"""

from __future__ import annotations

from collections.abc import Callable

from needs_torch import torch
from torch import Tensor

#: Elements of the largest FP64 tensor that exists at a time, unless one block of queries has more.
ELEMENTS = 1 << 25


def in_blocks(x: Tensor, size: int) -> Tensor:
    """(heads, blocks, size, channels) in FP64, with zeros behind the last token."""
    missing = -x.shape[1] % size
    return torch.nn.functional.pad(x.double(), (0, 0, 0, missing)).unflatten(1, (-1, size))


def sparse(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, listed: Tensor,
           sizes: tuple[int, int]) -> dict[str, Tensor]:  # fmt: skip
    """Computes O, dQ, dK and dV of attention to the keys of listed blocks."""
    heads, tokens, channels = q.shape
    keys = k.shape[1]
    scale = channels**-0.5
    q, dout = in_blocks(q, sizes[0]), in_blocks(dout, sizes[0])
    k, v = in_blocks(k, sizes[1]), in_blocks(v, sizes[1])
    columns = k.shape[1]
    is_key = (torch.arange(columns * sizes[1], device=q.device) < keys).view(columns, sizes[1])
    width = int(listed.sum(-1).max())
    order = listed.int().argsort(dim=-1, descending=True, stable=True)[..., :width]
    counts = listed.gather(-1, order)
    out, dq = torch.zeros_like(q), torch.zeros_like(q)
    dk, dv = (torch.zeros_like(x).flatten(0, 1).flatten(1) for x in (k, v))
    head = torch.arange(heads, device=q.device).view(-1, 1, 1)
    largest = heads * width * sizes[1] * max(sizes[0], channels)
    step = max(1, ELEMENTS // max(1, largest))
    for first in range(0, q.shape[1] if width else 0, step):
        rows = slice(first, first + step)
        block = order[:, rows]
        seen = (counts[:, rows, :, None] & is_key[block]).flatten(2).unsqueeze(2)
        k_rows, v_rows = (x[head, block].flatten(2, 3) for x in (k, v))
        scores = (q[:, rows] @ k_rows.mT * scale).masked_fill_(~seen, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        p = scores.sub_(top.masked_fill(top == -torch.inf, 0)).exp_()
        total = p.sum(-1, keepdim=True)
        p /= total.masked_fill(total == 0, 1)
        out[:, rows] = p @ v_rows
        do = dout[:, rows]
        delta = (do * out[:, rows]).sum(-1, keepdim=True)
        ds = (do @ v_rows.mT).sub_(delta).mul_(p)
        dq[:, rows] = scale * (ds @ k_rows)
        place = (head * columns + block).flatten()
        for to, found in ((dk, scale * (ds.mT @ q[:, rows])), (dv, p.mT @ do)):
            to.index_add_(0, place, found.reshape(place.numel(), -1))
    of_q = (x.flatten(1, 2)[:, :tokens] for x in (out, dq))
    of_k = (x.view(heads, -1, channels)[:, :keys] for x in (dk, dv))
    return dict(zip(("O", "dQ", "dK", "dV"), (*of_q, *of_k)))


def masked(q: Tensor, k: Tensor, v: Tensor, dout: Tensor,
           seen: Callable[[int, int], Tensor]) -> dict[str, Tensor]:  # fmt: skip
    """Computes O, dQ, dK and dV where `seen(first, end)` says which keys each of those queries
    sees, some key at least."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    scale = q.shape[2] ** -0.5
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    step = max(1, ELEMENTS // (q.shape[0] * k.shape[1]))
    for first in range(0, q.shape[1], step):
        rows = slice(first, first + step)
        scores = q[:, rows] @ k.mT * scale
        p = scores.masked_fill_(~seen(first, first + step), -torch.inf).softmax(-1)
        out[:, rows] = p @ v
        do = dout[:, rows]
        delta = (do * out[:, rows]).sum(-1, keepdim=True)
        ds = (do @ v.mT).sub_(delta).mul_(p)
        dq[:, rows] = scale * (ds @ k)
        dk += scale * (ds.mT @ q[:, rows])
        dv += p.mT @ do
    return {"O": out, "dQ": dq, "dK": dk, "dV": dv}


def linear(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, listed: Tensor,
           sizes: tuple[int, int]) -> dict[str, Tensor]:  # fmt: skip
    """Computes O, dQ, dK and dV of linear attention to the keys of blocks that are not listed. The
    feature map is the softmax over channels, of queries, and of keys without the mean of all keys.
    """
    with torch.enable_grad():
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        features = in_blocks(leaves[0].softmax(-1), sizes[0])
        of_keys = in_blocks((leaves[1] - leaves[1].mean(1, keepdim=True)).softmax(-1), sizes[1])
        left = (~listed).double()
        states = (of_keys.mT @ in_blocks(leaves[2], sizes[1])).flatten(2)
        sums = (left @ states).unflatten(2, (q.shape[2], v.shape[2]))
        norms = features @ (left @ of_keys.sum(2)).unsqueeze(-1)
        out = features @ sums / norms.masked_fill(norms == 0, 1)
        out = out.flatten(1, 2)[:, : q.shape[1]]
        gradients = torch.autograd.grad(out, leaves, dout.double())
    return dict(zip(("O", "dQ", "dK", "dV"), (out.detach(), *gradients)))


def mixed(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, listed: Tensor, sizes: tuple[int, int],
          alpha: Tensor) -> dict[str, Tensor]:  # fmt: skip
    """Computes O, dQ, dK and dV of alpha times sparse attention plus 1 - alpha times linear
    attention, in rows that have both. `alpha` is (heads, query blocks)."""
    alpha = alpha.detach().double().masked_fill(listed.all(-1), 1)
    alpha = alpha.masked_fill(~listed.any(-1), 0)
    rows = alpha.repeat_interleave(sizes[0], 1)[:, : q.shape[1], None]
    dout = dout.double()
    exact = sparse(q, k, v, rows * dout, listed, sizes)
    rest = linear(q, k, v, (1 - rows) * dout, listed, sizes)
    exact["O"], rest["O"] = rows * exact["O"], (1 - rows) * rest["O"]
    return {name: exact[name] + rest[name] for name in exact}
