"""Checks tensors, and runs the kernels on them: on the current stream of their device, in memory of
PyTorch's allocator. A form has all that depends on shapes and options alone, and is made once."""

import ctypes
import functools
import warnings

import torch

from ._native import Backward, Forward, Operation, Problem, SpecError, Tensor

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
DEVICES = ("cuda", "meta")
#: With more forms (lengths may keep changing) all are forgotten.
MOST_FORMS = 1024
_forms = {}


def stream_of(device):
    """The address of the current stream of a device's index."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw(device) if raw else torch.cuda.current_stream(device).cuda_stream


def index_of(device):
    """The number of a tensor's GPU."""
    return device.index


def new_workspace(like, size):
    """Memory that a pass works in, on the tensor's device."""
    return like.new_empty(size, dtype=torch.uint8)


def check(q, k, v, cu_q, cu_k, layout):
    """(batch, heads, heads_kv, seq_q, seq_kv) of tensors that belong together, else SpecError."""
    if layout not in ("bhsd", "bshd"):
        raise SpecError(f"layout={layout!r}: pass 'bhsd', (batch, heads, tokens, head_dim), or "
                        "'bshd', (batch, tokens, heads, head_dim)")  # fmt: skip
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise SpecError(f"{name} has shape {tuple(t.shape)}: four dimensions are supported, "
                            "(batch, heads, tokens, head_dim), or three with cu_seqlens_q and "
                            "cu_seqlens_k")  # fmt: skip
        if t.layout is not torch.strided:
            raise SpecError(f"{name} is {t.layout}: pass a dense tensor")
        if t.dtype not in DTYPES:
            raise SpecError(f"{name} is {t.dtype}: torch.bfloat16 and torch.float16 are supported")
        if t.device.type not in DEVICES:
            raise SpecError(f"{name} is on {t.device}: the kernels need a CUDA GPU")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise SpecError(
            f"q, k and v are {q.dtype} on {q.device}, {k.dtype} on {k.device} and {v.dtype} on "
            f"{v.device}: one dtype and one device are supported"
        )
    head, token = (1, 2) if layout == "bhsd" else (2, 1)
    heads, heads_kv = q.shape[head], k.shape[head]
    shapes = f"q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise SpecError(f"{shapes}: k and v must have equal batches, heads and tokens, and q the "
                        "same batch")  # fmt: skip
    if q.shape[3] != k.shape[3] or v.shape[3] > q.shape[3]:
        raise SpecError(f"{shapes}: q and k must have one head_dim, and v at most that")
    if heads_kv == 0 or heads == 0 or heads % heads_kv != 0:
        raise SpecError(f"q has {heads} heads and k {heads_kv} in layout={layout!r}: a multiple "
                        "is supported")  # fmt: skip
    _check_packing(q, cu_q, cu_k)
    return q.shape[0], heads, heads_kv, q.shape[token], k.shape[token]


def _check_packing(q, cu_q, cu_k):
    if (cu_q is None) != (cu_k is None):
        raise SpecError("cu_seqlens_q and cu_seqlens_k are given together or not at all")
    if cu_q is None:
        return
    if q.shape[0] != 1:
        raise SpecError(f"packed sequences are a batch of 1, and q has {q.shape[0]}")
    for name, t in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if t.dtype != torch.int32 or t.dim() != 1 or t.device != q.device:
            raise SpecError(f"{name} is {t.dtype} of shape {tuple(t.shape)} on {t.device}: int32 "
                            f"of (sequences + 1,) on {q.device} is supported")  # fmt: skip
    if cu_q.shape != cu_k.shape or cu_q.shape[0] < 2:
        raise SpecError(f"cu_seqlens_q and cu_seqlens_k have {cu_q.shape[0]} and {cu_k.shape[0]} "
                        "elements: both have one more than there are sequences")  # fmt: skip


def _strides(t, layout):
    """Those of batches, heads and tokens; None where no kernel can read the tensor. Dimensions of
    size 1 have none."""
    batch, first, second = (s if n > 1 else 0 for s, n in zip(t.stride()[:3], t.shape))
    if (t.shape[3] > 1 and t.stride(3) != 1) or (batch | first | second) % 8 or t.data_ptr() % 16:
        return None
    return (batch, first, second) if layout == "bhsd" else (batch, second, first)


def _operand(t, layout):
    strides = _strides(t, layout)
    return strides and Tensor(t.data_ptr(), *strides)


def _required(name, t, layout):
    operand = _operand(t, layout)
    if operand is None:
        raise SpecError(
            f"{name} has strides {tuple(t.stride())} in elements and address {t.data_ptr():#x}: "
            "the last stride must be 1, and the others and the address multiples of 16 bytes. Pass "
            f"{name}.{'clone' if t.is_contiguous() else 'contiguous'}()"
        )
    return operand


