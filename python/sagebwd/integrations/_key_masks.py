"""PyTorch's attn_mask as keywords of attention.

A mask that hides keys from all queries alike, such as padding, becomes seqused_k=: without a causal
mask the order of keys does not matter, so keys and values are put into an order in which the hidden
ones come last. The host asks what a mask holds wherever it may, once for each mask: a mask of
padding at the end needs no other order, and one that hides nothing is left out. Where it asks, some
masks that differ among queries become mask= or score= (_row_masks).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from sagebwd.core import forms, transforms
from sagebwd.core.keywords import absent
from sagebwd.core.options import SpecError
from sagebwd.integrations import _device_checks, _row_masks

#: This hides a key where PyTorch adds a mask to scores: -10000, which many models take, in bf16.
HIDDEN = -9984

#: (`_state`, sizes, what `_told` found) of masks that the host has asked.
_asked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class _Ordered(torch.autograd.Function):
    """x with its tokens in another order. A permutation's gradient needs no sums, so that it is the
    same in each run."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, order, back, dim):
        index = order[:, :, None, None] if dim == 1 else order[:, None, :, None]
        return torch.gather(x, dim, index.expand_as(x))

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, order, back, ctx.dim = inputs
        ctx.save_for_backward(order, back)

    @staticmethod
    def backward(ctx, grad):
        order, back = ctx.saved_tensors
        return _Ordered.apply(grad, back, order, ctx.dim), None, None, None


def applied(mask, query, key, value, layout):
    """(key, value, told, seeing) for a mask of attention, key and value as given and `told` empty
    where the mask hides nothing. `told` has keywords of attention. `seeing` is None, or bool of
    (batch, queries): False for those that see no key, whose results `hidden` takes away.

    Args:
        mask: a tensor that broadcasts to (batch, heads, queries, keys), the same for all heads. A
            bool mask has True for a key that is seen. A float mask has 0 for a key that is seen,
            and at most -9984 for others, which softmax takes to zero.
        query, key, value: (batch, heads, tokens, head_dim), or (batch, tokens, heads, head_dim)
            with layout='bshd'.

    Raises SpecError for other masks.
    """
    tokens, heads = (1, 2) if layout == "bshd" else (2, 1)
    sizes = query.shape[0], query.shape[heads], query.shape[tokens], key.shape[tokens]
    if not torch.compiler.is_compiling() and (
            query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3]):  # fmt: skip
        return key, value, {}, None  # which `attention` refuses with its own message
    dense = isinstance(mask, Tensor) and mask.layout == torch.strided and not mask.is_nested
    if not dense or mask.requires_grad:
        raise SpecError(f"attn_mask={_shown(mask)}: {absent('attn_mask', 'is_causal')}")
    if mask.device != key.device:
        raise SpecError(f"attn_mask is on {mask.device} and key on {key.device}: move the mask")
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(mask):
        raise SpecError("attn_mask is mapped by torch.func.vmap: give all elements one mask, or "
                        "make the mapped dimension a part of the batch")  # fmt: skip
    state = None if _is_unknown(mask) or mask.is_inference() else _state(mask)
    if state is None:
        order, back, told, seeing = _told(mask, sizes)
    else:
        kept = _asked.get(mask)
        if kept is None or kept[:2] != (state, sizes):
            with torch.inference_mode(False):  # what is kept may be for a training, too
                _asked[mask] = kept = state, sizes, _told(mask, sizes)
        order, back, told, seeing = kept[2]
    if order is not None:
        transforms.refuse_tangents(key, value)
        key, value = (_Ordered.apply(x, order, back, tokens) for x in (key, value))
    return key, value, told, seeing


def hidden(found, seeing, layout):
    """The output of attention, or (out, lse), in which queries that see no key have zeros, and
    -inf in lse."""
    out, *lse = found if isinstance(found, tuple) else (found,)
    blind = ~seeing
    out = out.masked_fill(blind[:, :, None, None] if layout == "bshd" else blind[:, None, :, None],
                          0)  # fmt: skip
    return (out, lse[0].masked_fill(blind[:, None], -torch.inf)) if lse else out


