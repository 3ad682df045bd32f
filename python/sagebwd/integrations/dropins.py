"""The functions of other attention libraries, with their names, signatures and conventions.

Each calls `sagebwd.attention` and takes its options (precision=, granularity=, ...) as further
keywords. Unsupported arguments raise an error, unless their value asks for nothing, as
dropout_p=0.0 does.
"""

import functools
import inspect
import sys

import torch
from torch.compiler import is_compiling

from sagebwd.core import options, seams
from sagebwd.core.front_arguments import OF_ATTENTION
from sagebwd.core.functional import attention
from sagebwd.core.keywords import RECOMPUTE, Words, absent, check_keywords
from sagebwd.integrations import _scores

#: Others have no norm, RoPE, gate, intervals of keys, mask= and score=. An attn_mask may have keys
#: in another order, without their tables and intervals, or become a mask= or score=.
_NOT_HERE = frozenset(
    ("q", "k", "v", "startend_row_indices", "mask", "score", "return_max_logits", *OF_ATTENTION,
     *RECOMPUTE)
)


def _drop_in(like=None, names=None, texts=None, **otherwise):
    """Makes errors speak of this function's arguments: `names` and `texts` are those of `Words`. It
    takes its own keywords, and those of `attention` (or of the drop-in `like`), except those for
    which `otherwise` says what to use."""

    def decorate(function):
        further = like.known if like else frozenset(inspect.signature(attention).parameters)
        own = {p.name for p in inspect.signature(function).parameters.values()
               if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}  # fmt: skip
        said = {**(like.otherwise if like else {}), **otherwise}
        known = further - _NOT_HERE | own
        words = Words(names or {}, texts or {})

        @functools.wraps(function)
        def wrapper(*given, **keywords):
            check_keywords(function.__name__, keywords, known, said)
            if is_compiling():  # which raises errors of its own, around ours
                return function(*given, **keywords)
            try:
                return function(*given, **keywords)
            except (TypeError, ValueError) as error:
                words.put_into(error)
                raise

        wrapper.known, wrapper.otherwise = known, said
        return wrapper

    return decorate


def _refuse(causal="causal", **given):
    """SpecError for arguments whose values are not neutral. `causal` is what the function calls
    that option."""
    for name, (value, neutral) in given.items():
        is_tensor = isinstance(value, torch.Tensor)
        if not any(value is n or (not is_tensor and value == n) for n in neutral):
            shown = "a tensor" if is_tensor else repr(value)
            raise options.SpecError(f"{name}={shown}: {absent(name, causal)}")


def window_bounds(window_size, given=()):
    """window_left and window_right, as a dict, for flash-attention's pair, in which -1 means no
    limit. Empty for a pair without limits; only then they may be `given`. Raises SpecError."""
    try:
        bounds = (None, None) if window_size is None else tuple(window_size)
        left, right = (None if w == -1 else w for w in bounds)
    except (TypeError, ValueError):
        raise options.SpecError(
            f"window_size={window_size!r}: pass (left, right), where -1 means no limit"
        ) from None
    if left is None and right is None:
        return {}
    for bound in (left, right):
        try:
            bound is None or options.whole_number("window_size", bound, least=0)
        except options.SpecError:
            raise options.SpecError(
                f"window_size={window_size!r}: pass (left, right), each a whole number of at least "
                "0, or -1 for no limit"
            ) from None
    for name in ("window_left", "window_right"):
        if name in given:
            raise options.SpecError(
                f"window_size={window_size!r} and {name}={given[name]!r} give the window twice: "
                "pass window_size, or window_left and window_right"
            )
    return {"window_left": left, "window_right": right}


def _flash_attention(q, k, v, causal, window_size, return_attn_probs, refused, scores, **given):
    try:
        _refuse(**refused)
    except options.SpecError as error:
        if str(error).startswith("dropout_p=") and given.get("softmax_scale") is None:
            error.args = (f"{error}. If this is flash-attention 3's fourth argument, pass it by "
                          "its name, softmax_scale=",)  # fmt: skip
        raise
    options.yes_or_no("causal", causal)
    options.yes_or_no("return_attn_probs", return_attn_probs)
    given = {**given, **window_bounds(window_size, given)}
    if (score := _score(q, k, *scores, given)) is not None:
        given["score"] = score
    out, lse = attention(q, k, v, causal="bottom-right" if causal else False, return_lse=True,
                         **given)  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def _score(q, k, softcap, alibi_slopes, given):
    """The score function of these arguments, or None. SpecError for what no kernel computes."""
    if alibi_slopes is not None and given.get("cu_seqlens_q") is not None:
        raise options.SpecError(
            "alibi_slopes for packed sequences: kernels for these read no tensors in the score. "
            "Call flash_attn_func for each sequence, or write slopes that are known as a text, "
            "such as score='s - 0.5 * abs(q - k)' for all heads"
        )
    return _scores.score_of(softcap, alibi_slopes, q, k)


