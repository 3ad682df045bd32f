"""INT8 attention for JAX: both passes are calls of XLA, under jax.jit, jax.grad and jax.vmap.

    from sagebwd.integrations.jax import attention

    out = attention(q, k, v, causal=True)

`sparse_linear_attention` is SLA2's, over lists of blocks. `qk_norm_rope` norms queries and keys and
rotates them, and both functions take its arguments. Kernels are compiled where they first
run, so a function that is compiled again later finds them. Over several GPUs a call goes into
jax.shard_map: heads and batches are independent.
"""

import functools
import numbers

import numpy as np

from sagebwd.core import fastest, keywords, options, results
from sagebwd.core.arguments.shapes import (
    check_equal,
    check_scale,
    check_value_channels,
    problem_of_shapes,
)
from sagebwd.integrations._jax_calls import NAME, call_xla, check_arrays, jax, jnp, named
from sagebwd.integrations._jax_front import has_front_end, qk_norm_rope  # noqa: F401
from sagebwd.lists import blocks


def _check(q, k, v, layout):
    """`problem_of_shapes`; SpecError for what no kernel takes."""
    check_arrays(q=q, k=k, v=v)
    check_equal(q.dtype, k.dtype, v.dtype, "are", "have one dtype: convert them")
    problem = problem_of_shapes(q.shape, k.shape, v.shape, layout)
    check_value_channels(q.shape, v.shape)
    return problem


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6, 7))
def _attention(q, k, v, spec, layout, softmax_scale, return_lse, return_max_logits):
    found = _computed(q, k, v, spec, layout, softmax_scale, return_max_logits)
    return results.returned(*found[:2], return_lse, found[2:])


def _computed(q, k, v, spec, layout, softmax_scale, return_max_logits):
    """(out, lse), or (out, lse, max_logits)."""
    batch, heads, _, queries, _ = problem_of_shapes(q.shape, k.shape, v.shape, layout)
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
    largest = (jax.ShapeDtypeStruct((heads,), jnp.float32),) * return_max_logits
    if q.size == 0 or k.size == 0:  # queries that see no key
        unseen = (jnp.full(x.shape, -jnp.inf) for x in (lse, *largest))
        return jnp.zeros(out.shape, out.dtype), *unseen
    name = "forward_max_logits" if return_max_logits else "forward"
    return call_xla(name, (out, lse, *largest), q, k, v, spec=spec, layout=layout,
                    softmax_scale=np.float32(softmax_scale))  # fmt: skip


def _forward(q, k, v, spec, layout, softmax_scale, return_lse, return_max_logits):
    found = named(_computed(q, k, v, spec, layout, softmax_scale, return_max_logits))
    out, lse, *more = found
    return results.returned(out, lse, return_lse, more), (q, k, v, out, lse)


def _backward(spec, layout, softmax_scale, return_lse, return_max_logits, saved, gradients):
    q, k, v, out, lse = saved
    dout, dlse = gradients, jnp.zeros(0)  # of no row: none
    if return_lse:
        dout, dlse = gradients[:2]  # max_logits has none
    elif return_max_logits:
        dout = gradients[0]
    if q.size == 0 or k.size == 0:
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    like = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
    return tuple(call_xla("backward", like, dout, q, k, v, out, lse, dlse, spec=spec,
                          layout=layout, softmax_scale=np.float32(softmax_scale)))  # fmt: skip


_attention.defvjp(_forward, _backward)


def _number_of(q):
    """The number of the GPU that a call will run on, or None. Traced arrays do not say on which:
    the first of this process stands for all."""
    device = jax.local_devices()[0]
    return device.local_hardware_id if device.platform in ("gpu", "cuda") else None


#: What to say of a keyword that functions on PyTorch's tensors have.
_KEPT = dict.fromkeys(keywords.RECOMPUTE, (
    "jax.checkpoint says what is kept. With policy=jax.checkpoint_policies.save_only_these_names("
    f"{NAME!r}) it forms normed and rotated queries and keys again, and attention not"))


