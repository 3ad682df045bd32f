"""smooth_v=True, on a simulated GPU: values with a mean no longer make out too small."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mixed import on_the_simulator  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("on_the_simulator")

TOKENS = 200


def made(d=64, mean=2.0, dtype=torch.bfloat16):
    """q, k, v and dout; each channel of the values has a mean, as have those of dout."""
    shapes = [(2, 4, TOKENS, d), (2, 2, TOKENS, d), (2, 2, TOKENS, d), (2, 4, TOKENS, d)]
    q, k, v, dout = (drawn(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes))
    q *= 3  # so that most of P is below half a level
    v += mean * drawn(1, 2, 1, d, seed=7, dtype=torch.float32)
    dout += drawn(1, 4, 1, d, seed=8, dtype=torch.float32)
    return [t.to(dtype).requires_grad_() for t in (q, k, v)], dout.to(dtype)


def below():
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def listed():
    blocks = torch.zeros(1, 1, 2, 4, dtype=torch.bool)
    blocks[..., 0, 1] = blocks[..., 1, 0] = blocks[..., 1, 3] = True
    return blocks


def exact(q, k, v, seen=None):
    """Attention in FP64, and zeros where a query sees nothing."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ v


#: By name: keywords, and which keys a query sees.
CALLS = {
    "dense": ({}, None),
    "causal": ({"causal": True}, below),
    "block": ({"granularity": "block"}, None),
    "16-bit scores": ({"precision": "qk16", "causal": True}, below),
    "no sink": ({"sink_keys": 0}, None),
    "mask": ({"mask": "q + k < 150"},
             lambda: torch.arange(TOKENS)[:, None] + torch.arange(TOKENS) < 150),
    "lists": ({"block_mask": listed(), "block_size": (128, 64)},
              lambda: listed()[0, 0].repeat_interleave(128, 0).repeat_interleave(64, 1)[
                  :TOKENS, :TOKENS]),
}  # fmt: skip


def of_call(told, emulated=False):
    if "block_mask" in told:
        return (sagebwd.emulation.emulated_block_sparse_attention if emulated
                else sagebwd.block_sparse_attention)  # fmt: skip
    return sagebwd.emulation.emulated_attention if emulated else sagebwd.attention


def error(x, ref):
    return float((x.double() - ref).norm() / ref.norm())


def bias(x, ref):
    """How much too large x is, along what is right."""
    return float(((x.double() - ref) * ref).sum() / ref.square().sum())


@pytest.mark.parametrize("name", CALLS)
def test_outputs_have_no_bias(name):
    told, seen = CALLS[name]
    seen = seen and seen()
    (q, k, v), _ = made()
    ref = exact(q.detach(), k.detach(), v.detach(), seen)
    attend = of_call(told)
    plain, smoothed = (attend(q, k, v, smooth_v=smooth, **told).detach()
                       for smooth in (False, True))  # fmt: skip
    assert bias(plain, ref) < -1e-3 and abs(bias(smoothed, ref)) < 2e-4
    assert error(smoothed, ref) < 0.9 * error(plain, ref)
    emulated = of_call(told, emulated=True)(q, k, v, smooth_v=True, **told).detach()
    assert error(smoothed, emulated.double()) < 3e-3
    if seen is not None:
        assert not smoothed.transpose(1, 2)[:, ~seen.any(-1)].any()


def test_gradients_are_nearer():
    (q, k, v), dout = made(80)
    wanted = torch.autograd.grad(exact(q, k, v, below()), (q, k, v), dout.double())
    far = {}
    for smooth in (False, True):
        out = sagebwd.attention(q, k, v, causal=True, smooth_v=smooth)
        found = torch.autograd.grad(out, (q, k, v), dout)
        far[smooth] = [error(x, ref) for x, ref in zip(found, wanted)]
    assert far[True][0] < 0.8 * far[False][0]  # dQ
    assert all(smoothed < 1.05 * plain for smoothed, plain in zip(far[True], far[False]))


def test_the_sparse_branch_of_sla2():
    (q, k, v), _ = made()
    lists = {"block_mask": listed(), "block_size": (128, 64)}
    ref = exact(q.detach(), k.detach(), v.detach(), CALLS["lists"][1]())
    plain, smoothed = (
        sagebwd.sparse_linear_attention(q, k, v, alpha=1.0, smooth_v=smooth, **lists).detach()
        for smooth in (False, True))  # fmt: skip
    assert bias(plain, ref) < -1e-3 and abs(bias(smoothed, ref)) < 2e-4


def test_packed_sequences_have_means_of_their_own():
    (q, k, v), _ = made()
    starts = torch.tensor([0, 70, 70, TOKENS], dtype=torch.int32)
    packed = [t.detach()[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    out = sagebwd.attention(*packed, cu_seqlens_q=starts, cu_seqlens_k=starts, smooth_v=True)
    for first, end in ((0, 70), (70, TOKENS)):
        alone = [t[first:end].transpose(0, 1)[None].contiguous() for t in packed]
        expected = sagebwd.attention(*alone, smooth_v=True)[0].transpose(0, 1)
        assert torch.equal(out[first:end], expected)


def test_a_value_that_is_not_finite_stays_in_its_channel():
    (q, k, v), _ = made()
    with torch.no_grad():
        v[0, 0, 8, 3] = torch.inf
    out = sagebwd.attention(q, k, v, smooth_v=True)
    assert not out[0, :2, :, 3].isfinite().any()
    assert torch.equal(out.isfinite(), sagebwd.attention(q, k, v).isfinite())


def test_one_key_is_that_value():
    (q, k, v), _ = made()
    out = sagebwd.attention(q[:, :, :5], k[:, :, :1], v[:, :, :1], smooth_v=True)
    assert error(out, v[:, :, :1].double().repeat_interleave(2, 1).expand_as(out)) < 1e-2
