"""sagebwd.integrations.jax, its kernels on a simulated GPU whose memory is the CPU's."""

import functools
import os
import sys
from pathlib import Path

import numpy as np
import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
# Each program runs once: XLA takes longer to optimise it than it takes to run.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
jax = pytest.importorskip("jax", reason="needs JAX")

import jax.numpy as jnp  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import _core  # noqa: E402
from sagebwd.integrations import _jax_calls  # noqa: E402
from sagebwd.integrations import jax as doors  # noqa: E402

import simulator_needed  # noqa: E402, F401

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import warm  # noqa: E402

if not _core.jax_targets():
    pytest.skip("built without JAX", allow_module_level=True)
_jax_calls.FUNCTIONS["cpu"] = "simulated"


def inputs(b=2, h=4, hk=2, m=100, n=100, d=64, dv=None, dtype=jnp.bfloat16):
    random = np.random.default_rng(0)
    shapes = (b, h, m, d), (b, hk, n, d), (b, hk, n, dv or d)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


# Compiled once for all cases of a shape: operation by operation takes longer than the kernels.
@functools.partial(jax.jit, static_argnames=("causal", "scale"))
def exact(q, k, v, causal=False, scale=None):
    """(out, lse) in FP32 of (batch, head, token, channel)."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("bhmd,bhnd->bhmn", q, k) * (scale or q.shape[3] ** -0.5)
    if causal:
        seen = np.tril(np.ones(scores.shape[2:], bool))
        scores = jnp.where(seen, scores, -jnp.inf)
    return jnp.einsum("bhmn,bhnd->bhmd", jax.nn.softmax(scores), v), jax.nn.logsumexp(scores, -1)


def weighted(function):
    """A scalar of all that a function gives, each value with a weight of its own."""

    def scalar(*arrays):
        total = 0
        for i, x in enumerate(jax.tree.leaves(function(*arrays))):
            weights = np.random.default_rng(i + 1).standard_normal(x.shape)
            total += (x.astype(jnp.float32) * weights).sum()
        return total

    return scalar


def assert_near(found, expected, limit=0.03):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        x, y = (np.asarray(t, np.float64) for t in (x, y))
        assert x.shape == y.shape
        assert np.linalg.norm(x - y) <= limit * np.linalg.norm(y)


def compare(ours, theirs, *arrays, wrap=jax.jit):
    assert_near(wrap(ours)(*arrays), jax.jit(theirs)(*arrays))
    assert_near(wrap(jax.grad(weighted(ours), (0, 1, 2)))(*arrays),
                jax.jit(jax.grad(weighted(theirs), (0, 1, 2)))(*arrays))  # fmt: skip


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_out_and_gradients(return_lse, wrap):
    def ours(q, k, v):
        return doors.attention(q, k, v, causal=True, return_lse=return_lse)

    def theirs(q, k, v):
        out, lse = exact(q, k, v, causal=True)
        return (out, lse) if return_lse else out

    compare(ours, theirs, *inputs(), wrap=wrap)


def test_layout_scale_and_value_channels():
    arrays = inputs(m=70, n=130, d=96, dv=64, dtype=jnp.float16)

    def ours(q, k, v):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        out = doors.attention(q, k, v, layout="bshd", softmax_scale=0.2, precision="gradients16")
        return out.swapaxes(1, 2)

    compare(ours, lambda q, k, v: exact(q, k, v, scale=0.2)[0], *arrays)


def test_vmap():
    stacked = [jnp.stack([x, x + 1]) for x in inputs(b=1, m=64, n=64)]
    found = jax.jit(jax.vmap(doors.attention))(*stacked)
    for i in range(2):
        assert jnp.array_equal(found[i], doors.attention(*(x[i] for x in stacked)))


def test_no_keys():
    q, k, v = inputs(n=0)
    out, lse = doors.attention(q, k, v, return_lse=True)
    assert not out.any() and (lse == -jnp.inf).all()
    assert all(not g.any() for g in jax.grad(weighted(doors.attention), (0, 1, 2))(q, k, v))


def test_refusals():
    q, k, v = inputs()
    with pytest.raises(sagebwd.SpecError, match=r"q is float32; .*q\.astype"):
        doors.attention(q.astype(jnp.float32), k, v)
    with pytest.raises(sagebwd.SpecError, match="k has rank 3"):
        doors.attention(q, k[0], v)
    with pytest.raises(sagebwd.SpecError, match="multiples of 8 from 32 to 512"):
        doors.attention(q[..., :20], k[..., :20], v[..., :20])
    with pytest.raises(sagebwd.SpecError, match="value_dim = 32 with head_dim = 64 is not supp"):
        jax.eval_shape(doors.attention, q, k, v[..., :32])  # as traced, on any machine
    with pytest.raises(sagebwd.SpecError, match="where Q is not copied: negate Q"):
        doors.attention(q, k, v, softmax_scale=-1.0, precision="qk16")
    with pytest.raises(TypeError, match=r"sink_logits'; it is an argument of sagebwd.attention"):
        doors.attention(q, k, v, sink_logits=jnp.zeros(4))
    with pytest.raises(TypeError, match="cu_seqlens_q'; this function takes no packed"):
        doors.attention(q, k, v, cu_seqlens_q=jnp.zeros(2, jnp.int32))
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        jax.grad(lambda q: jax.grad(weighted(doors.attention))(q, k, v).sum())(q)


def test_arrays_on_the_cpu_are_refused_when_it_runs():
    code = ("import jax.numpy as jnp; from sagebwd.integrations.jax import attention; "
            "x = jnp.zeros((1, 1, 64, 64), jnp.bfloat16); attention(x, x, x).block_until_ready()")
    done = warm.run(["-c", code])
    assert done.returncode == 1 and "these arrays are on the CPU" in done.stderr


# ---- the largest scores --------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_max_logits_are_found_and_change_nothing(causal):
    q, k, v = inputs(m=70, n=70)

    def attend(q, k, v, **wanted):
        return doors.attention(q, k, v, causal=causal, **wanted)

    out, lse = attend(q, k, v, return_lse=True)
    again, same_lse, found = attend(q, k, v, return_lse=True, return_max_logits=True)
    assert jnp.array_equal(again, out) and jnp.array_equal(same_lse, lse)
    scores = np.einsum("bhmd,bhnd->bhmn", *(np.asarray(x, np.float64) for x in (
        q, jnp.repeat(k, 2, axis=1)))) / 8  # fmt: skip
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[2:], bool)), scores, -np.inf)
    assert np.abs(np.asarray(found) - scores.max((0, 2, 3))).max() < 0.1
    assert found.shape == (4,) and found.dtype == jnp.float32
    alone = jax.jit(lambda *given: attend(*given, return_max_logits=True)[1])(q, k, v)
    assert jnp.array_equal(alone, found)
    gradients = [jax.grad(lambda *given, wanted=wanted: jax.tree.leaves(
        attend(*given, **wanted))[0].astype(jnp.float32).sum(), argnums=(0, 1, 2))(q, k, v)
        for wanted in ({}, {"return_max_logits": True})]  # fmt: skip
    assert all(map(jnp.array_equal, *gradients))
    with pytest.raises(sagebwd.SpecError, match="return_max_logits=1: pass True or False"):
        attend(q, k, v, return_max_logits=1)
