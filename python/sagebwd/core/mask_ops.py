"""torch.ops.sagebwd.mask_bits, .masked_forward and .masked_backward: attention under a mask that is
an expression of b, h, q and k and of tensors (generator/expression.h).

`tables` has the tensors that the expression indexes, int32, one behind the other in one dimension,
and `sizes` how many rows and columns each has, in the order in which the text names them first.
`bits` says which blocks of scores somebody sees, and in which of them some are hidden: int32 of
(batch or 1, heads or 1, blocks of queries, words), as runtime/attention.h has it. One launch makes
them on the device. `spec` is a line of options with `mask=`, a text without spaces.
"""

import functools

import torch

from sagebwd import _core
from sagebwd.core import forms, ops, options, seams
from sagebwd.core.arguments.shapes import check_scale
from sagebwd.core.arguments.tensors import check_backward, problem_of
from sagebwd.core.interval_ops import strides_of_shared

_library = ops.library()
_OPTIONS = ("Tensor tables, SymInt[] sizes, Tensor bits, float? softmax_scale, str layout, "
            "str spec")  # fmt: skip
_library.define("mask_bits(Tensor q, Tensor k, Tensor tables, SymInt[] sizes, str layout, str spec) "
                "-> Tensor", tags=ops.TAGS)  # fmt: skip
_library.define(f"masked_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) "
                "-> (Tensor out, Tensor lse)", tags=ops.TAGS)  # fmt: skip
_library.define("masked_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
                f"Tensor lse, Tensor? dlse, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
                tags=ops.TAGS)  # fmt: skip

_checked = functools.cache(options.spec_of_text)


@functools.cache
def _facts(text):
    """(operands, whether it depends on b, whether on h) of a mask; operands are (name, indices)."""
    return _core.mask_facts(text)


