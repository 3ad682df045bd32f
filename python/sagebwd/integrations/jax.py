"""INT8 attention for JAX: both passes are calls of XLA, under jax.jit, jax.grad and jax.vmap.

    from sagebwd.integrations.jax import attention

    out = attention(q, k, v, causal=True)

Kernels are compiled where they first run, so a function that is compiled again later finds them.
Over several GPUs it goes into jax.shard_map: heads and batches are independent.
"""

import functools

import numpy as np

from sagebwd import _core
from sagebwd.core import options
from sagebwd.core.arguments import checks
from sagebwd.core.arguments.shapes import (
    check_equal,
    check_rank,
    check_scale,
    check_value_channels,
    problem_of_shapes,
)
from sagebwd.core.compat import need

jax = need("jax", "sagebwd.integrations.jax")
jnp = jax.numpy

_DTYPES = (jnp.bfloat16, jnp.float16)


#: XLA's platforms, and the functions each has; tests simulate a GPU on the CPU.
_FUNCTIONS = {"CUDA": "CUDA", "cpu": "cpu"}


@functools.cache
def _register():
    """Tells XLA of the passes, once. LibraryError from a build that has none."""
    targets = _core.jax_targets()
    if not targets:
        raise _core.LibraryError(
            "this build of sagebwd has no calls for JAX: it was made where jaxlib was not "
            "installed. In a checkout, where jaxlib is installed: pip install scikit-build-core "
            "pybind11, then pip install --no-build-isolation ."
        )
    functions = {(name, platform): function for name, platform, function in targets}
    for name in ("forward", "backward"):
        for platform, kind in _FUNCTIONS.items():
            jax.ffi.register_ffi_target(f"sagebwd_{name}", functions[name, kind], platform=platform)


def _check(q, k, v, layout):
    """`problem_of_shapes`; SpecError for what no kernel takes."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(name, tuple(x.shape))
        if x.dtype not in _DTYPES:
            raise options.SpecError(
                f"{name} is {x.dtype}; the kernels take bfloat16 or float16: convert it by "
                f"{name}.astype(jnp.bfloat16)"
            )
    check_equal(q.dtype, k.dtype, v.dtype, "are", "have one dtype: convert them")
    problem = problem_of_shapes(q.shape, k.shape, v.shape, layout)
    check_value_channels(q.shape, v.shape)
    return problem


def _ffi(name, results, *operands, spec, layout, softmax_scale):
    _register()
    ffi = jax.ffi.ffi_call(f"sagebwd_{name}", results, vmap_method="sequential")

    @jax.custom_vjp  # within a derivative already
    def call(*operands):
        return ffi(*operands, spec=spec, layout=layout, softmax_scale=np.float32(softmax_scale))

    call.defvjp(lambda *operands: (call(*operands), None), checks.refuse_double_backward)
    return call(*operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _attention(q, k, v, spec, layout, softmax_scale, return_lse):
    out, lse = _out_and_lse(q, k, v, spec, layout, softmax_scale)
    return (out, lse) if return_lse else out


def _out_and_lse(q, k, v, spec, layout, softmax_scale):
    batch, heads, _, queries, _ = problem_of_shapes(q.shape, k.shape, v.shape, layout)
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
    if q.size == 0 or k.size == 0:  # queries that see no key
        return jnp.zeros(out.shape, out.dtype), jnp.full(lse.shape, -jnp.inf)
    return _ffi("forward", (out, lse), q, k, v, spec=spec, layout=layout,
                softmax_scale=softmax_scale)  # fmt: skip


def _forward(q, k, v, spec, layout, softmax_scale, return_lse):
    out, lse = _out_and_lse(q, k, v, spec, layout, softmax_scale)
    return (out, lse) if return_lse else out, (q, k, v, out, lse)


def _backward(spec, layout, softmax_scale, return_lse, saved, gradients):
    q, k, v, out, lse = saved
    dout, dlse = gradients if return_lse else (gradients, jnp.zeros(0))  # of no row: none
    if q.size == 0 or k.size == 0:
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    like = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
    return tuple(_ffi("backward", like, dout, q, k, v, out, lse, dlse, spec=spec, layout=layout,
                      softmax_scale=softmax_scale))  # fmt: skip


_attention.defvjp(_forward, _backward)


@options.takes()
def attention(q, k, v, *, softmax_scale=None, layout="bhsd", return_lse=False, chosen):
    """softmax(softmax_scale q k^T) v with INT8 matrix products, forward and backward.

    SageBwd (arXiv 2603.02170, Algorithms 1 and 2). Differentiable once, in reverse mode, through
    out and lse.

    Args:
        q: (batch, heads, queries, head_dim), bfloat16 or float16.
        k, v: (batch, heads_kv, keys, head_dim); heads must be a multiple of heads_kv. v may have
            fewer channels where head_dim is none of 64, 128 and 256.
        softmax_scale: a Python number of either sign, or 0; None means 1/sqrt(head_dim).
        layout: 'bhsd', or 'bshd' for (batch, tokens, heads, head_dim) arrays.
        {options}
        return_lse: also return the log-sum-exp, float32 of (batch, heads, queries).

    Returns:
        out, like q with v's channels; with `return_lse` (out, lse).

    Raises:
        SpecError (a ValueError): shapes, dtypes or options that no kernel takes, when traced.
        LibraryError: this build was made without JAX.
        jax.errors.JaxRuntimeError: what fails when it runs, with the library's own text.

    Packed sequences, learned sink logits and `k_mean` are for `sagebwd.attention` alone. Parts of
    the keys whose out and lse are put together by differentiable code have right gradients.
    """
    options.yes_or_no("return_lse", return_lse)
    q, k, v = map(jnp.asarray, (q, k, v))
    _, _, _, queries, keys = _check(q, k, v, layout)
    text = options.text_of(options.with_mask(chosen, queries, keys))
    spec = options.spec_of_text(text, head_dim=int(q.shape[3]), dtype=str(q.dtype))
    scale = check_scale(softmax_scale, q.shape[3], spec)
    return _attention(q, k, v, str(spec), layout, scale, return_lse)