def _readable(t, layout):
    """The tensor, or a copy that kernels can read: gradients come with any strides."""
    if _operand(t, layout) is None:
        t = t.clone(memory_format=torch.contiguous_format)
    return t


@functools.lru_cache(maxsize=256)
def _operation(words, device):
    return Operation(words, device)


class _Form:
    """A form is all that calls with these options on tensors of these sizes have in common."""

    def __init__(self, q, k, v, cu_q, cu_k, scale, layout, words):
        batch, *sizes = check(q, k, v, cu_q, cu_k, layout)
        self.rows = (batch, sizes[0], sizes[2])
        self.packed, self.layout = cu_q is not None, layout
        self.empty = q.numel() == 0 or k.numel() == 0
        self.device = index_of(q.device)
        self.scale = q.shape[3] ** -0.5 if scale is None else float(scale)
        self.in_any_order = "no-deterministic" in words.split()
        words = f"d{q.shape[3]} {DTYPES[q.dtype]} {words}" + " packed" * self.packed
        self._operation = _operation(words, self.device)
        self.problem = Problem(cu_q.shape[0] - 1 if self.packed else batch, *sizes)
        self._bytes = (0, 0) if self.empty else self._operation.workspace_bytes(self.problem)
        self.value_dim = v.shape[3]

    def new(self, like, channels=None):
        """A contiguous result; zeros where sequences may leave tokens out."""
        shape = (*like.shape[:3], like.shape[3] if channels is None else channels)
        return (like.new_zeros if self.packed or self.empty else like.new_empty)(shape)

    def run(self, args, cu_q, cu_k, q):
        args.struct_size, args.problem = ctypes.sizeof(args), self.problem
        args.value_dim = self.value_dim
        if self.packed:
            args.packing.first_queries, args.packing.first_keys = cu_q.data_ptr(), cu_k.data_ptr()
        size = self._bytes[isinstance(args, Backward)]
        workspace = new_workspace(q, size)
        stream = stream_of(self.device)
        self._operation.run(args, self.scale, workspace.data_ptr(), size, stream)


def _form_of(q, k, v, cu_q, cu_k, scale, layout, words):
    sequences = cu_q is not None and (cu_q.shape, cu_q.dtype, cu_k.shape, cu_k.dtype)
    key = (words, layout, scale, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device,
           k.device, v.device, sequences)  # fmt: skip
    form = _forms.get(key)
    if form is None:
        form = _Form(q, k, v, cu_q, cu_k, scale, layout, words)
        if len(_forms) >= MOST_FORMS:
            _forms.clear()
        _forms[key] = form
    return form


def _contiguous(t):
    return None if t is None else t.contiguous()


def forward(q, k, v, cu_q, cu_k, scale, layout, words):
    """(out, lse): out is contiguous in the layout, and lse float32 of (batch, heads, queries)."""
    form = _form_of(q, k, v, cu_q, cu_k, scale, layout, words)
    out = form.new(q, form.value_dim)
    lse = q.new_empty(form.rows, dtype=torch.float32)
    if form.packed or form.empty:
        lse.fill_(-torch.inf)
    if form.empty:
        return out, lse
    cu_q, cu_k = _contiguous(cu_q), _contiguous(cu_k)
    args = Forward(lse=lse.data_ptr())
    for name, t in (("q", q), ("k", k), ("v", v), ("out", out)):
        setattr(args, name, _required(name, t, layout))
    form.run(args, cu_q, cu_k, q)
    return out, lse


def backward(dout, q, k, v, out, lse, dlse, cu_q, cu_k, scale, layout, words):
    """(dq, dk, dv), contiguous in the layout."""
    form = _form_of(q, k, v, cu_q, cu_k, scale, layout, words)
    if form.in_any_order and torch.are_deterministic_algorithms_enabled():
        _alert()
    gradients = form.new(q), form.new(k), form.new(v)
    if form.empty:
        return gradients
    cu_q, cu_k = _contiguous(cu_q), _contiguous(cu_k)
    out, dout = _readable(out, layout), _readable(dout, layout)
    lse, dlse = lse.contiguous(), _contiguous(dlse)
    args = Backward(lse=lse.data_ptr(), dlse=None if dlse is None else dlse.data_ptr())
    for name, t in zip(("q", "k", "v", "out", "dout", "dq", "dk", "dv"),
                       (q, k, v, out, dout, *gradients)):  # fmt: skip
        setattr(args, name, _required(name, t, layout))
    form.run(args, cu_q, cu_k, q)
    return gradients


def _alert():
    message = ("deterministic=False adds dQ up in any order, and "
               "torch.use_deterministic_algorithms(True) is on: leave one of them out")  # fmt: skip
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=3)
