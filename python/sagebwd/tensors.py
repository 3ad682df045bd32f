"""What the kernels accept: which tensors belong together, and which of them kernels can read."""

import torch

from sagebwd import options

DTYPES = (torch.bfloat16, torch.float16)


def _shape(t):
    return tuple(t.shape)


def problem_of(q, k, v, layout, devices=None):
    """(batch, heads, heads_kv, seq_q, seq_kv) of tensors that belong together, else SpecError.

    v may have fewer channels than q and k.
    """
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
    if dims[0] != dims[1] or dims[2] > dims[0]:
        _check_equal(*dims, "have head dims",
                     "be equal, v's may be smaller: pad the smaller ones with zeros")  # fmt: skip
    if k.shape[:3] != v.shape[:3]:
        raise options.SpecError(
            f"k has shape {_shape(k)} and v {_shape(v)}; they must be equal but for the channels"
        )
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


def check_backward(dout, q, k, v, out, lse, dlse, layout, devices=None):
    """`problem_of`, of a backward's tensors."""
    problem = problem_of(q, k, v, layout, devices)
    like_q, must_be = (*_shape(q)[:3], v.shape[3]), "like q:"
    if v.shape[3] != q.shape[3]:
        must_be = "like q with v's channels:"
    for name, t in (("dout", dout), ("out", out)):
        _check_like(name, t, must_be, like_q, q.dtype, q.device)
    rows = (problem[0], problem[1], problem[3])
    for name, t in (("lse", lse), ("dlse", lse if dlse is None else dlse)):
        _check_like(name, t, "(batch, heads, queries) =", rows, torch.float32, q.device,
                    ", in either layout")  # fmt: skip
    return problem


def operand_of(t, layout):
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


def contiguous_strides(shape, layout):
    """Batch, head and token strides of a contiguous tensor."""
    second = shape[3]
    first = shape[2] * second
    batch = shape[1] * first
    return (batch, first, second) if layout == "bhsd" else (batch, second, first)


def required_operand(name, t, layout):
    operand = operand_of(t, layout)
    if operand is None:
        raise options.SpecError(
            f"{name} has strides {tuple(t.stride())} (elements) and address {t.data_ptr():#x}; the "
            "last stride must be 1, and the others and the address multiples of 16 bytes (8 "
            f"elements): pass {name}.{'clone' if t.is_contiguous() else 'contiguous'}()"
        )
    return operand


def readable(t, layout):
    """The tensor, or a copy that kernels can read, and its operand: gradients come with any
    strides (out.sum() gives an expanded scalar)."""
    operand = operand_of(t, layout)
    if operand is None:
        t = t.clone(memory_format=torch.contiguous_format)
        operand = operand_of(t, layout)
    return t, operand
