"""Norm, RoPE and gate as arguments of attention functions, against FP64 by other formulas."""

import inspect

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from front_inputs import NAMES, calls, drawn, exact, inputs, learned, table  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401

import sagebwd  # noqa: E402
from sagebwd.core import forms, not_kept  # noqa: E402
from sagebwd.core.front_end import gated  # noqa: E402

WITH_FRONT_END = (sagebwd.attention, sagebwd.block_sparse_attention,
                  sagebwd.sparse_linear_attention)  # fmt: skip


def attend(q, k, v, **given):
    """Attention to all keys in the type of its inputs, which needs no kernel."""
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return sagebwd.sparse_linear_attention(q, k, v, alpha=0.5, block_mask=mask, precision="exact",
                                           block_size=(64, 64), smooth_k=False, **given)  # fmt: skip


def in_fp64(q, k, v, *, gate=None, layout="bhsd", **given):
    y_q, y_k = exact(q, k, layout=layout, **given)
    if layout == "bshd":
        y_q, y_k, v = (t.transpose(1, 2) for t in (y_q, y_k, v))
    y_k, v = (t.double().repeat_interleave(y_q.shape[1] // t.shape[1], 1) for t in (y_k, v))
    weights = torch.einsum("bhqc,bhkc->bhqk", y_q, y_k).mul(q.shape[-1] ** -0.5).softmax(-1)
    out = torch.einsum("bhqk,bhkc->bhqc", weights, v)
    out = out.transpose(1, 2) if layout == "bshd" else out
    return out if gate is None else out / (1 + torch.exp(-gate.double()))


def case(dtype, layout="bhsd"):
    q, k = inputs(dtype, layout=layout)
    return q, k, drawn(*k.shape, seed=11, dtype=dtype), drawn(*q.shape, seed=12, dtype=dtype)


def results_of(function, q, k, v, gate, given):
    """The output, and gradients of its weighted sum."""
    given = {name: t.detach().requires_grad_() if name in learned(given) else t
             for name, t in given.items()}  # fmt: skip
    leaves = [t.detach().requires_grad_() for t in (q, k, v, gate)]
    out = function(*leaves[:3], gate=leaves[3], **given)
    weights = drawn(*out.shape, seed=13, dtype=torch.float64)
    leaves += [given[name] for name in learned(given)]
    return out, *torch.autograd.grad((out.double() * weights).sum(), leaves)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_are_those_of_fp64(name, layout):
    given = {**calls(dtype=torch.float64)[name], "layout": layout}
    tensors = case(torch.float64, layout)
    for found, wanted in zip(results_of(attend, *tensors, given),
                             results_of(in_fp64, *tensors, given)):  # fmt: skip
        torch.testing.assert_close(found, wanted.to(found.dtype), atol=1e-9, rtol=1e-9)


def test_a_gate_of_16_bits_rounds_once():
    q, k, v, gate = case(torch.bfloat16)
    plain = attend(q, k, v).detach().requires_grad_()
    gate = (3 * gate).requires_grad_()
    out = attend(q, k, v, gate=gate)
    dout = drawn(*out.shape, seed=13, dtype=torch.bfloat16)
    (found,) = torch.autograd.grad(out, gate, dout)
    share = 1 / (1 + torch.exp(-gate.detach().double()))
    wanted = plain.detach().double() * share
    assert torch.equal(out, wanted.bfloat16())
    torch.testing.assert_close(found.double(), dout.double() * wanted * (1 - share),
                               atol=1e-30, rtol=2.0**-8)  # fmt: skip


def test_compiled_it_is_the_same():
    torch.compiler.reset()
    q, k, v, gate = case(torch.float32)
    given = calls()["shared gains"]
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(results_of(compiled, q, k, v, gate, given),
                             results_of(attend, q, k, v, gate, given)):  # fmt: skip
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_a_checkpoint_gives_the_same_bits():
    q, k, v, gate = case(torch.float32)
    given = calls()["given"]

    def checkpointed(*tensors, **more):
        return torch.utils.checkpoint.checkpoint(attend, *tensors, use_reentrant=False, **more)

    for found, wanted in zip(results_of(checkpointed, q, k, v, gate, given),
                             results_of(attend, q, k, v, gate, given)):  # fmt: skip
        assert torch.equal(found, wanted)


hooks_can_be_seen = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="needs PyTorch 2.8")


@hooks_can_be_seen
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_queries_and_keys_formed_again_give_the_same_bits(dtype):
    q, k, v, gate = case(dtype)
    given = calls(dtype=dtype)["given"]

    def again(*tensors, **more):
        return attend(*tensors, **more, recompute_qk=True)

    for found, wanted in zip(results_of(again, q, k, v, gate, given),
                             results_of(attend, q, k, v, gate, given)):  # fmt: skip
        assert torch.equal(found, wanted)


@hooks_can_be_seen
def test_a_compiler_leaves_out_what_is_formed_again():
    torch.compiler.reset()
    q, k, v, gate = case(torch.float32)
    given = calls()["shared gains"]
    wanted = results_of(attend, q, k, v, gate, given)
    whole = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="recompute_qk=True is not compiled: compile without"):
        whole(q, k, v, **given, recompute_qk=True)
    parts = torch.compile(attend, backend="aot_eager")

    def again(*tensors, **more):
        return parts(*tensors, **more, recompute_qk=True)

    for found, expected in zip(results_of(again, q, k, v, gate, given), wanted):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_an_older_pytorch_cannot_form_them_again(monkeypatch):
    monkeypatch.setattr(not_kept, "_hooks_of_caller", None)
    q, k, v, _ = case(torch.float32)
    with pytest.raises(sagebwd.SpecError, match="recompute_qk=True needs PyTorch 2.8"):
        attend(q, k, v, q_norm=True, recompute_qk=True)


