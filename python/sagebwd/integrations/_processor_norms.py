"""Norms and RoPE of queries and keys in attention of diffusers, by `qk_norm_rope`."""

import torch
from diffusers.models.normalization import RMSNorm

from sagebwd.core import ops
from sagebwd.core.front import qk_norm_rope
from sagebwd.core.front_kernels import wide
from sagebwd.core.once import once

NORMS = (torch.nn.RMSNorm, RMSNorm)  #: the norms that `qk_norm_rope` computes


def unlike_an_rms_norm(norm):
    """Says what makes a module another norm than `qk_norm_rope` computes, or None."""
    if type(norm) not in NORMS:
        return f"a {type(norm).__name__} and no RMSNorm"
    if getattr(norm, "bias", None) is not None:
        return "an RMSNorm with a bias"
    return "an RMSNorm without eps" if norm.eps is None else None


def _is_plain(norm):
    """Whether a call of the norm does what its weight and eps say and nothing beside: a norm that
    was replaced since (by PEFT, say) or has hooks (to move its weight, say) has to be called."""
    return unlike_an_rms_norm(norm) is None and not (
        "forward" in norm.__dict__ or norm._forward_pre_hooks or norm._forward_hooks
        or norm._backward_pre_hooks or norm._backward_hooks
    )  # fmt: skip


def turned(query, key, rope, **norms):
    """`qk_norm_rope` of (batch, tokens, heads, channels), with neighbours as pairs."""
    style = {} if rope is None else {"rope_style": "interleaved"}
    return qk_norm_rope(query, key, **norms, rope=rope, **style, layout="bshd")


def of_each_head(attn, names, query, key, rope):
    """Queries and keys with the norms of each head that the attention has under these names, and
    rotated if there is a `rope`."""
    heads, keywords = [query, key], {}
    for i, name in enumerate(names):
        norm = getattr(attn, name, None)
        if norm is None:
            continue
        if not _is_plain(norm) or keywords.get("norm_eps", norm.eps) != norm.eps:
            heads[i] = norm(heads[i])
            continue
        keywords["qk"[i] + "_norm"] = True if norm.weight is None else norm.weight
        keywords["norm_eps"] = norm.eps
    return turned(*heads, rope, **keywords)


class _Scaled(torch.autograd.Function):
    """x of (batch, tokens, channels) and 1/rms of its tokens, in FP32 (FP64 for FP64).

    x passes through, so that one kernel adds the gradient that comes by way of 1/rms to the other.
    """

    @staticmethod
    def forward(ctx, x, eps):
        with ops.no_autocast(x.device.type):
            square = torch.linalg.vector_norm(x, dim=-1, dtype=wide(x.dtype)).square()
            inv_rms = (square / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, inv_rms)
        return x.view_as(x), inv_rms

    @staticmethod
    def backward(ctx, dx, dinv_rms):
        x, inv_rms = ctx.saved_tensors
        with ops.no_autocast(x.device.type):
            factor = -dinv_rms.detach() * inv_rms.detach() ** 3 / x.shape[-1]
            found = torch.empty_like(dx)
            torch.addcmul(dx.detach(), x.detach(), factor.unsqueeze(-1), out=found)
        return *once((found,), dx, dinv_rms, x), None


def over_all_heads(attn, query, key, heads, rope):
    """Queries and keys of (batch, tokens, channels) with norms over all channels, and rotated."""
    keywords, made = {}, []
    for side, x, name in (("q", query, "norm_q"), ("k", key, "norm_k")):
        norm = getattr(attn, name)
        if _is_plain(norm):
            x, keywords[side + "_inv_rms"] = _Scaled.apply(x, norm.eps)
            if norm.weight is not None:
                keywords[side + "_norm"] = norm.weight.unflatten(0, (heads, -1))
        else:
            x = norm(x)
        made.append(x.unflatten(2, (heads, -1)))
    return turned(*made, rope, **keywords)
