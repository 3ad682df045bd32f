"""`sagebwd.reference.sparse_linear` against central differences and what it must come to."""

import numpy as np
import pytest

import sagebwd
from sagebwd.reference import exact, sparse_linear

BLOCKS = (8, 4)


def drawn(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def inputs(heads=2, heads_kv=2, queries=21, keys=18, channels=4, batch=2):
    """Lengths whose last blocks are short: 3 blocks of queries, 5 of keys."""
    q, dout = (drawn(batch, heads, queries, channels, seed=s) for s in (1, 2))
    k, v = (drawn(batch, heads_kv, keys, channels, seed=s) + 0.7 for s in (3, 4))
    return dict(q=q, k=k, v=v), dout


def listed(*shape, seed=5):
    """Lists of which the first is empty, the second full and the third neither."""
    mask = drawn(*shape, seed=seed) > 0.2
    mask[..., 0, :], mask[..., 1, :] = False, True
    mask[..., 2, 1], mask[..., 2, 2] = True, False
    return mask


def differences_agree(varied, dout, at_most=1e-7, **given):
    """Every gradient, along random directions, is that of central differences."""
    varied = {name: np.asarray(x, float) for name, x in varied.items()}

    def loss(arrays):
        return float((sparse_linear(**arrays, **given)["out"] * dout).sum())

    found = sparse_linear(**varied, dout=dout, **given)
    for name, x in varied.items():
        gradient = found[f"d{name}"]
        assert gradient.shape == x.shape, name
        for seed in range(4):
            way = np.random.default_rng(seed).standard_normal(x.shape)
            step = 1e-5
            ends = [loss(varied | {name: x + s * step * way}) for s in (1, -1)]
            measured = (ends[0] - ends[1]) / (2 * step)
            size = np.abs(gradient * way).sum()
            assert abs((gradient * way).sum() - measured) <= at_most * size, (name, seed)
            assert size > 0, name
    return found


ALPHAS = {"number": 0.3, "heads": (4,), "blocks": (4, 3), "head": (4, 1), "rows": (2, 4, 21),
          "shared rows": (1, 1, 21)}  # fmt: skip


@pytest.mark.parametrize("kind", ALPHAS)
@pytest.mark.parametrize("linear", ["complement", "all"])
def test_gradients_with_a_given_mask(kind, linear):
    shape = ALPHAS[kind]
    alpha = shape if isinstance(shape, float) else 1 / (1 + np.exp(-drawn(*shape)))
    tensors, dout = inputs(heads=4, heads_kv=2)
    tensors["alpha"] = alpha
    differences_agree(tensors, dout, block_mask=listed(2, 4, 3, 5), linear=linear,
                      block_size=BLOCKS)  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (1, 2, 3, 5), (2, 1, 3, 5), (1, 4, 3, 5)])
@pytest.mark.parametrize("smooth_k", [False, True])
def test_gradients_of_a_fractional_mask(shape, smooth_k):
    tensors, dout = inputs(heads=4, heads_kv=2)
    tensors["block_mask"] = 1 / (1 + np.exp(-drawn(*shape)))
    for linear in ("complement", "all"):
        differences_agree(tensors, dout, alpha=0.4, linear=linear, block_size=BLOCKS,
                          smooth_k=smooth_k)  # fmt: skip


@pytest.mark.parametrize("linear", ["complement", "all"])
def test_gradients_of_an_estimated_alpha(linear):
    tensors, dout = inputs(heads=4, heads_kv=2)
    tensors |= dict(beta=drawn(4), block_mask=1 / (1 + np.exp(-drawn(2, 4, 3, 5))))
    given = dict(alpha="estimated", block_size=BLOCKS, linear=linear, softmax_scale=0.8)
    differences_agree(tensors, dout, **given)
    tensors["block_mask"] = listed(2, 4, 3, 5)
    mask = tensors.pop("block_mask")
    differences_agree(tensors, dout, block_mask=mask, **given)


@pytest.mark.parametrize("score", ["logits", "softmax"])
@pytest.mark.parametrize("maps", [(4, 4), (4, 4, 4)])
@pytest.mark.parametrize("alpha", [0.4, "estimated"])
def test_gradients_through_the_soft_router(score, maps, alpha):
    tensors, dout = inputs(heads=4, heads_kv=2)
    tensors |= dict(query_map=drawn(*maps, seed=8), key_map=drawn(*maps, seed=9))
    found = differences_agree(tensors, dout, alpha=alpha, density=0.45, temperature=0.3,
                              score=score, block_size=BLOCKS)  # fmt: skip
    np.testing.assert_allclose(found["block_mask"].sum(-1), 2, rtol=1e-12)
    soft = found["block_mask"]
    assert soft.min() > 0.0001 and soft.max() < 0.9999


def test_the_hard_router_is_the_limit_of_the_soft_one_and_has_no_gradient():
    tensors, dout = inputs()
    given = dict(alpha=0.4, density=0.45, block_size=BLOCKS)
    hard = sparse_linear(**tensors, dout=dout, **given)
    soft = sparse_linear(**tensors, temperature=1e-7, **given)
    assert set(np.unique(hard["block_mask"])) == {0, 1} and hard["dquery_map"] is None
    np.testing.assert_allclose(soft["block_mask"], hard["block_mask"], atol=1e-9)
    np.testing.assert_allclose(soft["out"], hard["out"], atol=1e-8)
    again = sparse_linear(**tensors, dout=dout, alpha=0.4, block_mask=hard["block_mask"],
                          block_size=BLOCKS)  # fmt: skip
    for name in ("out", "dq", "dk", "dv"):
        np.testing.assert_array_equal(again[name], hard[name])


