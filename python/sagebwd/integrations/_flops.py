"""Formulas for torch.utils.flop_counter.FlopCounterMode, which otherwise counts 0 for operators
that it does not know.

They count as PyTorch's do for its own attention: two products forward and five backward, two
operations for each multiplication, and no less under a causal mask, in a window and for tokens of
padding. Packed sequences count by their lengths, lists of blocks by the blocks that they list, and
keys with intervals by the blocks that somebody sees, for which the host waits for the device; where
there is no data, as if all saw all.
"""

import itertools

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import flop_counter

from sagebwd.core import options
from sagebwd.lists.blocks import count_of

_FORWARD, _BACKWARD = (1, 1), (3, 2)  #: products over the channels of q and k, and over those of v


def _has_data(t):
    return not t.is_meta and not isinstance(t, FakeTensor)


def _sizes(q, k, v, layout):
    """(batch, heads, heads_kv, queries, keys, channels of q, channels of v)."""
    head, token = (1, 2) if layout == "bhsd" else (2, 1)
    return (q.shape[0], q.shape[head], k.shape[head], q.shape[token], k.shape[token], q.shape[3],
            v.shape[3])  # fmt: skip


def _of_pairs(pairs, channels, of_v, products):
    """Counts the operations of so many pairs of a query and a key, which are those of all heads."""
    return 2 * pairs * (products[0] * channels + products[1] * of_v)


def _attention(q, k, v, layout, products, first_q, first_k):
    batch, heads, _, queries, keys, *channels = _sizes(q, k, v, layout)
    pairs = batch * queries * keys
    if first_q is not None and _has_data(first_q) and _has_data(first_k):
        lengths = ([max(0, end - begin) for begin, end in itertools.pairwise(first.tolist())]
                   for first in (first_q, first_k))  # fmt: skip
        pairs = sum(m * n for m, n in zip(*lengths))
    return _of_pairs(heads * pairs, *channels, products)


def _forward(q, k, v, softmax_scale, layout, spec, cu_seqlens_q=None, cu_seqlens_k=None, *more,
             out_val=None, **named):  # fmt: skip
    return _attention(q, k, v, layout, _FORWARD, cu_seqlens_q, cu_seqlens_k)


def _backward(dout, q, k, v, out, lse, dlse, softmax_scale, layout, spec, cu_seqlens_q=None,
              cu_seqlens_k=None, *more, out_val=None, **named):  # fmt: skip
    return _attention(q, k, v, layout, _BACKWARD, cu_seqlens_q, cu_seqlens_k)


# ---- lists of blocks -----------------------------------------------------------------------------


def _tokens_of_blocks(tokens, size, device):
    """How many tokens each block has: the last one may be short."""
    begins = torch.arange(0, tokens, size, device=device)
    return (tokens - begins).clamp(max=size)


