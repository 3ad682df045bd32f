"""The estimate of what keys of unlisted blocks weigh (`mixing.estimated_rest`) by kernels, for the
calls that have kernels for the linear branch too. For all else `mixing` has PyTorch's own products.

The kernels (templates/kernels/estimated_*.cuh) take the means of blocks of keys less the mean of
these means, in 16 bits, so that a mean that all keys share is not rounded: it adds to each query's
result a product in FP32, and to dq the mean itself.
"""

import math

import torch

from sagebwd.core import direct, ops
from sagebwd.lists import blocks
from sagebwd.lists.given import per_head
from sagebwd.sla import linear_kernels
from sagebwd.sla.linear_kernels import new_like, operation_of, readable
from sagebwd.sla.parts import alone
from sagebwd.sla.router import block_sums

_LOG2_E = math.log2(math.e)


def take(q, k, mask, sizes):
    """Whether there are kernels for (batch, heads, tokens, channels) tensors and a mask."""
    return set(sizes) <= set(blocks.SIZES) and linear_kernels.take(q, k, k, mask, sizes)


def _pooled(k, size, scale):
    """(means of blocks less their own mean, in k's type and times scale log2(e), and that mean
    times scale)."""
    sums = block_sums(k, size)
    if k.shape[2] % size:
        sums[:, :, -1] *= size / (k.shape[2] % size)  # as of a whole block
    mean = sums.mean(2, keepdim=True)
    of_k = torch.empty(sums.shape, dtype=k.dtype, device=k.device)
    torch.mul(sums.sub_(mean), scale * _LOG2_E / size, out=of_k)
    return of_k, mean.mul_(scale / size)


class _Kernels:
    """The kernels of a call. Forward and backward are calls of their own."""

    def __init__(self, q, mask, sizes, heads_kv, keys):
        self.q, self.mask = readable(q), per_head(mask, q.shape[1]).contiguous()
        self.problem = (*q.shape[:2], heads_kv, q.shape[2], keys)
        self.operation = operation_of(q, sizes)

    def run(self, kernel, **tensors):
        given = dict(q=self.q, block_mask=self.mask, **tensors)
        linear_kernels.run(self.operation, self.q.get_device(), kernel, self.problem, given)


def _forward(q, k, mask, sizes, scale):
    of_k, mean = _pooled(k, sizes[1], scale)
    rest, centred = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    kernels = _Kernels(q, mask, sizes, k.shape[1], k.shape[2])
    kernels.run("estimated_rest", pooled_keys=of_k, pooled_mean=mean, rest=rest,
                centred_rest=centred)  # fmt: skip
    return rest, centred, of_k, mean


def _backward(drest, q, mask, centred, of_k, mean, sizes, scale, keys, to=None):
    """(dq, dk), which are `to` with these added, of tensors without gaps."""
    heads_kv, size = of_k.shape[1], sizes[1]
    # Hooks for saved tensors may have changed strides.
    drest, centred, of_k, mean = (t.contiguous() for t in (drest, centred, of_k, mean))
    kernels = _Kernels(q, mask, sizes, heads_kv, keys)
    dq, dk = to or (new_like(q), q.new_zeros((q.shape[0], heads_kv, keys, q.shape[3])))
    common = dict(pooled_keys=of_k, centred_rest=centred, drest=drest)
    kernels.run("estimated_dq", pooled_mean=mean, dq_more=dq if to else None, dq=dq, **common)
    parts = q.shape[1] // heads_kv * kernels.operation.estimated_parts(kernels.problem)
    sums = q.new_empty((q.shape[0], heads_kv, parts, *of_k.shape[2:]), dtype=torch.float32)
    kernels.run("estimated_dk", pooled_dsums=sums, **common)
    sums, whole = sums.sum(2), keys // size
    if whole:
        _spread(sums[:, :, :whole], scale, dk[:, :, : whole * size])
    if keys % size:
        _spread(sums[:, :, whole:], scale, dk[:, :, whole * size :])
    return dq, dk


def _spread(sums, scale, dk):
    """Adds to each key of a block its part of the mean's gradient, scale times the sum."""
    tokens = dk.shape[2] // sums.shape[2]
    of_tokens = sums.unsqueeze(3).expand(-1, -1, -1, tokens, -1)
    dk.unflatten(2, (-1, tokens)).add_(of_tokens, alpha=scale / tokens)


# ---- as operators, for torch.compile -------------------------------------------------------------

_library = ops.library()
_library.define(
    "estimated_rest_forward(Tensor q, Tensor k, Tensor mask, int[2] sizes, float scale) -> "
    "(Tensor rest, Tensor centred, Tensor of_k, Tensor mean)",
    tags=ops.TAGS,
)
_library.define(
    "estimated_rest_backward(Tensor drest, Tensor q, Tensor mask, Tensor centred, Tensor of_k, "
    "Tensor mean, int[2] sizes, float scale, SymInt keys) -> (Tensor dq, Tensor dk)",
    tags=ops.TAGS,
)
_library.impl("estimated_rest_forward", _forward, "CUDA")
_library.impl("estimated_rest_backward", _backward, "CUDA")


@torch.library.register_fake("sagebwd::estimated_rest_forward", lib=_library)
def _forward_fake(q, k, mask, sizes, scale):
    rest = q.new_empty(q.shape[:3], dtype=torch.float32)
    count = blocks.count_of(k.shape[2], sizes[1])
    of_k = k.new_empty((*k.shape[:2], count, k.shape[3]))
    mean = k.new_empty((*k.shape[:2], 1, k.shape[3]), dtype=torch.float32)
    return rest, torch.empty_like(rest), of_k, mean


@torch.library.register_fake("sagebwd::estimated_rest_backward", lib=_library)
def _backward_fake(drest, q, mask, centred, of_k, mean, sizes, scale, keys):
    return q.new_empty(q.shape), q.new_empty((*of_k.shape[:2], keys, q.shape[3]))


def forward(q, k, mask, sizes, scale):
    """rest, and what the backward takes."""
    with alone(q.device):
        return torch.ops.sagebwd.estimated_rest_forward(q, k, mask, sizes, scale)


def backward(drest, q, mask, centred, of_k, mean, sizes, scale, keys):
    """(dq, dk)."""
    with alone(q.device):
        return torch.ops.sagebwd.estimated_rest_backward(drest, q, mask, centred, of_k, mean, sizes,
                                                         scale, keys)  # fmt: skip


def added(gradients, drest, q, mask, centred, of_k, mean, sizes, scale):
    """(dq, dk) of both, where the first are if nobody watches."""
    given = drest, q, mask, centred, of_k, mean, sizes, scale, gradients[1].shape[2]
    with alone(q.device):
        if not direct.is_watched(*given[:6], *gradients):
            return _backward(*given, to=gradients)
        more = torch.ops.sagebwd.estimated_rest_backward(*given)
        return tuple(x + y for x, y in zip(gradients, more))
