"""Norm and RoPE of queries and keys without kernels, against FP64."""

import types

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import front_inputs  # noqa: E402
from front_inputs import NAMES, calls, drawn, exact, inputs, table  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd.core import front, front_kernels  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_are_near_fp64(name, dtype, layout):
    front_inputs.assert_call(sagebwd.qk_norm_rope, name, dtype, layout=layout)


def test_a_gpus_operators_take_what_kernels_do_not(monkeypatch):
    """They choose between kernels and PyTorch's operations, which other devices have anyway."""
    asked = []
    monkeypatch.setattr(front_kernels, "may_run", lambda q: asked.append(q) is not None)
    monkeypatch.setattr(front, "operators", lambda: types.SimpleNamespace(
        front_forward=front_kernels._forward_on_gpu,
        front_backward=front_kernels._backward_on_gpu))  # fmt: skip
    front_inputs.assert_call(sagebwd.qk_norm_rope, "shared gains", torch.bfloat16)
    assert len(asked) == 2


def test_any_channels_and_strides():
    front_inputs.assert_call(sagebwd.qk_norm_rope, "shared gains", torch.float64, channels=20)
    front_inputs.assert_call(sagebwd.qk_norm_rope, "gains of heads", torch.bfloat16, slices=True)


def test_it_is_what_modules_compute():
    """A Llama-like layer's own operations, on the table that has each angle twice."""
    q, k = inputs(torch.float32)
    norm = torch.nn.RMSNorm(64, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    positions = torch.arange(50.0)[:, None] * 10000 ** (-torch.arange(0, 64, 2) / 64)
    cos, sin = (torch.cat([t, t], -1) for t in (positions.cos(), positions.sin()))

    def rotated(x):
        a, b = x.chunk(2, -1)
        tokens = x.shape[2]
        return x * cos[:tokens] + torch.cat([-b, a], -1) * sin[:tokens]

    rope = cos[:37, :32], sin[:37, :32]
    found = sagebwd.qk_norm_rope(q, k, q_norm=norm.weight, k_norm=norm.weight, norm_eps=1e-5,
                                 rope=rope, rope_k=(cos[..., :32], sin[..., :32]))  # fmt: skip
    torch.testing.assert_close(found, (rotated(norm(q)), rotated(norm(k))), atol=2e-6, rtol=1e-5)


def test_gradients_pass_gradcheck():
    q, k = (drawn(1, 2, 3, 8, seed=s, dtype=torch.float64).requires_grad_() for s in (1, 2))
    gain = drawn(2, 8, seed=3, dtype=torch.float64).requires_grad_()
    given = drawn(1, 3, seed=4, dtype=torch.float64).requires_grad_()
    rope = tuple(t.double() for t in table(3, 2))

    def function(q, k, gain, given):
        return sagebwd.qk_norm_rope(q, k, q_norm=gain, k_inv_rms=given, rope=rope, rope_begin=2)

    assert torch.autograd.gradcheck(function, (q, k, gain, given))


@pytest.mark.parametrize("shared", ["gain", "inv_rms", "q"])
def test_one_tensor_in_two_places_compiles(shared):
    q, k = (t.requires_grad_() for t in inputs(torch.float32))
    gain, given = torch.ones(64, requires_grad=True), torch.ones(1, requires_grad=True)

    def call(q, k, gain, given):
        if shared == "q":
            return sagebwd.qk_norm_rope(q, q, q_norm=gain, k_norm=gain)
        if shared == "gain":
            return sagebwd.qk_norm_rope(q, k, q_norm=gain, k_norm=gain)
        inv_rms = given.expand(q.shape[0], q.shape[2]).contiguous()
        return sagebwd.qk_norm_rope(q, k[:, :, : q.shape[2]], q_inv_rms=inv_rms, k_inv_rms=inv_rms)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    leaves = [t for t in (q, k, gain, given)]
    results = []
    for function in (call, compiled):
        out = function(*leaves)
        loss = sum((y * y).sum() for y in out)
        results.append((*out, *torch.autograd.grad(loss, leaves, allow_unused=True)))
    for x, y in zip(*results):
        assert (x is None and y is None) or torch.equal(x, y)


def test_what_nothing_is_learned_of_needs_no_gradient():
    q, k = inputs(torch.float32)
    found = sagebwd.qk_norm_rope(q.requires_grad_(), k, q_norm=True, k_norm=True)
    assert [t.requires_grad for t in found] == [True, False]
    (of_q,) = torch.autograd.grad(found[0].square().sum(), q)
    assert of_q.isfinite().all() and not k.requires_grad


def test_only_wanted_gradients():
    q, k = inputs(torch.float32)
    gain = torch.ones(64, requires_grad=True)
    of_q, of_k = sagebwd.qk_norm_rope(q, k, q_norm=gain, k_norm=True)
    of_q.sum().backward()
    assert gain.grad is not None and not of_k.isnan().any()
    assert not any(t.requires_grad for t in sagebwd.qk_norm_rope(q, k, q_norm=True))


def test_tokens_of_zeros_give_no_nan():
    q, k = torch.zeros(1, 2, 3, 64), torch.zeros(1, 1, 4, 64)
    q.requires_grad_()
    found = sagebwd.qk_norm_rope(q, k, q_norm=True, k_norm=True)
    (gradient,) = torch.autograd.grad(found[0].sum(), q)
    assert not any(t.isnan().any() for t in (*found, gradient))
    assert not any(t.any() for t in found)


def test_it_is_differentiated_once():
    q, k = (t.requires_grad_() for t in inputs(torch.float32))
    found = sagebwd.qk_norm_rope(q, k, q_norm=True)
    (gradient,) = torch.autograd.grad(found[0].square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("name", ["shared gains", "given", "interleaved part"])
def test_compiled_code_has_no_breaks(name):
    given = calls()[name]
    q, k = inputs(torch.float32)
    weights = front_inputs.weights_like(q, k, torch.float32)
    compiled = torch.compile(sagebwd.qk_norm_rope, fullgraph=True, backend="aot_eager")
    found = front_inputs.with_gradients(compiled, q, k, given, weights)
    wanted = front_inputs.with_gradients(sagebwd.qk_norm_rope, q, k, given, weights)
    torch.testing.assert_close(found, wanted)


def test_one_graph_serves_all_lengths():
    torch._dynamo.reset()  # of what other tests compiled
    compiled = torch.compile(sagebwd.qk_norm_rope, fullgraph=True, backend="aot_eager",
                             dynamic=True)  # fmt: skip
    gain = torch.linspace(0.5, 1.5, 64)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 9, 300):
            q, k = drawn(2, 4, tokens, 64), drawn(2, 2, tokens, 64, seed=1)
            given = dict(q_norm=gain, k_norm=gain, rope=table(tokens, 16), rope_begin=8)
            found = front_inputs.with_gradients(compiled, q, k, given, (1, 2))
            wanted = front_inputs.with_gradients(sagebwd.qk_norm_rope, q, k, given, (1, 2))
            torch.testing.assert_close(found, wanted)


def test_operators_pass_opcheck():
    q, k = inputs(torch.float32)
    cos, sin = (t.expand(2, 37, 32) for t in table(37, 32))
    cos_k, sin_k = (t.expand(2, 50, 32) for t in table(50, 32))
    gain = torch.ones(4, 64)
    given = (q, k, gain, None, None, torch.ones(2, 50), cos, sin, cos_k, sin_k, [True, True], 1e-6,
             0, False, "bhsd")  # fmt: skip
    torch.library.opcheck(torch.ops.sagebwd.front_forward.default, given)
    torch.library.opcheck(torch.ops.sagebwd.front_backward.default,
                          (q, k, *given, [True, False, False, True]))  # fmt: skip


def test_under_autocast_it_keeps_types():
    q, k = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sagebwd.qk_norm_rope(q, k, q_norm=torch.ones(64), k_norm=torch.ones(64))
    torch.testing.assert_close(found, tuple(t.float() for t in exact(
        q, k, q_norm=torch.ones(64), k_norm=torch.ones(64))))  # fmt: skip


@pytest.mark.parametrize(
    "change, why",
    [
        (dict(q_norm=torch.ones(63)), r"q_norm has shape \(63,\): pass \(64,\), or \(4, 64\)"),
        (dict(k_norm=torch.ones(4, 64)), r"k_norm has shape \(4, 64\)"),
        (dict(q_norm=torch.ones(64, dtype=torch.int32)), "q_norm is torch.int32"),
        (dict(q_inv_rms=torch.ones(2, 38)), r"q_inv_rms has shape \(2, 38\)"),
        (dict(norm_eps=-1), "norm_eps=-1"),
        (dict(norm_eps=float("nan")), "norm_eps=nan"),
        (dict(rope_style="neox"), "rope_style='neox'"),
        (dict(rope_begin=-1), "rope_begin=-1"),
        (dict(rope_begin=4), "without rope"),
        (dict(q_norm=True, rope_style="interleaved"),
         "rope_style='interleaved' is given without rope"),
        (dict(norm_eps=1e-5), "norm_eps=1e-05 is given without q_norm or k_norm"),
        (dict(q_inv_rms=torch.ones(2, 37), norm_eps=1e-5), "norm_eps=1e-05 is given without"),
        (dict(q_norm=False), "q_norm=False: pass None"),
        (dict(rope_begin="1"), "rope_begin='1' is a str"),
        (dict(rope_k=table(50, 32)), "rope_k is given without rope"),
        (dict(rope=table(37, 64), rope_k=table(50, 64)), "64 pairs .* halved"),
        (dict(rope=table(37, 32), rope_k=table(50, 32), rope_begin=4), "30 pairs at most"),
        (dict(rope=table(37, 32), rope_k=table(50, 16)), "as many"),
        (dict(rope=table(37, 32)), r"pass rope_k=\(cos, sin\) of \(50, pairs\) for the keys"),
        (dict(rope=table(50, 32)), r"rope's cos has shape \(50, 32\): pass \(37, pairs\)"),
        (dict(rope=table(3, 37, 32)), r"shape \(3, 37, 32\)"),
        (dict(rope=(torch.ones(37, 32, requires_grad=True),) * 2), "no gradient"),
        (dict(rope=(torch.ones(37, 32), torch.ones(37, 16))), "cos has 32 pairs and its sin 16"),
        (dict(layout="sbhd"), "layout='sbhd'"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(change, why):
    q, k = inputs(torch.float32)
    with pytest.raises(sagebwd.SpecError, match=why):
        sagebwd.qk_norm_rope(q, k, **change)


def test_wrong_tensors_are_refused():
    q, k = inputs(torch.float32)
    for change, why in (
        (lambda: (q[0], k), "q has rank 3"),
        (lambda: (q, k.double()), "one dtype"),
        (lambda: (q, k[..., :32]), "do not belong together"),
        (lambda: (q[:, :3], k), "3 heads and k has 2"),
        (lambda: (q.int(), k), "torch.int32"),
    ):
        with pytest.raises(sagebwd.SpecError, match=why):
            sagebwd.qk_norm_rope(*change())
    for given in (dict(q_norm=[1.0]), dict(rope=table(37, 32)[0]), dict(q_inv_rms=2.0)):
        with pytest.raises(TypeError, match="pass"):
            sagebwd.qk_norm_rope(q, k, **given)
    with pytest.raises(TypeError, match="norm_eps="):
        sagebwd.qk_norm_rope(q, k, eps=1e-6)
    with pytest.raises(sagebwd.SpecError, match=r"torch\.func"):
        torch.func.grad(lambda q: sagebwd.qk_norm_rope(q, k)[0].sum())(q)