def test_equal_scores_go_to_the_earlier_blocks():
    tensors, _ = inputs()
    tensors["q"] = 0 * tensors["q"]
    mask = sparse_linear(**tensors, alpha=0.4, density=0.45, block_size=BLOCKS)["block_mask"]
    np.testing.assert_array_equal(mask, np.broadcast_to([1, 1, 0, 0, 0], mask.shape))


def test_branches_are_what_they_are_called():
    """Attention to the listed keys alone, by the C++ reference; linear attention by its weights."""
    tensors, _ = inputs(heads=4, heads_kv=2, channels=8)
    mask = listed(2, 4, 3, 5)
    found = sparse_linear(**tensors, alpha=0.3, block_mask=mask, block_size=BLOCKS)
    q, k, v = tensors.values()
    whole = exact(*(x.astype(np.float32) for x in (q, k, v)))
    np.testing.assert_allclose(found["lse_full"], whole["lse"], rtol=1e-5)
    for b, h in np.ndindex(2, 4):
        smooth = k[b, h // 2] - k[b, h // 2].mean(0)
        phi_q, phi_k = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (q[b, h], smooth))
        for n in (0, 9, 20):
            seen = np.repeat(mask[b, h, n // 8], 4)[:18]
            assert (found["alpha"][b, h, n]) == (0 if n < 8 else 1 if n < 16 else 0.3)
            if seen.any():
                given = q[b, h, n : n + 1], k[b, h // 2][seen], v[b, h // 2][seen]
                one = exact(*(np.ascontiguousarray(x[None, None], np.float32) for x in given))
                np.testing.assert_allclose(found["out_sparse"][b, h, n], one["out"][0, 0, 0],
                                           rtol=1e-4, atol=1e-5)  # fmt: skip
                share = np.exp(one["lse"] - whole["lse"][b, h, n])
                np.testing.assert_allclose(found["exact_alpha"][b, h, n], share[0, 0, 0], rtol=1e-4)
            if not seen.all():
                w = (phi_k @ phi_q[n]) * ~seen
                np.testing.assert_allclose(found["out_linear"][b, h, n],
                                           w @ v[b, h // 2] / w.sum())  # fmt: skip
    assert not found["out_sparse"][:, :, :8].any() and not found["out_linear"][:, :, 8:16].any()
    assert np.isneginf(found["lse"][:, :, :8]).all()


def test_exact_alpha_is_the_row_sum_of_the_weights():
    tensors, _ = inputs()
    found = sparse_linear(**tensors, alpha=0.3, block_mask=listed(2, 2, 3, 5), block_size=BLOCKS)
    whole = exact(*(x.astype(np.float32) for x in tensors.values()), matrices=True)["p"]
    seen = np.repeat(np.repeat(listed(2, 2, 3, 5), 8, 2), 4, 3)[:, :, :21, :18]
    np.testing.assert_allclose(found["exact_alpha"], (whole * seen).sum(-1), rtol=1e-5, atol=1e-7)


def test_parts_merge_to_dense_attention():
    """Attention to the listed keys and to the others, merged by their lse."""
    tensors, _ = inputs()
    mask = listed(2, 2, 3, 5)[:, :, 2:].repeat(3, 2)
    parts = [sparse_linear(**tensors, alpha=1.0, block_mask=m, block_size=BLOCKS)
             for m in (mask, ~mask)]  # fmt: skip
    share = parts[0]["exact_alpha"][..., None]
    np.testing.assert_allclose(share[..., 0] + parts[1]["exact_alpha"], 1, rtol=1e-12)
    whole = sparse_linear(**tensors, alpha=1.0, block_mask=np.ones((1, 1, 3, 5)),
                          block_size=BLOCKS)  # fmt: skip
    merged = share * parts[0]["out_sparse"] + (1 - share) * parts[1]["out_sparse"]
    np.testing.assert_allclose(merged, whole["out"], rtol=1e-12, atol=1e-14)


def test_wrong_use_is_refused():
    (tensors, _), blocks = inputs(), dict(block_size=BLOCKS)
    for match, given in {
        "one of the two": dict(alpha=0.5), "of the key blocks": dict(alpha=0.5, density=0.0),
        r"share of the exact branch": dict(alpha=1.5, density=0.5),
        "belong to the router": dict(alpha=0.5, block_mask=np.ones((1, 1, 3, 5)), temperature=1.0),
        r"\(batch or 1, heads or heads_kv or 1, 3, 5\)": dict(
            alpha=0.5, block_mask=np.ones((1, 1, 5, 3))),
        "outside of 0 to 1": dict(alpha=0.5, block_mask=np.full((1, 1, 3, 5), 2.0)),
        "'complement' or 'all'": dict(alpha=0.5, density=0.5, linear="rest"),
        "'logits' or 'softmax'": dict(alpha=0.5, density=0.5, score="cosine"),
        "the paper has 0.1": dict(alpha=0.5, density=0.5, temperature=0),
        "'estimated'": dict(alpha="exact", density=0.5), "leave it out": dict(
            alpha=0.5, beta=np.zeros(2), density=0.5),
    }.items():  # fmt: skip
        with pytest.raises(sagebwd.SpecError, match=match):
            sparse_linear(**tensors, **given, **blocks)
    with pytest.raises(sagebwd.SpecError, match="do not belong together"):
        sparse_linear(tensors["q"], tensors["k"][:, :, :5], tensors["v"], alpha=0.5, density=0.5)
    with pytest.raises(TypeError, match="two numbers, queries and keys"):
        sparse_linear(**tensors, alpha=0.5, density=0.5, block_size=64)