@options.takes(otherwise=_KEPT, fastest=fastest.of_q(number_of=_number_of))
@has_front_end
def attention(
    q, k, v, *, softmax_scale=None, layout="bhsd", return_lse=False, return_max_logits=False,
    chosen,
):  # fmt: skip
    """softmax(softmax_scale q k^T) v with INT8 matrix products, forward and backward.

    SageBwd (arXiv 2603.02170, Algorithms 1 and 2). Differentiable once, in reverse mode, through
    out and lse.

    Args:
        q: (batch, heads, queries, head_dim), bfloat16 or float16.
        k, v: (batch, heads_kv, keys, head_dim); heads must be a multiple of heads_kv. v may have
            fewer channels where head_dim is none of 64, 128, 256 and 512.
        softmax_scale: a Python number of either sign, or 0; None means 1/sqrt(head_dim).
        layout: 'bhsd', or 'bshd' for (batch, tokens, heads, head_dim) arrays.
        {options}
        return_lse: also return the log-sum-exp, float32 of (batch, heads, queries).
        return_max_logits: also return the largest score of each head, float32 of (heads,), as
            `sagebwd.attention` does. It has no gradient.
        q_norm, k_norm, norm_eps, q_inv_rms, k_inv_rms, rope, rope_k, rope_style, rope_begin: norm
            and RoPE of queries and keys before attention, as `qk_norm_rope` computes them.
        gate: an array like out, of any floating type: the result is out * sigmoid(gate), computed
            in FP32 and rounded once (gated attention, arXiv 2505.06708). It receives gradients.

    Returns:
        out, like q with v's channels; with `return_lse` (out, lse). max_logits come last.

    Raises:
        SpecError (a ValueError): shapes, dtypes or options that no kernel takes, when traced.
        LibraryError: this build was made without JAX.
        jax.errors.JaxRuntimeError: what fails when it runs, with the library's own text.

    Packed sequences, learned sink logits and `k_mean` are for `sagebwd.attention` alone. Parts of
    the keys whose out and lse are put together by differentiable code have right gradients.
    """
    options.yes_or_no("return_lse", return_lse)
    chosen = results.with_max_logits(return_max_logits, chosen)
    q, k, v = map(jnp.asarray, (q, k, v))
    _, _, _, queries, keys = _check(q, k, v, layout)
    text = options.text_of(options.with_mask(chosen, queries, keys))
    spec = options.spec_of_text(text, head_dim=int(q.shape[3]), dtype=str(q.dtype))
    scale = check_scale(softmax_scale, q.shape[3], spec)
    return _attention(q, k, v, str(spec), layout, scale, return_lse, return_max_logits)


# ---- SLA2 ----------------------------------------------------------------------------------------

#: What to pass instead of arguments that `sagebwd.sparse_linear_attention` or others have.
_OTHERWISE = _KEPT | keywords.WITH_LISTS | dict.fromkeys(
    keywords.NOT_WITH_LISTS[2:], keywords.NO_OPTION_OF_LISTS
) | dict.fromkeys(
    ("topk", "density", "block_indices", "block_counts"),
    "pass block_mask=, which says which blocks are listed",
) | dict.fromkeys(
    ("beta", "feature_map", "return_branches", "return_lse"),
    "it is an argument of sagebwd.sparse_linear_attention, which takes PyTorch's tensors",
) | dict.fromkeys(
    ("causal", "is_causal"),
    "linear attention has no causal form here: leave it out",
)  # fmt: skip


def pack_blocks(block_mask):
    """Lists of blocks as bits, for several calls of `sparse_linear_attention`.

    Args:
        block_mask: bool of (batch or 1, heads or heads_kv or 1, query blocks, key blocks), true
            where a key block is listed.

    Returns:
        uint32 of (batch or 1, heads or heads_kv or 1, query blocks, words). Bit b % 32 of word
        b / 32 is set if block b of the keys is listed, and one bit at least is of no block.

    Raises:
        SpecError (a ValueError): the mask has another type or rank.
    """
    mask = jnp.asarray(block_mask)
    if mask.dtype != jnp.bool_ or mask.ndim != 4:
        raise options.SpecError(
            f"block_mask is {mask.dtype} of {mask.shape}: pass bool of (batch, heads, query "
            "blocks, key blocks)"
        )
    words = blocks.words_of(mask.shape[3])
    mask = jnp.pad(mask, (*[(0, 0)] * 3, (0, 32 * words - mask.shape[3])))
    bits = mask.reshape(*mask.shape[:3], words, 32).astype(jnp.uint32)
    return (bits << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)