def test_branches_are_those_without_a_gate():
    q, k, v, gate = case(torch.float32)
    found = attend(q, k, v, gate=gate, return_branches=True)
    plain = attend(q, k, v, return_branches=True)
    assert torch.equal(found[0], attend(q, k, v, gate=gate))
    assert not torch.equal(found[0], plain[0])
    assert all(torch.equal(x, y) for x, y in zip(found[1:], plain[1:]))


def test_autocast_casts_before_the_norm():
    q, k, v, gate = case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(q, k, v, q_norm=True, k_norm=True)
    assert torch.equal(found, attend(*(t.bfloat16() for t in (q, k, v)), q_norm=True, k_norm=True))


@pytest.fixture
def by_operators(kernels_on_the_cpu, tiny_tensors, monkeypatch):  # noqa: F811
    """How many passes of attention went by operators."""
    form_of, passes = forms.form_of, []
    monkeypatch.setattr(forms, "form_of", lambda *given, **named: (
        passes.append(1), form_of(*given, **named))[1])  # fmt: skip
    return passes


@pytest.mark.parametrize("options", [
    {}, dict(causal="bottom-right", smooth_k=False), dict(softmax_scale=0.25),
    dict(layout="bshd", causal=True), dict(return_lse=True)], ids=str)  # fmt: skip
def test_attention_behind_norm_and_rope_is_called_directly(by_operators, options):
    layout = options.get("layout", "bhsd")
    q, gate = (drawn(2, 4, 24, 64, seed=s, dtype=torch.bfloat16) for s in (1, 2))
    k, v = (drawn(2, 2, 24, 64, seed=s, dtype=torch.bfloat16) for s in (3, 4))
    if layout == "bshd":
        q, k, v, gate = (t.transpose(1, 2).contiguous() for t in (q, k, v, gate))
    given = dict(q_norm=torch.linspace(0.5, 1.5, 64), rope=table(24, 16))

    def call(function=sagebwd.attention):
        def out_of(*tensors, **more):
            found = function(*tensors, **options, **more)
            return found if isinstance(found, torch.Tensor) else found[0]

        return results_of(out_of, q, k, v, gate, given)

    def in_steps(q, k, v, gate, return_lse=None, **more):
        norms = {name: more.pop(name) for name in given}
        y = sagebwd.qk_norm_rope(q, k, **norms, layout=layout)
        return gated(sagebwd.attention_forward(*y, v, **more)[0], gate)

    wanted = call(in_steps)
    call()
    by_operators.clear()
    for found, expected in zip(call(), wanted):
        assert torch.equal(found, expected)
    assert not by_operators


