"""The two computations under measurement, called alike: the GPU kernels and their emulation."""

from __future__ import annotations

import torch
from exact import Attended
from torch import Tensor

def kernels(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, dlse=None, **options) -> Attended:
    """The kernels, by their explicit forward and backward; `options` as attention takes them."""
    import sagebwd

    out, lse = sagebwd.attention_forward(q, k, v, **options)
    gradients = sagebwd.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    return Attended(out, lse, *gradients)


def emulated(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, given: Attended | None = None, dlse=None,
    causal="none", softmax_scale=None, granularity="row", group_q=None, group_kv=None,
    smooth_k=True, rotate=True, precision="six-of-seven",
) -> Attended:
    """The emulation of the same spec; its backward starts from `given`'s out and lse, if any.

    All outputs are rounded to the type of the inputs, as the kernels' are.
    """
    from sagebwd import emulation

    rules = emulation.rules_of(
        q.shape[3], causal=causal, softmax_scale=softmax_scale, granularity=granularity,
        group_q=group_q, group_kv=group_kv, smooth_k=smooth_k, rotate=rotate, plan=precision,
        dtype=q.dtype, math_dtype=torch.float32,
    )
    out, lse = emulation.forward(q, k, v, rules)
    start = (out, lse) if given is None else (given.out, given.lse)
    return Attended(out, lse, *emulation.backward(dout, q, k, v, *start, dlse, rules))


def subject_of(device: str):
    """What is measured: without a GPU the emulation stands in, to try the scripts themselves."""
    return kernels if torch.device(device).type == "cuda" else emulated
