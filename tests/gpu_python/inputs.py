"""Inputs on the GPU, what computes gradients, and how far results are apart."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from errors import emulated, kernels  # noqa: E402, F401

import sagebwd  # noqa: E402

#: Relative L2 to the emulation, as kEmulationLimit of tests/gpu/operation.h, which says why.
EMULATION_LIMIT = 3e-3
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


def leaves(*args, **kwargs):
    """make(), as ((q, k, v), dout): what gradients are of."""
    *inputs, dout = make(*args, **kwargs)
    return [t.requires_grad_() for t in inputs], dout


def gradients(inputs, dout, **options):
    return torch.autograd.grad(sagebwd.attention(*inputs, **options), inputs, dout)


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second))


def relative(x, expected):
    """||x - expected|| / ||expected|| over finite numbers, which must be at the same places."""
    x, expected = x.double(), expected.double()
    finite = expected.isfinite()
    assert torch.equal(finite, x.isfinite())
    return float((x - expected)[finite].norm() / expected[finite].norm())


def listed(heads, queries, keys, sizes):
    """Lists of which the first is empty and the second full."""
    generator = torch.Generator("cuda").manual_seed(2)
    shape = 2, heads, -(-queries // sizes[0]), -(-keys // sizes[1])
    mask = torch.rand(shape, generator=generator, device="cuda") < 0.3
    mask[..., 0, :], mask[..., 1, :] = False, True
    return mask
