"""Norm and RoPE of queries and keys for JAX, and the output's gate, as functions and as arguments
of attention functions."""

import functools
from typing import NamedTuple

import numpy as np

from sagebwd.core import front_arguments, options
from sagebwd.core.arguments.shapes import problem_of_shapes
from sagebwd.core.keywords import known_keywords
from sagebwd.integrations._jax_calls import call_xla, check_arrays, jax, jnp


class _Told(NamedTuple):
    """What XLA's calls are told beside arrays."""

    spec: str
    layout: str
    eps: np.float32
    begin: np.int64
    interleaved: bool
    q_normed: bool
    k_normed: bool


# Gains, 1/rms and tables are FP32 arrays or None.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _front(told, q, k, gains, inv_rms, tables):
    return _called("front_forward", (q, k), told, q, k, *gains, *inv_rms, *tables)


def _called(name, like, told, *operands):
    """Arrays without numbers stand for those that are None, and for results of a shape None."""
    none = jax.ShapeDtypeStruct((0,), jnp.float32)
    results = [none if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]
    operands = [jnp.zeros(0) if x is None else x for x in operands]
    return tuple(call_xla(name, results, *operands, **told._asdict()))


def _forward(told, q, k, gains, inv_rms, tables):
    if any(x is not None and x.perturbed for x in tables):
        raise options.SpecError(
            "rope is differentiated, but tables get no gradient: pass "
            "jax.lax.stop_gradient(cos) and jax.lax.stop_gradient(sin)"
        )
    # Whether a gradient is wanted has to survive jax.jit: it is in the structure, without arrays.
    wanted = [() if x is not None and x.perturbed else None for x in (*gains, *inv_rms)]
    values = jax.tree.map(lambda x: x.value, (q, k, gains, inv_rms, tables))
    return _front(told, *values), (*values, wanted)


def _backward(told, saved, gradients):
    q, k, gains, inv_rms, tables, wanted = saved
    dy = [jnp.zeros(g.shape, g.dtype) if isinstance(g, jax.custom_derivatives.SymbolicZero) else g
          for g in gradients]  # fmt: skip
    of_each_head = []
    for x, r in ((q, inv_rms[0]), (k, inv_rms[1])):
        batch, heads, tokens = x.shape[:3] if told.layout == "bhsd" else np.take(x.shape, (0, 2, 1))
        of_each_head.append(None if r is None else jax.ShapeDtypeStruct(
            (int(batch), int(heads), int(tokens)), jnp.float32))  # fmt: skip
    like = [None if want is None else x for want, x in zip(wanted, (*gains, *of_each_head))]
    dq, dk, *found = _called("front_backward", (q, k, *like), told, *dy, q, k, *gains, *inv_rms,
                             *tables)  # fmt: skip
    found = [None if want is None else g for want, g in zip(wanted, found)]
    for i, r in enumerate(inv_rms):
        if found[2 + i] is not None and r.ndim == 2:  # all heads share it
            found[2 + i] = found[2 + i].sum(1)
    return dq, dk, tuple(found[:2]), tuple(found[2:]), (None,) * 4


_front.defvjp(_forward, _backward, symbolic_zeros=True)


@front_arguments.described
@known_keywords(front_arguments.OTHERWISE)
def qk_norm_rope(
    q, k, *, q_norm=None, k_norm=None, norm_eps=1e-6, q_inv_rms=None, k_inv_rms=None, rope=None,
    rope_k=None, rope_style="halves", rope_begin=0, layout="bhsd",
):  # fmt: skip
    """RMSNorm of each head of queries and keys (QK-norm), and RoPE, in one pass over each.

    `sagebwd.qk_norm_rope` says more (RMSNorm, arXiv 1910.07467; RoPE, arXiv 2104.09864). All is
    computed in FP32 and rounded once, and the gradients have the same bits in every run.
    Differentiable once, in reverse mode, in q, k, the gains and given 1/rms.

    Args:
        q: (batch, heads, queries, head_dim), bfloat16 or float16, with a head_dim that is a
            multiple of 8 from 32 to 512.
        k: (batch, heads_kv, keys, head_dim), of the same; heads must be a multiple of heads_kv.
        {arguments}
        layout: 'bhsd', or 'bshd' for (batch, tokens, heads, head_dim) arrays.

    Returns:
        (q, k) of the inputs' shapes and types.

    Raises:
        SpecError (a ValueError): what no kernel takes, such as a rope_begin that is no multiple of
            4, or R that is no multiple of 8 (interleaved: of 4), when traced; tables that are
            differentiated.
        LibraryError: this build was made without JAX.
        jax.errors.JaxRuntimeError: what fails when it runs, with the library's own text.
    """
    options.check_layout(layout)
    q, k = map(jnp.asarray, (q, k))
    check_arrays(q=q, k=k)
    if q.dtype != k.dtype:
        raise options.SpecError(f"q is {q.dtype} and k {k.dtype}: convert one to the other's dtype")
    batch, *heads, queries, keys = problem_of_shapes(q.shape, k.shape, k.shape, layout)
    if not q.size or not k.size:
        raise options.SpecError(f"q of {q.shape} and k of {k.shape}: pass a token or more of each")
    eps, begin = front_arguments.check_numbers(
        q_norm, k_norm, norm_eps, rope, rope_k, rope_style, rope_begin)  # fmt: skip
    channels, interleaved = q.shape[3], rope_style == "interleaved"
    gains = tuple(_gain(*of, channels) for of in zip(("q_norm", "k_norm"), (q_norm, k_norm), heads))
    inv_rms = tuple(_inv_rms(name, given, batch, count, tokens) for name, given, count, tokens in
                    zip(("q_inv_rms", "k_inv_rms"), (q_inv_rms, k_inv_rms), heads,
                        (queries, keys)))  # fmt: skip
    if rope is not None and rope_k is None and queries != keys:
        raise options.SpecError(
            f"{queries} queries and {keys} keys have tables of their own: pass rope_k=(cos, sin) "
            f"of ({keys}, pairs) for the keys"
        )
    name, of_keys = ("rope", rope) if rope_k is None else ("rope_k", rope_k)
    tables = (*_table("rope", rope, batch, queries, channels, begin, interleaved),
              *_table(name, of_keys, batch, keys, channels, begin, interleaved))  # fmt: skip
    if rope is not None and tables[0].shape[2] != tables[2].shape[2]:
        raise options.SpecError(
            f"rope has {tables[0].shape[2]} pairs of channels and rope_k {tables[2].shape[2]}: "
            "pass tables of as many"
        )
    spec = options.spec_of_text("", head_dim=int(channels), dtype=str(q.dtype))
    normed = [norm is not None or given is not None
              for norm, given in ((q_norm, q_inv_rms), (k_norm, k_inv_rms))]  # fmt: skip
    told = _Told(str(spec), layout, np.float32(eps), np.int64(begin), interleaved, *normed)
    return _front(told, q, k, gains, inv_rms, tables)


