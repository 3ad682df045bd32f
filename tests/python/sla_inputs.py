"""Inputs of the tests of SLA2 in PyTorch: short last blocks, and lists of every kind."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

BLOCKS = (8, 4)
EXACT = dict(block_size=BLOCKS, precision="exact")


def drawn(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def inputs(heads=4, heads_kv=2, queries=21, keys=18, channels=4, batch=2, dtype=torch.float64):
    """q, k, v and dout; the last blocks are short."""
    made = ((heads, queries), (heads_kv, keys), (heads_kv, keys), (heads, queries))
    q, k, v, dout = (drawn(batch, h, n, channels, seed=s, dtype=dtype)
                     for s, (h, n) in enumerate(made))  # fmt: skip
    return [t.requires_grad_() for t in (q, k + 0.7, v)], dout


def listed(*shape):
    """Lists of which the first is empty, the second full and the third neither."""
    mask = drawn(*shape, seed=5) > 0.2
    mask[..., 0, :], mask[..., 1, :] = False, True
    mask[..., 2, 1], mask[..., 2, 2] = True, False
    return mask


def arrays(*tensors):
    return [t.detach().double().numpy() if isinstance(t, torch.Tensor) else t for t in tensors]
