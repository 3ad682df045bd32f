"""torch.nn.functional.scaled_dot_product_attention, computed by sagebwd where asked for."""

import contextlib
import types
import warnings

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from torch.nn.functional import scaled_dot_product_attention as call  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from sagebwd.integrations import _operators  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")


def inputs(heads_kv=4, layout="bhsd"):
    torch.manual_seed(0)
    shapes = [(2, heads, 24, 64) for heads in (4, heads_kv, heads_kv)]
    if layout == "bshd":
        return [torch.randn(b, s, h, d).bfloat16().transpose(1, 2).requires_grad_()
                for b, h, s, d in shapes]  # fmt: skip
    return [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
def test_calls_inside_are_sagebwds(causal):
    q, k, v = inputs()
    expected = sagebwd.attention(q, k, v, causal=causal)
    with sagebwd.sdpa() as mode:
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        gradients = torch.autograd.grad(found.sum(), (q, k, v))
    assert torch.equal(found, expected) and mode.calls == 1 and not mode.fallbacks
    for got, own in zip(gradients, torch.autograd.grad(expected.sum(), (q, k, v))):
        assert torch.equal(got, own)
    assert not torch.equal(call(q, k, v, is_causal=causal), expected)  # outside it is PyTorch's


def test_modules_that_call_it():
    """By whatever name they know it; but what calls it where no mode can see that says so."""

    class Own(torch.nn.Module):
        def forward(self, *qkv):
            return call(*qkv)

    q, k, v = inputs()
    with sagebwd.sdpa():
        assert torch.equal(Own()(q, k, v), sagebwd.attention(q, k, v))
    for training in (True, False):
        layer = torch.nn.TransformerEncoderLayer(256, 4, dtype=torch.bfloat16).train(training)
        x = torch.randn(24, 2, 256).bfloat16()
        refused = pytest.raises(sagebwd.SpecError, match="activate_flash_attention_impl")
        with refused, torch.set_grad_enabled(training), sagebwd.sdpa():
            layer(x)
    warned = pytest.warns(UserWarning, match="PyTorch computed 1 of 1 calls")
    with warned, sagebwd.sdpa(fallback="torch"):
        layer(x)


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_of_data_parallel_are_inside(replicas, monkeypatch):
    """It calls each in a thread of its own, for GPUs that are stood in for."""
    for part in (torch.cuda, torch.accelerator):
        for name in ("current_stream", "stream", "device", "device_index"):
            monkeypatch.setattr(part, name, contextlib.nullcontext, raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *check: cpu)

    class Own(torch.nn.Module):
        def forward(self, *qkv):
            return checkpoint(call, *qkv, use_reentrant=False)

    qkv, parallel = inputs(), types.SimpleNamespace(device_ids=[0] * replicas)
    with sagebwd.sdpa() as mode:
        outs = torch.nn.DataParallel.parallel_apply(
            parallel, [Own() for _ in range(replicas)], [qkv] * replicas, [{}] * replicas)
    assert mode.calls == replicas
    for out in outs:
        assert torch.equal(out, sagebwd.attention(*qkv))
        out.sum().backward()
    assert mode.calls == 2 * replicas


def test_options_are_attentions():
    q, k, v = inputs()
    with sagebwd.sdpa(precision="gradients16", granularity="block"):
        found = call(q, k, v)
    assert torch.equal(found, sagebwd.attention(q, k, v, precision="gradients16",
                                                granularity="block"))  # fmt: skip


@pytest.mark.parametrize("fallback", [None, "torch"])
@pytest.mark.parametrize(
    "given, message",
    [
        ({"precision": "x"}, "'x'"),
        ({"smooth_k": "no"}, "smooth_k='no'"),
        ({"granularity": "tokn"}, "'tokn'"),
        ({"smooth_q": True, "precision": "qk16"}, "smooth_q is not supported"),
        ({"granulity": "block"}, r"sdpa\(\).*did you mean 'granularity'"),
        ({"falback": "torch"}, "did you mean 'fallback'"),
        ({"causal": True}, r"sdpa\(\) takes no causal: each call inside says is_causal"),
        ({"softmax_scale": 1.0}, "each call inside says scale"),
        ({"is_causal": True}, r"sdpa\(\) takes no is_causal: each call"),
        ({"layout": "bshd"}, r"has \(batch, heads, tokens, head_dim\) tensors"),
        ({"return_lse": True}, "returns out alone"),
        ({"return_max_logits": True}, "returns out alone"),
    ],
)
def test_wrong_options_are_refused_before_any_call(fallback, given, message):
    of_value = given.keys() & {"precision", "smooth_k", "granularity"}
    with pytest.raises(sagebwd.SpecError if of_value else TypeError, match=message):
        sagebwd.sdpa(fallback=fallback, **given)


def test_what_is_refused_goes_to_pytorch_only_where_asked_to():
    q, k, v = inputs()
    mask = torch.full((24, 24), 0.5, dtype=torch.bfloat16)
    said = r"^attn_mask=.* use is_causal= in the call, or in sagebwd.sdpa\(\) window_left="
    with pytest.raises(sagebwd.SpecError, match=said), sagebwd.sdpa():
        call(q, k, v, attn_mask=mask)
    for wide, refused in ((520, "head dimension 520"), (64, "torch.float32")):  # a pipeline's VAE
        vae = torch.randn(1, 1, 24, wide, dtype=torch.bfloat16 if wide > 64 else torch.float32)
        named = rf"{refused}.*with sagebwd\.sdpa\(fallback='torch'\) PyTorch computes"
        with pytest.raises(sagebwd.SpecError, match=named), sagebwd.sdpa():
            call(vae, vae, vae)
    warned = pytest.warns(UserWarning, match="PyTorch computed 2 of 3 calls: 2 x attn_mask=")
    with warned, sagebwd.sdpa(fallback="torch") as mode:
        found = [call(q, k, v, attn_mask=mask) for _ in range(2)]
        call(q, k, v)
    assert mode.fallbacks.total() == 2 and mode.calls == 3
    assert torch.equal(found[0], call(q, k, v, attn_mask=mask))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sagebwd.sdpa(fallback="torch"):
            call(q, k, v)


@pytest.mark.parametrize("fallback", ["pytorch", True, "cudnn"])
def test_other_fallbacks_are_refused(fallback):
    with pytest.raises(sagebwd.SpecError, match=f"fallback={fallback!r}: pass 'torch'"):
        sagebwd.sdpa(fallback=fallback)


def test_it_is_neither_a_function_of_tensors_nor_a_decorator():
    q = inputs()[0]
    for call_it in (lambda: sagebwd.sdpa(q, q, q), lambda: sagebwd.sdpa(len),
                    lambda: sagebwd.sdpa()(len)):  # fmt: skip
        with pytest.raises(TypeError, match=r"write 'with sagebwd\.sdpa.*scaled_dot_product_att"):
            call_it()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
def test_what_the_registry_is_given_computes_both_passes(layout, causal):
    q, k, v = inputs(2, layout)
    out, lse, *_, seed, offset, debug = _operators.forward(
        q.detach(), k.detach(), v.detach(), 0.0, causal, False, scale=0.2
    )
    assert out.stride() == q.stride() and seed.shape == (2,) and offset.dim() == debug.numel() == 0
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradients = _operators.backward(dout, *(t.detach() for t in (q, k, v)), out, lse, None, None, 24,
                                  24, 0.0, causal, seed, offset, scale=0.2)  # fmt: skip
    expected = sagebwd.attention(q, k, v, causal=causal, softmax_scale=0.2)
    assert torch.equal(out, expected)
    for got, own, like in zip(gradients, torch.autograd.grad(expected, (q, k, v), dout), (q, k, v)):
        assert torch.equal(got, own) and got.stride() == like.stride()


def test_pytorchs_operator_and_its_gradient_are_taken():
    """As on a GPU, where scaled_dot_product_attention calls it."""
    q, k, v = inputs(2)
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    active = _operators.Active("CPU")
    try:
        found = operator(q, k, v, 0.0, True, scale=0.2)[0]
        gradients = torch.autograd.grad(found.sum(), (q, k, v))
    finally:
        active.remove()
    expected = sagebwd.attention(q, k, v, causal=True, softmax_scale=0.2)
    assert torch.equal(found, expected)
    for got, own in zip(gradients, torch.autograd.grad(expected.sum(), (q, k, v))):
        assert torch.equal(got, own)
    with pytest.raises(NotImplementedError):
        operator(q, k, v, 0.0, True)


@pytest.mark.parametrize("change", [{"dropout_p": 0.1}, {"return_debug_mask": True}])
def test_what_the_registry_cannot_do_is_refused(change):
    q, k, v = (t.detach() for t in inputs())
    with pytest.raises(sagebwd.SpecError, match="restore_flash_attention_impl"):
        _operators.forward(q, k, v, **change)


def test_the_registry_activates_by_name():
    attention = torch.nn.attention
    if not hasattr(attention, "activate_flash_attention_impl"):
        pytest.skip("this PyTorch has no registry")
    assert "sagebwd" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None  # importing did not
    attention.activate_flash_attention_impl("sagebwd")
    try:
        assert attention.current_flash_attention_impl() == "sagebwd"
    finally:
        attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None


def ring_of_pytorch(q, k, v, dout, causal):
    """The calls of context_parallel have a part of the keys each, in both passes; the backward has
    out and logsumexp of all of them. There are two ranks, and the queries are the second's."""
    forward, backward = _operators.forward, _operators.backward
    given = [(*(t.detach() for t in (q, k_c, v_c)), causal and last)
             for k_c, v_c, last in zip(k.chunk(2, 2), v.chunk(2, 2), (False, True))]  # fmt: skip
    parts = [forward(q, k, v, 0.0, mask) for q, k, v, mask in given]
    out, lse = sagebwd.merge([part[:2] for part in parts])
    gradients = [backward(dout, q, k, v, out, lse, None, None, 24, 12, 0.0, mask, *part[6:8])
                 for (q, k, v, mask), part in zip(given, parts)]  # fmt: skip
    dq, dk, dv = zip(*gradients)
    return out, sum(g.float() for g in dq), torch.cat(dk, 2), torch.cat(dv, 2)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_registry_is_right_about_parts_of_the_keys(layout, causal):
    q, k, v = (t.detach() for t in inputs(2, layout))
    q, k = q[:, :, 12:] if causal else q, k + 2  # the ring's second rank has the second half
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = ring_of_pytorch(q, k, v, dout, causal)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    mask = torch.ones(q.shape[2], 24, dtype=torch.bool).tril(24 - q.shape[2])
    expected = call(*leaves, attn_mask=mask if causal else None, enable_gqa=True)
    expected = expected, *torch.autograd.grad(expected, leaves, dout.double())
    for x, y in zip(found, expected):
        assert float((x - y).detach().norm() / y.detach().norm()) < 0.03


def test_what_autograd_hands_back_is_not_computed_twice(kernels_on_the_cpu):  # noqa: F811
    q, k, v = inputs(2)
    operator = torch.ops.aten._scaled_dot_product_flash_attention

    def launches(change):
        """They are those of a backward, after a change between the passes."""
        out, lse, *more = operator(q, k, v, 0.0, True)
        change(out, lse)
        before = sum(kernels.launches for kernels in kernels_on_the_cpu.values())
        arguments = [*(t.detach() for t in (q, k, v)), out.detach(), lse.detach()]
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            torch.ones_like(out), *arguments, None, None, 24, 24, 0.0, True, *more[4:6]
        )
        return sum(kernels.launches for kernels in kernels_on_the_cpu.values()) - before

    active = _operators.Active("CPU")
    try:
        found = operator(q, k, v, 0.0, True)[0]
        before = sum(kernels.launches for kernels in kernels_on_the_cpu.values())
        torch.autograd.grad(found.sum(), (q, k, v))
        assert sum(kernels.launches for kernels in kernels_on_the_cpu.values()) - before == 1
        assert launches(lambda out, lse: None) == 1
        with torch.no_grad():  # as where parts are put together in place
            assert launches(lambda out, lse: lse.add_(0.5)) == 2
            assert launches(lambda out, lse: out.mul_(0.5)) == 2
    finally:
        active.remove()