def _sizes_of_bits(problem, spec):
    """The shape of the bits: of one sequence or head where the mask is the same for all."""
    batch, heads, _, queries, keys = problem
    told = _checked(spec)
    _, of_batch, of_heads = _facts(told.mask)
    blocks = -(keys // -told.sparse_kv)
    return (batch if of_batch else 1, heads if of_heads else 1, -(queries // -told.sparse_q),
            2 * (blocks // 32 + 1))  # fmt: skip


def _check(problem, tables, sizes, bits, spec, device):
    operands = _facts(_checked(spec).mask)[0]
    if len(sizes) != 2 * len(operands) or tables.dtype != torch.int32 or tables.dim() != 1:
        raise options.SpecError(
            f"the tables are {tables.dtype} of {tuple(tables.shape)} with sizes {tuple(sizes)}; the "
            f"mask indexes {len(operands)}, which are torch.int32 of one dimension, each with rows "
            "and columns"
        )
    expected = _sizes_of_bits(problem, spec)
    if tuple(bits.shape) != expected or bits.dtype != torch.int32:
        raise options.SpecError(f"the bits are {bits.dtype} of {tuple(bits.shape)}; mask_bits gives "
                                f"torch.int32 of {expected}")  # fmt: skip
    for name, t in (("the tables are", tables), ("the bits are", bits)):
        if t.device != device:
            raise options.SpecError(f"{name} on {t.device} and q on {device}: move the mask")


def _each(tables, sizes):
    """The tables of a call, each by itself."""
    counts = [rows * columns for rows, columns in zip(sizes[::2], sizes[1::2])]
    return torch.split(tables, counts) if counts else ()


def _pairs(sizes):
    return list(zip(sizes[::2], sizes[1::2]))


class _Form(forms.Form):
    """A `Form` of calls with a mask. The bits and the tables are the last of its passes' tensors."""

    _NO_SHARES = (0, 0, 0, 1, 0, 0)

    def __init__(self, q, k, v, tables, sizes, bits, softmax_scale, layout, text):
        problem = problem_of(q, k, v, layout, ops.DEVICES)
        _check(problem, tables, sizes, bits, text, q.device)
        self._of_lists = strides_of_shared(bits), self._NO_SHARES, (0, 0), _pairs(sizes)
        super().__init__(q, k, v, softmax_scale, layout, text, ops.DEVICES)

    def _more(self, packing, k_mean):
        return (k_mean, *packing)


_forms = forms.Table()


def _form_of(q, k, v, tables, sizes, bits, *told):
    """The form of a call, and its tensors as kernels read them."""
    tables, bits, sizes = tables.contiguous(), bits.contiguous(), tuple(sizes)
    form = _forms.of((q, k, v, tables, bits), (sizes, *told),
                     lambda: _Form(q, k, v, tables, sizes, bits, *told))  # fmt: skip
    return form, (bits, *_each(tables, sizes))


def _forward(q, k, v, tables, sizes, bits, softmax_scale, layout, spec):
    form, more = _form_of(q, k, v, tables, sizes, bits, softmax_scale, layout, spec)
    return form.forward(q, k, v, packing=more)


def _backward(dout, q, k, v, out, lse, dlse, tables, sizes, bits, softmax_scale, layout, spec):
    check_backward(dout, q, k, v, out, lse, dlse, layout, ops.DEVICES)
    form, more = _form_of(q, k, v, tables, sizes, bits, softmax_scale, layout, spec)
    return form.backward(dout, q, k, v, out, lse, dlse, packing=more)


def _bits(q, k, tables, sizes, layout, spec):
    problem = problem_of(q, k, k, layout, ops.DEVICES)
    shape = _sizes_of_bits(problem, spec)
    _check(problem, tables, sizes, tables.new_empty(shape), spec, q.device)
    if 0 in problem:
        return tables.new_zeros(shape)
    bits, device = tables.new_empty(shape), q.get_device()
    each = _each(tables.contiguous(), sizes)
    forms.operation(device, spec).pack_mask(
        (shape[0], shape[1], 1, *problem[3:]), [t.data_ptr() for t in each], _pairs(sizes),
        bits.data_ptr(), forms.stream_of(device),
    )  # fmt: skip
    return bits


for _key in ("CUDA", "CPU", "SparseCUDA", "SparseCPU", "SparseCsrCUDA", "SparseCsrCPU"):
    _library.impl("masked_forward", _forward, _key)
    _library.impl("masked_backward", _backward, _key)
    _library.impl("mask_bits", _bits, _key)


# ---- shapes without data -------------------------------------------------------------------------


@torch.library.register_fake("sagebwd::mask_bits", lib=_library)
def _bits_fake(q, k, tables, sizes, layout, spec):
    return tables.new_empty(_sizes_of_bits(problem_of(q, k, k, layout, ops.DEVICES), spec))


def _check_told(problem, q, tables, sizes, bits, softmax_scale, spec):
    told = options.spec_of_text(spec, head_dim=int(q.shape[3]), dtype=q.dtype)
    check_scale(softmax_scale, q.shape[3], told)
    _check(problem, tables, sizes, bits, spec, q.device)


@torch.library.register_fake("sagebwd::masked_forward", lib=_library)
def _forward_fake(q, k, v, tables, sizes, bits, softmax_scale, layout, spec):
    problem = problem_of(q, k, v, layout, ops.DEVICES)
    _check_told(problem, q, tables, sizes, bits, softmax_scale, spec)
    rows = (problem[0], problem[1], problem[3])
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake("sagebwd::masked_backward", lib=_library)
def _backward_fake(dout, q, k, v, out, lse, dlse, tables, sizes, bits, softmax_scale, layout, spec):
    problem = check_backward(dout, q, k, v, out, lse, dlse, layout, ops.DEVICES)
    _check_told(problem, q, tables, sizes, bits, softmax_scale, spec)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# ---- torch.func.vmap, and gradients --------------------------------------------------------------

for _name in ("masked_forward", "masked_backward"):
    torch.library.register_vmap(f"sagebwd::{_name}", ops.one_by_one(
        getattr(torch.ops.sagebwd, _name).default), lib=_library)  # fmt: skip


@torch.library.register_vmap("sagebwd::mask_bits", lib=_library)
def _bits_of_each(info, in_dims, q, k, tables, sizes, layout, spec):
    """Of q and k only the sizes count."""
    q, k = (t if dim is None else t.select(dim, 0) for t, dim in zip((q, k), in_dims))
    each = (tables,) if in_dims[2] is None else tables.unbind(in_dims[2])
    bits = [torch.ops.sagebwd.mask_bits(q, k, of, sizes, layout, spec) for of in each]
    return (bits[0], None) if in_dims[2] is None else (torch.stack(bits), 0)


ops.make_differentiable("masked_forward", "masked_backward")


# ---- calls ---------------------------------------------------------------------------------------


def _rows_of(name, indices, t):
    """A tensor that a mask indexes as kernels read it: int32 of one dimension; with its sizes."""
    if t.is_floating_point() or t.is_complex():
        raise options.SpecError(f"the mask indexes {name}, which is {t.dtype}; masks compare ints: "
                                "pass an integer or bool tensor")  # fmt: skip
    if t.dim() != indices or 0 in t.shape:
        raise options.SpecError(f"the mask indexes {name} with {indices} numbers, and it has shape "
                                f"{tuple(t.shape)}: pass a tensor of as many dimensions, none of "
                                "them empty")  # fmt: skip
    sizes = (1, *t.shape)[-2:]
    return t.to(torch.int32).reshape(-1), sizes


def told(mask, q, k, v, layout, text):
    """(tables, sizes, bits, spec) of a call, as the operators take them.

    Raises SpecError for a mask that no kernel takes, and TypeError for what is none.
    """
    problem_of(q, k, v, layout, ops.DEVICES)
    if isinstance(mask, str) or callable(mask):
        mask = seams.traced_mask(mask)
    if getattr(mask, "kind", None) != "mask":
        raise TypeError(f"mask is {options.a_kind(mask)}; pass a function of (b, h, q, k), a text "
                        "such as 'q >= k', or what sagebwd.masks.trace_mask gives")  # fmt: skip
    spec = f"{text} mask={mask.text.replace(' ', '')}"
    operands = _facts(mask.text)[0]
    if missing := [name for name, _ in operands if name not in mask.operands]:
        raise options.SpecError(f"mask indexes {', '.join(missing)}, and no tensor of that name is "
                                f"given: sagebwd.masks.trace_mask({mask.text!r}, "
                                f"{{{missing[0]!r}: tensor}})")  # fmt: skip
    rows = [_rows_of(name, indices, mask.operands[name]) for name, indices in operands]
    if not rows:
        tables = q.new_empty(0, dtype=torch.int32)
    elif len(rows) == 1:
        tables = rows[0][0]
    else:
        tables = torch.cat([table for table, _ in rows])
    sizes = [size for _, of_table in rows for size in of_table]
    bits = torch.ops.sagebwd.mask_bits(q, k, tables, sizes, layout, spec)
    return tables, sizes, bits, spec
