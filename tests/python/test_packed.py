"""Packed sequences and used lengths: how calls say them, and that each sequence is as if alone.

The emulation stands in for the kernels; of these tests/gpu/packed_test.cpp asks the same.
"""

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from alike import assert_alike, compiled  # noqa: E402
from packed_inputs import LENGTHS_Q, alone, assert_equal, firsts, packed, spans_of  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401

from sagebwd.core import options  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")


@pytest.mark.parametrize("chosen", [{}, {"causal": "top-left"}, {"causal": "bottom-right"}])
def test_each_sequence_is_as_if_alone(chosen):
    inputs, dout, where = packed()
    out, lse = sagebwd.attention(*inputs, return_lse=True, **where, **chosen)
    gradients = torch.autograd.grad(out, inputs, dout)
    expected = alone(inputs, dout, spans_of(), **chosen)
    assert_equal((out, lse, *gradients), expected)

    q, k, v = (t.detach() for t in inputs)
    out, lse = sagebwd.attention_forward(q, k, v, **where, **chosen)
    gradients = sagebwd.attention_backward(dout, q, k, v, out, lse, **where, **chosen)
    assert_equal((out, lse, *gradients), expected)


def test_what_is_not_used_is_zero():
    inputs, dout, where = packed()
    used_q, used_k = (20, 0, 7, 10, 1), (3, 5, 0, 16, 0)
    where |= {"seqused_q": torch.tensor(used_q, dtype=torch.int32),
              "seqused_k": torch.tensor(used_k, dtype=torch.int32)}  # fmt: skip
    out, lse = sagebwd.attention(*inputs, return_lse=True, **where)
    gradients = torch.autograd.grad(out, inputs, dout)
    spans = [((first_q, m), (first_k, n))
             for ((first_q, _), (first_k, _)), m, n in zip(spans_of(), used_q, used_k)]  # fmt: skip
    assert_equal((out, lse, *gradients), alone(inputs, dout, spans))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_padded_batch(layout, causal):
    generator = torch.Generator().manual_seed(1)
    used = torch.tensor([11, 0, 16], dtype=torch.int32)

    def randn(heads):
        shape = (3, heads, 16, 64) if layout == "bhsd" else (3, 16, heads, 64)
        return torch.randn(shape, generator=generator).bfloat16().requires_grad_()

    inputs, dout = (randn(4), randn(2), randn(2)), randn(4).detach()
    out, lse = sagebwd.attention(*inputs, layout=layout, causal=causal, seqused_q=used,
                                 seqused_k=used, return_lse=True)  # fmt: skip
    gradients = torch.autograd.grad(out, inputs, dout)
    token = 2 if layout == "bhsd" else 1
    for i, n in enumerate(used.tolist()):
        parts = [t[i : i + 1].narrow(token, 0, n).detach().requires_grad_() for t in inputs]
        one, one_lse = sagebwd.attention(*parts, layout=layout, causal=causal, return_lse=True)
        of_one = torch.autograd.grad(one, parts, dout[i : i + 1].narrow(token, 0, n))
        assert torch.equal(lse[i, :, :n], one_lse[0]) and (lse[i, :, n:] == -torch.inf).all()
        for whole, part in zip((out, *gradients), (one, *of_one)):
            whole = whole[i : i + 1]
            assert torch.equal(whole.narrow(token, 0, n), part)
            assert not whole.narrow(token, n, 16 - n).any()


def test_one_form_serves_other_lengths():
    inputs, dout, where = packed()
    sagebwd.attention(*inputs, **where)
    other_q, other_k = (3, 17, 10, 4, 10), (10, 14, 10, 10, 10)
    where = {"cu_seqlens_q": firsts(other_q), "cu_seqlens_k": firsts(other_k)}
    from sagebwd.core import forms

    before = len(forms._forms)
    out, lse = sagebwd.attention(*inputs, return_lse=True, **where)
    gradients = torch.autograd.grad(out, inputs, dout)
    assert len(forms._forms) == before
    assert_equal((out, lse, *gradients), alone(inputs, dout, spans_of(other_q, other_k)))


def test_compiled_it_is_the_same():
    inputs, dout, where = packed()

    def layer(q, k, v, where):
        return sagebwd.attention(q * 2, k, v, causal="top-left", **where) * 0.5

    assert_alike(compiled(layer), layer, inputs, dout, where)


