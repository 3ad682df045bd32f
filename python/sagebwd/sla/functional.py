"""`sagebwd.sparse_linear_attention` and `sagebwd.block_linear_attention`, on torch tensors."""

import functools
import numbers

import torch

from sagebwd.core import fastest, functional, keywords, ops, options, transforms
from sagebwd.core.arguments.tensors import DTYPES
from sagebwd.core.front_end import has_front_end
from sagebwd.core.keywords import NO_OPTION_OF_LISTS, NOT_WITH_LISTS, WITH_LISTS
from sagebwd.lists import block_sparse, blocks
from sagebwd.lists.given import check_heads, check_tensor, lists_of
from sagebwd.sla import mixed, mixing
from sagebwd.sla.exact import listed_attention
from sagebwd.sla.linear import linear_branch
from sagebwd.sla.parts import no_tokens

FEATURE_MAPS = ("softmax",)

#: Others have these arguments; the texts say what to pass in their place.
OTHERWISE = WITH_LISTS | dict.fromkeys(NOT_WITH_LISTS[2:], NO_OPTION_OF_LISTS) | {
    "causal": "the complement of the listed keys would need sums for each token of the blocks on "
    "the diagonal. sagebwd.block_sparse_attention has causal=, without a linear branch",
    "is_causal": "it has no causal form; sagebwd.block_sparse_attention has causal=",
    "topk": "pass density=, the share of the key blocks that is exact, to sagebwd.top_blocks or to "
    "the module",
    "return_lse": "pass return_branches=True, whose fourth result is lse",
}

known_keywords = keywords.known_keywords(OTHERWISE)


def prepared(q, k, v, layout):
    """q, k and v of (batch, heads, tokens, channels), cast as autocast wants. SpecError and
    TypeError for tensors that do not belong together."""
    options.check_layout(layout)
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, t)
    transforms.refuse_tangents(q, k, v)
    transforms.refuse_transforms("SLA2's attention", "sagebwd.block_sparse_attention on a GPU")
    q, k, v = ops.as_autocast_wants(q.device.type, q, k, v)
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise options.SpecError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype} on {q.device}, {k.device} and "
            f"{v.device}: pass one dtype on one device"
        )
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    check_heads(q, k)
    if k.shape[:3] != v.shape[:3] or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise options.SpecError(f"q, k and v of {tuple(q.shape)}, {tuple(k.shape)} and "
                                f"{tuple(v.shape)} do not belong together: pass one batch, one "
                                "head_dim of q and k, and k and v of the same heads and tokens")
    return q, k, v


def check_feature_map(feature_map):
    if feature_map not in FEATURE_MAPS:
        raise options.SpecError(
            f"feature_map={feature_map!r}: pass 'softmax', over channels, which is what SLA2 has; "
            "the linear branch has no other"
        )


def sparse_branch(q, k, v, lists, sizes, scale, kernels):
    """(out, lse) of the listed keys, from the kernels.

    `kernels`: keywords of `sagebwd.block_sparse_attention`; its precision 'exact' means PyTorch's
    own products instead.
    """
    if kernels["precision"] == "exact":
        out, lse = listed_attention(q, k, v, lists.mask, sizes, scale)
        rows = lists.invalid_rows(q.shape[1], sizes[0], q.shape[2])
        if rows is not None:
            out, lse = out.masked_fill(rows, torch.nan), lse.masked_fill(rows[..., 0], torch.nan)
        return out, lse
    check_for_kernels(q)
    return block_sparse.block_sparse_attention(
        q, k, v, **lists.given, block_size=sizes, softmax_scale=scale, return_lse=True, **kernels
    )


def check_for_kernels(q):
    """SpecError for a tensor that only precision='exact' takes."""
    if q.device.type in ops.DEVICES and q.dtype in DTYPES:
        return
    text = (f"q is {q.dtype} on {q.device}; the kernels take torch.bfloat16 or torch.float16 on a "
            "CUDA GPU")  # fmt: skip
    if q.device.type in ops.DEVICES:
        raise options.SpecError(
            f"{text}: convert it, run under torch.autocast('cuda'), or pass precision='exact', "
            "which takes every floating type"
        )
    raise options.SpecError(
        f"{text}. Elsewhere pass precision='exact', which takes every floating type on any device; "
        "sagebwd.emulation.emulated_block_sparse_attention computes the sparse branch with its "
        "INT8 products, and sagebwd.reference.sparse_linear all in FP64"
    )


