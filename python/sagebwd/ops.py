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


def as_autocast_wants(kind, *tensors):
    """The inputs, cast where autocast is on for devices of that kind."""
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return [t.to(dtype) if t.dtype in (torch.float32, *DTYPES) else t for t in tensors]


def problem_of(q, k, v, layout, devices=None):
    """(batch, heads, heads_kv, seq_q, seq_kv) of tensors that belong together, else SpecError."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise options.SpecError(
                f"{name} has rank {t.dim()} (shape {_shape(t)}); it must have rank 4: "
                "(batch, head, token, channel), or layout='bshd'"
            )
        _check_dense(name, t)
        if t.dtype not in DTYPES:
            raise options.SpecError(
                f"{name} is {t.dtype}; the kernels take torch.bfloat16 or torch.float16: convert "
                "it, or run under torch.autocast('cuda')"
            )
        if devices and t.device.type not in devices:
            raise options.SpecError(
                f"{name} is on {t.device}; the kernels need a CUDA GPU. For the CPU there are "
                "sagebwd.trace, sagebwd.reference and sagebwd.emulation.emulated_attention"
            )
    _check_equal(q.dtype, k.dtype, v.dtype, "are", "have one dtype: convert them")
    _check_equal(q.device, k.device, v.device, "are on", "be on one device: move them")
    options.check_layout(layout)
    dims = (q.shape[3], k.shape[3], v.shape[3])
    _check_equal(*dims, "have head dims", "be equal: pad the smaller ones with zeros")
    if k.shape != v.shape:
        raise options.SpecError(f"k has shape {_shape(k)} and v {_shape(v)}; they must be equal")
    if q.shape[0] != k.shape[0]:
        raise options.SpecError(
            f"q has batch {q.shape[0]} and k {k.shape[0]}; they must be equal: expand the smaller "
            "one"
        )
    head, token = (1, 2) if layout == "bhsd" else (2, 1)
    heads, heads_kv = q.shape[head], k.shape[head]
    if heads_kv == 0 or heads == 0 or heads % heads_kv != 0:
        raise options.SpecError(
            f"q has {heads} heads and k and v have {heads_kv}; the first must be a positive "
            "multiple of the second (is layout= right?)"
        )
    return q.shape[0], heads, heads_kv, q.shape[token], k.shape[token]


def _check_dense(name, t):
    if t.layout is not torch.strided:
        raise options.SpecError(f"{name} is {t.layout}; pass a dense tensor: {name}.to_dense()")


def _check_equal(of_q, of_k, of_v, have, must):
    if not of_q == of_k == of_v:
        raise options.SpecError(f"q, k and v {have} {of_q}, {of_k} and {of_v}; they must {must}")


def _check_like(name, t, must_be, shape, dtype, device, more=""):
    _check_dense(name, t)
    if _shape(t) != shape or t.dtype != dtype or t.device != device:
        raise options.SpecError(
            f"{name} is {_shape(t)} {t.dtype} on {t.device}; it must be {must_be} {shape} {dtype} "
            f"on {device}{more}"
        )


def _new_lse(q, problem):
    return q.new_empty((problem[0], problem[1], problem[3]), dtype=torch.float32)


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
        raise options.SpecError(
            f"{name} has strides {tuple(t.stride())} (elements) and address {t.data_ptr():#x}; the "
            "last stride must be 1, and the others and the address multiples of 16 bytes (8 "
            f"elements): pass {name}.{'clone' if t.is_contiguous() else 'contiguous'}()"
        )
    return operand


def _copied_operand(t, layout):
    """The tensor, or a copy that kernels can read, and its operand: gradients come with any
    strides (out.sum() gives an expanded scalar)."""
    operand = _operand(t, layout)
    if operand is None:
        t = t.clone(memory_format=torch.contiguous_format)
        operand = _operand(t, layout)
    return t, operand


# ---- the kernels ---------------------------------------------------------------------------------


_checked = functools.cache(options.spec_of_text)


@functools.cache
def operation(device, text, **tensors):
    """The `_core.Attention` of a device index and a line of options, made once. `tensors`: the
    head_dim and dtype of tensors, where the line does not say."""
    return _core.Attention(options.spec_of_text(text, local_arch(device), **tensors), device)


def _forward(q, k, v, softmax_scale, layout, spec):
    problem = problem_of(q, k, v, layout, DEVICES)
    scale = options.check_softmax_scale(softmax_scale, q.shape[3])
    kernels = operation(q.get_device(), spec, head_dim=q.shape[3], dtype=q.dtype)
    operands = [_required_operand(n, t, layout) for n, t in (("q", q), ("k", k), ("v", v))]
    out = q.new_empty(q.shape)
    lse = _new_lse(q, problem)
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
    dout, dout_operand = _copied_operand(dout, layout)
    out, out_operand = _copied_operand(out, layout)
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
    problem = problem_of(q, k, v, layout, DEVICES)
    for name, t in (("dout", dout), ("out", out)):
        _check_like(name, t, "like q:", _shape(q), q.dtype, q.device)
    rows = (problem[0], problem[1], problem[3])
    for name, t in (("lse", lse), ("dlse", lse if dlse is None else dlse)):
        _check_like(name, t, "(batch, heads, queries) =", rows, torch.float32, q.device,
                    ", in either layout")  # fmt: skip
    return problem


# On the CPU, and sparse tensors, to refuse with our own message.
for _key in ("CUDA", "CPU", "SparseCUDA", "SparseCPU", "SparseCsrCUDA", "SparseCsrCPU"):
    _library.impl("forward", _forward, _key)
    _library.impl("backward", _backward, _key)


# ---- shapes without data -------------------------------------------------------------------------


@torch.library.register_fake("sagebwd::forward", lib=_library)
def _forward_fake(q, k, v, softmax_scale, layout, spec):
    problem = problem_of(q, k, v, layout, DEVICES)
    options.check_softmax_scale(softmax_scale, q.shape[3])
    _checked(spec, head_dim=int(q.shape[3]), dtype=q.dtype)
    return q.new_empty(q.shape), _new_lse(q, problem)


@torch.library.register_fake("sagebwd::backward", lib=_library)
def _backward_fake(dout, q, k, v, out, lse, dlse, softmax_scale, layout, spec):
    _check_backward(dout, q, k, v, out, lse, dlse, layout)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# ---- gradients -----------------------------------------------------------------------------------


class Differentiable(torch.autograd.Function):
    """(out, lse) of `forward(q, k, v, *given)`, and of these gradients by
    `backward(dout, q, k, v, out, lse, dlse, *given)`."""

    @staticmethod
    def forward(ctx, forward, backward, q, k, v, *given):
        out, lse = forward(q, k, v, *given)
        ctx.backward_pass, ctx.given = backward, given
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # an unused lse costs nothing
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        unwanted = (None,) * (5 + len(ctx.given))
        if dout is None and dlse is None:
            return unwanted
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        gradients = ctx.backward_pass(dout, q, k, v, out, lse, dlse, *ctx.given)
        wanted = (g if need else None for g, need in zip(gradients, ctx.needs_input_grad[2:]))
        return (None, None, *wanted, *unwanted[5:])


def _backward_autograd(*arguments):
    operator = torch.ops.sagebwd.backward.default
    if torch.is_grad_enabled():  # create_graph=True: leave a node that refuses
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _below_autograd(keyset, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        operator = torch.ops.sagebwd.forward.default
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def _forward_autograd(keyset, q, k, v, *given):
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        forward = functools.partial(_below_autograd, keyset)
        return Differentiable.apply(forward, _backward_autograd, q, k, v, *given)
    return _below_autograd(keyset, q, k, v, *given)


# What torch.library.register_autograd does, short of parsing the schema in every call, which takes
# longer than all the rest of the forward's host side.
_library.impl("forward", _forward_autograd, "Autograd", with_keyset=True)
torch.library.register_autograd("sagebwd::backward", options.refuse_double_backward, lib=_library)