def _floats(name, x, shapes, wanted):
    """The array in FP32. SpecError for one of another type, or of none of these shapes."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.shape not in shapes:
        raise options.SpecError(f"{name} is {x.dtype} of {x.shape}: pass floating numbers of "
                                f"{wanted}")  # fmt: skip
    return x.astype(jnp.float32)


def _gain(name, gain, heads, channels):
    if gain is None or gain is True:
        return None
    if gain is False:
        raise options.SpecError(f"{name}=False: pass None for no norm")
    return _floats(name, gain, ((channels,), (heads, channels)),
                   f"({channels},), or ({heads}, {channels}) for a gain of each head")  # fmt: skip


def _inv_rms(name, inv_rms, batch, heads, tokens):
    if inv_rms is None:
        return None
    return _floats(name, inv_rms, ((batch, tokens), (batch, heads, tokens)),
                   f"({batch}, {tokens}), or ({batch}, {heads}, {tokens}) for one of each "
                   "head")  # fmt: skip


def _table(name, given, batch, tokens, channels, begin, interleaved):
    """Cosines and sines of (batch or 1, tokens, pairs); two of None."""
    if given is None:
        return None, None
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"{name} is {options.a_kind(given)}; pass (cos, sin), two arrays, such as "
                        "(f.real, f.imag) of a complex table")  # fmt: skip
    cos, sin = map(jnp.asarray, given)
    made = []
    for of, t in (("cos", cos), ("sin", sin)):
        pairs = cos.shape[-1] if cos.ndim else 0
        shapes = [(*first, tokens, pairs) for first in ((), (1,), (batch,))]
        t = _floats(f"{name}'s {of}", t, shapes,
                    f"({tokens}, pairs) or ({batch}, {tokens}, pairs)")  # fmt: skip
        made.append(t.reshape(-1, tokens, pairs))
    if made[0].shape != made[1].shape:
        raise options.SpecError(
            f"{name}'s cos is of {cos.shape} and its sin of {sin.shape}: pass arrays of one shape"
        )
    front_arguments.check_pairs(f"{name}'s cos", pairs, begin, channels)
    if begin % 4:
        raise options.SpecError(f"rope_begin={begin}: the kernels take multiples of 4")
    if pairs % (2 if interleaved else 4):
        raise options.SpecError(
            f"{name}'s cos has {pairs} pairs of channels: the kernels take multiples of "
            + ("2" if interleaved else "4, or of 2 with rope_style='interleaved'")
        )
    return made


# ---- as arguments of attention -------------------------------------------------------------------


@jax.checkpoint  # no FP32 arrays are kept for the backward
def _times(out, gate):
    wide = out.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return wide.astype(out.dtype)


def _gated(out, gate):
    """out * sigmoid(gate), computed in FP32 and rounded once."""
    gate = jnp.asarray(gate)
    if not jnp.issubdtype(gate.dtype, jnp.floating) or gate.shape != out.shape:
        raise options.SpecError(
            f"gate is {gate.dtype} of {gate.shape}, and out of {out.shape}: pass floating numbers "
            "of out's shape, in its layout"
        )
    return _times(out, gate)


def _before(q, k, v, given, layout="bhsd", **_):
    return *qk_norm_rope(q, k, layout=layout, **given), v


#: Gives a function of (q, k, v, ...) on JAX's arrays the keywords of a front end.
has_front_end = front_arguments.with_front_end(_before, _gated)
