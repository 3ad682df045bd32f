"""SLA2's attention from JAX, its kernels on a simulated GPU whose memory is the CPU's.

Gradients are compared with those that JAX forms of the formulas in FP32."""

import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX")

import jax.numpy as jnp  # noqa: E402

import sagebwd  # noqa: E402

from test_jax import assert_near, doors, inputs, weighted  # noqa: E402


def listed(*shape):
    """A mask that lists a third of the blocks. One list is empty, and another has all blocks."""
    mask = np.random.default_rng(3).random(shape) < 0.35
    mask[:, -1, 0] = False
    mask[:, -1, 1:2] = True
    return jnp.asarray(mask)


def formulas(q, k, v, alpha, mask, *told, **more):
    """Algorithm 2 of SLA2 (arXiv 2602.12675), weight by weight. alpha is (batch or 1, heads or 1,
    queries or 1)."""
    return compiled_formulas(q, k, v, jnp.broadcast_to(alpha, q.shape[:3]), mask, *told, **more)


# Compiled once for all cases of a shape: operation by operation takes longer than the kernels.
@functools.partial(jax.jit, static_argnames=("sizes", "linear", "scale"))
def compiled_formulas(q, k, v, alpha, mask, sizes=(128, 64), linear="complement", scale=None):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    features_of_k = jax.nn.softmax(k - k.mean(2, keepdims=True))
    group = q.shape[1] // k.shape[1]
    k, v, features_of_k = (jnp.repeat(x, group, axis=1) for x in (k, v, features_of_k))
    if mask.shape[1] not in (1, q.shape[1]):
        mask = jnp.repeat(mask, group, axis=1)
    mask = mask.repeat(sizes[0], 2)[:, :, : q.shape[2]].repeat(sizes[1], 3)[..., : k.shape[2]]

    def of_weights(weights):
        total = weights.sum(-1, keepdims=True)
        return weights / jnp.where(total == 0, 1, total) @ v

    scores = jnp.einsum("bhmd,bhnd->bhmn", q, k) * (scale or q.shape[3] ** -0.5)
    exact = of_weights(jnp.where(mask, jnp.exp(scores), 0))
    weights = jnp.einsum("bhmd,bhnd->bhmn", jax.nn.softmax(q), features_of_k)
    if linear == "complement":
        weights = jnp.where(mask, 0, weights)
        alpha = jnp.where(mask.all(-1), 1, alpha)
    alpha = jnp.where(mask.any(-1), alpha, 0)[..., None]
    return alpha * exact + (1 - alpha) * of_weights(weights)


def compare(ours, theirs, *arrays, wrap=jax.jit, limit_of_alpha=0.03):
    assert_near(wrap(ours)(*arrays), jax.jit(theirs)(*arrays))
    found = wrap(jax.grad(weighted(ours), (0, 1, 2, 3)))(*arrays)
    expected = jax.jit(jax.grad(weighted(theirs), (0, 1, 2, 3)))(*arrays)
    assert_near(found[:3], expected[:3], 0.04)
    assert_near(found[3], expected[3], limit_of_alpha)


def shares(*shape):
    return jnp.asarray(np.random.default_rng(4).uniform(0.2, 0.8, shape), jnp.float32)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("linear", ["complement", "all"])
def test_out_and_gradients(linear, wrap):
    """With an alpha for each query block, of which the last is short."""
    mask = listed(2, 4, 3, 4)

    def ours(q, k, v, alpha):
        return doors.sparse_linear_attention(q, k, v, alpha=alpha, block_mask=mask, linear=linear)

    def theirs(q, k, v, alpha):
        rows = alpha[None].repeat(128, 2)[..., :300]
        return formulas(q, k, v, rows, mask, linear=linear)

    compare(ours, theirs, *inputs(m=300, n=200), shares(4, 3), wrap=wrap)


#: Shapes of alpha for 2 sequences of 4 heads and 130 queries, as the formulas take them.
FORMS_OF_ALPHA = {(): (1, 1, 1), (4,): (1, 4, 1), (2, 4, 130): None, (1, 4, 130): None,
                  (2, 1, 1): None}  # fmt: skip


@pytest.mark.parametrize("shape", FORMS_OF_ALPHA, ids=str)
def test_forms_of_alpha(shape):
    """Lists are those of heads of keys, in blocks of other sizes."""
    mask, sizes = listed(1, 2, 3, 2), (64, 128)

    def ours(q, k, v, alpha):
        return doors.sparse_linear_attention(q, k, v, alpha=alpha, block_mask=mask,
                                             block_size=sizes)  # fmt: skip

    def theirs(q, k, v, alpha):
        rows = alpha.reshape(FORMS_OF_ALPHA[shape] or shape)
        return formulas(q, k, v, rows, mask, sizes)

    # A sum over many queries is far smaller than its terms, and so less exact than they are.
    compare(ours, theirs, *inputs(m=130, n=200), shares(*shape),
            limit_of_alpha=0.03 if len(shape) == 3 and shape[2] == 130 else 0.1)  # fmt: skip


