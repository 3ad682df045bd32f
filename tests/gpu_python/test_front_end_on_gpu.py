"""Norm, RoPE and gate as arguments of attention functions, on a GPU: alone, compiled, captured,
checkpointed and under autocast."""

import functools

import front_inputs
import pytest
from inputs import torch
from torch.utils.checkpoint import checkpoint

import sagebwd

MASK = torch.tensor([[True, False, True], [False, True, True]])[None, None]
DOORS = {
    "all keys": functools.partial(sagebwd.attention, causal=True),
    "listed blocks": sagebwd.block_sparse_attention,
    "mixed": functools.partial(sagebwd.sparse_linear_attention, alpha=0.7),
}


def door(name):
    return DOORS[name] if name == "all keys" else functools.partial(
        DOORS[name], block_mask=MASK.cuda())  # fmt: skip


def tensors(dtype=torch.bfloat16):
    """[q, k, v, gate] and dout, of 4 heads on 2 and 170 tokens of 128 channels."""
    made = [(front_inputs.drawn(1, heads, 170, 128, seed=s) + 0.2).cuda().to(dtype)
            for s, heads in enumerate((4, 2, 2, 4, 4))]  # fmt: skip
    return [t.requires_grad_() for t in made[:4]], made[4]


def front():
    gains = [(1 + 0.2 * front_inputs.drawn(128, seed=s)).cuda().requires_grad_() for s in (6, 7)]
    return dict(q_norm=gains[0], k_norm=gains[1], rope=front_inputs.table(170, 64, device="cuda"))


def with_gradients(function, leaves, dout, given):
    out = function(*leaves, given)
    learned = [given["q_norm"], given["k_norm"]]
    # A graph that lives on would keep its stream, on which a capture must not wait.
    return out.detach(), *torch.autograd.grad(out, [*leaves, *learned], dout)


def call(attend, q, k, v, gate, given):
    return attend(q, k, v, gate=gate, **given)


@pytest.mark.parametrize("name", DOORS)
def test_one_step_after_the_other_gives_the_same_bits(name):
    def in_one(q, k, v, given):
        return door(name)(q, k, v, **given)

    def in_steps(q, k, v, given):
        return door(name)(*sagebwd.qk_norm_rope(q, k, **given), v)

    leaves, dout = tensors()
    found = with_gradients(in_one, leaves[:3], dout, front())
    wanted = with_gradients(in_steps, leaves[:3], dout, front())
    assert all(x.isfinite().all() and x.any() for x in found)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_gate", ["like out", "a slice", "FP32"])
def test_a_gate_rounds_once(dtype, of_gate):
    """The output is a sum of the values with weights, and so is its gradient for the values."""
    (q, k, v, gate), dout = tensors(dtype)
    gate = (4 * gate).detach()
    if of_gate == "a slice":
        gate = torch.cat([gate, gate], -1)[..., 128:]
    gate = (gate.float() if of_gate == "FP32" else gate).requires_grad_()
    plain = door("all keys")(q, k, v)
    found = door("all keys")(q, k, v, gate=gate)
    of_v, of_gates = torch.autograd.grad(found, [v, gate], dout)
    share = gate.detach().double().sigmoid()
    half = front_inputs.LAST[dtype]

    def assert_rounded(x, exact, last):
        assert ((x.double() - exact).abs() <= last * exact.abs() + 1e-7).all()

    exact = plain.detach().double() * share
    assert_rounded(found, exact, half)
    assert_rounded(of_gates, dout.double() * exact * (1 - share),
                   1e-5 if of_gate == "FP32" else half)  # fmt: skip
    (wanted,) = torch.autograd.grad(plain, v, (dout.double() * share).to(dtype))
    torch.testing.assert_close(of_v, wanted, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", DOORS)
def test_compiled_it_is_the_same(name):
    torch.compiler.reset()
    leaves, dout = tensors()
    compiled = torch.compile(functools.partial(call, door(name)), fullgraph=True)
    found = with_gradients(compiled, leaves, dout, front())
    wanted = with_gradients(functools.partial(call, door(name)), leaves, dout, front())
    for x, y in zip(found, wanted):  # Inductor may round the gate's product in another order
        torch.testing.assert_close(x, y, atol=2e-3, rtol=2.0**-6)


@pytest.mark.parametrize("name", DOORS)
def test_a_checkpoint_gives_the_same_bits(name):
    leaves, dout = tensors()
    attend = functools.partial(call, door(name))
    found = with_gradients(lambda *given: checkpoint(attend, *given, use_reentrant=False), leaves,
                           dout, front())  # fmt: skip
    wanted = with_gradients(attend, leaves, dout, front())
    assert all(torch.equal(x, y) for x, y in zip(found, wanted))


@pytest.mark.parametrize("name", DOORS)
def test_a_captured_step_replays(name):
    leaves, dout = tensors()
    attend, given = functools.partial(call, door(name)), front()
    wanted = with_gradients(attend, leaves, dout, given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with_gradients(attend, leaves, dout, given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = with_gradients(attend, leaves, dout, given)
    for t in found:
        t.data.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(found, wanted))


def test_autocast_takes_the_kernels_of_16_bits():
    leaves, _ = tensors(torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        found = call(door("all keys"), *leaves, front())
    cast = [t.detach().bfloat16() for t in leaves[:3]]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, call(door("all keys"), *cast, leaves[3], front()))
