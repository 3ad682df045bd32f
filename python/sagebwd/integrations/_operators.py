"""PyTorch's operators of FlashAttention-2, by sagebwd: what its registry activates.

A backward is also handed out and logsumexp that are of more keys than its own, by rings
(context_parallel of torch.distributed.tensor.experimental): it starts from them as they are only
where it knows that they are its forward's, and else computes the forward of its keys again, as
under torch.compile.
"""

import warnings
import weakref

import torch

from sagebwd.core import options
from sagebwd.core.functional import attention_backward, attention_forward


def _refuse_unless_neutral(dropout_p, **switches):
    if dropout_p != 0.0 or any(switches.values()):
        named = ", ".join(f"{name}={value}" for name, value in switches.items())
        raise options.SpecError(
            f"dropout_p={dropout_p}, {named}: under activate_flash_attention_impl('sagebwd') pass "
            "neither, or give such calls back to PyTorch: "
            "torch.nn.attention.restore_flash_attention_impl()"
        )


def _layout(query):
    """In which `query` is dense: results shall lie in memory as PyTorch's do, like query."""
    return "bshd" if query.stride(1) < query.stride(2) else "bhsd"


def _as(layout, *tensors):
    return [t.transpose(1, 2) for t in tensors] if layout == "bshd" else tensors


def _given(is_causal, scale, layout):
    return dict(causal="top-left" if is_causal else False, softmax_scale=scale, layout=layout)


def _contents(t):
    """Returns what is equal while contents are what they were: their memory, place and changes."""
    if t is None:
        return None
    return weakref.ref(t.untyped_storage()), t.data_ptr(), t.shape, t.stride(), t._version


def _leave_word(out, lse, *inputs):
    """Notes for `_are_of` that these belong together, where autograd will hand all of them back.

    The word lies with the memory of lse, and goes with it. Elsewhere, in compiled code say, memory
    may change and nobody counts. Gradients may be off, as within the operator of varlen_attn, whose
    own backward has all of them.
    """
    if any(t is not None and t.requires_grad for t in inputs):
        lse.untyped_storage().sagebwd_of = [_contents(t) for t in (out, lse, *inputs)]


def _are_of(out, lse, *inputs):
    """Whether out and lse are as the forward of these inputs gave them. False where not known."""
    said = getattr(lse.untyped_storage(), "sagebwd_of", None)
    return said is not None and said == [_contents(t) for t in (out, lse, *inputs)]


def forward(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None,
):  # fmt: skip
    """aten::_scaled_dot_product_flash_attention."""
    _refuse_unless_neutral(dropout_p, return_debug_mask=return_debug_mask)
    layout = _layout(query)
    out, lse = attention_forward(*_as(layout, query, key, value),
                                 **_given(is_causal, scale, layout))  # fmt: skip
    out = _as(layout, out)[0]
    _leave_word(out, lse, query, key, value)
    seed, offset = (query.new_zeros(shape, dtype=torch.uint64) for shape in ((2,), ()))
    return (out, lse, None, None, query.shape[2], key.shape[2], seed, offset,
            query.new_empty(0))  # fmt: skip


def backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_backward."""
    layout = _layout(query)
    given = _given(is_causal, scale, layout)
    known = _are_of(out, logsumexp, query, key, value)
    dout, q, k, v, out = _as(layout, grad_out, query, key, value, out)
    part = None if known else attention_forward(q, k, v, **given)
    gradients = attention_backward(dout, q, k, v, out, logsumexp, part=part, **given)
    return tuple(_as(layout, *gradients))


# ---- packed sequences, as torch.nn.attention.varlen calls for ------------------------------------


def _packed_given(first_q, first_k, is_causal, scale, left, right):
    """Options of FlashAttention-2's mask, whose corner is the bottom right. Tensors are (tokens,
    heads, head_dim), or without `first_q` (batch, tokens, heads, head_dim)."""
    given = dict(causal="bottom-right" if is_causal else False, softmax_scale=scale,
                 window_left=left if left is not None and left >= 0 else None,
                 window_right=right if right is not None and right >= 0 else None)  # fmt: skip
    if is_causal:
        given["window_right"] = None  # none is seen behind its own
    if first_q is None:
        given["layout"] = "bshd"
    else:
        given |= {"cu_seqlens_q": first_q, "cu_seqlens_k": first_k}
    return given


def _refuse_further(further):
    for name, value in further.items():
        if value is not None:
            raise options.SpecError(
                f"{name}: not supported under activate_flash_attention_impl('sagebwd'): give such "
                "calls back to PyTorch: torch.nn.attention.restore_flash_attention_impl()"
            )


def packed_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
    *, scale=None, window_size_left=None, window_size_right=None, **further,
):  # fmt: skip
    """aten::_flash_attention_forward."""
    _refuse_unless_neutral(dropout_p, return_debug_mask=return_debug_mask)
    _refuse_further(further)
    given = _packed_given(cum_seq_q, cum_seq_k, is_causal, scale, window_size_left,
                          window_size_right)  # fmt: skip
    out, lse = attention_forward(query, key, value, **given)
    _leave_word(out, lse, query, key, value, cum_seq_q, cum_seq_k)
    state = query.new_zeros((2,), dtype=torch.uint64)
    return out, lse, state, query.new_empty(0), query.new_empty(0)


def packed_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    **further,
):  # fmt: skip
    """aten::_flash_attention_backward."""
    _refuse_unless_neutral(dropout_p)
    _refuse_further(further)
    given = _packed_given(cum_seq_q, cum_seq_k, is_causal, scale, window_size_left,
                          window_size_right)  # fmt: skip
    known = _are_of(out, logsumexp, query, key, value, cum_seq_q, cum_seq_k)
    part = None if known else attention_forward(query, key, value, **given)
    return attention_backward(grad_out, query, key, value, out, logsumexp, part=part, **given)


class Active:
    """Takes the place of PyTorch's operators, until remove()."""

    def __init__(self, key="CUDA"):
        self.library = torch.library.Library("aten", "IMPL", key)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it takes PyTorch's place, which is asked for
            for name, function in (
                ("_scaled_dot_product_flash_attention", forward),
                ("_scaled_dot_product_flash_attention_backward", backward),
                ("_flash_attention_forward", packed_forward),
                ("_flash_attention_backward", packed_backward),
            ):
                self.library.impl(name, function, key)

    def remove(self):
        self.library = None