def _pairs_of(mask, batch, heads, queries, keys, sizes):
    """Pairs of a query and a key in listed blocks, of all heads. `mask`: (batch or 1, heads or
    1, query blocks, key blocks)."""
    rows = _tokens_of_blocks(queries, sizes[0], mask.device)
    columns = _tokens_of_blocks(keys, sizes[1], mask.device)
    listed = (mask.long() * rows[:, None] * columns).sum()
    return int(listed) * (batch // mask.shape[0]) * (heads // mask.shape[1])


def _sizes_of_blocks(spec):
    checked = options.spec_of_text(spec)
    return checked.sparse_q, checked.sparse_kv


def _listed(q, k, v, bits, layout, spec, products):
    batch, heads, _, queries, keys, *channels = _sizes(q, k, v, layout)
    pairs = batch * heads * queries * keys
    if _has_data(bits):
        sizes = _sizes_of_blocks(spec)
        mask = (bits[..., None] >> torch.arange(32, device=bits.device) & 1).flatten(-2)
        mask = mask[..., : count_of(keys, sizes[1])]
        pairs = _pairs_of(mask, batch, heads, queries, keys, sizes)
    return _of_pairs(pairs, *channels, products)


def _listed_forward(q, k, v, bits, softmax_scale, layout, spec, *, out_val=None, **named):
    return _listed(q, k, v, bits, layout, spec, _FORWARD)


def _listed_backward(dout, q, k, v, out, lse, dlse, bits, softmax_scale, layout, spec, *,
                     out_val=None, **named):  # fmt: skip
    return _listed(q, k, v, bits, layout, spec, _BACKWARD)


def _interval_forward(q, k, v, intervals, bits, softmax_scale, layout, spec, *, out_val=None,
                      **named):  # fmt: skip
    """By the blocks that somebody sees: every second word says in which intervals hide a part."""
    return _listed(q, k, v, bits[..., ::2], layout, spec, _FORWARD)


def _interval_backward(dout, q, k, v, out, lse, dlse, intervals, bits, softmax_scale, layout, spec,
                       *, out_val=None, **named):  # fmt: skip
    return _listed(q, k, v, bits[..., ::2], layout, spec, _BACKWARD)


def _pointwise(q, k, v, bits, layout, spec, products):
    if bits is None:
        return _attention(q, k, v, layout, products, None, None)
    return _listed(q, k, v, bits[..., ::2], layout, spec, products)


def _masked_forward(q, k, v, tables, sizes, bits, softmax_scale, layout, spec, *, out_val=None,
                    **named):  # fmt: skip
    return _pointwise(q, k, v, bits, layout, spec, _FORWARD)


def _masked_backward(dout, q, k, v, out, lse, dlse, tables, sizes, bits, softmax_scale, layout,
                     spec, *, out_val=None, **named):  # fmt: skip
    return _pointwise(q, k, v, bits, layout, spec, _BACKWARD)


def _table_gradients(dout, q, k, v, dlse, tables, sizes, softmax_scale, layout, spec, names, *,
                     out_val=None, **named):  # fmt: skip
    """Scores and dP of all pairs, also of those that nobody sees."""
    return _attention(q, k, v, layout, _FORWARD, None, None)


# ---- SLA2 ----------------------------------------------------------------------------------------


def _linear(q, k, v, sizes, of_keys, of_blocks, of_queries):
    """So many products of the linear branch over keys, over pairs of blocks, and over queries."""
    batch, heads, heads_kv, queries, keys, *channels = _sizes(q, k, v, "bhsd")
    pairs = heads * count_of(queries, sizes[0]) * count_of(keys, sizes[1])
    products = of_keys * heads_kv * keys + of_blocks * pairs + of_queries * heads * queries
    return 2 * batch * products * channels[0] * channels[1]


def _linear_forward(q, k, v, mask, sizes, smooth_k, *, out_val=None, **named):
    return _linear(q, k, v, sizes, 1, 1, 1)


def _linear_backward(dout, q, k, v, mask, sizes, smooth_k, *, out_val=None, **named):
    """The sums again, and two products for each of the forward's."""
    return _linear(q, k, v, sizes, 3, 2, 2)


def _mixed_forward(q, k, v, bits, alpha, tokens, of_rest, keeps, scale, layout, spec, **named):
    return _listed_forward(q, k, v, bits, scale, layout, spec) + (
        _linear_forward(q, k, v, None, _sizes_of_blocks(spec), True))  # fmt: skip


def _mixed_backward(dout, q, k, v, kept, lse, sums, bits, alpha, tokens, of_rest, keeps, scale,
                    layout, spec, **named):  # fmt: skip
    """Sums that are kept are not formed again."""
    return _listed_backward(dout, q, k, v, kept, lse, None, bits, scale, layout, spec) + (
        _linear(q, k, v, _sizes_of_blocks(spec), 3 - keeps, 2 - keeps, 2))


def _estimated(q, blocks, products):
    batch, heads, queries, channels = q.shape
    return 2 * products * batch * heads * queries * blocks * channels


def _estimated_forward(q, k, mask, sizes, scale, *, out_val=None, **named):
    """Scores of queries with the means of blocks of keys."""
    return _estimated(q, count_of(k.shape[2], sizes[1]), 1)


def _estimated_backward(drest, q, mask, centred, of_k, mean, sizes, scale, keys, *, out_val=None,
                        **named):  # fmt: skip
    return _estimated(q, of_k.shape[2], 3)


_FORMULAS = {
    "forward": _forward, "backward": _backward, "block_sparse_forward": _listed_forward,
    "block_sparse_backward": _listed_backward, "linear_branch_forward": _linear_forward,
    "linear_branch_backward": _linear_backward, "estimated_rest_forward": _estimated_forward,
    "estimated_rest_backward": _estimated_backward, "sparse_linear_forward": _mixed_forward,
    "sparse_linear_backward": _mixed_backward, "interval_forward": _interval_forward,
    "interval_backward": _interval_backward, "masked_forward": _masked_forward,
    "masked_backward": _masked_backward, "table_gradients": _table_gradients,
}  # fmt: skip
for _name, _formula in _FORMULAS.items():
    _operator = getattr(torch.ops.sagebwd, _name)
    flop_counter.flop_registry.pop(_operator, None)  # this module may be imported again
    flop_counter.register_flop_formula(_operator, get_raw=True)(_formula)
