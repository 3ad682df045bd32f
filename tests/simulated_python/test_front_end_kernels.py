"""The kernels' functions take norm, RoPE and gate as arguments: on a simulated GPU."""

import functools

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mixed import on_the_simulator  # noqa: E402, F401

LENGTHS = (40, 0, 90)
MASK = torch.tensor([[True, False, True], [False, True, True]])[None, None]


def tensors(layout="bhsd"):
    """q, k, v, a gate and dout, of 2 heads on 1 and 130 tokens of 64 channels."""
    made = [drawn(1, heads, 130, 64, seed=s, dtype=torch.bfloat16) + 0.3
            for s, heads in enumerate((2, 1, 1, 2, 2))]  # fmt: skip
    return [t.transpose(1, 2).contiguous() if layout == "bshd" else t for t in made]


def front(tokens=130):
    angles = 2 * drawn(tokens, 32, seed=7, dtype=torch.float32)
    gain = 1 + 0.2 * drawn(64, seed=8, dtype=torch.float32)
    return dict(q_norm=gain, k_norm=True, rope=(angles.cos(), angles.sin()))


def with_gradients(function, q, k, v, gate, dout):
    leaves = [t.detach().requires_grad_() for t in (q, k, v, gate)]
    out = function(*leaves)
    return out, *torch.autograd.grad(out, leaves, dout)


def in_steps(attend, given, layout, q, k, v, gate):
    """It computes the same by `qk_norm_rope`, and PyTorch's sigmoid in FP32."""
    out = attend(*sagebwd.qk_norm_rope(q, k, layout=layout, **given), v, layout=layout)
    return (out.float() * gate.float().sigmoid()).to(out.dtype)


ATTENDS = {
    "all keys": functools.partial(sagebwd.attention, causal=True),
    "listed blocks": functools.partial(sagebwd.block_sparse_attention, block_mask=MASK),
}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", ATTENDS)
def test_it_is_one_step_after_the_other(on_the_simulator, name, layout):  # noqa: F811
    attend, given = ATTENDS[name], front()
    *leaves, gate, dout = tensors(layout)
    found = with_gradients(
        lambda q, k, v, gate: attend(q, k, v, gate=gate, layout=layout, **given), *leaves, gate, dout
    )
    wanted = with_gradients(functools.partial(in_steps, attend, given, layout), *leaves, gate, dout)
    for x, y in zip(found[:-1], wanted[:-1]):
        assert torch.equal(x, y) and x.isfinite().all() and x.any()
    # PyTorch rounds the output's gradient in another place.
    torch.testing.assert_close(found[-1], wanted[-1], atol=1e-3, rtol=2.0**-6)


def test_a_packed_sequence_is_as_if_alone(on_the_simulator):  # noqa: F811
    q, k, v, gate, dout = (t[0] for t in tensors("bshd"))
    given, firsts = front(), torch.tensor([0, 40, 40, 130], dtype=torch.int32)
    inv_rms = 1 + 0.1 * drawn(2, 130, seed=9, dtype=torch.float32)

    def packed(q, k, v, gate):
        return sagebwd.attention(q, k, v, cu_seqlens_q=firsts, cu_seqlens_k=firsts, gate=gate,
                                 q_inv_rms=inv_rms, **given)  # fmt: skip

    found = with_gradients(packed, q, k, v, gate, dout)
    for first, end in ((0, 40), (40, 130)):
        own = slice(first, end)
        of_own = {**given, "rope": tuple(t[own] for t in given["rope"])}

        def alone(q, k, v, gate, own=own, of_own=of_own):
            return sagebwd.attention(q, k, v, gate=gate, layout="bshd",
                                     q_inv_rms=inv_rms[None, :, own], **of_own)  # fmt: skip

        wanted = with_gradients(alone, *(t[None, own] for t in (q, k, v, gate, dout)))
        assert all(torch.equal(x[own], y[0]) and y.any() for x, y in zip(found, wanted))


def test_errors_are_of_the_arguments(on_the_simulator):  # noqa: F811
    q, k, v, gate, _ = (t[0] for t in tensors("bshd"))
    firsts = torch.tensor([0, 40, 130], dtype=torch.int32)
    with pytest.raises(sagebwd.SpecError, match=r"rope's cos has shape \(90, 32\): pass \(130,"):
        sagebwd.attention(q, k, v, cu_seqlens_q=firsts, cu_seqlens_k=firsts, **front(90))
    with pytest.raises(sagebwd.SpecError, match=r"gate has shape \(1, 130, 2, 64\) and out"):
        sagebwd.attention(q, k, v, cu_seqlens_q=firsts, cu_seqlens_k=firsts, gate=gate[None])