def test_errors_behind_norm_and_rope_are_those_without(by_operators):
    q, k, v = (drawn(2, 2, 24, 64, seed=s, dtype=torch.bfloat16) for s in (1, 2, 3))
    sagebwd.attention(q, k, v, q_norm=True)
    for wrong in (dict(causal=1), dict(return_lse=1), dict(softmax_scale="1"), dict(layout="sbhd"),
                  dict(v=v[:, :, 1:]), dict(v=v.half()), dict(granularity="tile"),
                  dict(v=v.float().numpy())):  # fmt: skip
        messages = []
        for more in ({}, dict(k_norm=None), dict(q_norm=True)):
            with pytest.raises((TypeError, ValueError)) as raised:
                sagebwd.attention(**dict(q=q, k=k, v=v) | wrong | more)
            messages.append((type(raised.value), str(raised.value)))
        assert messages[0] == messages[1] == messages[2]


def test_what_asks_for_nothing_changes_nothing():
    q, k, v, _ = case(torch.float32)
    nothing = dict(q_norm=None, k_norm=None, q_inv_rms=None, rope=None, gate=None, norm_eps=1e-6,
                   rope_style="halves")  # fmt: skip
    assert torch.equal(attend(q, k, v, **nothing), attend(q, k, v))


@pytest.mark.parametrize("function", WITH_FRONT_END)
def test_signatures_and_documents_have_the_arguments(function):
    listed = inspect.signature(function).parameters
    of_norms = {name: p.default for name, p in inspect.signature(sagebwd.qk_norm_rope)
                .parameters.items() if name not in ("q", "k", "layout")}  # fmt: skip
    assert {name: listed[name].default for name in of_norms} == of_norms
    assert listed["gate"].default is None and listed["recompute_qk"].default is False
    assert "sigmoid(gate)" in function.__doc__ and "{front_end}" not in function.__doc__


@pytest.mark.parametrize("given, says", [
    (dict(gate=3), "gate is an int; pass a torch tensor like out"),
    (dict(gate=torch.zeros(2, 4, 37, 1)), r"gate has shape \(2, 4, 37, 1\) and out \(2, 4, 37, 64\)"),
    (dict(gate=torch.zeros(2, 4, 37, 64, dtype=torch.int32)), "gate is torch.int32"),
    (dict(q_norm=torch.ones(32)), r"q_norm has shape \(32,\): pass \(64,\)"),
    (dict(rope_begin=4), "rope_begin=4 is given without rope"),
    (dict(rope_style="half"), "pass 'halves' or 'interleaved'"),
    (dict(q_norm=True, rope_style="interleaved"), "rope_style='interleaved' is given without rope"),
    (dict(q_inv_rms=torch.ones(2, 37), norm_eps=1e-5), "norm_eps=1e-05 is given without q_norm"),
    (dict(norm_eps=-1.0), "norm_eps=-1.0: pass a number"),
    (dict(recompute_qk=True), "recompute_qk=True is given without norm or RoPE"),
    (dict(q_norm=True, recompute_qk=1), "recompute_qk=1: pass True or False"),
])  # fmt: skip
def test_what_is_wrong_is_said(given, says):
    q, k, v, _ = case(torch.float32)
    with pytest.raises((TypeError, ValueError), match=says):
        attend(q, k, v, **given)


@pytest.mark.parametrize("given, says", [
    (dict(q_inv_rms=torch.ones(1, 9)),
     r"q_inv_rms has shape \(1, 9\): for packed sequences pass \(9,\), or \(4, 9\) for one"),
    (dict(k_inv_rms=torch.ones(8)), r"k_inv_rms has shape \(8,\): .* pass \(9,\), or \(2, 9\)"),
    (dict(q_inv_rms=2.0), "q_inv_rms is a float; pass 1/rms of each token"),
    (dict(rope=(torch.ones(9, 8), torch.ones(9, 8)), cu_seqlens_k=None),
     "pass cu_seqlens_q and cu_seqlens_k, or neither"),
    (dict(q_norm=True, cu_seqlens_q=None), "pass cu_seqlens_q and cu_seqlens_k, or neither"),
])  # fmt: skip
def test_what_is_wrong_with_packed_sequences_is_said(given, says):
    q, k = torch.zeros(9, 4, 64), torch.zeros(9, 2, 64)
    first = torch.tensor([0, 4, 9], dtype=torch.int32)
    packing = dict(cu_seqlens_q=first, cu_seqlens_k=first)
    with pytest.raises((TypeError, ValueError), match=says):
        sagebwd.attention(q, k, k, **packing | given)


