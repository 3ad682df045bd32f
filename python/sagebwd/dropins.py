"""The functions that users of other attentions call, by their names, signatures and conventions.

Each computes what it is named after, by `sagebwd.attention`, whose options (precision=,
granularity= ..) each takes as further keywords; what it does not honour is refused by its own name,
unless its value asks for nothing, such as dropout_p=0.0.
"""

from sagebwd import options
from sagebwd.functional import attention
from sagebwd.keywords import absent


def _refuse(**given):
    """SpecError for the arguments that ask for something."""
    for name, (value, neutral) in given.items():
        if not any(value is n or (not hasattr(value, "dim") and value == n) for n in neutral):
            shown = "a tensor" if hasattr(value, "dim") else repr(value)
            raise options.SpecError(f"{name}={shown}: {absent(name)}")


def _window(window_size):
    """window_left and window_right of flash-attention's pair, in which -1 is all."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise options.SpecError(
            f"window_size={window_size!r}: pass (left, right), -1 for no bound"
        ) from None
    bounds = (None if w is None or w == -1 else w for w in (left, right))
    return dict(zip(("window_left", "window_right"), bounds))


def _flash_attention(q, k, v, causal, window_size, return_attn_probs, refused, **given):
    _refuse(**refused)
    options.yes_or_no("causal", causal)
    options.yes_or_no("return_attn_probs", return_attn_probs)
    given |= _window(window_size)
    if causal:
        given |= {"causal": "bottom-right", "window_right": None}
    out, lse = attention(q, k, v, return_lse=True, **given)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False, **more,
):  # fmt: skip
    """flash-attention 2's function: (batch, tokens, heads, head_dim) tensors.

    A causal mask is aligned to the bottom right, as there. Results are deterministic whatever
    `deterministic` says. With `return_attn_probs` (out, lse, None), lse being (batch, heads,
    queries). Further keywords are those of `sagebwd.attention`. Raises what it raises, SpecError
    for dropout, softcap and alibi_slopes.
    """
    refused = {"dropout_p": (dropout_p, (0.0, None)), "softcap": (softcap, (0.0, None)),
               "alibi_slopes": (alibi_slopes, (None,))}  # fmt: skip
    return _flash_attention(q, k, v, causal, window_size, return_attn_probs, refused,
                            layout="bshd", softmax_scale=softmax_scale, **more)  # fmt: skip


def flash_attn_qkvpacked_func(qkv, *given, **more):
    """`flash_attn_func` of (batch, tokens, 3, heads, head_dim)."""
    return flash_attn_func(*_unpacked("qkv", qkv, 5, 3), *given, **more)


def flash_attn_kvpacked_func(q, kv, *given, **more):
    """`flash_attn_func` of q and (batch, tokens, 2, heads_kv, head_dim)."""
    return flash_attn_func(q, *_unpacked("kv", kv, 5, 2), *given, **more)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None, **more,
):  # fmt: skip
    """flash-attention 2's function of packed sequences: (tokens, heads, head_dim) tensors.

    The longest lengths are not needed and not looked at; lse is (heads, tokens). Otherwise as
    `flash_attn_func`.
    """
    refused = {"dropout_p": (dropout_p, (0.0, None)), "softcap": (softcap, (0.0, None)),
               "alibi_slopes": (alibi_slopes, (None,)),
               "block_table": (block_table, (None,))}  # fmt: skip
    return _flash_attention(q, k, v, causal, window_size, return_attn_probs, refused,
                            softmax_scale=softmax_scale, cu_seqlens_q=cu_seqlens_q,
                            cu_seqlens_k=cu_seqlens_k, **more)  # fmt: skip


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen=None, *given, **more):
    """`flash_attn_varlen_func` of (tokens, 3, heads, head_dim)."""
    return flash_attn_varlen_func(*_unpacked("qkv", qkv, 4, 3), cu_seqlens, cu_seqlens, max_seqlen,
                                  max_seqlen, *given, **more)  # fmt: skip


def flash_attn_varlen_kvpacked_func(q, kv, *given, **more):
    """`flash_attn_varlen_func` of q and (tokens, 2, heads_kv, head_dim)."""
    return flash_attn_varlen_func(q, *_unpacked("kv", kv, 4, 2), *given, **more)


def _unpacked(name, packed, dims, count):
    """The tensors side by side in one, as views."""
    if not hasattr(packed, "dim"):
        raise TypeError(f"{name} is {options.a_kind(packed)}; pass a torch tensor on a GPU")
    if packed.dim() != dims or packed.shape[dims - 3] != count:
        shape = ("tokens", str(count), "heads", "head_dim")
        raise options.SpecError(
            f"{name} has shape {tuple(packed.shape)}; it must be "
            f"({', '.join(shape if dims == 4 else ('batch', *shape))})"
        )
    return packed.unbind(dims - 3)


def sageattn(
    q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, *,
    smooth_k=True, **more,
):  # fmt: skip
    """SageAttention's function, with gradients.

    `tensor_layout`: 'HND' for (batch, heads, tokens, head_dim), 'NHD' for (batch, tokens, heads,
    head_dim). `is_causal` takes as many queries as keys. Further keywords are those of
    `sagebwd.attention`; any other is an error. Raises what it raises.
    """
    layouts = {"HND": "bhsd", "NHD": "bshd"}
    if tensor_layout not in layouts:
        raise options.SpecError(f"tensor_layout={tensor_layout!r}: pass 'HND' or 'NHD'")
    options.yes_or_no("is_causal", is_causal)
    return attention(q, k, v, layout=layouts[tensor_layout], causal=is_causal,
                     softmax_scale=sm_scale, return_lse=return_lse, smooth_k=smooth_k,
                     **more)  # fmt: skip


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False, **more,
):  # fmt: skip
    """torch.nn.functional's function: (batch, heads, tokens, head_dim) tensors.

    A causal mask is aligned to the top left, as there. Further keywords are those of
    `sagebwd.attention`. Raises what it raises, SpecError for attn_mask and dropout_p, and for fewer
    key heads without `enable_gqa`.
    """
    _refuse(attn_mask=(attn_mask, (None,)), dropout_p=(dropout_p, (0.0, None)))
    options.yes_or_no("is_causal", is_causal)
    options.yes_or_no("enable_gqa", enable_gqa)
    head = 2 if more.get("layout") == "bshd" else 1
    if not enable_gqa and query.dim() == key.dim() == 4 and query.shape[head] != key.shape[head]:
        raise options.SpecError(
            f"query has {query.shape[head]} heads and key {key.shape[head]}: pass enable_gqa=True"
        )
    return attention(query, key, value, causal="top-left" if is_causal else False,
                     softmax_scale=scale, **more)  # fmt: skip
