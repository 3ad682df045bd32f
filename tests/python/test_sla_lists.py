"""Lists of blocks for SLA2: their forms, what is refused, and the router that makes them."""

import math

import numpy as np
import pytest

import sagebwd
from sagebwd.reference import sparse_linear

torch = pytest.importorskip("torch", reason="needs PyTorch")

from sla_inputs import BLOCKS, EXACT, arrays, drawn, inputs, listed  # noqa: E402

from sagebwd.sla.exact import listed_attention  # noqa: E402
from sagebwd.sla.linear import linear_branch  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")

# ---- lists ---------------------------------------------------------------------------------------


def as_indices(mask, seed=0):
    """The mask's blocks have numbers in any order, some twice, then others that do not count."""
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
    refused("block_mask is torch.float64; pass torch.bool or torch.uint8", block_mask=mask.double())
    refused(r"shape \(2, 4, 5, 3\); 21 queries and 18 keys in blocks of \(8, 4\) need .*"
            r"\(2 or 1, 4 or 2 or 1, 3, 5\)", block_mask=mask.mT)  # fmt: skip
    refused("4 or 2 or 1", block_mask=mask[:, :3])
    refused(r"need .*words.* 3, 1\)", block_bits=indices)
    refused("block_indices is torch.int16", block_indices=indices.short())
    refused(r"block_counts is \(2, 4, 2\) torch.int32 .*must be \(2, 4, 3\)", block_indices=indices,
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
    # There is no slope, and no 0 / 0, where sigmoids are 0 or 1 in their type.
    steep = sagebwd.soft_top_blocks(scores, 0.3, 1e-30)
    assert torch.autograd.grad(steep[0, 0], scores)[0].isfinite().all()


@pytest.mark.parametrize("excluded", [-math.inf, torch.finfo(torch.float32).min, -1e15, -1e9])
def test_scores_that_exclude_blocks(excluded):
    scores = drawn(4, 12).float()
    plain = scores[:, :9].clone()
    scores[:, 9:] = excluded
    for x in (scores, plain):
        x.requires_grad_()
    for kept in (1, 3, 8):
        soft, expected = (sagebwd.soft_top_blocks(x, kept / x.shape[1]) for x in (scores, plain))
        assert not soft[:, 9:].any() and (soft.sum(-1) - kept).abs().max() < 1e-5
        assert (soft[:, :9] - expected).abs().max() < 1e-5
        weights = drawn(4, 9).float()
        of_scores, of_plain = (torch.autograd.grad((y[:, :9] * weights).sum(), x)[0]
                               for x, y in ((scores, soft), (plain, expected)))  # fmt: skip
        assert (of_scores[:, :9] - of_plain).abs().max() < 1e-4 and not of_scores[:, 9:].any()
        assert torch.equal(sagebwd.top_blocks(scores, kept / 12)[:, :9],
                           sagebwd.top_blocks(plain, kept / 9))  # fmt: skip


def test_of_too_few_blocks_that_are_not_excluded_all_are_listed():
    scores = drawn(3, 6)
    scores[:, 2:] = -math.inf
    scores[0] = -math.inf
    for density in (0.5, 1.0):
        hard = sagebwd.top_blocks(scores, density)
        assert torch.equal(hard, scores > -math.inf)
        assert torch.equal(sagebwd.soft_top_blocks(scores, density), hard.double())


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
        ("q has rank 3", sagebwd.SpecError, lambda: sagebwd.pooled_block_scores(q[0], k)),
        ("k is torch.int64: pass torch.bfloat16,", sagebwd.SpecError,
         lambda: sagebwd.pooled_block_scores(q, k.long())),
        ("q has 4 heads and k has 0;", sagebwd.SpecError,
         lambda: sagebwd.pooled_block_scores(q, k[:, :0])),
        ("one batch and one head_dim", sagebwd.SpecError,
         lambda: sagebwd.pooled_block_scores(q, k[:1].repeat(3, 1, 1, 1))),
        ("q is on cpu and k on meta", sagebwd.SpecError,
         lambda: sagebwd.pooled_block_scores(q, k.to("meta"))),
        ("block_size=0: pass a whole number", sagebwd.SpecError,
         lambda: sagebwd.pooled_block_scores(q, k, block_size=(0, 64))),
        ("block_size=64: pass two numbers", TypeError,
         lambda: sagebwd.pooled_block_scores(q, k, block_size=64)),
        ("query_map is a list", TypeError,
         lambda: sagebwd.pooled_block_scores(q, k, query_map=[1])),
        ("key_map is torch.int64 on cpu: pass floating numbers", sagebwd.SpecError,
         lambda: sagebwd.pooled_block_scores(q, k, key_map=torch.eye(4).long())),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            call()


@pytest.mark.parametrize("sizes", [(8, 4), (8, 3), (6, 4), (5, 7)])
@pytest.mark.parametrize("tokens", [(48, 32), (48, 24), (48, 21), (45, 36)])
def test_scores_have_the_bits_of_means(sizes, tokens):
    """Also where sums take their places."""
    q, k = (drawn(2, h, n, 16, seed=h, dtype=torch.float32) for h, n in zip((4, 2), tokens))
    maps = [drawn(16, 16, seed=s, dtype=torch.float32) for s in range(2)]

    def blocks(t, size):
        return [t[:, :, i : i + size] for i in range(0, t.shape[2], size)]

    means = [torch.stack([x.sum(2) / x.shape[2] for x in blocks(t, size)], 2)
             for t, size in zip((q, k), sizes)]  # fmt: skip
    counts = torch.tensor([x.shape[2] for x in blocks(k, sizes[1])]).view(-1, 1)
    of_all = (means[1] * counts).sum(2, keepdim=True) / k.shape[2]
    keys = (means[1] - of_all).repeat_interleave(2, 1) @ maps[1].mT
    expected = 0.3 * ((means[0] @ maps[0].mT) @ keys.mT)
    found = sagebwd.pooled_block_scores(q, k, block_size=sizes, query_map=maps[0],
                                        key_map=maps[1], softmax_scale=0.3)  # fmt: skip
    assert torch.equal(found, expected)
