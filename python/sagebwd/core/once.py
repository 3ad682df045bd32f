"""Gradients that refuse to be differentiated."""

import torch

from sagebwd.core.arguments import checks


class _Refuses(torch.autograd.Function):
    """Stands behind gradients that are differentiated."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(t.view_as(t) for t in tensors[:count])

    backward = staticmethod(checks.refuse_double_backward)


def once(gradients, *inputs):
    """The gradients; with create_graph=True they have a node that refuses. `inputs`: all that they
    depend on and that may require grad, also the gradients of outputs; those left out would have
    second derivatives that are wrong, silently."""
    if not torch.is_grad_enabled():
        return gradients
    there = [g for g in gradients if g is not None]
    left = iter(_Refuses.apply(len(there), *there, *inputs))
    return tuple(g if g is None else next(left) for g in gradients)
