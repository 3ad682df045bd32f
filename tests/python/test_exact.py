"""FP64 attention in PyTorch against autograd, and against the C++ reference."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
from sagebwd import reference  # noqa: E402
from sagebwd.core import options  # noqa: E402
from sagebwd.numerics import emulation, numerics  # noqa: E402
from sagebwd.numerics.exact import exact_attention  # noqa: E402

LENGTHS = [(5, 5), (7, 3), (3, 7)]
CAUSALS = ["none", "top-left", "bottom-right"]


def tensors(seq_q, seq_kv):
    torch.manual_seed(0)
    q, dout = (torch.randn(2, 4, seq_q, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 2, seq_kv, 8, dtype=torch.float64) for _ in range(2))
    return q, k, v, dout, torch.randn(2, 4, seq_q, dtype=torch.float64)


@pytest.mark.parametrize("causal", CAUSALS)
@pytest.mark.parametrize("seq_q, seq_kv", LENGTHS)
def test_is_autograds(causal, seq_q, seq_kv, monkeypatch):
    monkeypatch.setattr(emulation, "CHUNK_ELEMENTS", 1)  # one key head at a time
    q, k, v, dout, dlse = tensors(seq_q, seq_kv)
    found, scale = exact_attention(q, k, v, dout, dlse=dlse, causal=causal, softmax_scale=0.3,
                                   scales=True)  # fmt: skip
    for t in (q, k, v):
        t.requires_grad_()
    s = 0.3 * q @ k.repeat_interleave(2, 1).mT
    mask = numerics.visible_keys(options.Mask(causal), seq_q, seq_kv, "cpu")
    seen = torch.ones(seq_q, dtype=torch.bool)
    if mask is not None:
        seen = mask.any(-1)
        s = s.masked_fill(~mask, -math.inf)
    s = s[:, :, seen]
    out = s.softmax(-1) @ v.repeat_interleave(2, 1)
    loss = (out * dout[:, :, seen]).sum() + (s.logsumexp(-1) * dlse[:, :, seen]).sum()
    gradients = torch.autograd.grad(loss, (q, k, v))
    assert torch.allclose(found.out[:, :, seen], out)
    assert torch.allclose(found.lse[:, :, seen], s.logsumexp(-1))
    for x, y in zip((found.dq, found.dk, found.dv), gradients):
        assert torch.allclose(x, y)
    assert not found.out[:, :, ~seen].any() and (found.lse[:, :, ~seen] == -math.inf).all()
    # Noise of relative size e in every term gives about e times the scale.
    assert (scale.out[:, :, seen] > 0).all() and torch.isfinite(scale.dq).all()
    assert torch.equal(scale.lse, found.lse)


@pytest.mark.parametrize("causal", CAUSALS)
@pytest.mark.parametrize("seq_q, seq_kv", LENGTHS)
def test_is_the_references(causal, seq_q, seq_kv):
    q, k, v, dout, dlse = (t.float() for t in tensors(seq_q, seq_kv))
    expected = reference.exact(*(t.numpy() for t in (q, k, v, dout)), dlse=dlse.numpy(),
                               causal=causal, softmax_scale=0.25)  # fmt: skip
    found = exact_attention(q, k, v, dout, dlse=dlse, causal=causal, softmax_scale=0.25)
    for name, x in vars(found).items():
        assert x.dtype == torch.float64
        np.testing.assert_allclose(x, expected[name], rtol=1e-12, atol=1e-12, err_msg=name)


def test_scales_are_the_roots_of_sums_of_squares():
    """With one query dV = p dO has one term, and out sums as many as there are keys."""
    q, k, v, dout, _ = tensors(1, 3)
    found, scale = exact_attention(q, k, v, dout, scales=True)
    assert torch.allclose(scale.dv.square(), (
        found.dv.new_tensor(0) + torch.stack([
            (torch.softmax(q[:, h] @ k[:, h // 2].mT / 8**0.5, -1).mT * dout[:, h]).square()
            for h in range(4)], 1)).unflatten(1, (2, 2)).sum(2))  # fmt: skip
    assert (scale.out.square() >= found.out.square() / 3 - 1e-12).all()  # Cauchy and Schwarz


def test_layouts_agree():
    q, k, v, dout, dlse = tensors(6, 4)
    expected = exact_attention(q, k, v, dout, dlse=dlse)
    swapped = (t.transpose(1, 2) for t in (q, k, v, dout))
    found = exact_attention(*swapped, dlse=dlse, layout="bshd")
    assert torch.equal(found.lse, expected.lse)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(found, name).transpose(1, 2), getattr(expected, name))


def test_nothing_to_attend_to():
    q, k, v, dout, _ = tensors(4, 0)
    found = exact_attention(q, k, v, dout)
    assert not found.out.any() and (found.lse == -math.inf).all() and found.dk.shape == k.shape
    assert exact_attention(*(t[:0] for t in (q, k, v, dout))).dq.shape == (0, 4, 4, 8)


def test_wrong_options_are_refused():
    given = tensors(4, 4)[:4]
    for wrong in (dict(causal="up"), dict(layout="sbhd"), dict(softmax_scale=1e-21)):
        with pytest.raises(sagebwd.SpecError):
            exact_attention(*given, **wrong)