def linear_of(q, k, v, lists, sizes, linear, smooth_k):
    mask = None if linear == "all" else lists.mask
    out = linear_branch(q, k, v, mask, sizes, smooth_k)
    rows = lists.invalid_rows(q.shape[1], sizes[0], q.shape[2])
    return out if rows is None else out.masked_fill(rows, torch.nan)


def as_layout(layout, *tensors):
    return [t.transpose(1, 2) if layout == "bshd" else t for t in tensors]


@known_keywords
@has_front_end
def sparse_linear_attention(
    q, k, v, *, alpha, beta=None, block_mask=None, block_indices=None, block_counts=None,
    block_bits=None, block_size=(128, 64), linear="complement", feature_map="softmax",
    softmax_scale=None, layout="bhsd", granularity="row", group_kv=None, smooth_k=True,
    smooth_v=False, rotate=True, precision="six-of-seven", deterministic=True, dp_sums="fp32",
    return_branches=False,
):  # fmt: skip
    """SLA2's attention: exact for the keys of listed blocks, linear for the others, mixed by alpha
    (arXiv 2602.12675, Algorithms 2 and 3).

    out = alpha out_sparse + (1 - alpha) out_linear. out_sparse is `block_sparse_attention`, with
    INT8 products forward and backward; out_linear is `block_linear_attention`. A query block that
    lists nothing has out = out_linear. With linear='complement' one that lists every block has
    out = out_sparse, as no key is left for the linear branch. alpha gets no gradient from either.

    Args:
        q: (batch, heads, queries, head_dim). For kernels bfloat16 or float16 on a CUDA GPU; with
            precision='exact' any floating type on any device. Under torch.autocast inputs are cast
            to its dtype.
        k, v: (batch, heads_kv, keys, head_dim), of the same dtype; heads must be a multiple of
            heads_kv.
        alpha: the share of the exact branch: a number from 0 to 1; a tensor of (heads,); of
            (heads, query blocks); or of (batch or 1, heads or 1, queries). Tensors get gradients,
            and are not checked to be from 0 to 1. Or 'estimated': sigmoid(lse - rest - beta) of
            each query, where rest is the logarithm of what the keys of unlisted blocks would weigh
            if all keys of a block were their mean. This is sagebwd's own, and needs no length.
        beta: (heads,), learned, for alpha='estimated' only; None means 0. The gradient is a sum
            over all queries that the error of INT8 scores goes through: 0.004 off where q and k
            have standard deviations of 1, and ten times as much and more where scores are sharp.
        block_mask: bool or uint8 of (batch or 1, heads or heads_kv or 1, query blocks, key blocks):
            which blocks are listed. `top_blocks` gives one.
        block_indices, block_counts: instead, int32 or int64 of (..., query blocks, width): numbers
            of key blocks in any order, of which the first `block_counts`, of (..., query blocks),
            count. None means all. The rows of a query block that lists a block which does not
            exist become NaN.
        block_bits: instead, what `pack_blocks` gives.
        block_size: queries and keys of a block: 64 or 128 each. Any with precision='exact'.
        linear: which keys the linear branch sees: the 'complement' of the listed, or 'all', which
            is cheaper (as in SLA's public code).
        feature_map: 'softmax', over channels.
        softmax_scale: a number; None means 1/sqrt(head_dim). The linear branch has none.
        layout: 'bhsd', or 'bshd' for (batch, tokens, heads, head_dim) tensors.
        granularity, group_kv, smooth_v, rotate, deterministic, dp_sums: as for
            `block_sparse_attention`.
        smooth_k: subtract the mean of all keys, in both branches. It changes out_linear, whose
            gradient contains that of the mean.
        precision: as for `block_sparse_attention`, except that dp_sums stays beside 'fastest'; or
            'exact' for PyTorch's own products in the type of q, with sums in FP32 (FP64 for FP64),
            which takes much longer.
        return_branches: also return out_sparse, out_linear and lse, to which the gate does nothing.
        {front_end}

    Returns:
        out, like q; with `return_branches` (out, out_sparse, out_linear, lse), where lse is FP32 of
        (batch, heads, queries), the log-sum-exp of the listed keys. All are differentiable once.

    Raises:
        SpecError (a ValueError): tensors or options that are not supported.
        TypeError: a keyword is unknown, or an argument is not a tensor.
        NotImplementedError: the backward is differentiated.
        Further what `attention` raises.
    """
    q, k, v = prepared(q, k, v, layout)
    exact = precision == "exact"
    sizes = blocks.check_block_size(block_size, any_size=exact)
    blocks.one_of("linear", linear, blocks.LINEAR)
    check_feature_map(feature_map)
    options.yes_or_no("return_branches", return_branches)
    options.yes_or_no("smooth_k", smooth_k)
    scale = options.check_softmax_scale(softmax_scale, q.shape[3])
    check_alpha(alpha, beta, q)
    lists = lists_of(q, k, sizes, block_mask, block_indices, block_counts, block_bits)
    kernels = dict(granularity=granularity, group_kv=group_kv, smooth_k=smooth_k,
                   smooth_v=smooth_v, rotate=rotate, precision=precision,
                   deterministic=deterministic, dp_sums=dp_sums)  # fmt: skip
    check_kernels(kernels, sizes)
    given = q, k, v, alpha, beta, lists, sizes, scale, linear, kernels
    if not return_branches:
        return as_layout(layout, mixture(*given))[0]
    results = branches(*given)
    return (*as_layout(layout, *results[:3]), results[3])


