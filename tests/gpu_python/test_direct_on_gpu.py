"""Calls whose form is known, which go straight to the kernels."""

import pytest
from inputs import equal, gradients, leaves, torch
from torch.autograd import forward_ad

import sagebwd
from sagebwd.core import direct


def test_later_calls_of_a_form_give_the_same_bits():
    """The first call goes by the operators, those after it straight to the kernels."""
    (q, k, v), dout = leaves(300, 200)
    fresh = [t.detach() for t in (q, k, v)]
    out, lse = sagebwd.attention_forward(*fresh)
    expected = (out, lse, *sagebwd.attention_backward(dout, *fresh, out, lse))
    assert direct.attention(*fresh) is not None
    for with_lse in (False, True):
        got = sagebwd.attention(q, k, v, return_lse=with_lse)
        out, lse = got if with_lse else (got, expected[1])
        assert equal((out, lse, *torch.autograd.grad(out, (q, k, v), dout)), expected)
        got = sagebwd.attention(*fresh, return_lse=with_lse)
        out, lse = got if with_lse else (got, expected[1])
        assert equal((out, lse), expected)
    with pytest.raises(sagebwd.SpecError, match="one dtype"):
        sagebwd.attention(q, k.half(), v)


def test_calls_of_a_form_follow_the_current_stream():
    (q, k, v), dout = leaves(512)
    expected = [sagebwd.attention(q, k, v), *gradients((q, k, v), dout)]
    sources = [t.detach() for t in (q, k, v)]
    torch.cuda.synchronize()
    sides = [torch.cuda.Stream() for _ in range(2)]
    for side in sides * 2:
        with torch.cuda.stream(side):
            buffers = [torch.zeros_like(t) for t in sources]
            torch.cuda._sleep(600_000_000)  # on a busy CPU, too, inputs arrive after the launches
            for to, source in zip(buffers, sources):
                to.copy_(source)
            inputs = [t.requires_grad_() for t in buffers]
            out = sagebwd.attention(*inputs)
            got = [out, *torch.autograd.grad(out, inputs, dout)]
        assert not side.query(), "a call waited for the device"
        side.synchronize()
        assert equal(got, expected)


def test_tangents_are_refused():
    (q, k, v), _ = leaves(64)
    sagebwd.attention(q, k, v)
    for grad in (False, True):
        q, k, v = (t.detach().requires_grad_(grad) for t in (q, k, v))
        tangent = torch.ones_like(q)
        with pytest.raises(sagebwd.SpecError, match=r"carries a tangent.*only reverse mode"):
            torch.func.jvp(lambda q, k=k, v=v: sagebwd.attention(q, k, v), (q,), (tangent,))
        with forward_ad.dual_level(), pytest.raises(sagebwd.SpecError, match="carries a tangent"):
            sagebwd.attention(forward_ad.make_dual(q, tangent), k, v)
