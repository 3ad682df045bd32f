"""The functions of SLA2 in PyTorch, against the FP64 reference and its forms of lists."""

import numpy as np
import pytest

import sagebwd
from sagebwd.reference import sparse_linear

torch = pytest.importorskip("torch", reason="needs PyTorch")

from alike import assert_alike, compiled, relative  # noqa: E402
from sla_inputs import BLOCKS, EXACT, arrays, drawn, inputs, listed  # noqa: E402

from sagebwd.sla import parts  # noqa: E402
from sagebwd.sla.exact import listed_attention  # noqa: E402
from sagebwd.sla.linear import linear_branch  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


# ---- results -------------------------------------------------------------------------------------

ALPHAS = {"number": 0.3, "heads": (4,), "blocks": (4, 3), "head": (4, 1), "rows": (2, 4, 21),
          "shared": (1, 1, 21), "estimated": "estimated"}  # fmt: skip


@pytest.mark.parametrize("kind", ALPHAS)
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("linear", ["complement", "all"])
def test_it_is_the_reference(kind, heads_kv, linear, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 1 if heads_kv == 2 else 1 << 28)
    tensors, dout = inputs(heads_kv=heads_kv)
    alpha, beta = ALPHAS[kind], None
    if isinstance(alpha, tuple):
        alpha = drawn(*alpha, seed=7).sigmoid().requires_grad_()
    if kind == "estimated":
        beta = drawn(4).requires_grad_()
    leaves = {"dalpha": alpha} if isinstance(alpha, torch.Tensor) else (
        {} if beta is None else {"dbeta": beta})  # fmt: skip
    mask = listed(2, heads_kv, 3, 5)
    out, *branches, lse = sagebwd.sparse_linear_attention(
        *tensors, alpha=alpha, beta=beta, block_mask=mask, linear=linear, return_branches=True,
        **EXACT)  # fmt: skip
    expected = sparse_linear(*arrays(*tensors, dout), **dict(zip(
        ("alpha", "beta"), arrays(alpha, beta))), block_mask=mask.numpy(), linear=linear,
        block_size=BLOCKS)  # fmt: skip
    gradients = torch.autograd.grad(out, [*tensors, *leaves.values()], dout)
    for name, x in zip(("out", "out_sparse", "out_linear", "lse", "dq", "dk", "dv", *leaves),
                       (out, *branches, lse, *gradients)):  # fmt: skip
        np.testing.assert_allclose(x.detach().numpy(), expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("part_bytes", [1, 3000, 1 << 28])
def test_parts_change_nothing(part_bytes, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    monkeypatch.setattr("sagebwd.sla.exact.PART_BYTES", part_bytes)
    tensors, dout = inputs(heads=2, heads_kv=2, queries=40, keys=30)
    mask = drawn(2, 2, 5, 8).sigmoid().requires_grad_()
    out = listed_attention(*tensors, mask, BLOCKS, 0.5)[0] + linear_branch(*tensors, mask, BLOCKS)
    gradients = torch.autograd.grad(out, [*tensors, mask], dout)
    expected = sparse_linear(*arrays(*tensors, 2 * dout), alpha=0.5, block_mask=mask.detach(),
                             block_size=BLOCKS, softmax_scale=0.5)  # fmt: skip
    for name, x in zip(("dq", "dk", "dv", "dblock_mask"), gradients):
        np.testing.assert_allclose(x.numpy(), expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mask_heads", [1, 2, 4])
def test_gradcheck(mask_heads):
    tensors, _ = inputs(queries=11, keys=7, channels=3, batch=1)
    mask = drawn(1, mask_heads, 2, 2).sigmoid().requires_grad_()
    alpha = drawn(4, 2).sigmoid().requires_grad_()
    beta = drawn(4).requires_grad_()

    def both(q, k, v, mask):
        out, lse = listed_attention(q, k, v, mask, BLOCKS, 0.6)
        return out, lse, linear_branch(q, k, v, mask, BLOCKS)

    assert torch.autograd.gradcheck(both, (*tensors, mask), fast_mode=True)

    def layer(q, k, v, alpha, beta):
        options = dict(block_mask=hard, **EXACT)
        return (sagebwd.sparse_linear_attention(q, k, v, alpha=alpha, **options),
                sagebwd.sparse_linear_attention(q, k, v, alpha="estimated", beta=beta, linear="all",
                                                **options))  # fmt: skip

    hard = mask.detach() > 0.5
    assert hard.any() and not hard.all()
    assert torch.autograd.gradcheck(layer, (*tensors, alpha, beta), fast_mode=True)


def test_sixteen_bit_inputs_have_sixteen_bit_errors():
    """The errors are those of the linear branch, whose last rounding alone is 0.0017."""
    for dtype in (torch.bfloat16, torch.float16):
        for sigma, at_most, of_gradients in ((1.0, 0.003, 0.006), (3.0, 0.004, 0.012)):
            (q, k, v), dout = inputs(heads=2, heads_kv=1, queries=300, keys=520, channels=64,
                                     batch=1)  # fmt: skip
            q, k, v, dout = (t.detach().to(dtype).requires_grad_() for t in
                             (sigma * q, sigma * k, v, dout))  # fmt: skip
            mask = sagebwd.top_blocks(sagebwd.pooled_block_scores(q, k), 0.3)
            out = sagebwd.block_linear_attention(q, k, v, block_mask=mask)
            gradients = torch.autograd.grad(out, (q, k, v), dout)
            expected = sparse_linear(*arrays(q, k, v, dout), alpha=0.0, block_mask=mask.numpy())
            assert out.dtype == dtype and relative(out, expected["out_linear"]) < at_most
            for name, x in zip(("dq", "dk", "dv"), gradients):
                assert x.dtype == dtype and relative(x, expected[name]) < of_gradients, name


def test_the_exact_branch_keeps_the_bits_of_float16():
    """The last rounding of results is 0.0002; operands in bf16 gave 0.003 to 0.004."""
    (q, k, v), dout = inputs(heads=2, heads_kv=1, queries=300, keys=520, channels=64, batch=1)
    q, k, v, dout = (t.detach().half().requires_grad_() for t in (q, k, v, dout))
    mask = sagebwd.top_blocks(sagebwd.pooled_block_scores(q, k), 0.3)
    results = sagebwd.sparse_linear_attention(q, k, v, alpha=1.0, block_mask=mask,
                                              precision="exact", return_branches=True)
    gradients = torch.autograd.grad(results[1], (q, k, v), dout)
    expected = sparse_linear(*arrays(q, k, v, dout), alpha=1.0, block_mask=mask.numpy())
    assert relative(results[1], expected["out_sparse"]) < 0.0004
    assert relative(results[3], expected["lse"]) < 1e-6
    for name, x in zip(("dq", "dk", "dv"), gradients):
        assert x.dtype == torch.float16 and relative(x, expected[name]) < 0.0004, name


def test_a_large_mean_of_v_is_kept():
    """Weights sum to 1 after rounding, because normalisers are sums of what is rounded."""
    (q, k, _), _ = inputs(heads=1, heads_kv=1, queries=128, keys=640, channels=64, batch=1)
    q, k = q.bfloat16(), k.bfloat16()
    out = sagebwd.block_linear_attention(
        q, k, torch.full_like(k, 3.0), block_mask=torch.zeros(1, 1, 1, 10, dtype=torch.bool)
    )
    assert (out - 3).abs().max() <= 2**-6


@pytest.mark.parametrize("kind", ["sparse", "linear"])
def test_layouts_agree(kind):
    tensors, dout = inputs()
    given = dict(block_mask=listed(1, 4, 3, 5))
    if kind == "sparse":
        function, given = sagebwd.sparse_linear_attention, given | dict(alpha=0.3, **EXACT)
    else:
        function, given = sagebwd.block_linear_attention, given | dict(block_size=BLOCKS)
    expected = function(*tensors, **given)
    wanted = torch.autograd.grad(expected, tensors, dout)
    swapped = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in tensors]
    out = function(*swapped, layout="bshd", **given)
    got = torch.autograd.grad(out, swapped, dout.transpose(1, 2))
    for x, y in zip((out, *got), (expected, *wanted)):
        torch.testing.assert_close(x.transpose(1, 2), y, rtol=1e-12, atol=1e-14)


def test_without_keys_or_queries_there_is_zero():
    for queries, keys in ((21, 0), (0, 18)):
        tensors, dout = inputs(queries=queries, keys=keys)
        mask = torch.zeros(1, 1, -(-queries // 8), -(-keys // 4), dtype=torch.bool)
        out = sagebwd.sparse_linear_attention(*tensors, alpha=0.5, block_mask=mask, **EXACT)
        assert out.shape == dout.shape and not out.any()
        assert not any(g.any() for g in torch.autograd.grad(out, tensors, dout))


def test_autocast_casts_inputs_and_nothing_inside():
    tensors, dout = inputs(channels=32)
    low = [t.detach().bfloat16().requires_grad_() for t in tensors]
    given = dict(alpha=0.3, block_mask=listed(1, 1, 3, 5), **EXACT)
    expected = sagebwd.sparse_linear_attention(*low, **given)
    wanted = torch.autograd.grad(expected, low, dout.bfloat16())
    leaves = [t.detach().float().requires_grad_() for t in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        out = sagebwd.sparse_linear_attention(*leaves, **given)
        got = torch.autograd.grad(out, leaves, dout.bfloat16())
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    for x, y in zip(got, wanted):
        assert torch.equal(x, y.float())


def test_a_non_finite_value_is_seen_where_it_is_read():
    (q, k, v), _ = inputs()
    mask = listed(1, 1, 3, 5).expand(2, 4, 3, 5)
    with torch.no_grad():
        for name, t in (("q", q), ("k", k), ("v", v)):
            kept = t[0, 0, 9].clone()
            t[0, 0, 9] = torch.nan
            out = sagebwd.sparse_linear_attention(q, k, v, alpha=0.3, block_mask=mask, **EXACT)
            t[0, 0, 9] = kept
            bad = out.isnan().any(-1)
            assert not bad[1].any() and not bad[0, 2:].any(), name
            assert bad[0, 0, 9] if name == "q" else bad[0, :2].all(), name


def test_it_is_differentiated_once():
    tensors, dout = inputs()
    out = sagebwd.sparse_linear_attention(*tensors, alpha=0.3, block_mask=listed(1, 1, 3, 5),
                                          **EXACT)  # fmt: skip
    gradients = torch.autograd.grad(out, tensors, dout, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        sum(g.sum() for g in gradients).backward()


# ---- the kernels' door ---------------------------------------------------------------------------


def test_kernels_are_given_what_the_caller_gave(monkeypatch):
    """A stand-in for `block_sparse_attention`, whose results and gradients are used."""
    tensors, dout = inputs()
    mask, seen = listed(2, 4, 3, 5), {}

    def kernels(q, k, v, *, block_mask, return_lse, **given):
        seen.update(given)
        assert return_lse and block_mask is mask
        return listed_attention(q, k, v, block_mask, BLOCKS, given["softmax_scale"])

    monkeypatch.setattr("sagebwd.lists.block_sparse.block_sparse_attention", kernels)
    monkeypatch.setattr("sagebwd.sla.functional.check_for_kernels", lambda q: None)
    monkeypatch.setattr("sagebwd.lists.blocks.SIZES", BLOCKS)
    monkeypatch.setattr("sagebwd.sla.functional.check_kernels", lambda *options: None)
    given = dict(alpha="estimated", block_mask=mask, block_size=BLOCKS, softmax_scale=0.7)
    given["return_branches"] = True  # in one function they are tests of test_sla_memory.py
    out = sagebwd.sparse_linear_attention(*tensors, **given, group_kv=64, rotate=False)[0]
    expected = sagebwd.sparse_linear_attention(*tensors, **given, precision="exact")[0]
    assert torch.equal(out, expected)
    for x, y in zip(*(torch.autograd.grad(o, tensors, dout) for o in (out, expected))):
        assert torch.equal(x, y)
    assert seen == dict(block_size=BLOCKS, softmax_scale=0.7, granularity="row", group_kv=64,
                        smooth_k=True, smooth_v=False, rotate=False, precision="six-of-seven",
                        deterministic=True, dp_sums="fp32")  # fmt: skip


def test_parts_merge_to_dense_attention_with_its_gradients():
    """Listed keys and the others, merged by lse as ring attention does."""
    tensors, dout = inputs()
    mask = listed(1, 1, 3, 5).expand(2, 4, 3, 5)
    found = [listed_attention(*tensors, m, BLOCKS, 0.5) for m in (mask, ~mask)]
    lse = torch.logaddexp(*(lse for _, lse in found))
    out = sum((part - lse).exp().unsqueeze(-1) * o for o, part in found)
    whole, whole_lse = listed_attention(*tensors, None, BLOCKS, 0.5)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)
    for x, y in zip(*(torch.autograd.grad(o, tensors, dout) for o in (out, whole))):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore")
def test_compiled_it_is_the_same():
    tensors, dout = inputs(heads=2, heads_kv=1, batch=1)
    weight = drawn(4, 4).requires_grad_()

    def layer(q, k, v, weight):
        mask = sagebwd.top_blocks(sagebwd.pooled_block_scores(q, k, block_size=BLOCKS), 0.4)
        return sagebwd.sparse_linear_attention(q @ weight, k, v, alpha=0.4, block_mask=mask,
                                               **EXACT)  # fmt: skip

    assert_alike(compiled(layer), layer, [*tensors, weight], dout)


@pytest.mark.parametrize("wrong", [dict(granularity="foo"), dict(rotate="foo"), dict(group_kv=-4),
                                   dict(dp_sums="x"), dict(precision="int8")])  # fmt: skip
def test_options_of_the_sparse_branch_are_checked_in_exact_too(wrong):
    x = torch.randn(1, 1, 128, 64)
    mask = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    with pytest.raises((sagebwd.SpecError, TypeError)):
        sagebwd.sparse_linear_attention(x, x, x, alpha=0.4, block_mask=mask, **(EXACT | wrong))
    from sagebwd.nn import SparseLinearAttention

    with pytest.raises((sagebwd.SpecError, TypeError)):
        SparseLinearAttention(64, 4, alpha="head", **wrong)


@pytest.mark.parametrize("of", ["blocks", "rows"])
@pytest.mark.parametrize("queries", [21, 24])
def test_alpha_of_queries_without_a_choice_is_not_read(of, queries):
    """Those of the first block list nothing, and those of the second everything."""
    tensors, dout = inputs(queries=queries)
    mask = listed(2, 4, 3, 5)
    alpha = drawn(*((4, 3) if of == "blocks" else (2, 4, queries)), seed=3).sigmoid()
    wild = alpha.clone()
    size = 1 if of == "blocks" else 8
    wild[..., :size], wild[..., size : 2 * size] = torch.nan, torch.inf
    found = []
    for x in (alpha, wild):
        x.requires_grad_()
        out = sagebwd.sparse_linear_attention(*tensors, alpha=x, block_mask=mask, **EXACT)
        found.append((out, *torch.autograd.grad(out, [*tensors, x], dout)))
    assert all(torch.equal(x, y) for x, y in zip(*found))
    assert not found[1][-1][..., : 2 * size].any() and found[1][-1][..., 2 * size :].all()


def test_a_default_device_does_not_matter():
    """Models are often made under one without memory."""
    (q, k, v), dout = inputs()
    given = dict(alpha=0.3, block_mask=listed(2, 4, 3, 5), **EXACT)
    with torch.device("meta"):
        out = sagebwd.sparse_linear_attention(q, k, v, **given)
        found = torch.autograd.grad(out, [q, k, v], dout)
    expected = sagebwd.sparse_linear_attention(q, k, v, **given)
    assert torch.equal(out, expected)
    for x, y in zip(found, torch.autograd.grad(expected, [q, k, v], dout)):
        assert torch.equal(x, y)


def test_an_earlier_call_does_not_make_distributed_tensors_pass():
    class Distributed(torch.Tensor):
        __module__ = "torch.distributed.tensor"

    q = torch.empty(1, 2, 256, 64, dtype=torch.bfloat16, device="meta")
    mask = torch.ones(1, 2, 2, 4, dtype=torch.bool, device="meta")

    def call(t):
        return sagebwd.sparse_linear_attention(t, t, t, alpha=0.3, block_mask=mask)

    assert call(q).shape == q.shape
    with pytest.raises(sagebwd.SpecError, match="is a DTensor"):
        call(q.as_subclass(Distributed))
