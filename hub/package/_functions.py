"""The public functions: what callers pass becomes the words of a spec and an operator's call."""

import math
from numbers import Integral, Real

import torch

from . import _ops
from ._native import SpecError
from ._passes import DTYPES

PRECISIONS = ("six-of-seven", "dv16", "qk16", "gradients16")


def attention(
    q, k, v, *, causal=False, softmax_scale=None, layout="bhsd", precision="six-of-seven",
    window_left=None, window_right=None, softcap=None, sink_logits=None, deterministic=True,
    return_lse=False, cu_seqlens_q=None, cu_seqlens_k=None,
):  # fmt: skip
    """softmax(softmax_scale q k^T) v with INT8 matrix products in both passes.

    Args:
        q, k, v: bf16 or fp16 on one CUDA GPU, in the layout; q may have a multiple of the heads of
            k and v. The last stride is 1, the others and the address are multiples of 16 bytes.
            With cu_seqlens they are (tokens, heads, head_dim), whatever the layout. Under autocast
            float32 is cast.
        causal: False; True for as many queries as keys; 'top-left' or 'bottom-right'.
        softmax_scale: a number, or None for head_dim ** -0.5.
        layout: 'bhsd' for (batch, heads, tokens, head_dim), or 'bshd'.
        precision: 'six-of-seven', 'dv16', 'qk16' or 'gradients16'.
        window_left, window_right: how many keys before and after its own a query sees; None is all.
        softcap: scores s become softcap tanh(s / softcap); None or 0 is none.
        sink_logits: float tensor of (heads,), a logit per head that takes weight and has no value.
        deterministic: False lets the backward add dQ up in any order, where that is faster.
        return_lse: also return the log-sum-exp of each query, float32 of (batch, heads, queries).
        cu_seqlens_q, cu_seqlens_k: int32 of (sequences + 1,), where packed sequences begin.

    Returns out, contiguous and like q, or (out, lse). Both are differentiable once. Raises
    SpecError for what no kernel supports, and RuntimeError where a compiler, a driver or a GPU is
    missing.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} is {type(t).__name__}: pass a torch.Tensor")
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if packed:
        if any(t.dim() != 3 for t in (q, k, v)):
            raise SpecError("packed sequences (cu_seqlens_q, cu_seqlens_k) are (tokens, heads, "
                            f"head_dim), and q has shape {tuple(q.shape)}")  # fmt: skip
        q, k, v, layout = q[None], k[None], v[None], "bshd"
    q, k, v = _as_autocast_wants(q, k, v)
    words = _words(q, k, causal, layout, packed, precision, window_left, window_right, softcap,
                   deterministic)  # fmt: skip
    scale = _number("softmax_scale", softmax_scale)
    out, lse = _ops.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, layout, words)
    if sink_logits is not None:
        out, lse = _with_sink(out, lse, sink_logits, layout)
    if packed:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _as_autocast_wants(*tensors):
    if not tensors[0].is_cuda or not torch.is_autocast_enabled("cuda"):
        return tensors
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(t.to(dtype) if t.dtype in (torch.float32, *DTYPES) else t for t in tensors)


def _number(name, value, least=-math.inf):
    if value is None:
        return None
    if not isinstance(value, Real) or isinstance(value, bool) or not least <= value < math.inf:
        raise SpecError(f"{name}={value!r}: pass a finite number"
                        + (f" of at least {least}" if least == 0 else ""))  # fmt: skip
    return float(value)


def _words(q, k, causal, layout, packed, precision, left, right, softcap, deterministic):
    """The options as words of a spec (docs/use/cpp.md of sagebwd)."""
    words = ["causal=" + _causal(causal, q, k, layout, packed), _precision(precision)]
    for name, bound in (("window_left", left), ("window_right", right)):
        if bound is not None:
            if not isinstance(bound, Integral) or isinstance(bound, bool) or bound < 0:
                raise SpecError(f"{name}={bound!r}: pass a whole number of at least 0, or None")
            words.append(f"{name}={bound}")
    cap = _number("softcap", softcap, least=0)
    if cap:
        words.append(f"score={cap!r}*tanh(s/{cap!r})")
    if not isinstance(deterministic, bool):
        raise SpecError(f"deterministic={deterministic!r}: pass True or False")
    return " ".join(words if deterministic else [*words, "no-deterministic"])


def _precision(precision):
    if precision not in PRECISIONS:
        raise SpecError(f"precision={precision!r}: supported are {', '.join(PRECISIONS)}")
    return precision


def _causal(causal, q, k, layout, packed):
    if causal is False or causal == "none":
        return "none"
    if causal in ("top-left", "bottom-right"):
        return causal
    if causal is not True:
        raise SpecError(f"causal={causal!r}: pass False, True, 'top-left' or 'bottom-right'")
    token = 1 if layout == "bshd" else 2
    if packed or (q.dim() == k.dim() == 4 and q.shape[token] != k.shape[token]):
        raise SpecError("causal=True is ambiguous unless there are as many queries as keys, which "
                        "packed sequences do not say: pass 'top-left' or 'bottom-right'"
                        )  # fmt: skip
    return "top-left"


def _with_sink(out, lse, sink, layout):
    """With one more key per head, of this logit and no value."""
    heads = lse.shape[1]
    if not isinstance(sink, torch.Tensor) or tuple(sink.shape) != (heads,):
        given = tuple(sink.shape) if isinstance(sink, torch.Tensor) else sink
        raise SpecError(f"sink_logits is {given}: pass a tensor of ({heads},), a logit per head")
    sink = sink.float()[None, :, None]
    kept = torch.sigmoid(lse - sink)
    kept = kept[..., None] if layout == "bhsd" else kept.transpose(1, 2)[..., None]
    return (out.float() * kept).to(out.dtype), torch.logaddexp(lse, sink)


# ---- flash-attention's names, which transformers asks kernels for --------------------------------


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False, *, s_aux=None,
    precision="six-of-seven",
):  # fmt: skip
    """flash-attention 2's function on (batch, tokens, heads, head_dim) tensors.

    A causal mask is aligned to the bottom right, and results are always deterministic. s_aux are
    logits of (heads,), as `sink_logits`. With return_attn_probs it returns (out, lse, None).
    Dropout and alibi_slopes are refused.
    """
    return _flash(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                  return_attn_probs, s_aux, precision, layout="bshd")  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None, *, s_aux=None,
    precision="six-of-seven",
):  # fmt: skip
    """`flash_attn_func` on packed sequences, (tokens, heads, head_dim). It ignores max_seqlen."""
    if block_table is not None:
        raise SpecError("block_table is given: keys and values in pages are not supported")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise SpecError("cu_seqlens_q and cu_seqlens_k say where packed sequences begin: pass "
                        "int32 tensors of (sequences + 1,)")  # fmt: skip
    return _flash(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                  return_attn_probs, s_aux, precision, cu_seqlens_q=cu_seqlens_q,
                  cu_seqlens_k=cu_seqlens_k)  # fmt: skip


def _flash(q, k, v, dropout_p, scale, causal, window_size, softcap, slopes, with_lse, s_aux,
           precision, **more):  # fmt: skip
    if dropout_p:
        raise SpecError(f"dropout_p={dropout_p!r}: dropout is not supported, pass 0.0")
    if slopes is not None:
        raise SpecError("alibi_slopes is given: the package sagebwd has ALiBi, and this kernel not")
    try:
        left, right = (None if bound in (None, -1) else bound for bound in window_size)
    except (TypeError, ValueError):
        raise SpecError(
            f"window_size={window_size!r}: pass (left, right), where -1 means no limit"
        ) from None
    out, lse = attention(
        q, k, v, causal="bottom-right" if causal else False, softmax_scale=scale, window_left=left,
        window_right=right, softcap=softcap, sink_logits=s_aux, precision=precision,
        return_lse=True, **more,
    )  # fmt: skip
    return (out, lse, None) if with_lse else out
