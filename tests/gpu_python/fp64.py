"""Attention in FP64 by PyTorch's autograd: what the kernels are measured against."""

import math

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

NAMES = ("out", "lse", "dq", "dk", "dv")


def make(m=256, n=None, *, b=2, h=4, hk=2, d=64, dtype=torch.bfloat16, sigma=1.0, seed=0,
         layout="bhsd"):  # fmt: skip
    """(q, k, v, dout) on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(heads, length, scale):
        shape = (b, heads, length, d) if layout == "bhsd" else (b, length, heads, d)
        return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)

    n = m if n is None else n
    return randn(h, m, sigma), randn(hk, n, sigma), randn(hk, n, 1.0), randn(h, m, 1.0)


def visible(causal, m, n):
    """A boolean (M, N) matrix."""
    i, j = torch.arange(m, device="cuda")[:, None], torch.arange(n, device="cuda")
    if not causal or causal == "none":
        return torch.ones(m, n, dtype=torch.bool, device="cuda")
    return j <= i + (n - m if causal == "bottom-right" else 0)


def exact(q, k, v, dout, dlse=None, causal=False, softmax_scale=None, layout="bhsd"):
    """{'out', 'lse', 'dq', 'dk', 'dv'} in float64."""
    swap = (lambda t: t.transpose(1, 2)) if layout == "bshd" else lambda t: t
    q, k, v = (swap(t).detach().double().requires_grad_() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scale = softmax_scale or 1 / math.sqrt(q.shape[3])
    scores = scale * q @ k.repeat_interleave(group, 1).mT
    mask = visible(causal, q.shape[2], k.shape[2])
    seen = mask.any(-1, keepdim=True)
    scores = scores.masked_fill(~mask & seen, -torch.inf)
    out = torch.where(seen, torch.softmax(scores, -1) @ v.repeat_interleave(group, 1), 0)
    lse = torch.where(seen[:, 0], scores.logsumexp(-1), -torch.inf)
    loss = (out * swap(dout).double()).sum()
    if dlse is not None:
        loss = loss + torch.where(seen[:, 0], lse * dlse, 0).sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    return {"out": swap(out).detach(), "lse": lse.detach(), "dq": swap(dq), "dk": swap(dk),
            "dv": swap(dv)}  # fmt: skip


def relative(x, expected):
    """||x - expected|| / ||expected|| over finite numbers, which must be at the same places."""
    x, expected = x.double(), expected.double()
    finite = expected.isfinite()
    assert torch.equal(finite, x.isfinite())
    return float((x - expected)[finite].norm() / expected[finite].norm())
