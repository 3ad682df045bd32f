"""torch.ops.sagebwd.forward and .backward: the kernels as PyTorch operators.

Both take tensors in the layout they are told ('bhsd' or 'bshd') and give contiguous tensors in
that layout; lse is (batch, heads, queries) in either. They run on the current stream of the
tensors' device, in memory of PyTorch's allocator. Forward has fakes and autograd (through out and
lse), backward has fakes and refuses to be differentiated. `sagebwd.attention` is the way in.
"""

import functools

import torch

from sagebwd import _core, options
from sagebwd.kernels import local_arch
from sagebwd.options import SpecError

DTYPES = (torch.bfloat16, torch.float16)
DEVICES = ("cuda", "meta")

# How both operators are told what to compute: `spec` is a line of options.text_of.
_OPTIONS = "float? softmax_scale, str layout, str spec"

_library = torch.library.Library("sagebwd", "DEF")
_tags = (torch.Tag.pt2_compliant_tag,)
if hasattr(torch.Tag, "needs_exact_strides"):  # from 2.8 on: Inductor keeps our inputs' strides
    _tags += (torch.Tag.needs_exact_strides,)
_library.define(
    f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)", tags=_tags
)
_library.define(
    "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    f"{_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=_tags,
)


# ---- what the kernels accept ---------------------------------------------------------------------


def _shape(t):
    return tuple(t.shape)


def check_types(q, k, v):
    """Raises SpecError for ranks, dtypes and devices that no kernel takes."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise SpecError(
                f"{name} has rank {t.dim()} (shape {_shape(t)}); it must have rank 4: "
                "(batch, head, token, channel), or layout='bshd'"
            )
        if t.dtype not in DTYPES:
            raise SpecError(
                f"{name} is {t.dtype}; the kernels take torch.bfloat16 or "
                "torch.float16: convert it, or run under torch.autocast('cuda')"
            )
        if t.device.type not in DEVICES:
            raise SpecError(
                f"{name} is on {t.device}; the kernels need a CUDA GPU. For the CPU "
                "there are sagebwd.trace, sagebwd.reference and "
                "sagebwd.emulation.emulated_attention"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise SpecError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must have one "
            "dtype: convert them"
        )
    if not q.device == k.device == v.device:
        raise SpecError(
            f"q, k and v are on {q.device}, {k.device} and {v.device}; they must be "
            "on one device: move them"
        )


def _check_shapes(q, k, v, head_axis):
    """Raises SpecError for shapes that do not belong together."""
    if not q.shape[3] == k.shape[3] == v.shape[3]:
        raise SpecError(
            f"q, k and v have head dims {q.shape[3]}, {k.shape[3]} and {v.shape[3]}; "
            "they must be equal: pad the smaller ones with zeros"
        )
    if k.shape != v.shape:
        raise SpecError(f"k has shape {_shape(k)} and v {_shape(v)}; they must be equal")
    if q.shape[0] != k.shape[0]:
        raise SpecError(
            f"q has batch {q.shape[0]} and k {k.shape[0]}; they must be equal: expand "
            "the smaller one"
        )
    heads, heads_kv = q.shape[head_axis], k.shape[head_axis]
    if heads_kv == 0 or heads == 0 or heads % heads_kv != 0:
        raise SpecError(
            f"q has {heads} heads and k and v have {heads_kv}; the first must be a "
            "positive multiple of the second (is layout= right?)"
        )


def _problem(q, k, v, layout):
    """(batch, heads, heads_kv, seq_q, seq_kv) of tensors that belong together, else SpecError."""
    check_types(q, k, v)
    options.check_layout(layout)
    head, token = (1, 2) if layout == "bhsd" else (2, 1)
    _check_shapes(q, k, v, head)
    return q.shape[0], q.shape[head], k.shape[head], q.shape[token], k.shape[token]


def _check_like(name, t, like_name, like):
    if t.shape != like.shape or t.dtype != like.dtype or t.device != like.device:
        raise SpecError(
            f"{name} is {_shape(t)} {t.dtype} on {t.device}; it must be like "
            f"{like_name}: {_shape(like)} {like.dtype} on {like.device}"
        )


def _check_rows(name, t, problem, device):
    expected = (problem[0], problem[1], problem[3])
    if _shape(t) != expected or t.dtype != torch.float32 or t.device != device:
        raise SpecError(
            f"{name} is {_shape(t)} {t.dtype} on {t.device}; it must be (batch, heads, "
            f"queries) = {expected} torch.float32 on {device}, in either layout"
        )


def _operand(t, layout):
    """(address, batch, head and token strides), or None where no kernel can read the tensor.

    Copies move 16 bytes, so all of these must be multiples of 8 elements; the stride of a
    dimension of size one is never used.
    """
    shape, stride = t.shape, t.stride()
    batch = stride[0] if shape[0] > 1 else 0
    first = stride[1] if shape[1] > 1 else 0
    second = stride[2] if shape[2] > 1 else 0
    address = t.data_ptr()
    if stride[3] != 1 or (batch | first | second) & 7 or address & 15:
        return None
    return (address, batch, first, second) if layout == "bhsd" else (address, batch, second, first)


def _required_operand(name, t, layout):
    operand = _operand(t, layout)
    if operand is None:
        raise SpecError(
            f"{name} has strides {tuple(t.stride())} (elements) and address "
            f"{t.data_ptr():#x}; the last stride must be 1, and the others and the "
            "address multiples of 16 bytes (8 elements): pass "
            f"{name}.{'clone' if t.is_contiguous() else 'contiguous'}()"
        )
    return operand


# ---- the kernels ---------------------------------------------------------------------------------


@functools.cache
def _checked(text, head_dim, dtype):
    options.spec_of_text(text, head_dim=head_dim, dtype=dtype)


@functools.cache
def operation(device, text, **tensors):
    """The `_core.Attention` of a device index and a line of options, made once. `tensors`: the
    head_dim and dtype of tensors, where the line does not say."""
    return _core.Attention(options.spec_of_text(text, local_arch(device), **tensors), device)


def _forward(q, k, v, softmax_scale, layout, spec):
    problem = _problem(q, k, v, layout)
    scale = options.check_softmax_scale(softmax_scale, q.shape[3])
    kernels = operation(q.get_device(), spec, head_dim=q.shape[3], dtype=q.dtype)
    operands = [_required_operand(n, t, layout) for n, t in (("q", q), ("k", k), ("v", v))]
    out = q.new_empty(q.shape)
    lse = q.new_empty((problem[0], problem[1], problem[3]), dtype=torch.float32)
    if q.numel() == 0 or k.numel() == 0:  # a query that sees no key
        return out.zero_(), lse.fill_(-torch.inf)
    size = kernels.forward_workspace_bytes(problem)
    workspace = q.new_empty(size, dtype=torch.uint8)
    stream = torch.cuda.current_stream(q.device).cuda_stream
    kernels.forward(
        problem,
        (*operands, _operand(out, layout), lse.data_ptr()),
        scale,
        workspace.data_ptr(),
        size,
        stream,
    )
    return out, lse


def _backward(dout, q, k, v, out, lse, dlse, softmax_scale, layout, spec):
    problem = _check_backward(dout, q, k, v, out, lse, dlse, layout)
    scale = options.check_softmax_scale(softmax_scale, q.shape[3])
    kernels = operation(q.get_device(), spec, head_dim=q.shape[3], dtype=q.dtype)
    operands = [_required_operand(n, t, layout) for n, t in (("q", q), ("k", k), ("v", v))]
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    # Gradients come with any strides (out.sum() gives an expanded scalar): copy where it must be.
    dout_operand = _operand(dout, layout)
    if dout_operand is None:
        dout = dout.clone(memory_format=torch.contiguous_format)
        dout_operand = _operand(dout, layout)
    out_operand = _operand(out, layout)
    if out_operand is None:
        out = out.clone(memory_format=torch.contiguous_format)
        out_operand = _operand(out, layout)
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    size = kernels.backward_workspace_bytes(problem)
    workspace = q.new_empty(size, dtype=torch.uint8)
    stream = torch.cuda.current_stream(q.device).cuda_stream
    kernels.backward(
        problem,
        (
            *operands,
            out_operand,
            dout_operand,
            _operand(dq, layout),
            _operand(dk, layout),
            _operand(dv, layout),
            lse.data_ptr(),
            0 if dlse is None else dlse.data_ptr(),
        ),
        scale,
        workspace.data_ptr(),
        size,
        stream,
    )
    return dq, dk, dv


def _check_backward(dout, q, k, v, out, lse, dlse, layout):
    problem = _problem(q, k, v, layout)
    _check_like("dout", dout, "q", q)
    _check_like("out", out, "q", q)
    _check_rows("lse", lse, problem, q.device)
    if dlse is not None:
        _check_rows("dlse", dlse, problem, q.device)
    return problem


for _key in ("CUDA", "CPU"):  # on the CPU to refuse with our own message
    _library.impl("forward", _forward, _key)
    _library.impl("backward", _backward, _key)


# ---- shapes without data -------------------------------------------------------------------------


@torch.library.register_fake("sagebwd::forward", lib=_library)
def _forward_fake(q, k, v, softmax_scale, layout, spec):
    problem = _problem(q, k, v, layout)
    options.check_softmax_scale(softmax_scale, q.shape[3])
    _checked(spec, int(q.shape[3]), q.dtype)
    return q.new_empty(q.shape), q.new_empty(
        (problem[0], problem[1], problem[3]), dtype=torch.float32
    )


@torch.library.register_fake("sagebwd::backward", lib=_library)
def _backward_fake(dout, q, k, v, out, lse, dlse, softmax_scale, layout, spec):
    _check_backward(dout, q, k, v, out, lse, dlse, layout)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# ---- gradients -----------------------------------------------------------------------------------


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, keyset, q, k, v, *given):
        out, lse = _below_autograd(keyset, q, k, v, *given)
        ctx.options = given
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # an unused lse costs nothing
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        unwanted = (None,) * (4 + len(ctx.options))
        if dout is None and dlse is None:
            return unwanted
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        operator = torch.ops.sagebwd.backward.default
        if torch.is_grad_enabled():  # create_graph=True: leave a node that refuses
            gradients = operator(dout, q, k, v, out, lse, dlse, *ctx.options)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                gradients = operator(dout, q, k, v, out, lse, dlse, *ctx.options)
        wanted = (g if need else None for g, need in zip(gradients, ctx.needs_input_grad[1:]))
        return (None, *wanted, *unwanted[4:])


def _below_autograd(keyset, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        operator = torch.ops.sagebwd.forward.default
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def _forward_autograd(keyset, q, k, v, *given):
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Differentiable.apply(keyset, q, k, v, *given)
    return _below_autograd(keyset, q, k, v, *given)


# What torch.library.register_autograd does, short of parsing the schema in every call, which takes
# longer than all the rest of the forward's host side.
_library.impl("forward", _forward_autograd, "Autograd", with_keyset=True)
torch.library.register_autograd("sagebwd::backward", options.refuse_double_backward, lib=_library)
