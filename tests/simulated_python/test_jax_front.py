"""Norm and RoPE of queries and keys from JAX, their kernels on a simulated GPU whose memory is the
CPU's, against formulas in FP32 and the gradients that JAX forms of them."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX")

import inspect  # noqa: E402

import jax.numpy as jnp  # noqa: E402

import sagebwd  # noqa: E402

from test_jax import assert_near, doors, exact, inputs, weighted  # noqa: E402

B, H, HK, M, N, D = 2, 4, 2, 37, 50, 64


def drawn(*shape, seed, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def table(*shape, seed):
    angles = 3 * np.random.default_rng(seed).standard_normal(shape)
    return tuple(jnp.asarray(1.1 * of(angles), jnp.float32) for of in (np.cos, np.sin))


def gain(*shape, seed):
    return jnp.asarray(1 + 0.3 * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


CASES = {
    "shared gains": dict(q_norm=gain(D, seed=1), k_norm=gain(D, seed=2), rope=table(M, 32, seed=5),
                         rope_k=table(N, 32, seed=6)),
    "gains of heads": dict(q_norm=gain(H, D, seed=1), k_norm=gain(HK, D, seed=2), norm_eps=0.01,
                           rope=table(B, M, 32, seed=5), rope_k=table(1, N, 32, seed=6)),
    "one norm": dict(q_norm=True, rope=table(M, 16, seed=5), rope_k=table(N, 16, seed=6),
                     rope_begin=8),
    "interleaved part": dict(k_norm=gain(D, seed=2).astype(jnp.bfloat16), rope_begin=4,
                             rope=table(M, 6, seed=5), rope_k=table(B, N, 6, seed=6),
                             rope_style="interleaved"),
    "given": dict(q_norm=gain(D, seed=1), q_inv_rms=gain(B, M, seed=3),
                  k_inv_rms=gain(B, HK, N, seed=4), rope=table(M, 32, seed=5),
                  rope_k=table(N, 32, seed=6)),
    "no rope": dict(q_norm=gain(D, seed=1), k_norm=gain(HK, D, seed=2)),
}  # fmt: skip
#: The arguments that have gradients.
LEARNED = ("q_norm", "k_norm", "q_inv_rms", "k_inv_rms")


def turned(x, rope, style, begin):
    """Pairs of channels as complex numbers, times those of the table."""
    cos, sin = (jnp.reshape(t, (-1, 1, *t.shape[-2:])) for t in rope)
    pairs = cos.shape[-1]
    if style == "halves":
        first = begin + np.arange(pairs)
        second = first + pairs
    else:
        first = begin + 2 * np.arange(pairs)
        second = first + 1
    found = jax.lax.complex(x[..., first], x[..., second]) * jax.lax.complex(cos, sin)
    return x.at[..., first].set(found.real).at[..., second].set(found.imag)


def formulas(q, k, q_norm=None, k_norm=None, norm_eps=1e-6, q_inv_rms=None, k_inv_rms=None,
             rope=None, rope_k=None, rope_style="halves", rope_begin=0):  # fmt: skip
    """(y of q, y of k) in FP32 of (batch, heads, tokens, channels)."""
    made = []
    for x, norm, given, of in ((q, q_norm, q_inv_rms, rope), (k, k_norm, k_inv_rms, rope_k)):
        y = x.astype(jnp.float32)
        if given is not None:
            y = y * jnp.reshape(given, (x.shape[0], -1, x.shape[2], 1))
        elif norm is not None:
            y = y / jnp.sqrt((y**2).mean(-1, keepdims=True) + norm_eps)
        if norm is not None and norm is not True:
            y = y * jnp.reshape(norm, (1, -1, 1, x.shape[3])).astype(jnp.float32)
        made.append(y if of is None else turned(y, of, rope_style, rope_begin))
    return tuple(made)


def front_inputs(dtype):
    """A token of zeros, and numbers that the type has."""
    q, k = drawn(B, H, M, D, seed=7, dtype=dtype), drawn(B, HK, N, D, seed=8, dtype=dtype)
    return q.at[0, 0, 3].set(0), k


def loss_of(function, dtype):
    """A weighted sum of both results, whose weights the type has."""

    def loss(q, k, learned, given):
        found = function(q, k, **given, **learned)
        return sum((y.astype(jnp.float32) * drawn(*y.shape, seed=20 + i, dtype=dtype)).sum()
                   for i, y in enumerate(found))  # fmt: skip

    return loss


@pytest.mark.parametrize("dtype, layout", [(jnp.bfloat16, "bhsd"), (jnp.float16, "bshd")])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name, layout, dtype):
    learned = {of: x for of, x in CASES[name].items() if of in LEARNED and x is not True}
    given = {of: x for of, x in CASES[name].items() if of not in learned}

    def ours(q, k, **more):
        q, k = (x if layout == "bhsd" else x.swapaxes(1, 2) for x in (q, k))
        found = doors.qk_norm_rope(q, k, layout=layout, **more)
        return [y if layout == "bhsd" else y.swapaxes(1, 2) for y in found]

    q, k = front_inputs(dtype)
    found = jax.jit(lambda q, k: ours(q, k, **given, **learned))(q, k)
    assert all(y.dtype == dtype for y in found)
    once = 3e-3 if dtype == jnp.bfloat16 else 4e-4  # half of the last bit
    expected = jax.jit(lambda q, k: formulas(q, k, **given, **learned))(q, k)
    assert_near(found, expected, limit=once)

    def gradients(function):
        made = jax.grad(lambda *leaves: loss_of(function, dtype)(*leaves, given), (0, 1, 2))
        return jax.jit(made)(q, k, learned)

    *dx, more = gradients(ours)
    *expected, of_more = gradients(formulas)
    assert_near(dx, expected, limit=once)
    for of in learned:
        is_narrow = learned[of].dtype == jnp.bfloat16
        assert more[of].dtype == learned[of].dtype and more[of].shape == learned[of].shape
        assert_near(more[of], of_more[of], limit=once if is_narrow else 2e-5)


def test_gradients_of_some_and_none():
    q, k = front_inputs(jnp.bfloat16)
    both, given = CASES["shared gains"], {"rope": CASES["shared gains"]["rope"],
                                          "rope_k": CASES["shared gains"]["rope_k"]}  # fmt: skip

    def loss(q, gain):
        found, _ = doors.qk_norm_rope(q, k, q_norm=gain, k_norm=both["k_norm"], **given)
        return (found.astype(jnp.float32) * drawn(*q.shape, seed=20, dtype=jnp.bfloat16)).sum()

    of_both = jax.grad(loss, (0, 1))(q, both["q_norm"])
    alone = jax.jit(jax.grad(loss))(q, both["q_norm"]), jax.grad(loss, 1)(q, both["q_norm"])
    for x, y in zip(of_both, alone):
        assert x.any() and jnp.array_equal(x, y)


def test_vmap_and_scan():
    q, k = front_inputs(jnp.bfloat16)
    stacked = [jnp.stack([x, x + 1]) for x in (q, k)]
    given = CASES["gains of heads"]

    def call(q, k):
        return doors.qk_norm_rope(q, k, **given)

    found = jax.jit(jax.vmap(call))(*stacked)
    for i in range(2):
        for x, y in zip(found, call(*(s[i] for s in stacked))):
            assert jnp.array_equal(x[i], y)

    def layers(q, gains):
        """As models scan over their layers."""

        def layer(x, gain):
            return doors.qk_norm_rope(x, k, q_norm=gain)[0], None

        out, _ = jax.lax.scan(layer, q, gains)
        return out

    gains = gain(3, D, seed=9)
    found = jax.jit(jax.grad(weighted(layers), 1))(q, gains)

    def plain(q, gains):
        for one in gains:
            q = doors.qk_norm_rope(q, k, q_norm=one)[0]
        return q

    assert_near(found, jax.grad(weighted(plain), 1)(q, gains), limit=1e-6)


def attention_inputs():
    q, k, v = inputs(b=1, m=100, n=100)
    rope = table(100, 16, seed=5)
    return q, k, v, dict(q_norm=gain(64, seed=1), k_norm=True, rope=rope, rope_begin=8)


def test_attention_sees_normed_and_rotated_ones():
    q, k, v, given = attention_inputs()
    gate = drawn(*q.shape, seed=3, dtype=jnp.bfloat16)

    def ours(q, k, v, gain, gate):
        return doors.attention(q, k, v, causal=True, gate=gate, return_lse=True,
                               **given | {"q_norm": gain})  # fmt: skip

    def theirs(q, k, v, gain, gate):
        y = formulas(q, k, **given | {"q_norm": gain, "rope_k": given["rope"]})
        out, lse = exact(*y, v, causal=True)
        return out / (1 + jnp.exp(-gate.astype(jnp.float32))), lse

    arrays = q, k, v, given["q_norm"], gate
    for wrap in (lambda f: f, lambda f: jax.grad(weighted(f), range(5))):
        assert_near(*(jax.jit(wrap(function))(*arrays) for function in (ours, theirs)))
    plain, _ = doors.attention(*doors.qk_norm_rope(q, k, **given), v, causal=True, return_lse=True)
    share = jax.nn.sigmoid(gate.astype(jnp.float32))
    expected = (plain.astype(jnp.float32) * share).astype(plain.dtype)
    assert jnp.array_equal(ours(*arrays)[0], expected)


def test_so_does_sparse_linear_attention():
    q, k, v, given = attention_inputs()
    told = dict(alpha=0.4, block_mask=jnp.asarray([[[[True, False]]]]))
    found = doors.sparse_linear_attention(q, k, v, **told, **given)
    plain = doors.sparse_linear_attention(*doors.qk_norm_rope(q, k, **given), v, **told)
    assert jnp.array_equal(found, plain)
    assert not jnp.array_equal(found, doors.sparse_linear_attention(q, k, v, **told))


KEPT = {
    "attention": (doors.attention, dict(causal=True)),
    "sparse_linear": (doors.sparse_linear_attention,
                      dict(alpha=0.4, block_mask=jnp.asarray([[[[True, False]]]]))),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_policy_of_checkpoints_forms_queries_and_keys_again(name, capsys):
    """As recompute_qk=True does for PyTorch, it gives the same bits, computes norm and RoPE once
    more in the backward, attention not, and keeps no result of norm and RoPE."""
    function, told = KEPT[name]
    q, k, v, given = attention_inputs()
    gain = given.pop("q_norm")

    def kept_twice(q, k, v, gain):
        return function(q, k, v, q_norm=gain, **given, **told)

    policy = jax.checkpoint_policies.save_only_these_names("sagebwd")
    found, launches, kept = [], [], []
    for layer in (kept_twice, jax.checkpoint(kept_twice, policy=policy)):
        gradients = jax.jit(jax.grad(weighted(layer), range(4)))
        found.append(gradients(q, k, v, gain))
        text = gradients.lower(q, k, v, gain).compile().as_text()
        launches.append([text.count(f'custom_call_target="sagebwd_{of}_forward"')
                         for of in ("front", "sparse_linear")] + [
                             text.count('custom_call_target="sagebwd_forward"')])  # fmt: skip
        capsys.readouterr()
        jax.ad_checkpoint.print_saved_residuals(layer, q, k, v, gain)
        kept.append(sum("[1,4,100,64]" in line or "[1,2,100,64]" in line
                        for line in capsys.readouterr().out.splitlines()))  # fmt: skip
    assert all(x.any() and jnp.array_equal(x, y) for x, y in zip(*found))
    others = [0, 1] if name == "attention" else [1, 0]
    assert launches == [[1, *others], [2, *others]]
    assert kept[0] - kept[1] == 2  # y of q and of k
    with pytest.raises(TypeError, match=r"takes no recompute_qk: .*these_names\('sagebwd'\)"):
        function(q, k, v, q_norm=gain, **given, **told, recompute_qk=True)


@pytest.mark.parametrize("function", [doors.attention, doors.sparse_linear_attention])
def test_signatures_are_those_of_pytorch(function):
    listed = inspect.signature(function).parameters
    of_norms = {name: p.default for name, p in inspect.signature(doors.qk_norm_rope)
                .parameters.items() if name not in ("q", "k", "layout")}  # fmt: skip
    assert {name: listed[name].default for name in of_norms} == of_norms
    assert "sigmoid(gate)" in function.__doc__ and "{" not in doors.qk_norm_rope.__doc__


@pytest.mark.parametrize("given, says", [
    (dict(q_norm=jnp.ones(63)), r"q_norm is float32 of \(63,\): .* \(64,\), or \(4, 64\)"),
    (dict(k_norm=jnp.ones(64, jnp.int32)), "k_norm is int32"),
    (dict(q_norm=False), "q_norm=False: pass None"),
    (dict(q_inv_rms=jnp.ones((2, 38))), r"q_inv_rms is .* \(2, 37\), or \(2, 4, 37\)"),
    (dict(norm_eps=1e-5), "norm_eps=1e-05 is given without q_norm or k_norm"),
    (dict(q_norm=True, rope_style="interleaved"), "rope_style='interleaved' is given without rope"),
    (dict(rope=table(M, 32, seed=1)), r"pass rope_k=\(cos, sin\) of \(50, pairs\)"),
    (dict(rope=table(M, 32, seed=1), rope_k=table(N, 16, seed=1)), "pass tables of as many"),
    (dict(rope=table(N, 32, seed=1)), "pass rope_k"),
    (dict(rope=table(N, 32, seed=1), rope_k=table(N, 32, seed=1)), r"cos is .* \(37, pairs\)|rope"),
    (dict(rope=table(M, 64, seed=1), rope_k=table(N, 64, seed=1)), "64 pairs .* halved"),
    (dict(rope=(jnp.ones((M, 32)), jnp.ones((M, 16))), rope_k=table(N, 32, seed=1)), "rope's sin"),
    (dict(rope=jnp.ones((M, 32))), "pass rope_k"),
    (dict(rope=jnp.ones((M, 32)), rope_k=table(N, 32, seed=1)), r"pass \(cos, sin\), two arrays"),
    (dict(rope=table(M, 8, seed=1), rope_k=table(N, 8, seed=1), rope_begin=2), "multiples of 4"),
    (dict(rope=table(M, 6, seed=1), rope_k=table(N, 6, seed=1)), "6 pairs .* multiples of 4, or"),
    (dict(layout="sbhd"), "layout='sbhd'"),
    (dict(cos=1), r"takes no cos: pass rope=\(cos, sin\)"),
])  # fmt: skip
def test_wrong_arguments_are_refused_when_traced(given, says):
    q, k = front_inputs(jnp.bfloat16)
    with pytest.raises((ValueError, TypeError), match=says):
        jax.eval_shape(lambda q, k: doors.qk_norm_rope(q, k, **given), q, k)


def test_wrong_arrays_are_refused():
    q, k, v, given = attention_inputs()
    for arrays, says in (
        ((q.astype(jnp.float32), k), "q is float32"),
        ((q, k.astype(jnp.float16)), "q is bfloat16 and k float16"),
        ((q[0], k), "q has rank 3"),
        ((q[:, :3], k), "3 heads"),
        ((q[..., :20], k[..., :20]), "multiples of 8 from 32 to 512"),
        ((q, k[:, :, :0]), "pass a token or more"),
    ):
        with pytest.raises(sagebwd.SpecError, match=says):
            doors.qk_norm_rope(*arrays, q_norm=True)
    with pytest.raises(sagebwd.SpecError, match=r"gate is float32 of \(1, 4, 100, 1\), and out"):
        doors.attention(q, k, v, gate=jnp.ones((1, 4, 100, 1)))

    def of_tables(cos, sin):
        return doors.qk_norm_rope(q, k, rope=(cos, sin))[0].astype(jnp.float32).sum()

    with pytest.raises(sagebwd.SpecError, match=r"tables get no gradient: pass jax\.lax\.stop"):
        jax.grad(of_tables)(*given["rope"])
    assert not jax.grad(lambda cos, sin: of_tables(jax.lax.stop_gradient(cos), sin))(
        *given["rope"]
    ).any()
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        jax.grad(lambda q: jax.grad(weighted(lambda q: doors.qk_norm_rope(q, k, q_norm=True)))(q)
                 .astype(jnp.float32).sum())(q)  # fmt: skip