@pytest.mark.parametrize("name, says", [
    ("cos", r"pass rope=\(cos, sin\)"), ("sin", r"pass rope=\(cos, sin\)"),
    ("position_ids", r"rope=\(cos\[positions\], sin\[positions\]\)"),
    ("interleaved", "pass rope_style='interleaved'"), ("eps", "pass norm_eps="),
    ("q_weight", "pass the norm's weight as q_norm="),
])  # fmt: skip
@pytest.mark.parametrize("function", (*WITH_FRONT_END, sagebwd.qk_norm_rope))
def test_other_names_say_which_argument_is_meant(function, name, says):
    q = torch.zeros(1, 1, 8, 32)
    tensors = (q, q) if function is sagebwd.qk_norm_rope else (q, q, q)
    more = dict(alpha=0.5) if "alpha" in inspect.signature(function).parameters else {}
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) .*{name}.*{says}"):
        function(*tensors, **more, **{name: q})


@pytest.mark.parametrize("name, says", [("rope", "sagebwd.qk_norm_rope before"),
                                        ("norm_eps", "sagebwd.qk_norm_rope before"),
                                        ("gate", r"multiply the result by torch.sigmoid\(gate\)"),
                                        ("recompute_qk", "call one of these")])
@pytest.mark.parametrize("function", [
    sagebwd.scaled_dot_product_attention, sagebwd.flash_attn_func, sagebwd.sageattn,
    sagebwd.attention_forward, sagebwd.block_sparse_attention_forward, sagebwd.flashmask_attention,
    lambda q, k, v, **given: sagebwd.sdpa(**given)])  # fmt: skip
def test_other_functions_say_who_has_them(function, name, says):
    """A mask may have these give attention keys in another order, and contexts fall back."""
    q, k, v, _ = case(torch.bfloat16)
    with pytest.raises(TypeError, match=f"{name!r}; it is an argument of .*{says}"):
        function(q, k, v, **{name: None})


def test_a_tensor_given_twice_is_said():
    q, k, v, gate = case(torch.float32)
    with pytest.raises(TypeError, match="multiple values for argument 'v'"):
        attend(q, k, v, v=v, gate=gate)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
        sagebwd.attention(q=q, k=k, gate=gate)


def test_keys_of_another_number_have_a_table_of_their_own():
    q, k, v, _ = case(torch.float32)
    with pytest.raises(sagebwd.SpecError, match=r"pass rope_k=\(cos, sin\) of \(50, pairs\)"):
        attend(q, k, v, rope=(torch.ones(37, 8), torch.ones(37, 8)))


def test_nested_tensors_and_transforms_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(3, 2, 8), torch.ones(4, 2, 8)],
                                        layout=torch.jagged)  # fmt: skip
    with pytest.raises(sagebwd.SpecError, match="q is a nested tensor: pass its values as"):
        sagebwd.qk_norm_rope(nested, nested, layout="bshd", q_norm=True)
    q, k, v, gate = case(torch.float32)
    with pytest.raises(sagebwd.SpecError, match="has no rules for torch.func's transforms"):
        torch.func.grad(lambda gate: gated(q, gate).sum())(gate)


@pytest.mark.parametrize("function", WITH_FRONT_END)
def test_missing_tensors_and_unknown_names_are_said(function):
    q = torch.zeros(1, 1, 8, 32)
    more = dict(alpha=0.5) if "alpha" in inspect.signature(function).parameters else {}
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) missing 1 required .*'v'"):
        function(q, q, gate=q, **more)
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) .*did you mean 'q_norm'"):
        function(q, q, q, q_nrm=True, **more)
