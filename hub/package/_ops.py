"""The kernels as PyTorch operators, torch.ops.<namespace>.forward and .backward, with shapes for
compilers and with gradients. Each build has a namespace of its own, as the Hub asks."""

import torch

from . import _passes
from ._build import NAMESPACE

_OPTIONS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float? softmax_scale, str layout, str words"
_TAGS = (torch.Tag.pt2_compliant_tag,)
if hasattr(torch.Tag, "needs_exact_strides"):  # Inductor then keeps the strides of inputs
    _TAGS += (torch.Tag.needs_exact_strides,)

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)",
                tags=_TAGS)  # fmt: skip
_library.define(
    "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    f"{_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)", tags=_TAGS,
)  # fmt: skip
for _key in ("CUDA", "CPU"):  # on the CPU they say what is supported
    _library.impl("forward", _passes.forward, _key)
    _library.impl("backward", _passes.backward, _key)

forward = getattr(torch.ops, NAMESPACE).forward
_backward = getattr(torch.ops, NAMESPACE).backward


@torch.library.register_fake(f"{NAMESPACE}::forward", lib=_library)
def _(q, k, v, cu_q, cu_k, scale, layout, words):
    batch, heads, _, queries, _ = _passes.check(q, k, v, cu_q, cu_k, layout)
    rows = q.new_empty((batch, heads, queries), dtype=torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), rows


@torch.library.register_fake(f"{NAMESPACE}::backward", lib=_library)
def _(dout, q, k, v, out, lse, dlse, *options):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx, inputs, output):
    q, k, v, cu_q, cu_k, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse):
    if dout is None and dlse is None:
        return (None,) * 8
    q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    found = _backward(dout, q, k, v, out, lse, dlse, cu_q, cu_k, *ctx.options)
    wanted = (g if need else None for g, need in zip(found, ctx.needs_input_grad))
    return (*wanted, *(None,) * 5)


def _refuse(ctx, *gradients):
    raise NotImplementedError("this attention can be differentiated once, and not twice")


torch.library.register_autograd(f"{NAMESPACE}::forward", _gradients, setup_context=_keep,
                                lib=_library)  # fmt: skip
torch.library.register_autograd(f"{NAMESPACE}::backward", _refuse, lib=_library)