def _bits(block_mask, block_bits, problem, sizes):
    """The lists of a call, of all heads of q or of one. SpecError for what are none."""
    given = {"block_mask": block_mask, "block_bits": block_bits}
    there = [name for name, lists in given.items() if lists is not None]
    if len(there) != 1:
        raise options.SpecError(f"{' and '.join(there) or 'no lists of blocks'} given: pass one of "
                                "block_mask or block_bits")  # fmt: skip
    lists = jnp.asarray(given[there[0]])
    blocks.check_lists(there[0], lists.shape, problem, sizes)
    if there == ["block_mask"]:
        lists = pack_blocks(lists)
    elif lists.dtype != jnp.uint32:
        raise options.SpecError(f"block_bits is {lists.dtype}; pack_blocks gives uint32: pass that")
    heads, heads_kv = problem[1:3]
    return lists if lists.shape[1] in (1, heads) else jnp.repeat(lists, heads // heads_kv, 1)


def _shares(alpha, problem, size):
    """alpha as float32 of (batch or 1, heads or 1, queries or query blocks or 1)."""
    if isinstance(alpha, (str, bool)) or alpha is None:
        raise options.SpecError(
            f"alpha={alpha!r}: pass a number or an array; an estimated alpha is for "
            "sagebwd.sparse_linear_attention alone, which takes PyTorch's tensors"
        )
    if isinstance(alpha, numbers.Real):
        alpha = float(blocks.check_alpha_number(alpha))
    alpha = jnp.asarray(alpha)
    batch, heads, _, queries, _ = problem
    count, shape = blocks.count_of(queries, size), alpha.shape
    fits = shape in ((), (heads,), (heads, count), (heads, 1)) or (
        len(shape) == 3 and shape[0] in (1, batch) and shape[1] in (1, heads)
        and shape[2] in (1, queries))  # fmt: skip
    if not fits or not jnp.issubdtype(alpha.dtype, jnp.floating):
        raise options.SpecError(
            f"alpha is {alpha.dtype} of {shape}: pass a number, or floating numbers of ({heads},), "
            f"one for each head; of ({heads}, {count}), one for each query block of a head; or of "
            f"({blocks.either(batch)}, {blocks.either(heads)}, {blocks.either(queries)})"
        )
    alpha = alpha.astype(jnp.float32)
    return alpha if len(shape) == 3 else alpha.reshape((1, *shape, 1)[:3] if shape else (1, 1, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _mixture(q, k, v, alpha, bits, spec, layout, softmax_scale):
    return _mixture_forward(q, k, v, alpha, bits, spec, layout, softmax_scale)[0]


def _mixture_forward(q, k, v, alpha, bits, spec, layout, softmax_scale):
    batch, heads, _, queries, _ = problem_of_shapes(q.shape, k.shape, v.shape, layout)
    if q.size == 0 or k.size == 0:  # queries that see no key
        return jnp.zeros_like(q), (q, k, v, alpha, bits, None, None)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
    out, *kept = named(call_xla(
        "sparse_linear_forward", (out, out, lse), q, k, v, bits, alpha, spec=spec, layout=layout,
        softmax_scale=np.float32(softmax_scale)))  # fmt: skip
    return out, (q, k, v, alpha, bits, *kept)


def _mixture_backward(spec, layout, softmax_scale, saved, dout):
    q, k, v, alpha, bits, sparse_out, lse = saved
    if sparse_out is None:
        return *map(jnp.zeros_like, (q, k, v, alpha)), None
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, lse)]
    *gradients, dalpha = call_xla("sparse_linear_backward", like, dout, q, k, v, sparse_out, lse,
                                  bits, alpha, spec=spec, layout=layout,
                                  softmax_scale=np.float32(softmax_scale))  # fmt: skip
    size = options.Spec(spec).sparse_q
    return *gradients, _of_shares(dalpha, alpha.shape, size), None


def _of_shares(dalpha, shape, size):
    """The sums of each query's gradient over what shares a number."""
    queries = dalpha.shape[2]
    if shape[2] not in (1, queries):
        dalpha = jnp.pad(dalpha, ((0, 0), (0, 0), (0, -queries % size)))
        dalpha = dalpha.reshape(*dalpha.shape[:2], -1, size).sum(3)
    shared = tuple(axis for axis in range(3) if shape[axis] == 1)
    return dalpha.sum(shared, keepdims=True)


_mixture.defvjp(_mixture_forward, _mixture_backward)


@keywords.known_keywords(_OTHERWISE)
@has_front_end
def sparse_linear_attention(
    q, k, v, *, alpha, block_mask=None, block_bits=None, block_size=(128, 64), linear="complement",
    softmax_scale=None, layout="bhsd", granularity="row", group_kv=None, smooth_k=True,
    smooth_v=False, rotate=True, precision="six-of-seven", deterministic=True, dp_sums="fp32",
):  # fmt: skip
    """SLA2's attention: exact for the keys of listed blocks, linear for the others, mixed by alpha
    (arXiv 2602.12675, Algorithms 2 and 3).

    out = alpha out_sparse + (1 - alpha) out_linear, where out_sparse has INT8 products forward and
    backward. A query block that lists nothing has out = out_linear. With linear='complement' one
    that lists every block has out = out_sparse. alpha gets no gradient from either. Differentiable
    once, in reverse mode, in q, k, v and alpha.

    Args:
        q: (batch, heads, queries, head_dim), bfloat16 or float16, with a head_dim of 64 or 128.
        k, v: (batch, heads_kv, keys, head_dim); heads must be a multiple of heads_kv.
        alpha: the share of exact attention: a number from 0 to 1; floating numbers of (heads,); of
            (heads, query blocks); or of (batch or 1, heads or 1, queries or 1). Arrays are not
            checked to be from 0 to 1.
        block_mask: bool of (batch or 1, heads or heads_kv or 1, query blocks, key blocks), true
            where a key block is listed. The last block of queries or keys may be short.
        block_bits: instead, what `pack_blocks` gives.
        block_size: queries and keys of a block: 64 or 128 each.
        linear: which keys linear attention sees: the 'complement' of the listed, or 'all'.
        softmax_scale: a Python number; None means 1/sqrt(head_dim). Linear attention has none.
        layout: 'bhsd', or 'bshd' for (batch, tokens, heads, head_dim) arrays.
        granularity, group_kv, smooth_v, rotate, precision, deterministic, dp_sums: as for
            `attention`; beside precision='fastest' dp_sums stays what it is.
        smooth_k: subtract the mean of all keys, in both branches. It changes linear attention,
            whose gradient contains that of the mean.
        q_norm, k_norm, norm_eps, q_inv_rms, k_inv_rms, rope, rope_k, rope_style, rope_begin: norm
            and RoPE of queries and keys before both branches, as `qk_norm_rope` computes them.
        gate: an array like out, of any floating type: the result is out * sigmoid(gate), computed
            in FP32 and rounded once (gated attention, arXiv 2505.06708). It receives gradients.

    Returns:
        out, like q.

    Raises:
        SpecError (a ValueError): shapes, dtypes or options that no kernel takes, when traced.
        LibraryError: this build was made without JAX.
        jax.errors.JaxRuntimeError: what fails when it runs, with the library's own text.

    The lists have no gradient.
    """
    q, k, v = map(jnp.asarray, (q, k, v))
    problem = _check(q, k, v, layout)
    sizes = blocks.check_block_size(block_size)
    blocks.one_of("linear", linear, blocks.LINEAR)
    chosen = dict(granularity=granularity, group_kv=group_kv, smooth_k=smooth_k,
                  smooth_v=smooth_v, rotate=rotate, precision=precision,
                  deterministic=deterministic, dp_sums=dp_sums)  # fmt: skip
    text = options.text_of(fastest.with_words(chosen, q, _number_of))
    text += f" sparse_q={sizes[0]} sparse_kv={sizes[1]} linear={linear}"
    spec = options.spec_of_text(text, head_dim=int(q.shape[3]), dtype=str(q.dtype))
    scale = check_scale(softmax_scale, q.shape[3], spec)
    bits = _bits(block_mask, block_bits, problem, sizes)
    shares = _shares(alpha, problem, sizes[0])
    return _mixture(q, k, v, shares, bits, str(spec), layout, scale)