@pytest.mark.parametrize("backward", [False, True])
def test_opcheck(backward):
    inputs, dout, where = packed((20, 4), (24, 5))
    q, k, v = (t.detach()[None].requires_grad_(not backward) for t in inputs)
    text = options.text_of({"causal": "top-left"})
    given = (None, "bshd", text, *where.values())
    if backward:
        out, lse = torch.ops.sagebwd.forward(q, k, v, *given)
        arguments = (dout[None], q, k, v, out, lse, None, *given)
        operator = torch.ops.sagebwd.backward.default
    else:
        arguments, operator = (q, k, v, *given), torch.ops.sagebwd.forward.default
    torch.library.opcheck(operator, arguments, test_utils=(
        "test_schema", "test_autograd_registration", "test_faketensor",
        "test_aot_dispatch_dynamic"))  # fmt: skip


def test_causal_true_is_clear_for_one_tensor_alone():
    inputs, _, where = packed(LENGTHS_Q, LENGTHS_Q)
    same = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), where["cu_seqlens_q"])
    out = sagebwd.attention(*inputs, causal=True, **same)
    assert torch.equal(out, sagebwd.attention(*inputs, causal="top-left", **where))

    def ambiguous(what):
        return pytest.raises(sagebwd.SpecError, match=f"ambiguous {what}: pass one as both, causal")

    with ambiguous("for cu_seqlens_q and cu_seqlens_k that are two tensors"):
        sagebwd.attention(*inputs, causal=True, **where)
    # The lengths that are used of them may differ as well.
    used = [torch.tensor(LENGTHS_Q, dtype=torch.int32) for _ in range(2)]
    lengths = {"seqused_q": used[0], "seqused_k": used[1]}
    with ambiguous("for seqused_q and seqused_k that are two tensors"):
        sagebwd.attention(*inputs, causal=True, **same, **lengths)
    padded = [torch.zeros(len(LENGTHS_Q), 2, 32, 64, dtype=torch.bfloat16)] * 3
    with ambiguous("for seqused_q and seqused_k that are two tensors"):
        sagebwd.attention(*padded, causal=True, **lengths)
    for name, used_alone in lengths.items():
        with ambiguous(f"with {name} alone"):
            sagebwd.attention(*padded, causal=True, **{name: used_alone})
    lengths["seqused_k"] = used[0]
    assert torch.equal(sagebwd.attention(*inputs, causal=True, **same, **lengths), out)


def test_refusals_say_what_is_wanted():
    (q, k, v), _, where = packed()

    def refused(match, error=sagebwd.SpecError, tensors=(q, k, v), **changed):
        with pytest.raises(error, match=match):
            sagebwd.attention(*tensors, **{**where, **changed})

    refused("and cu_seqlens_k, or neither", cu_seqlens_k=None)
    refused("cu_seqlens_q is a list; pass an int32 tensor", TypeError, cu_seqlens_q=[0, 5])
    refused(r"torch\.int64.*contiguous torch", cu_seqlens_q=where["cu_seqlens_q"].long())
    refused("6 numbers and cu_seqlens_k 5", cu_seqlens_k=where["cu_seqlens_k"][:-1])
    refused("seqused_k has 3 numbers; there are 5 sequences",
            seqused_k=torch.zeros(3, dtype=torch.int32))  # fmt: skip
    refused(r"\(tokens, heads, head_dim\)", tensors=(q[None], k[None], v[None]))
    refused("packed.*'block'.*'row'", granularity="block")
    with pytest.raises(TypeError, match=r"max_seqlen_q.*leave it out"):
        sagebwd.attention(q, k, v, max_seqlen_q=20, **where)


def test_a_layout_that_there_is_not_is_refused_though_packed_sequences_have_none():
    inputs, dout, where = packed()
    out, lse = sagebwd.attention_forward(*inputs, layout="bhsd", **where)
    passes = (lambda **given: sagebwd.attention(*inputs, **given),
              lambda **given: sagebwd.attention_forward(*inputs, **given),
              lambda **given: sagebwd.attention_backward(dout, *inputs, out, lse, **given),
              lambda **given: sagebwd.emulation.emulated_attention(*inputs, **given))  # fmt: skip
    for function in passes:
        with pytest.raises(sagebwd.SpecError, match="layout='thd': pass 'bhsd'"):
            function(layout="thd", **where)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"])
def test_lengths_that_require_a_gradient_are_called_by_their_name(name):
    """Not k_mean, which alone might require one."""
    inputs, _, where = packed()
    used = dict.fromkeys(("seqused_q", "seqused_k"), torch.ones(5, dtype=torch.int32))
    given = where | used
    given[name] = given[name].float().requires_grad_()
    with pytest.raises(sagebwd.SpecError, match=rf"{name} is \(\d,\) torch.float32 on cpu"):
        sagebwd.attention(*inputs, **given)