_FLASH = {
    "texts": {
        "(batch, head, token, channel), or layout='bshd'": "(batch, tokens, heads, head_dim)",
        "need cu_seqlens_q= and cu_seqlens_k=": "are for flash_attn_varlen_func",
        "(is layout= right?)": "(tensors are (batch, tokens, heads, head_dim))",
    },
    "layout": "tokens come before heads, as in flash-attention; sagebwd.attention takes layouts",
    "return_lse": "pass return_attn_probs=True",
}


@_drop_in(**_FLASH)
def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False, **more,
):  # fmt: skip
    """flash-attention 2's function, on (batch, tokens, heads, head_dim) tensors.

    A causal mask is aligned to the bottom right, as there. `window_left` and `window_right` may be
    passed instead of `window_size`. Results are always deterministic. With `return_attn_probs` it
    returns (out, lse, None), where lse is (batch, heads, queries). Further keywords are those of
    `sagebwd.attention`. Raises what `sagebwd.attention` raises, and SpecError for dropout.

    Scores become softcap tanh(s / softcap), unless softcap is 0, and then slope |i + keys - queries
    - j| is subtracted for query i and key j. alibi_slopes: float32 of (heads,) or (batch, heads).
    Both exclude what `score=` of `sagebwd.attention` excludes. Slopes that require grad get one.
    """
    refused = {"dropout_p": (dropout_p, (0.0, None))}
    scores = softcap, alibi_slopes
    return _flash_attention(q, k, v, causal, window_size, return_attn_probs, refused, scores,
                            layout="bshd", softmax_scale=softmax_scale, **more)  # fmt: skip


@_drop_in(flash_attn_func)
def flash_attn_qkvpacked_func(qkv, *given, **more):
    """`flash_attn_func` on q, k and v in one tensor of (batch, tokens, 3, heads, head_dim)."""
    return flash_attn_func(*_unpacked("qkv", qkv, 5, 3), *given, **more)


@_drop_in(flash_attn_func)
def flash_attn_kvpacked_func(q, kv, *given, **more):
    """`flash_attn_func` with k and v in one tensor of (batch, tokens, 2, heads_kv, head_dim)."""
    return flash_attn_func(q, *_unpacked("kv", kv, 5, 2), *given, **more)