def _remembered(function):
    """A function of options that is asked the same in call after call."""
    known = functools.lru_cache(maxsize=256, typed=True)(function)

    def call(*given, **named):
        if torch.compiler.is_compiling():
            return function(*given, **named)
        try:
            return known(*given, **named)
        except TypeError:  # of a list, say, which has no hash: the function's own error says more
            return function(*given, **named)

    return call


def check_kernels(kernels, sizes, head_dim=64):
    """SpecError and TypeError for options of the sparse branch that no kernel takes, and for a
    block size and a head dimension that none has, which precision='exact' does not ask for. Calls
    leave the head dimension to the operator."""
    if not torch.compiler.is_compiling():  # operators refuse what compiled calls are given
        _check_kernels(sizes, head_dim, **kernels)


@_remembered
def _check_kernels(sizes, head_dim, **kernels):
    precision = kernels["precision"]
    of_no_kernel = ("exact", options.FASTEST)  # kernels of some GPU stand for the second
    known = (*options.PRECISIONS, *of_no_kernel)
    if isinstance(precision, str) and precision not in known:
        blocks.one_of("precision", precision, known)
    if isinstance(precision, str) and precision in of_no_kernel:
        kernels = kernels | {"precision": options.PRECISIONS[0]}
    if precision == "exact":
        options.spec_of_text(options.text_of(kernels))
    else:
        options.spec_of_text(f"head_dim={head_dim} {options.text_of(kernels)} "
                             f"sparse_q={sizes[0]} sparse_kv={sizes[1]}")  # fmt: skip


def check_alpha(alpha, beta, q):
    """SpecError and TypeError for an alpha of a wrong kind; shapes are looked at later."""
    if isinstance(alpha, str):
        blocks.one_of("alpha", alpha, ("estimated",))
    elif not isinstance(alpha, torch.Tensor):
        if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real):
            raise TypeError(f"alpha is {options.a_kind(alpha)}; pass a number, a torch tensor or "
                            "'estimated'")  # fmt: skip
        blocks.check_alpha_number(alpha)
    if beta is None:
        return
    if not isinstance(alpha, str):
        raise options.SpecError("beta is given and alpha is not 'estimated': leave it out")
    if not isinstance(beta, torch.Tensor):
        raise TypeError(f"beta is {options.a_kind(beta)}; pass a torch tensor")
    fits = tuple(beta.shape) == (q.shape[1],) and beta.is_floating_point()
    if not fits or beta.device != q.device:
        raise options.SpecError(
            f"beta is {beta.dtype} of {tuple(beta.shape)} on {beta.device}: pass floating numbers "
            f"of ({q.shape[1]},), one for each head, on {q.device}"
        )