def test_layout_scale_and_bits():
    """More blocks of keys than a word has bits, and an alpha of 16 bits."""
    arrays = inputs(b=1, h=2, hk=1, m=128, n=64 * 33, d=128, dtype=jnp.float16)
    mask = listed(1, 1, 2, 33)
    bits = doors.pack_blocks(mask)
    assert bits.shape == (1, 1, 2, 2) and bits.dtype == jnp.uint32

    def ours(q, k, v, alpha):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        out = doors.sparse_linear_attention(
            q, k, v, alpha=alpha, block_bits=bits, block_size=(64, 64), layout="bshd",
            softmax_scale=0.05, precision="gradients16",
        )  # fmt: skip
        return out.swapaxes(1, 2)

    def theirs(q, k, v, alpha):
        return formulas(q, k, v, alpha.repeat(64, 1)[None], mask, (64, 64), scale=0.05)

    compare(ours, theirs, *arrays, shares(2, 2).astype(jnp.float16))


def test_vmap():
    """Over q, k, v and lists, with one alpha for all, whose gradient is the sum of all."""
    stacked = [jnp.stack([x, x + 1]) for x in inputs(b=1, m=128, n=192)]
    stacked.append(jnp.stack([listed(1, 1, 2, 3), ~listed(1, 1, 2, 3)]))
    alpha = shares(4)

    def one(alpha, q, k, v, mask):
        return doors.sparse_linear_attention(q, k, v, alpha=alpha, block_mask=mask,
                                             block_size=(64, 64))  # fmt: skip

    def total(alpha, *arrays):
        return one(alpha, *arrays).astype(jnp.float32).sum()

    found = jax.jit(jax.vmap(one, (None, 0, 0, 0, 0)))(alpha, *stacked)
    each = [[x[i] for x in stacked] for i in range(2)]
    assert all(jnp.array_equal(found[i], one(alpha, *each[i])) for i in range(2))
    of_all = jax.vmap(total, (None, 0, 0, 0, 0))
    of_alpha = jax.jit(jax.grad(lambda alpha: of_all(alpha, *stacked).sum()))(alpha)
    assert_near(of_alpha, sum(jax.grad(total)(alpha, *arrays) for arrays in each), 1e-5)


def test_a_number_is_an_alpha_for_all():
    arrays, mask = inputs(m=64, n=130), jnp.asarray([[[[True, False, True]]]])
    told = dict(block_mask=mask, block_size=(64, 64))
    out = doors.sparse_linear_attention(*arrays, alpha=0.25, **told)
    assert jnp.array_equal(
        out, doors.sparse_linear_attention(*arrays, alpha=jnp.full(4, 0.25), **told)
    )
    assert not jnp.array_equal(out, doors.sparse_linear_attention(*arrays, alpha=0.5, **told))


def test_no_keys():
    q, k, v = inputs(n=0)
    alpha, mask = shares(4), jnp.zeros((1, 1, 1, 0), bool)

    def out(q, k, v, alpha):
        return doors.sparse_linear_attention(q, k, v, alpha=alpha, block_mask=mask)

    assert not out(q, k, v, alpha).any()
    gradients = jax.grad(weighted(out), (0, 1, 2, 3))(q, k, v, alpha)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape, (4,)]
    assert all(not g.any() for g in gradients)


def test_refusals():
    q, k, v = inputs(m=200, n=130)
    mask = listed(2, 4, 2, 3)

    def refused(match, error=sagebwd.SpecError, x=(q, k, v), **changed):
        told = dict(alpha=0.5, block_mask=mask) | changed
        with pytest.raises(error, match=match):
            jax.eval_shape(lambda: doors.sparse_linear_attention(*x, **told))  # as traced

    refused("q is float32", x=(q.astype(jnp.float32), k, v))
    refused("head_dim = 32.*its kernels have 64 or 128 channels",
            x=[t[..., :32] for t in (q, k, v)])  # fmt: skip
    refused("value_dim = 32 with head_dim = 64", x=(q, k, v[..., :32]))
    refused("no lists of blocks given", block_mask=None)
    refused("block_mask and block_bits given", block_bits=doors.pack_blocks(mask))
    refused("block_mask has shape", block_mask=mask[..., :2])
    refused("block_mask is int32", block_mask=mask.astype(jnp.int32))
    refused("block_bits is int32", block_mask=None,
            block_bits=doors.pack_blocks(mask).astype(jnp.int32))  # fmt: skip
    refused("block_bits has shape .* words", block_mask=None,
            block_bits=doors.pack_blocks(mask[:, :, :1]))  # fmt: skip
    refused(r"block_size=\(32, 64\)", block_size=(32, 64))
    refused("linear='none'", linear="none")
    refused("alpha=1.5", alpha=1.5)
    refused("alpha='estimated'.*sagebwd.sparse_linear_attention alone", alpha="estimated")
    refused(r"alpha is float32 of \(3,\)", alpha=shares(3))
    refused(r"alpha is float32 of \(2, 4, 2\)", alpha=shares(2, 4, 2))
    refused(r"alpha is int32 of \(4,\)", alpha=jnp.ones(4, jnp.int32))
    refused("no causal form", TypeError, causal=True)
    refused("takes no block_indices: pass block_mask=", TypeError, block_indices=mask)
    refused("takes no beta", TypeError, beta=shares(4))
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        jax.grad(lambda alpha: jax.grad(weighted(lambda q: doors.sparse_linear_attention(
            q, k, v, alpha=alpha, block_mask=mask)))(q).astype(jnp.float32).sum())(shares(4))