@_drop_in(**_FLASH)
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None, **more,
):  # fmt: skip
    """flash-attention 2's function for packed sequences, on (tokens, heads, head_dim) tensors.

    The longest lengths are ignored, and lse is (heads, tokens). alibi_slopes raises a SpecError:
    kernels for packed sequences read no tensors in the score. The rest is as in `flash_attn_func`.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise options.SpecError(
            "cu_seqlens_q and cu_seqlens_k say where packed sequences begin: pass int32 tensors of "
            "shape (sequences + 1,). flash_attn_func takes sequences of one length, as (batch, "
            "tokens, heads, head_dim)"
        )
    refused = {"dropout_p": (dropout_p, (0.0, None)), "block_table": (block_table, (None,))}
    scores = softcap, alibi_slopes
    return _flash_attention(q, k, v, causal, window_size, return_attn_probs, refused, scores,
                            softmax_scale=softmax_scale, cu_seqlens_q=cu_seqlens_q,
                            cu_seqlens_k=cu_seqlens_k, **more)  # fmt: skip


@_drop_in(
    flash_attn_varlen_func, names=dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "pass cu_seqlens, of both"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "pass max_seqlen, of both"),
)
def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen=None, *given, **more):
    """`flash_attn_varlen_func` on q, k and v in one tensor of (tokens, 3, heads, head_dim)."""
    return flash_attn_varlen_func(*_unpacked("qkv", qkv, 4, 3), cu_seqlens, cu_seqlens, max_seqlen,
                                  max_seqlen, *given, **more)  # fmt: skip


@_drop_in(flash_attn_varlen_func)
def flash_attn_varlen_kvpacked_func(q, kv, *given, **more):
    """`flash_attn_varlen_func` with k and v in one tensor of (tokens, 2, heads_kv, head_dim)."""
    return flash_attn_varlen_func(q, *_unpacked("kv", kv, 4, 2), *given, **more)


def flash_attn_with_kvcache(*given, **more):
    """Not supported: raises a SpecError that says what to use instead."""
    raise options.SpecError(f"flash_attn_with_kvcache: {absent('k_cache')}")


def _unpacked(name, packed, dims, count):
    """The tensors that are packed in one, as views."""
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"{name} is {options.a_kind(packed)}; pass a torch tensor on a GPU")
    if packed.dim() != dims or packed.shape[dims - 3] != count:
        shape = ("tokens", str(count), "heads", "head_dim")
        raise options.SpecError(
            f"{name} has shape {tuple(packed.shape)}; it must be "
            f"({', '.join(shape if dims == 4 else ('batch', *shape))})"
        )
    return packed.unbind(dims - 3)


@_drop_in(
    names={"q": "query", "k": "key", "v": "value", "return_lse": "return_softmax_lse"},
    texts=_FLASH["texts"] | {
        "pass causal='top-left'": "call sagebwd.attention with causal='top-left'",
    },
    layout="tokens come before heads, as in FlashMask; sagebwd.attention takes layouts",
    return_lse="pass return_softmax_lse=True",
    attn_mask="pass sagebwd.masks.from_bool(attn_mask).startend_row_indices, for a mask that hides "
    "at most two intervals of queries from each key",
    **dict.fromkeys(("window_left", "window_right"), "pass window_size"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "sagebwd.masks.documents says by intervals "
                    "where sequences lie, and flash_attn_varlen_func takes packed ones"),
)
def flashmask_attention(
    query, key, value, startend_row_indices=None, *, dropout=0.0, causal=False, window_size=None,
    return_softmax_lse=False, return_seed_offset=False, fixed_seed_offset=None, rng_name="",
    training=True, name=None, softmax_scale=None, block_mask=None, **more,
):  # fmt: skip
    """FlashMask's function (arXiv 2410.01359, section 4), of PaddlePaddle, on PyTorch's tensors of
    (batch, tokens, heads, head_dim).

    `startend_row_indices` is int32 of (batch or 1, heads_kv or 1, keys, columns), as
    `sagebwd.attention` takes it, with 1 or 2 columns if causal, and else 2 or 4. `causal` requires
    as many queries as keys. `window_size`, for calls without intervals, is a number or (left,
    right): how many keys before its own, and without `causal` behind its own, a query sees. With
    `return_softmax_lse` it returns (out, lse), where lse is (batch, heads, queries). `rng_name`,
    `fixed_seed_offset` and `name` are ignored, as is `dropout` unless `training`. Further keywords
    are those of `sagebwd.attention`. Raises what `sagebwd.attention` raises, and SpecError for
    dropout, return_seed_offset, block_mask, and a window beside intervals.
    """
    options.yes_or_no("training", training)
    options.yes_or_no("causal", causal)
    options.yes_or_no("return_softmax_lse", return_softmax_lse)
    if training:
        _refuse(dropout=(dropout, (0.0, None)))
    _refuse(return_seed_offset=(return_seed_offset, (False, None)),
            block_mask=(block_mask, (None,)))  # fmt: skip
    if window_size is not None and startend_row_indices is not None:
        raise options.SpecError(
            f"window_size={window_size!r} and startend_row_indices are given together: leave one "
            "of the two out; sagebwd.masks.window_and_global says a window by intervals"
        )
    return attention(query, key, value, layout="bshd", causal=causal, softmax_scale=softmax_scale,
                     startend_row_indices=startend_row_indices, return_lse=return_softmax_lse,
                     **_bounds_of_flashmask(window_size, causal), **more)  # fmt: skip


def _bounds_of_flashmask(window_size, causal):
    """window_left and window_right, as a dict, for FlashMask's number or pair. SpecError."""
    if window_size is None:
        return {}
    pair = (window_size, window_size) if isinstance(window_size, int) else window_size
    try:
        left, right = (options.whole_number("window_size", bound, least=0) for bound in pair)
    except (TypeError, ValueError):
        raise options.SpecError(
            f"window_size={window_size!r}: pass a whole number of at least 0, or two as (left, "
            "right)"
        ) from None
    return {"window_left": left, "window_right": None if causal else right}


