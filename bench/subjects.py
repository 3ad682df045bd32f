"""The two computations under measurement, called alike: the GPU kernels and their emulation."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.exact import Attended


def kernels(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, dlse=None, **options) -> Attended:
    """The kernels, by their explicit forward and backward; `options` as attention takes them."""
    import sagebwd

    out, lse = sagebwd.attention_forward(q, k, v, **options)
    gradients = sagebwd.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    return Attended(out, lse, *gradients)


def emulated(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, given: Attended | None = None, dlse=None,
    precision="six-of-seven", **options,
) -> Attended:
    """The emulation of the same spec; its backward starts from `given`'s out and lse, if any.

    All outputs are rounded to the type of the inputs, as the kernels' are.
    """
    from sagebwd import emulation

    options["plan"] = precision
    out, lse = emulation.emulated_forward(q, k, v, **options)
    start = (out, lse) if given is None else (given.out, given.lse)
    gradients = emulation.emulated_backward(dout, q, k, v, *start, dlse=dlse, **options)
    return Attended(out, lse, *gradients)


def subject_of(device: str):
    """What is measured: without a GPU the emulation stands in, to try the scripts themselves."""
    return kernels if torch.device(device).type == "cuda" else emulated