def branches(q, k, v, alpha, beta, lists, sizes, scale, linear, kernels, sparse=sparse_branch):
    """(out, out_sparse, out_linear, lse) of checked arguments. `sparse` computes the sparse
    branch."""
    transforms.refuse_tangents(alpha, beta)
    if 0 in (*q.shape[:3], k.shape[2]):
        nothing = no_tokens(q, k, v, *(t for t in (alpha, beta) if isinstance(t, torch.Tensor)))
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=mixing.wide(q.dtype))
        return nothing, nothing, nothing, lse
    out_sparse, lse = sparse(q, k, v, lists, sizes, scale, kernels)
    out_linear = linear_of(q, k, v, lists, sizes, linear, kernels["smooth_k"])
    if isinstance(alpha, str):
        rows = mixing.estimated_alpha(q, k, lse, lists.mask, beta, sizes, scale)
    else:
        rows = mixing.alpha_rows(alpha, q, sizes[0])
    rows = mixing.with_ends(rows, lists.mask, q.shape[1], sizes[0], q.shape[2], linear)
    return mixing.mixed(out_sparse, out_linear, rows), out_sparse, out_linear, lse


@_remembered
def _line_of(sizes, linear, **kernels):
    """The options of a call as operators take them."""
    chosen = options.text_of(dict(causal="none", **kernels))
    return f"{chosen} sparse_q={sizes[0]} sparse_kv={sizes[1]} linear={linear}"


def mixture(q, k, v, alpha, beta, lists, sizes, scale, linear, kernels):
    """The first result of `branches`, as one operation of the kernels where there are such."""
    by_kernels = kernels["precision"] != "exact" and mixed.take(q, v, sizes)
    if not by_kernels or 0 in (*q.shape[:3], k.shape[2]):
        return branches(q, k, v, alpha, beta, lists, sizes, scale, linear, kernels)[0]
    transforms.refuse_tangents(alpha, beta)
    q, k, v = functional.inputs(q, k, v)
    text = _line_of(sizes, linear, **fastest.with_words(kernels, q))
    bits = block_sparse.bits_of_checked(lists.arguments, (q.shape[1], k.shape[1]),
                                        blocks.count_of(k.shape[2], sizes[1]), sizes)  # fmt: skip
    if estimated := isinstance(alpha, str):
        shares, tokens, lists_again = beta, 1, (lists.mask, sizes)
    else:
        shares, of_blocks = mixing.alpha_of_call(alpha, q, sizes[0])
        tokens, lists_again = sizes[0] if of_blocks else 1, (None, None)
    told = tokens, estimated, mixed.keeps_sums(q, k, v, shares), scale, "bhsd", text
    return mixed.Mixed.apply(q, k, v, shares, bits, *lists_again, told)


@known_keywords
def block_linear_attention(
    q, k, v, *, block_mask=None, block_indices=None, block_counts=None, block_bits=None,
    block_size=(128, 64), feature_map="softmax", smooth_k=True, layout="bhsd",
):  # fmt: skip
    """Linear attention to the keys of blocks that are not listed: the linear branch of
    `sparse_linear_attention` (SLA2, arXiv 2602.12675, Algorithms 2 and 3).

    A key with G = phi(k) weighs F . G for a query with F = phi(q), and weights sum to 1 over the
    blocks that the query's block does not list. phi is the softmax over channels. Nothing of size
    queries x keys exists. 16-bit inputs have bf16 operands and sums in FP32. On GPUs there are
    kernels for heads of 64 or 128 channels, with as many in v; PyTorch computes others.

    Args:
        q: (batch, heads, queries, head_dim), of any floating type, on any device.
        k, v: (batch, heads_kv, keys, head_dim), of the same dtype; heads must be a multiple of
            heads_kv. v may have another number of channels.
        block_mask, block_indices, block_counts, block_bits: the blocks that are left out, as for
            `sparse_linear_attention`.
        block_size: queries and keys of a block, of any size.
        feature_map: 'softmax', over channels.
        smooth_k: subtract the mean of all keys before phi.
        layout: 'bhsd', or 'bshd' for (batch, tokens, heads, head_dim) tensors.

    Returns:
        out, like q with v's channels, differentiable once. It is 0 for a query block that lists
        every block.

    Raises:
        SpecError, TypeError; NotImplementedError if the backward is differentiated.
    """
    q, k, v = prepared(q, k, v, layout)
    sizes = blocks.check_block_size(block_size, any_size=True)
    check_feature_map(feature_map)
    options.yes_or_no("smooth_k", smooth_k)
    lists = lists_of(q, k, sizes, block_mask, block_indices, block_counts, block_bits)
    out = linear_of(q, k, v, lists, sizes, "complement", smooth_k)
    return as_layout(layout, out)[0]
