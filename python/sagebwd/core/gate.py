"""The gate of an attention's output, by kernels or as PyTorch computes it.

The kernels (templates/kernels/gate.cuh, gate_gradients.cuh) take 16-bit tensors of one type on a
GPU, and read and write every element once: 6 bytes forward and 10 backward. PyTorch's operations
would round several times, or write FP32 tensors. A compiler makes one of these formulas too.
"""

import torch

from sagebwd import _core
from sagebwd.core import forms, options, transforms
from sagebwd.core.arguments.tensors import DTYPES
from sagebwd.core.direct import is_wrapped
from sagebwd.core.front import check_floats
from sagebwd.core.front_kernels import (
    MOST_HEADS,
    MOST_SEQUENCES,
    has_width,
    may_run,
    readable,
    wide,
)
from sagebwd.core.once import once


def _rows(t):
    """(batch, heads, tokens, channels) or (tokens, heads, channels) as the first of these, with most
    of them as tokens: to a gate all three are the same."""
    t = t.transpose(0, 1).unsqueeze(0) if t.dim() == 3 else t
    return t.transpose(1, 2) if t.shape[1] > t.shape[2] else t


def _takes(out, gate):
    """Whether kernels take the tensors, and nobody looks on who would see no operator."""
    if not (may_run(out) and out.dtype == gate.dtype and out.dtype in DTYPES) or is_wrapped(
        out, gate
    ):
        return False
    batch, heads, tokens, channels = _rows(out).shape
    return has_width(channels) and tokens > 0 and 0 < heads <= MOST_HEADS and (
        0 < batch <= MOST_SEQUENCES)  # fmt: skip


def _launch(kernel, read, written):
    """Reads and writes tensors of one shape. A tensor that kernels cannot read is copied."""
    read = [readable(_rows(t)) for t in read]
    batch, heads, tokens, channels = read[0].shape
    places = [[(t.data_ptr(), tuple(step if size > 1 else 0
                                    for size, step in zip(t.shape[:3], t.stride())))
               for t in group] for group in (read, map(_rows, written))]  # fmt: skip
    device = read[0].get_device()
    operation = forms.operation(device, "", head_dim=channels, dtype=read[0].dtype)
    problem = batch, heads, heads, tokens, tokens
    kernel(operation, problem, *places, forms.stream_of(device))


def _dense(t):
    """Memory for a tensor like this one, in the same order without gaps if kernels can write that."""
    found = torch.empty_like(t)
    rows = _rows(found)
    fits = readable(rows) is rows
    return found if fits else torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _gate(operation, problem, read, written, stream):
    _core.gate(operation, problem, (*read, *written), stream)


class _Gated(torch.autograd.Function):
    """Formed again from its inputs in the backward, so that no more than these is kept."""

    @staticmethod
    def forward(ctx, out, gate):
        ctx.save_for_backward(out, gate)
        ctx.about = _about(out), _about(gate)
        if _takes(out, gate):
            gated = _dense(out)
            _launch(_gate, (out, gate), (gated,))
            return gated
        kind = wide(out.dtype)
        return (out.to(kind) * gate.to(kind).sigmoid()).to(out.dtype)

    @staticmethod
    def backward(ctx, gradient):
        out, gate = ctx.saved_tensors
        if (_about(out), _about(gate)) != ctx.about:
            raise options.SpecError(
                f"the gate's backward got {_about(out)} and {_about(gate)} of {ctx.about[0]} and "
                f"{ctx.about[1]}: a hook for saved tensors has to bring back what it was given"
            )
        with torch.no_grad():
            found = _gradients(gradient, out, gate)
        return once(found, gradient, out, gate)


def _about(t):
    return tuple(t.shape), t.dtype, t.device


def _gradients(gradient, out, gate):
    """Those of out and gate."""
    if gradient.dtype == out.dtype and _takes(out, gate) and not is_wrapped(gradient):
        found = _dense(out), _dense(gate)
        _launch(_core.gate_gradients, (out, gate, gradient), found)
        return found
    kind = wide(out.dtype)
    gate32, given = gate.to(kind), gradient.to(kind)
    of_out = given * gate32.sigmoid()
    # 1 - sigmoid(gate) would have no digits where that is nearly 1.
    of_gate = of_out * out.to(kind) * (-gate32).sigmoid()
    return of_out.to(out.dtype), of_gate.to(gate.dtype)


def check_gate(gate, like, shape):
    """TypeError and SpecError for what is no gate of an output of this shape, on the device of
    `like`."""
    check_floats("gate", gate, like, "a torch tensor like out, or None")
    if gate.shape != shape:
        raise options.SpecError(
            f"gate has shape {tuple(gate.shape)} and out {tuple(shape)}: pass one of out's "
            "shape, in its layout; a gate of each head, say, is gate.expand(...) of that"
        )
    transforms.refuse_tangents(gate)
    transforms.refuse_transforms("gate=")


def gated(out, gate):
    """out * sigmoid(gate), differentiable once. TypeError and SpecError for what is no gate of it."""
    check_gate(gate, out, out.shape)
    return _Gated.apply(out, gate)
