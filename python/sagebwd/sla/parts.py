"""Both branches share these: types of products, parts that fit in memory, blocks of tokens."""

import contextlib

import torch
import torch.nn.functional as F

from sagebwd.core import options
from sagebwd.core.ops import no_autocast
from sagebwd.numerics.emulation import full_precision

#: Bytes that the matrices of one part of the heads may take, unless one head takes more.
PART_BYTES = 1 << 28
_WIDE_BMM = "dtype" in torch.ops.aten.bmm.overloads()


def narrow(dtype):
    """The type of operands: bf16 for 16-bit inputs, whose range sums over keys need, or their
    own."""
    return torch.bfloat16 if dtype in (torch.bfloat16, torch.float16) else dtype


def between(dtype):
    """The type of operands that are computed, P and dS: that of the inputs, or FP32 where FP16
    would lose small ones and overflow."""
    return torch.float32 if dtype == torch.float16 else dtype


def wide(dtype):
    """The type of sums, normalisers and parameters: FP32, or FP64 for inputs of FP64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product(a, b):
    """a @ b in the type of sums, of 4-D operands whose first two dimensions are equal. If they
    have two types, both are computed in the type of sums."""
    to = wide(a.dtype)
    if a.dtype == b.dtype == to:
        return a @ b
    if a.dtype == b.dtype and a.is_cuda and _WIDE_BMM:
        found = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=to)
        return found.unflatten(0, a.shape[:2])
    return a.to(to) @ b.to(to)


def parts_of(batch, heads, bytes_of_one):
    """Pairs of slices (of the batch, of the key heads), each with about PART_BYTES; in compiled
    code all, or if these are more one head of the whole batch."""
    if torch.compiler.is_compiling():  # each number of parts would make a graph of its own
        step_h = heads if batch * heads * bytes_of_one <= PART_BYTES else 1
        for h in range(0, heads, step_h):
            yield slice(0, batch), slice(h, h + step_h)
        return
    at_once = max(1, PART_BYTES // max(1, bytes_of_one))
    step_h = min(heads, at_once)
    step_b = max(1, at_once // max(1, heads)) if step_h == heads else 1
    for b in range(0, batch, step_b):
        for h in range(0, heads, step_h):
            yield slice(b, b + step_b), slice(h, h + step_h)


def in_blocks(x, size):
    """(..., tokens, channels) as (..., blocks, size, channels), with zeros behind the last."""
    missing = -x.shape[-2] % size
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    return x.unflatten(-2, (x.shape[-2] // size, size))


def of_tokens(x, tokens):
    """`in_blocks` undone."""
    return x.flatten(-3, -2)[..., :tokens, :]


def grouped(x, heads_kv):
    """(batch, heads, ...) as (batch, heads_kv, heads of a group, ...), a view."""
    return x.unflatten(1, (heads_kv, -1))


def of_heads(x, b, h, heads_kv):
    """Returns a view of x, (batch or 1, heads or heads_kv or 1, ...): a slice of the batch, and one
    of the key heads."""
    x = x[b] if x.shape[0] > 1 else x
    group = x.shape[1] // heads_kv
    return x[:, h.start * group : h.stop * group] if x.shape[1] > 1 else x


def mask_by_group(mask, shape):
    """A mask of (batch or 1, heads or heads_kv or 1, ...) as (batch, heads_kv, group, ...), a
    view. `shape`: batch, heads, heads_kv."""
    batch, heads, heads_kv = shape
    mask = mask.unflatten(1, (heads_kv, -1)) if mask.shape[1] == heads else mask.unsqueeze(2)
    return mask.expand(batch, heads_kv, heads // heads_kv, *mask.shape[3:])


def summed_to(x, mask_shape):
    """The sum of (batch, heads_kv, group, ...) over what a mask of this shape shares."""
    of_heads = mask_shape[1] == x.shape[1] * x.shape[2]
    x = x.flatten(1, 2) if of_heads else x.sum(2)
    return x.sum_to_size(mask_shape)


def softmax_backward(p, dp):
    return p * (dp - (p * dp).sum(-1, keepdim=True))


def alone(device):
    """No gradients, no autocast, and no TF32, which compiled code cannot switch."""
    if torch.compiler.is_compiling():
        return no_autocast(device.type)
    return _alone(device)


@contextlib.contextmanager
def _alone(device):
    with torch.no_grad(), full_precision(device):
        yield


def no_tokens(q, k, v, *more):
    """The output where there is nothing to attend to, with gradients of zero."""
    ends = (t[..., :0] if t.dim() else t.reshape(1)[:0] for t in (q, k, v, *more))
    nothing = sum(t.sum().to(q.dtype) for t in ends)
    return q.new_zeros(*q.shape[:3], v.shape[3]) + nothing


def save(ctx, *tensors):
    """`ctx.save_for_backward` of tensors that kernels will read."""
    ctx.save_for_backward(*tensors)
    if not torch.compiler.is_compiling():
        ctx.saved_kinds = [_kind(t) for t in tensors]


def saved(ctx):
    """Returns what `save` was given. Strides may differ if hooks for saved tensors bring it back.

    SpecError for other types, shapes or devices: kernels are told addresses, and would not know.

    Once only: a checkpoint forms them again, and gives them once.
    """
    tensors = saved_tensors(ctx)
    if torch.compiler.is_compiling():
        return tensors
    for t, kind in zip(tensors, ctx.saved_kinds):
        if _kind(t) != kind:
            raise options.SpecError(
                f"a hook for saved tensors gave {_said(_kind(t))} in place of {_said(kind)}: let "
                "it bring back the type, shape and device that it was given"
            )
    return tensors


def saved_tensors(ctx):
    """`ctx.saved_tensors`. Those that a captured backward reads stay as long as its node does: once
    they were free, what is captured later would lie in their memory, and a further replay of the
    backward, without one of the forward, would read that."""
    tensors = ctx.saved_tensors
    if not torch.compiler.is_compiling() and any(map(is_captured, tensors)):
        ctx.read_by_a_graph = [None if t is None else t.detach() for t in tensors]
    return tensors


def is_captured(t):
    """Whether what is done with the tensor goes to a CUDA graph."""
    return t is not None and t.is_cuda and torch.cuda.is_current_stream_capturing()


def _kind(t):
    return None if t is None else (t.dtype, t.shape, t.device)


def _said(kind):
    return "nothing" if kind is None else f"{kind[0]} of {tuple(kind[1])} on {kind[2]}"
