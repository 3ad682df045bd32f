"""Calls of a known form still have what PyTorch's dispatcher does for tensors and threads."""

import pytest
from inputs import equal, leaves, torch

import sagebwd
from sagebwd.core import direct


@pytest.fixture
def known():
    """Inputs of a form whose calls now go straight to the kernels, dout, and out and gradients by
    the operators."""
    inputs, dout = leaves(300, 200)
    inputs = [t.detach() for t in inputs]
    out, lse = sagebwd.attention_forward(*inputs)
    expected = [out, *sagebwd.attention_backward(dout, *inputs, out, lse)]
    assert direct.attention(*inputs) is not None
    return inputs, dout, expected


def both_passes(inputs, dout):
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = sagebwd.attention(*inputs)
    return [out, *torch.autograd.grad(out, inputs, dout)]


def test_both_passes_go_straight_to_the_kernels(known, monkeypatch):
    """The backward too, in the thread that autograd has for the device."""
    inputs, dout, expected = known

    def refuse(*given):
        raise AssertionError("the operators were called")

    library = torch.ops.sagebwd
    monkeypatch.setattr(library, "forward", refuse)
    monkeypatch.setattr(library, "backward", refuse)
    assert equal(both_passes(inputs, dout), expected)


@pytest.mark.parametrize("which", range(4))
def test_a_lazy_sign(known, which):
    inputs, dout, expected = known
    tensors = [*inputs, dout]
    tensors[which] = torch._neg_view(-tensors[which])
    assert tensors[which].is_neg()
    for _ in range(3):
        assert equal(both_passes(tensors[:3], tensors[3]), expected)


def test_a_lazy_sign_of_the_gradient_of_lse(known):
    inputs, dout, _ = known
    inputs = [t.requires_grad_() for t in inputs]
    dlse = torch.randn(2, 4, 300, device="cuda")
    found = [torch.autograd.grad(sagebwd.attention(*inputs, return_lse=True), inputs, (dout, given))
             for given in (dlse, torch._neg_view(-dlse))]  # fmt: skip
    assert equal(*found)


def test_the_older_vmap(known):
    inputs, dout, expected = known
    inputs = [t.requires_grad_() for t in inputs]
    for _ in range(3):
        out = sagebwd.attention(*inputs)
        found = torch.autograd.grad(out, inputs, torch.stack([dout, 0 * dout]),
                                    is_grads_batched=True)  # fmt: skip
        assert equal([g[0] for g in found], expected[1:]) and not any(g[1].any() for g in found)


def test_vmap_and_grad_of_torch_func(known):
    inputs, dout, expected = known

    def loss(q, k, v, dout):
        return (sagebwd.attention(q, k, v).float() * dout.float()).sum()

    gradients = torch.func.grad(loss, (0, 1, 2))
    assert equal(gradients(*inputs, dout), expected[1:])
    together = torch.func.vmap(gradients)(*(torch.stack([t, t]) for t in (*inputs, dout)))
    for i in range(2):
        assert equal([t[i] for t in together], expected[1:])
    (found, *_), pullback = torch.func.vjp(lambda *qkv: (sagebwd.attention(*qkv),), *inputs)
    assert torch.equal(found, expected[0]) and equal(pullback((dout,)), expected[1:])


def test_any_order_under_deterministic_algorithms(known):
    inputs, dout, expected = known
    inputs = [t.requires_grad_() for t in inputs]

    def gradients(**options):
        return torch.autograd.grad(sagebwd.attention(*inputs, **options), inputs, dout)

    before = torch.are_deterministic_algorithms_enabled()
    try:
        for _ in range(3):
            torch.use_deterministic_algorithms(True)
            assert equal(gradients(), expected[1:])
            with pytest.raises(RuntimeError, match="leave deterministic=False out"):
                gradients(deterministic=False)
            torch.use_deterministic_algorithms(True, warn_only=True)
            with pytest.warns(UserWarning, match="in any order"):
                gradients(deterministic=False)
            torch.use_deterministic_algorithms(False)
            gradients(deterministic=False)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["out", "lse", "both"])
def test_checkpoints_of_each_result(known, reentrant, what):
    """Each saved tensor is read once, also where lse alone is used."""
    inputs, dout, _ = known

    def call(q, k, v):
        out, lse = sagebwd.attention(q, k, v, return_lse=True)
        return {"out": (out,), "lse": (lse,), "both": (out, lse)}[what]

    def gradients(call):
        fresh = [t.detach().requires_grad_() for t in inputs]
        sum((x.float() ** 2).mean() for x in call(*fresh)).backward()
        return [t.grad for t in fresh]

    expected = gradients(call)
    for _ in range(2):
        assert equal(gradients(lambda *qkv: torch.utils.checkpoint.checkpoint(
            call, *qkv, use_reentrant=reentrant)), expected)  # fmt: skip
