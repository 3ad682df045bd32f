"""The functions of SLA2 in PyTorch, against the FP64 reference and its forms of lists."""

import numpy as np
import pytest

import sagebwd
from sagebwd.reference import sparse_linear

torch = pytest.importorskip("torch", reason="needs PyTorch")

from alike import assert_alike, compiled  # noqa: E402

from sagebwd.sla import parts  # noqa: E402
from sagebwd.sla.exact import listed_attention  # noqa: E402
from sagebwd.sla.linear import linear_branch  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")

BLOCKS = (8, 4)
EXACT = dict(block_size=BLOCKS, precision="exact")


def drawn(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def inputs(heads=4, heads_kv=2, queries=21, keys=18, channels=4, batch=2, dtype=torch.float64):
    """q, k, v and dout; the last blocks are short."""
    made = ((heads, queries), (heads_kv, keys), (heads_kv, keys), (heads, queries))
    q, k, v, dout = (drawn(batch, h, n, channels, seed=s, dtype=dtype)
                     for s, (h, n) in enumerate(made))  # fmt: skip
    return [t.requires_grad_() for t in (q, k + 0.7, v)], dout


def listed(*shape):
    """Lists of which the first is empty, the second full and the third neither."""
    mask = drawn(*shape, seed=5) > 0.2
    mask[..., 0, :], mask[..., 1, :] = False, True
    mask[..., 2, 1], mask[..., 2, 2] = True, False
    return mask


def arrays(*tensors):
    return [t.detach().double().numpy() if isinstance(t, torch.Tensor) else t for t in tensors]


def relative(x, expected):
    x = x.detach().double().numpy() if isinstance(x, torch.Tensor) else x
    return float(np.linalg.norm(x - expected) / np.linalg.norm(expected))


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
    """Of the linear branch, whose last rounding alone is 0.0017."""
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

    monkeypatch.setattr(sagebwd, "block_sparse_attention", kernels, raising=False)
    monkeypatch.setattr("sagebwd.sla.blocks.SIZES", BLOCKS)
    given = dict(alpha="estimated", block_mask=mask, block_size=BLOCKS, softmax_scale=0.7)
    out = sagebwd.sparse_linear_attention(*tensors, **given, group_kv=64, rotate=False)
    expected = sagebwd.sparse_linear_attention(*tensors, **given, precision="exact")
    assert torch.equal(out, expected)
    for x, y in zip(*(torch.autograd.grad(o, tensors, dout) for o in (out, expected))):
        assert torch.equal(x, y)
    assert seen == dict(block_size=BLOCKS, softmax_scale=0.7, granularity="row", group_kv=64,
                        smooth_k=True, rotate=False, precision="six-of-seven",
                        deterministic=True)  # fmt: skip


# ---- lists ---------------------------------------------------------------------------------------


def as_indices(mask, seed=0):
    """Of a mask the numbers of its blocks, in any order, some twice, with what does not count."""
    width = mask.shape[-1] + 3
    generator = np.random.default_rng(seed)
    indices = np.full((*mask.shape[:-1], width), 10**6, np.int32)
    counts = np.zeros(mask.shape[:-1], np.int32)
    for row in np.ndindex(*mask.shape[:-1]):
        of = np.flatnonzero(mask[row].numpy())
        of = generator.permutation(np.concatenate([of, of[:2]]))
        indices[row][: len(of)], counts[row] = of, len(of)
    return torch.from_numpy(indices), torch.from_numpy(counts)


def as_bits(mask):
    words = mask.shape[-1] // 32 + 1
    bits = np.zeros((*mask.shape[:-1], words), np.uint32)
    for *row, j in zip(*np.nonzero(mask.numpy())):
        bits[(*row, j // 32)] |= np.uint32(1) << np.uint32(j % 32)
    return torch.from_numpy(bits.view(np.int32))


@pytest.mark.parametrize("keys", [18, 140])
def test_all_forms_of_lists_give_the_same_bits(keys):
    tensors, dout = inputs(keys=keys)
    mask = listed(2, 4, 3, -(-keys // 4))
    indices, counts = as_indices(mask)
    forms = [
        dict(block_mask=mask),
        dict(block_mask=mask.to(torch.uint8)),
        dict(block_indices=indices, block_counts=counts),
        dict(block_bits=as_bits(mask)),
    ]
    first = None
    for form in forms:
        out = sagebwd.sparse_linear_attention(*tensors, alpha=0.3, **form, **EXACT)
        found = (out, *torch.autograd.grad(out, tensors, dout))
        first = first or found
        assert all(torch.equal(x, y) for x, y in zip(found, first))


def test_a_block_that_does_not_exist_makes_its_rows_nan():
    tensors, _ = inputs()
    mask = listed(2, 4, 3, 5)
    indices, counts = as_indices(mask)
    indices[1, 2, 1, 0] = 5
    indices[0, 1, 2, 0] = -1
    counts[0, 3, 0] = 9
    bad = torch.zeros(2, 4, 21, dtype=torch.bool)
    bad[1, 2, 8:16] = bad[0, 1, 16:] = bad[0, 3, :8] = True
    results = sagebwd.sparse_linear_attention(
        *tensors, alpha=0.3, block_indices=indices, block_counts=counts, return_branches=True,
        **EXACT)  # fmt: skip
    for x in results[:3]:
        assert torch.equal(x.isnan().any(-1), bad) and torch.equal(x.isnan().all(-1), bad)
    assert torch.equal(results[3].isnan(), bad)
    bits = as_bits(mask)
    bits[1, 2, 1, -1] |= -(2**31)
    out = sagebwd.block_linear_attention(*tensors, block_bits=bits, block_size=BLOCKS)
    assert torch.equal(out.isnan().any(-1).nonzero()[:, 0].unique(), torch.tensor([1]))
    assert out[1, 2, 8:16].isnan().all() and out.isnan().sum() == 8 * 4


def test_wrong_use_is_refused():
    (q, k, v), _ = inputs()
    mask = listed(2, 4, 3, 5)
    indices, counts = as_indices(mask)

    def refused(match, error=sagebwd.SpecError, of=(q, k, v), **given):
        with pytest.raises(error, match=match):
            sagebwd.sparse_linear_attention(*of, **{"alpha": 0.3, **EXACT, **given})

    refused("no lists of blocks given: pass one of block_mask")
    refused("block_mask and block_bits given", block_mask=mask, block_bits=mask)
    refused("block_counts belongs to block_indices", block_mask=mask, block_counts=counts)
    refused("block_mask is torch.float64: pass torch.bool or torch.uint8", block_mask=mask.double())
    refused(r"shape \(2, 4, 5, 3\): 21 queries and 18 keys in blocks of \(8, 4\) need .*"
            r"\(2 or 1, 4 or 2 or 1, 3, 5\)", block_mask=mask.mT)  # fmt: skip
    refused("4 or 2 or 1", block_mask=mask[:, :3])
    refused(r"need .*words.* 3, 1\)", block_bits=indices)
    refused("block_indices is torch.int64", block_indices=indices.long())
    refused(r"block_counts is torch.int32 of \(2, 4, 2\)", block_indices=indices,
            block_counts=counts[:, :, :2])  # fmt: skip
    refused("is on meta", block_mask=mask.to("meta"))
    refused("block_mask is a list", TypeError, block_mask=[1])
    refused("kernels have 64 and 128", block_mask=mask, precision="six-of-seven")
    refused("share of the exact branch", block_mask=mask, alpha=1.1)
    refused("alpha is a str|'estimated'", block_mask=mask, alpha="mean")
    refused("alpha is a list", TypeError, block_mask=mask, alpha=[0.5])
    refused(r"alpha is torch.float32 of \(3,\).*\(4,\).*\(4, 3\)", block_mask=mask,
            alpha=torch.zeros(3))  # fmt: skip
    refused("leave it out", block_mask=mask, beta=torch.zeros(4))
    refused(r"\(4,\), one for each head", block_mask=mask, alpha="estimated", beta=torch.zeros(2))
    refused("feature_map='elu': pass 'softmax'", block_mask=mask, feature_map="elu")
    refused("'complement' or 'all'", block_mask=mask, linear="none")
    refused("layout='sbhd'", block_mask=mask, layout="sbhd")
    refused("one dtype on one device", of=(q, k.float(), v), block_mask=mask)
    refused("multiple of the second", of=(q, k[:, :0], v), block_mask=mask)
    refused("do not belong together", of=(q, k, v[:, :, :5]), block_mask=mask)
    refused("q has rank 3", of=(q[0], k, v), block_mask=mask)
    refused("q is torch.int64", of=(q.long(), k, v), block_mask=mask)
    refused("q is a list", TypeError, of=([1], k, v), block_mask=mask)
    refused("takes no causal: .*block_sparse_attention has causal=", TypeError, block_mask=mask,
            causal=True)  # fmt: skip
    refused("takes no topk: pass density=", TypeError, topk=0.1)
    refused("takes no BLKQ: pass block_size=", TypeError, BLKQ=64)
    refused("did you mean 'softmax_scale'", TypeError, block_mask=mask, scale=1.0)
    block_mask = type("BlockMask", (), {})()
    refused("full_kv_indices", TypeError, block_mask=block_mask)
    refused("two numbers, queries and keys", TypeError, block_mask=mask, block_size=8)


# ---- the router ----------------------------------------------------------------------------------


@pytest.mark.parametrize("heads_kv", [1, 4])
@pytest.mark.parametrize("maps", [None, (4, 4), (4, 4, 4)])
def test_scores_and_lists_are_those_of_the_reference(heads_kv, maps):
    tensors, dout = inputs(heads_kv=heads_kv)
    weights = {} if maps is None else {name: drawn(*maps, seed=s) for s, name in
                                       enumerate(("query_map", "key_map"))}  # fmt: skip
    leaves = [*tensors, *(w.requires_grad_() for w in weights.values())]
    scores = sagebwd.pooled_block_scores(*tensors[:2], block_size=BLOCKS, **weights)
    mask = sagebwd.soft_top_blocks(scores, 0.45, 0.3)
    out = 0.4 * listed_attention(*tensors, mask, BLOCKS, 0.5)[0] + (
        0.6 * linear_branch(*tensors, mask, BLOCKS))  # fmt: skip
    expected = sparse_linear(*arrays(*tensors, dout), alpha=0.4, density=0.45, temperature=0.3,
                             block_size=BLOCKS, softmax_scale=0.5,
                             **{n: w.detach().numpy() for n, w in weights.items()})  # fmt: skip
    names = "scores", "block_mask", "out", "dq", "dk", "dv", *(f"d{name}" for name in weights)
    found = scores, mask, out, *torch.autograd.grad(out, leaves, dout)
    for name, x in zip(names, found):
        np.testing.assert_allclose(x.detach().numpy(), expected[name], rtol=1e-9, atol=1e-11,
                                   err_msg=name)  # fmt: skip
    hard = sparse_linear(
        *arrays(*tensors),
        alpha=0.4,
        density=0.45,
        block_size=BLOCKS,
        softmax_scale=0.5,
        **{n: w.detach().numpy() for n, w in weights.items()},
    )
    best = sagebwd.top_blocks(scores, 0.45)
    assert best.dtype == torch.bool and np.array_equal(best.numpy(), hard["block_mask"])


def test_scores_of_sixteen_bits_have_sums_in_fp32():
    (q, k, _), _ = inputs(queries=300, keys=300, channels=32)
    q, k = q.detach().bfloat16(), k.detach().bfloat16()
    scores = sagebwd.pooled_block_scores(q, k)
    assert scores.dtype == torch.float32 and scores.shape == (2, 4, 3, 5)
    exact = sagebwd.pooled_block_scores(q.double(), k.double())
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-6)
    swapped = sagebwd.pooled_block_scores(q.transpose(1, 2), k.transpose(1, 2), layout="bshd")
    assert torch.equal(swapped, scores)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sagebwd.pooled_block_scores(q, k), scores)


def test_how_many_blocks_are_kept():
    scores = drawn(2, 3, 512)
    for density, kept in ((0.03, 15), (0.05, 25), (0.1, 51), (1.0, 512), (0.0001, 1),
                          (3 / 512, 3)):  # fmt: skip
        mask = sagebwd.top_blocks(scores, density)
        assert (mask.sum(-1) == kept).all()
        assert torch.equal(mask, scores >= scores.sort(-1).values[..., -kept, None])
        soft = sagebwd.soft_top_blocks(scores.float(), density)
        assert soft.dtype == torch.float32 and (soft.sum(-1) - kept).abs().max() < 1e-4
        assert (sagebwd.soft_top_blocks(scores, density).sum(-1) - kept).abs().max() < 1e-10


def test_equal_scores_go_to_the_earlier_blocks():
    assert sagebwd.top_blocks(torch.zeros(2, 9), 0.4).tolist() == [[True] * 3 + [False] * 6] * 2


def test_soft_lists_become_hard_and_have_an_exact_gradient():
    scores = drawn(3, 12).requires_grad_()
    hard = sagebwd.top_blocks(scores, 0.3)
    gaps = []
    for temperature in (1.0, 0.1, 0.01, 1e-6):
        soft = sagebwd.soft_top_blocks(scores, 0.3, temperature)
        gaps.append(float((soft - hard.double()).detach().abs().max()))
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < 1e-9
    for temperature in (1.0, 0.3):
        assert torch.autograd.gradcheck(
            lambda x, t=temperature: sagebwd.soft_top_blocks(x, 0.3, t), (scores,)
        )
    whole = sagebwd.soft_top_blocks(scores, 1.0)
    assert (whole == 1).all() and not torch.autograd.grad(whole.sum(), scores)[0].any()
    # Where sigmoids are 0 or 1 in their type there is no slope, and no 0 / 0.
    steep = sagebwd.soft_top_blocks(scores, 0.3, 1e-30)
    assert torch.autograd.grad(steep[0, 0], scores)[0].isfinite().all()


def test_the_router_refuses_wrong_use():
    (q, k, _), _ = inputs()
    scores = drawn(2, 9)
    for match, error, call in (
        ("density=0", sagebwd.SpecError, lambda: sagebwd.top_blocks(scores, 0)),
        ("density=1.5", sagebwd.SpecError, lambda: sagebwd.soft_top_blocks(scores, 1.5)),
        ("density='x'", TypeError, lambda: sagebwd.top_blocks(scores, "x")),
        ("temperature=0", sagebwd.SpecError, lambda: sagebwd.soft_top_blocks(scores, 0.5, 0)),
        ("scores is a list", TypeError, lambda: sagebwd.top_blocks([1.0], 0.5)),
        ("scores is torch.int64", sagebwd.SpecError, lambda: sagebwd.top_blocks(scores.long(), 1)),
        (r"query_map has shape \(3, 3\): pass \(4, 4\)", sagebwd.SpecError,
         lambda: sagebwd.pooled_block_scores(q, k, query_map=torch.eye(3))),
        ("do not belong together", sagebwd.SpecError,
         lambda: sagebwd.pooled_block_scores(q, k[..., :3])),
        ("k is a list", TypeError, lambda: sagebwd.pooled_block_scores(q, [1])),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            call()


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
