"""Functions by the names that users of other attentions know, against PyTorch's in FP64."""

import inspect
import re

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from alike import compiled  # noqa: E402
from stand_in import interval_kernels_on_the_cpu, kernels_on_the_cpu  # noqa: E402, F401
from torch.nn.functional import scaled_dot_product_attention as exact_sdpa  # noqa: E402

from sagebwd import masks  # noqa: E402
from sagebwd.integrations import dropins  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16().requires_grad_()


def close(found, expected, inputs, dout):
    """Both out and every gradient have to be close."""
    gradients = torch.autograd.grad(found, inputs, dout, retain_graph=True)
    wanted = torch.autograd.grad(expected, inputs, dout.double())
    for x, y in zip((found.detach(), *gradients), (expected.detach(), *wanted)):
        assert x.dtype == torch.bfloat16 and x.shape == y.shape
        assert float((x.double() - y.double()).norm() / y.double().norm()) < 0.03


def bottom_right(m, n, left=None):
    """flash-attention's causal mask."""
    behind = torch.arange(n) - torch.arange(m)[:, None] - (n - m)
    return (behind <= 0) & (behind >= -left if left is not None else True)


def flash(q, k, v, mask=None, scale=None):
    """(batch, tokens, heads, head_dim) by PyTorch, in FP64."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    return exact_sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("n", [40, 56])
@pytest.mark.parametrize("given", [{}, {"causal": True}, {"causal": True, "window_size": (9, 0)},
                                   {"softmax_scale": 0.2}], ids=str)  # fmt: skip
def test_flash_attn_func(n, given):
    q, k, v = randn(2, 40, 4, 64), randn(2, n, 2, 64, seed=1), randn(2, n, 2, 64, seed=2)
    mask = bottom_right(40, n, given["window_size"][0] if "window_size" in given else None)
    expected = flash(q, k, v, mask if "causal" in given else None, given.get("softmax_scale"))
    found, lse, nothing = dropins.flash_attn_func(q, k, v, return_attn_probs=True, **given)
    close(found, expected, (q, k, v), randn(*found.shape, seed=3).detach())
    assert lse.shape == (2, 4, 40) and nothing is None
    kv = torch.stack((k, v), 2)
    assert torch.equal(dropins.flash_attn_kvpacked_func(q, kv, **given), found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bounds", [{"window_left": 9}, {"window_left": 9, "window_right": 3}])
def test_a_window_by_the_names_of_its_bounds(causal, bounds):
    qkv = randn(40, 3, 4, 64)
    pair = (bounds["window_left"], bounds.get("window_right", -1))
    firsts = torch.tensor([0, 16, 40]).int()
    for function, *given in [
        (dropins.flash_attn_func, *qkv[None].unbind(2)),
        (dropins.flash_attn_qkvpacked_func, qkv[None]),
        (dropins.flash_attn_varlen_func, *qkv.unbind(1), firsts, firsts),
        (dropins.flash_attn_varlen_qkvpacked_func, qkv, firsts),
    ]:
        expected = function(*given, causal=causal, window_size=pair)
        assert not torch.equal(expected, function(*given, causal=causal))
        for neutral in ({}, {"window_size": (-1, -1)}, {"window_size": None}):
            found = function(*given, causal=causal, **neutral, **bounds)
            assert torch.equal(found, expected)
        with pytest.raises(sagebwd.SpecError, match="and window_left=9 give the window twice"):
            function(*given, causal=causal, window_size=(-1, 5), **bounds)


def test_flash_attn_qkvpacked_func():
    qkv = randn(2, 24, 3, 4, 64)
    found = dropins.flash_attn_qkvpacked_func(qkv, 0.0, None, True)
    close(found, flash(*qkv.unbind(2), bottom_right(24, 24)), (qkv,), randn(*found.shape).detach())


def test_flash_attn_varlen_func():
    lengths = (24, 0, 9)
    firsts = torch.tensor([0, *lengths]).cumsum(0).int()
    qkv = randn(33, 3, 4, 64)
    q, k, v = qkv.unbind(1)
    found = dropins.flash_attn_varlen_func(q, k, v, firsts, firsts, 24, 24, causal=True)
    expected = torch.cat([flash(*(t[None] for t in part), bottom_right(n, n))[0] for n, *part in
                          zip(lengths, *(t.split(lengths) for t in (q, k, v))) if n])  # fmt: skip
    close(found, expected, (qkv,), randn(*found.shape, seed=3).detach())
    same = dropins.flash_attn_varlen_qkvpacked_func(qkv, firsts, 24, causal=True)
    assert torch.equal(same, found)
    kv = torch.stack((k, v), 1)
    same = dropins.flash_attn_varlen_kvpacked_func(q, kv, firsts, firsts, 24, 24, causal=True)
    assert torch.equal(same, found)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("causal", [False, True])
def test_sageattn(layout, causal):
    inputs = randn(2, 4, 40, 64), randn(2, 2, 40, 64, seed=1), randn(2, 2, 40, 64, seed=2)
    expected = exact_sdpa(*(t.double() for t in inputs), is_causal=causal, enable_gqa=True)
    swapped = [t if layout == "HND" else t.transpose(1, 2) for t in inputs]
    found, lse = dropins.sageattn(*swapped, tensor_layout=layout, is_causal=causal, return_lse=True)
    found = found if layout == "HND" else found.transpose(1, 2)
    close(found, expected, inputs, randn(*found.shape, seed=3).detach())
    assert lse.shape == (2, 4, 40)


def test_sageattn_smooths_what_it_is_told_to():
    q, k, v = randn(1, 2, 40, 64) + 4, randn(1, 2, 40, 64, seed=1), randn(1, 2, 40, 64, seed=2)
    for given in ({"smooth_q": True}, {"smooth_k": False}):
        found = dropins.sageattn(q, k, v, **given)
        assert torch.equal(found, sagebwd.attention(q, k, v, **given))
        assert not torch.equal(found, dropins.sageattn(q, k, v))
    firsts = torch.tensor([0, 40]).int()
    with pytest.raises(sagebwd.SpecError, match="smooth_q is not supported for packed"):
        dropins.sageattn(q[0].mT, k[0].mT, v[0].mT, cu_seqlens_q=firsts, cu_seqlens_k=firsts,
                         smooth_q=True)  # fmt: skip
    with pytest.raises(sagebwd.SpecError, match=r"smooth_q is not supported under .*'qk16'"):
        dropins.sageattn(q, k, v, smooth_q=True, precision="qk16")


def test_packed_sequences_need_to_know_where_they_begin():
    q = randn(40, 2, 64)
    with pytest.raises(sagebwd.SpecError, match=r"pass int32 tensors.*flash_attn_func takes"):
        dropins.flash_attn_varlen_func(q, q, q, None, None, 40, 40)


@pytest.mark.parametrize("given", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_scaled_dot_product_attention(given):
    inputs = randn(2, 4, 40, 64), randn(2, 2, 56, 64, seed=1), randn(2, 2, 56, 64, seed=2)
    expected = exact_sdpa(*(t.double() for t in inputs), enable_gqa=True, **given)
    found = dropins.scaled_dot_product_attention(*inputs, enable_gqa=True, **given)
    close(found, expected, inputs, randn(*found.shape, seed=3).detach())


def test_signatures_are_those_of_the_originals():
    def names(function):
        return [p.name for p in inspect.signature(function).parameters.values()
                if p.kind is p.POSITIONAL_OR_KEYWORD]  # fmt: skip

    # PyTorch's has no signature to inspect: as documented.
    assert names(dropins.scaled_dot_product_attention) == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    flash_2 = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes",
               "deterministic", "return_attn_probs"]  # fmt: skip
    assert names(dropins.flash_attn_func) == ["q", "k", "v", *flash_2]
    assert names(dropins.flash_attn_varlen_func) == [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *flash_2,
        "block_table"]  # fmt: skip
    assert names(dropins.sageattn) == ["q", "k", "v", "tensor_layout", "is_causal", "sm_scale",
                                       "return_lse"]  # fmt: skip
    assert names(dropins.flashmask_attention) == ["query", "key", "value", "startend_row_indices"]
    assert [p.name for p in inspect.signature(dropins.flashmask_attention).parameters.values()
            if p.kind is p.KEYWORD_ONLY] == [
        "dropout", "causal", "window_size", "return_softmax_lse", "return_seed_offset",
        "fixed_seed_offset", "rng_name", "training", "name", "softmax_scale", "block_mask",
    ]  # fmt: skip


def test_what_is_not_honoured_is_refused_by_its_name():
    q, k, v = randn(1, 16, 4, 64), randn(1, 16, 2, 64), randn(1, 16, 2, 64)
    mask = torch.ones(4, 2, dtype=torch.bool).tril()
    mask[2:, 0] = False  # pairs that no two numbers say

    def refused(match, function, *given, error=sagebwd.SpecError, **more):
        with pytest.raises(error, match=match):
            function(*given, **more)

    refused("dropout_p=.*not supported", dropins.flash_attn_func, q, k, v, dropout_p=0.1)
    refused(r"window_size=5: pass \(left, right\)", dropins.flash_attn_func, q, k, v, window_size=5)
    for pair in ((-2, 0), (0.5, 0), (0, "3"), (1 << 62, 0)):
        refused(rf"^window_size={re.escape(repr(pair))}: pass \(left, right\), each a whole number",
                dropins.flash_attn_func, q, k, v, window_size=pair)  # fmt: skip
    refused("causal='yes'", dropins.flash_attn_func, q, k, v, causal="yes")
    refused("attn_mask=a tensor.*flex", dropins.scaled_dot_product_attention, q, k, v, mask)
    refused("dropout_p=0.5", dropins.scaled_dot_product_attention, q, k, v, None, 0.5)
    refused("16 heads and key 8: pass enable_gqa", dropins.scaled_dot_product_attention, q,
            k[:, :8], v[:, :8])  # fmt: skip
    compiled = torch.compile(dropins.scaled_dot_product_attention, backend="eager")
    refused("16 heads and key 8: pass enable_gqa", compiled, q, k[:, :8], v[:, :8],
            error=Exception)  # fmt: skip
    refused("tensor_layout='BHSD'", dropins.sageattn, q, k, v, tensor_layout="BHSD")
    refused("ambiguous", dropins.sageattn, q, k[:, :8], v[:, :8], tensor_layout="NHD",
            is_causal=True)  # fmt: skip
    refused("no KV cache", dropins.flash_attn_varlen_func, q[0], k[0], v[0],
            *[torch.tensor([0, 16]).int()] * 2, block_table=mask)  # fmt: skip
    refused(r"qkv has shape .*must be \(batch, tokens, 3, heads, head_dim\)",
            dropins.flash_attn_qkvpacked_func, q)  # fmt: skip
    refused(r"kv has shape .*\(tokens, 2, heads, head_dim\)",
            dropins.flash_attn_varlen_kvpacked_func, q[0], k[0], None, None)  # fmt: skip
    for name, instead in (("qk_quant_gran", "granularity="), ("pv_accum_dtype", "precision=")):
        refused(rf"sageattn\(\) takes no {name}: .*{instead}", dropins.sageattn, q, k, v,
                error=TypeError, **{name: "per_warp"})  # fmt: skip
    for function in (dropins.flash_attn_func, dropins.sageattn):
        refused("return_max_logits", function, q, k, v, error=TypeError, return_max_logits=True)
    refused(r"dropout_p=0\.125.*fourth argument, pass it by its name, softmax_scale=",
            dropins.flash_attn_func, q, k, v, 0.125)  # fmt: skip
    refused("query is a list", dropins.scaled_dot_product_attention, [q], [k], [v],
            error=TypeError)  # fmt: skip
    flashmask, numbers = dropins.flashmask_attention, torch.zeros(1, 1, 16, 2).int()
    refused("dropout=0.1: dropout is not supported", flashmask, q, k, v, dropout=0.1)
    refused("return_seed_offset=True: there is no dropout", flashmask, q, k, v, numbers,
            return_seed_offset=True)  # fmt: skip
    refused("block_mask=a tensor: sagebwd.block_sparse_attention", flashmask, q, k, v, numbers,
            block_mask=mask)  # fmt: skip
    refused(r"window_size=4 and startend_row_indices are given together.*window_and_global",
            flashmask, q, k, v, numbers, window_size=4)  # fmt: skip
    for window in (-1, (3,), (1, 2, 3), (-1, -1), "12", 0.5):
        refused(rf"window_size={re.escape(repr(window))}: pass a whole number of at least 0",
                flashmask, q, k, v, window_size=window)  # fmt: skip


def test_errors_speak_of_the_functions_own_arguments():
    q, k = randn(1, 16, 4, 64).detach(), randn(1, 8, 4, 64).detach()
    two = [torch.tensor([0, 16]).int(), torch.tensor([0, 8]).int()]

    def says(said, function, *given, error=sagebwd.SpecError, **more):
        with pytest.raises(error) as raised:
            getattr(dropins, function)(*given, **more)
        for part in said:
            assert part in str(raised.value)
        for word in ("layout='bshd'", " softmax_scale", "(is layout=", "pass causal", "use causal"):
            assert word not in str(raised.value)

    corner = ["is_causal=True is ambiguous", "call sagebwd.attention with causal='top-left'"]
    says(corner, "sageattn", q, k, k, tensor_layout="NHD", is_causal=True)
    says([*corner, "pass one as both, or call"], "sageattn", q[0], k[0], k[0], is_causal=True,
         cu_seqlens_q=two[0], cu_seqlens_k=two[1])  # fmt: skip
    says(["sm_scale='x': pass a number"], "sageattn", q, q, q, sm_scale="x")
    says(["(is tensor_layout= right?)"], "sageattn", q, q[:, :3], q[:, :3])
    says(["or tensor_layout='NHD' for (batch, token"], "sageattn", q[0], q[0], q[0])
    says(["use is_causal=, window_left="], "sageattn", q, q, q, attn_mask=None, error=TypeError)
    says(["scale='x': pass a number"], "scaled_dot_product_attention", q, q, q, scale="x")
    says(["query has 3 heads", "key and value have 4"], "scaled_dot_product_attention",
         q[:, :3], q[:, :4], q[:, :4], enable_gqa=True)  # fmt: skip
    says(["use is_causal=, window_left="], "scaled_dot_product_attention", q, q, q,
         attn_mask=q[:, :, :, :4])  # fmt: skip
    says(["query is torch.float32"], "scaled_dot_product_attention", q.float(), q, q)
    says(["(batch, tokens, heads, head_dim). Packed sequences, (tokens, heads, head_dim), are for "
          "flash_attn_varlen_func"], "flash_attn_func", q[0], q[0], q[0])  # fmt: skip
    says(["(tensors are (batch, tokens, heads, head_dim))"], "flash_attn_func", q, q[:, :, :3],
         q[:, :, :3])  # fmt: skip
    says(["causal=True is ambiguous", "call sagebwd.attention with causal='top-left'"],
         "flashmask_attention", q, k, k, causal=True)  # fmt: skip
    says(["query is torch.float32"], "flashmask_attention", q.float(), q, q)
    says(["(tensors are (batch, tokens, heads, head_dim))"], "flashmask_attention", q, q[:, :, :3],
         q[:, :, :3])  # fmt: skip
    says(["cu_seqlens is (2,) torch.int64"], "flash_attn_varlen_qkvpacked_func",
         torch.stack([q[0]] * 3, 1), two[0].long())  # fmt: skip


@pytest.mark.parametrize(
    "function, name, message",
    [
        ("flash_attn_func", "window_sizes", "did you mean 'window_size'"),
        ("flash_attn_func", "softcapp", "did you mean 'softcap'"),
        ("flash_attn_func", "alibi_slope", r"did you mean 'alibi_slopes'\?"),
        ("flash_attn_func", "precison", r"did you mean 'precision'\?"),
        ("flash_attn_func", "is_causal", r"did you mean 'causal'\?"),
        ("flash_attn_varlen_func", "max_seqlen", "did you mean 'max_seqlen_"),
        ("flash_attn_qkvpacked_func", "window_sizes", "did you mean 'window_size'"),
        ("flash_attn_varlen_kvpacked_func", "k", "did you mean"),
        ("sageattn", "tensor_layot", r"did you mean 'tensor_layout'\?"),
        ("scaled_dot_product_attention", "is_casual", "did you mean 'is_causal'"),
        ("flash_attn_func", "layout", "tokens come before heads"),
        ("flash_attn_kvpacked_func", "return_lse", "pass return_attn_probs=True"),
        ("flash_attn_varlen_qkvpacked_func", "cu_seqlens_k", "pass cu_seqlens"),
        ("sageattn", "causal", "pass is_causal"),
        ("sageattn", "softmax_scale", "pass sm_scale"),
        ("sageattn", "layout", "pass tensor_layout"),
        ("flashmask_attention", "return_lse", "pass return_softmax_lse=True"),
        ("flashmask_attention", "window_left", "pass window_size"),
        ("flashmask_attention", "attn_mask", r"pass sagebwd.masks.from_bool\(attn_mask\)"),
        ("flashmask_attention", "cu_seqlens_q", "sagebwd.masks.documents says by intervals"),
        ("flashmask_attention", "startend_rows", "did you mean 'startend_row_indices'"),
        ("scaled_dot_product_attention", "causal", "pass is_causal"),
        ("scaled_dot_product_attention", "softmax_scale", "pass scale"),
    ],
)
def test_a_wrong_keyword_is_told_of_in_the_functions_own_names(function, name, message):
    unknown = "got an unexpected keyword argument '{}'; " if "mean" in message else "takes no {}: "
    with pytest.raises(TypeError, match=rf"^{function}\(\) {unknown.format(name)}{message}"):
        getattr(dropins, function)(**{name: None})


def test_compiled_they_are_the_same():
    qkv = randn(1, 24, 3, 4, 64)

    def layer(qkv):
        q, k, v = qkv.unbind(2)
        out = dropins.flash_attn_qkvpacked_func(qkv * 2, causal=True, window_left=7)
        out = out + dropins.sageattn(q, k, v, tensor_layout="NHD", is_causal=True)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return out + dropins.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2)

    assert torch.equal(compiled(layer)(qkv), layer(qkv))


def test_flashmask_is_attention_with_intervals_also_compiled(interval_kernels_on_the_cpu):
    qkv, numbers = randn(2, 24, 3, 4, 64), masks.documents(lengths=[9, 15]).startend_row_indices

    def layer(qkv):
        out, lse = dropins.flashmask_attention(*(qkv * 2).unbind(2), numbers, causal=True,
                                               return_softmax_lse=True, softmax_scale=0.2)  # fmt: skip
        return out * lse.mean()

    out, lse = sagebwd.attention(*(qkv * 2).unbind(2), startend_row_indices=numbers, causal=True,
                                 layout="bshd", return_lse=True, softmax_scale=0.2)  # fmt: skip
    assert torch.equal(layer(qkv), out * lse.mean())
    assert torch.equal(compiled(layer)(qkv), layer(qkv))


def test_a_cache_of_keys_is_refused_with_advice():
    with pytest.raises(sagebwd.SpecError, match=r"no KV cache: .* scaled_dot_product_attention"):
        sagebwd.flash_attn_with_kvcache(1, 2, 3, cache_seqlens=4)
