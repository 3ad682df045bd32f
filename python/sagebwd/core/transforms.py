"""Errors for what PyTorch's transforms ask of functions that have no rules for it."""

import torch
from torch.autograd import forward_ad

from sagebwd.core import options


def refuse_tangents(*tensors):
    """SpecError for tensors of forward-mode differentiation, whose tangents would be lost. Those
    that torch.func.vmap has mapped are left to the operator's next level, where they are not."""
    if forward_ad._current_level < 0:
        return
    for t in tensors:
        if not isinstance(t, torch.Tensor) or torch._C._functorch.is_batchedtensor(t):
            continue
        if forward_ad.unpack_dual(t).tangent is not None:
            raise options.SpecError(
                f"an input of shape {tuple(t.shape)} carries a tangent (torch.func.jvp, jacfwd or "
                "torch.autograd.forward_ad): this attention has no forward-mode derivative, only "
                "reverse mode is supported. Take gradients by torch.autograd.grad or .backward(), "
                "or use another attention in that part of the model"
            )


def refuse_transforms(what, instead=None):
    """SpecError within torch.func's transforms, for which `what` has no rules and `instead` has."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise options.SpecError(
            f"{what} has no rules for torch.func's transforms (grad, vjp, vmap and jacrev): use "
            "torch.autograd.grad or .backward() with it, and a batch in place of vmap"
            + (f"; or use {instead}, which has rules" if instead else "")
        )


def _is_batched(t):
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(t) or functorch.is_legacy_batchedtensor(t)


def refuse_batches(*gradients):
    """SpecError for several gradients in one tensor, of which functions that have no rules for vmap
    cannot know."""
    if not torch.compiler.is_compiling() and any(g is not None and _is_batched(g)
                                                 for g in gradients):  # fmt: skip
        raise options.SpecError(
            "a gradient is a batch (is_grads_batched=True, a jacobian with vectorize=True, or "
            "torch.func.vmap), for which this function has no rules: call torch.autograd.grad for "
            "each of them"
        )


def refuse_gradient(k_mean):
    """SpecError if the mean of the keys requires a gradient."""
    if torch.is_grad_enabled() and isinstance(k_mean, torch.Tensor) and k_mean.requires_grad:
        raise options.SpecError(
            "k_mean requires grad, but it has no gradient: it only changes roundings. Pass "
            "k_mean.detach()"
        )