@_drop_in(
    names={"softmax_scale": "sm_scale"},
    texts={
        ", or layout='bshd'": ", or tensor_layout='NHD' for (batch, token, head, channel)",
        "(is layout= right?)": "(is tensor_layout= right?)",
        "causal=True is ambiguous": "is_causal=True is ambiguous",
        "pass causal='top-left'": "call sagebwd.attention with causal='top-left'",
        "both, causal='top-left'": "both, or call sagebwd.attention with causal='top-left'",
    },
    layout="pass tensor_layout='HND' or 'NHD'",
    causal="pass is_causal; sagebwd.attention takes the corner of a mask as well",
    softmax_scale="pass sm_scale",
    qk_quant_gran="pass granularity='row' or 'block'",
    pv_accum_dtype="sums are FP32 here: pass precision= for which products are INT8",
)
def sageattn(
    q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, *,
    smooth_k=True, smooth_q=False, **more,
):  # fmt: skip
    """SageAttention's function, with gradients.

    `tensor_layout` is 'HND' for (batch, heads, tokens, head_dim) and 'NHD' for (batch, tokens,
    heads, head_dim). `is_causal` requires as many queries as keys. `smooth_k`, `smooth_q` and
    further keywords are those of `sagebwd.attention`. Raises what `sagebwd.attention` raises.
    """
    layouts = {"HND": "bhsd", "NHD": "bshd"}
    if tensor_layout not in layouts:
        raise options.SpecError(f"tensor_layout={tensor_layout!r}: pass 'HND' or 'NHD'")
    options.yes_or_no("is_causal", is_causal)
    return attention(q, k, v, layout=layouts[tensor_layout], causal=is_causal,
                     softmax_scale=sm_scale, return_lse=return_lse, smooth_k=smooth_k,
                     smooth_q=smooth_q, **more)  # fmt: skip


@_drop_in(
    names={"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"},
    texts=dict.fromkeys((" (is layout= right?)", ", or layout='bshd'"), "") | {
        "attention_of_dtensors() takes no": "scaled_dot_product_attention() takes for DTensors no",
    },
    causal="pass is_causal; sagebwd.attention takes the corner of a mask as well",
    softmax_scale="pass scale",
)
def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False, **more,
):  # fmt: skip
    """torch.nn.functional's function, on (batch, heads, tokens, head_dim) tensors.

    A causal mask is aligned to the top left, as there. Further keywords are those of
    `sagebwd.attention`. DTensors that share tokens, as in PyTorch's context_parallel, are computed
    by `sagebwd.distributed`, in a ring.

    attn_mask may hide keys, such as padding, from all heads and queries alike: a tensor that
    broadcasts to (batch, heads, queries, keys), of bool, or of a float type with 0 for keys that
    are seen and at most -9984 for others. One of bool may also hide all keys from some queries,
    whose results are zero. The host waits for the GPU to read it, once for each mask. Then a mask
    may also be one in which of any two queries one sees all that the other sees, or any two see the
    same keys or none in common, such as prefixes and documents; it is computed as mask=. One of 0
    and 1 of a float type, which PyTorch adds to scores, is computed as score= where a number of
    each query times one of each key gives it. In compiled code and captured graphs the host does
    not wait, and another mask stops the program.

    Raises what `sagebwd.attention` raises, and SpecError for other masks, for one beside is_causal,
    seqused_k or a window, for dropout_p, and for fewer key heads than query heads without
    `enable_gqa`.
    """
    _refuse("is_causal", dropout_p=(dropout_p, (0.0, None)))
    options.yes_or_no("is_causal", is_causal)
    options.yes_or_no("enable_gqa", enable_gqa)
    heads, heads_kv = (_heads(t, more.get("layout")) for t in (query, key))
    if not enable_gqa and heads and heads_kv and heads != heads_kv:
        raise options.SpecError(f"query has {heads} heads and key {heads_kv}: pass enable_gqa=True")
    given = dict(causal="top-left" if is_causal else False, softmax_scale=scale, **more)
    if any(map(_is_dtensor, (query, key, value))):
        _refuse("is_causal", attn_mask=(attn_mask, (None,)))
        return seams.attention_of_dtensors(query, key, value, **given)
    if attn_mask is not None:
        from sagebwd.integrations import _key_masks

        key, value, told, seeing = _of_mask(attn_mask, query, key, value, **given)
        given |= told
        if seeing is not None:
            return _key_masks.hidden(attention(query, key, value, **given), seeing,
                                     given.get("layout"))  # fmt: skip
    return attention(query, key, value, **given)


def _of_mask(attn_mask, query, key, value, causal, layout="bhsd", seqused_k=None, **more):
    from sagebwd.integrations import _key_masks

    if causal or seqused_k is not None or any(more.get(name) not in (None, -1) for name in
                                              ("window_left", "window_right")):
        raise options.SpecError(
            "attn_mask beside is_causal, seqused_k or a window: leave one of them out"
        )
    if None in (_heads(t, layout) for t in (query, key, value)):
        raise options.SpecError("attn_mask is for (batch, heads, tokens, head_dim) tensors")
    return _key_masks.applied(attn_mask, query, key, value, layout)


def _is_dtensor(x):
    """Without importing what only programs of several processes need."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def _heads(t, layout):
    """The number of heads; None if `attention` refuses the tensor with its own message."""
    if not isinstance(t, torch.Tensor) or t.is_nested or t.dim() != 4:
        return None
    return t.shape[2 if layout == "bshd" else 1]