def _told(mask, sizes):
    """(order of the keys or None, its inverse, keywords of attention, which queries see any or
    None), SpecError for a mask that no kernel takes."""
    batch, *_, keys = sizes
    if mask.dim() > 4 or any(have not in (1, want) for have, want in
                             zip(reversed(mask.shape), reversed(sizes))):  # fmt: skip
        raise SpecError(f"attn_mask has shape {tuple(mask.shape)}: it must broadcast to (batch, "
                        f"heads, queries, keys) = {tuple(sizes)}")  # fmt: skip
    mask = mask[(None,) * (4 - mask.dim())]
    if 0 in mask.shape[1:3]:  # there is nothing to hide keys from
        return None, None, {}, None
    for dim in (1, 2):  # heads and queries
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    seeing = None
    if mask.dtype == torch.bool:
        seen, seeing = mask.any(2).any(1), mask.any(3).any(1)
        # The seen pairs lie within the pairs of these, and are all of them if they are as many.
        known = mask.sum() == mask.shape[1] * (seen.sum(-1) * seeing.sum(-1)).sum()
        seen = seen.expand(batch, keys)
        seeing = seeing.expand(batch, -1) if mask.shape[2] > 1 else None
    elif mask.is_floating_point():
        row = mask[:, 0, 0].expand(batch, keys)
        seen, none = row == 0, (row == -torch.inf).all(-1)
        # A mask of -10000 everywhere hides nothing.
        known = (seen | (row <= HIDDEN)).all() & (seen.any(-1) | none).all()
        known = known & (mask == mask[:, :1, :1]).all()
    else:
        raise SpecError(f"attn_mask of {mask.dtype}: pass bool or a float type, as to PyTorch")
    used = seen.sum(-1, dtype=torch.int32)
    at_end = (seen == (torch.arange(keys, device=mask.device) < used[:, None])).all()
    if _is_unknown(mask):
        _device_checks.require(known, f"attn_mask: {_wrong(mask)}")
    else:
        blind = torch.zeros_like(known) if seeing is None else (~seeing).any()
        asked = torch.stack([known, at_end, (~seen).any(), blind]).cpu()
        # Tensors that torch.func wraps make no list.
        is_known, is_at_end, hides, some_blind = map(bool, asked)
        if not is_known and (told := _told_of_pairs(mask, sizes)):
            return None, None, told, None
        if not is_known:
            raise SpecError(f"attn_mask={_shown(mask)}: {_wrong(mask)}{_MORE}; "
                            f"{absent('attn_mask', 'is_causal')}")  # fmt: skip
        seeing = seeing if some_blind else None
        if not hides:
            return None, None, {}, seeing
        if is_at_end:
            return None, None, {"seqused_k": used}, seeing
    order = (~seen).byte().argsort(stable=True, dim=-1)
    return order, order.argsort(-1), {"seqused_k": used}, seeing


def _told_of_pairs(mask, sizes):
    """Keywords of attention for a mask of four dimensions that differs among queries, or None."""
    if (pairs := _pairs(mask)) is not None:
        found = _row_masks.said(pairs.expand(-1, *sizes[2:]), sizes)
        return found and {"mask": found}
    if not mask.is_floating_point() or not bool((mask == mask[:, :1]).all()):
        return None
    found = _row_masks.added_ones(mask[:, 0].expand(-1, *sizes[2:]))
    return found and {"score": found}


def _pairs(mask):
    """Which pairs are seen, bool of (batch or 1, queries or 1, keys or 1), of a mask of four
    dimensions that is the same for all heads and says no more than that; else None."""
    known, seen = (mask == mask[:, :1]).all(), mask[:, 0]
    if mask.is_floating_point():
        added, seen = mask[:, 0], mask[:, 0] == 0
        none = (added == -torch.inf).all(-1)
        known = known & (seen | (added <= HIDDEN)).all() & (seen.any(-1) | none).all()
    return seen if bool(known) else None


def _is_unknown(mask):
    """Whether the host cannot ask now what a mask holds."""
    return torch.compiler.is_compiling() or mask.is_meta or isinstance(mask, FakeTensor) or (
        mask.is_cuda and torch.cuda.is_current_stream_capturing())  # fmt: skip


def _state(mask):
    """Returns what differs if a mask says something else than before, or if what is kept of it may
    not yet be there for this stream. It is None for what torch.func wraps, which has no address."""
    try:
        address = mask.data_ptr()
    except RuntimeError:
        return None
    stream = forms.stream_of(mask.device.index) if mask.is_cuda else None
    return mask._version, address, mask.shape, mask.stride(), stream


def _shown(mask):
    if not isinstance(mask, Tensor):
        return repr(mask)
    return f"a tensor of {str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"


def _wrong(mask):
    says = (", or all keys from some queries" if mask.dtype == torch.bool else
            f", with 0 for keys that are seen and at most {HIDDEN} for others, of which each "
            "sequence sees one")  # fmt: skip
    return f"masks are supported that hide the same keys from all heads and queries{says}"


#: Where the host asks, there are more masks.
_MORE = (
    "; and such, the same for all heads, in which of any two queries one sees all that the other "
    "sees, or any two see the same keys or none in common"
)
