"""Checks what kernels accept: which tensors belong together, and which of them kernels can read."""

import torch

from sagebwd.core import options
from sagebwd.core.arguments.shapes import (
    check_equal,
    check_rank,
    check_value_channels,
    operand_of,
    problem_of_shapes,
)

DTYPES = (torch.bfloat16, torch.float16)
#: Which function of `sagebwd.emulation` computes what kernels would.
EMULATION, EMULATION_OF_LISTS = "emulated_attention", "emulated_block_sparse_attention"


def _shape(t):
    return tuple(t.shape)


def assume_equal(sizes, others):
    """Tells a compiler that cannot know these sizes that they are equal; compiled code checks it.

    It does not know them after mark_unbacked, for which sagebwd needs PyTorch 2.8.
    """
    for size, other in zip(sizes, others):
        symbolic = isinstance(size, torch.SymInt) or isinstance(other, torch.SymInt)
        if symbolic or torch.compiler.is_compiling():  # to Dynamo all are numbers
            # Not for nothing: PyTorch itself imports it where it compiles.
            from torch.fx.experimental import symbolic_shapes

            unequal = size != other
            if hasattr(symbolic_shapes, "guard_or_false"):
                unequal = symbolic_shapes.guard_or_false(unequal)
            if not unequal:
                torch._check(size == other)


def problem_of(q, k, v, layout, devices=None, emulation=EMULATION):
    """`problem_of_shapes` of tensors that belong together, else SpecError. `devices`: kinds that
    kernels run on; None for the emulation, which takes any and any width of v."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_rank(name, _shape(t), packed=True)
        _check_dense(name, t)
        elsewhere = devices and t.device.type not in devices
        if t.dtype not in DTYPES:
            who = "the kernels take" if devices else "the emulation takes"
            on, gpu = (f" on {t.device}", " on a CUDA GPU") if elsewhere else ("", "")
            raise options.SpecError(
                f"{name} is {t.dtype}{on}; {who} torch.bfloat16 or torch.float16{gpu}: "
                + _how_to_convert(t, elsewhere and emulation)
            )
        if elsewhere:
            raise options.SpecError(
                f"{name} is on {t.device}; the kernels need a CUDA GPU. For the CPU there are "
                f"sagebwd.trace, sagebwd.reference and sagebwd.emulation.{emulation}"
            )
    check_equal(q.dtype, k.dtype, v.dtype, "are", "have one dtype: convert them")
    check_equal(q.device, k.device, v.device, "are on", "be on one device: move them")
    assume_equal((*k.shape[:3], k.shape[0]), (*v.shape[:3], q.shape[0]))
    problem = problem_of_shapes(_shape(q), _shape(k), _shape(v), layout)
    if devices:
        check_value_channels(_shape(q), _shape(v))
    return problem


def _how_to_convert(t, emulation):
    """Says how to make the tensor one that kernels, or on the CPU this emulation, take."""
    if emulation:
        return (
            f"on the CPU convert it and call sagebwd.emulation.{emulation}, or call sagebwd.trace "
            "or sagebwd.reference, which take float32"
        )
    kind = "cpu" if t.device.type == "cpu" else "cuda"
    return "convert it" + (f", or run under torch.autocast('{kind}')"
                           if t.dtype == torch.float32 else "")  # fmt: skip


def _check_dense(name, t):
    if t.layout is not torch.strided:
        raise options.SpecError(f"{name} is {t.layout}; pass a dense tensor: {name}.to_dense()")


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


def check_k_mean(k_mean, shape, device, smooth_k=True):
    """SpecError for a tensor that is no such mean: (batch or packed sequences, heads_kv,
    head_dim)."""
    if k_mean is None:
        return
    if not isinstance(k_mean, torch.Tensor):
        raise TypeError(f"k_mean is {options.a_kind(k_mean)}; pass a float32 torch tensor, or None")
    _check_like("k_mean", k_mean, "(batch or packed sequences, heads_kv, head_dim) =", tuple(shape),
                torch.float32, device, ", in either layout")  # fmt: skip
    if not smooth_k:
        raise options.SpecError(
            "k_mean is given and smooth_k=False: no mean is taken from the keys. Pass no k_mean, "
            "or smooth_k=True"
        )


def readable(t, layout):
    """The tensor, or a copy that kernels can read, and its operand: gradients come with any
    strides (out.sum() gives an expanded scalar)."""
    operand = operand_of(t, layout)
    if operand is None:
        t = t.clone(memory_format=torch.contiguous_format)
        operand = operand_of(t, layout)
    return t, operand
