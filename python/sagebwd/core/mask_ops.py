"""torch.ops.sagebwd.mask_bits, .masked_forward and .masked_backward: attention under a mask, or
with a score function, that is an expression of b, h, q and k and of tensors
(generator/expression.h).

`tables` has the tensors that the expressions index, int32 or float32's bits, one behind the other
in one dimension, and `sizes` how many rows and columns each has, in the order in which first the
mask and then the score function names them. `bits`, None without a mask, says which blocks of
scores somebody sees, and in which of them some are hidden: int32 of (batch or 1, heads or 1,
blocks of queries, words), as runtime/attention.h has it. One launch makes them on the device.
`spec` is a line of options with `mask=` and `score=`, texts without spaces.
"""

import functools
import sys

import torch

from sagebwd.core import forms, op_pairs, ops, options, transforms
from sagebwd.core.arguments.shapes import check_scale
from sagebwd.core.arguments.tensors import problem_of
from sagebwd.core.expressions import checked, facts, facts_of
from sagebwd.core.interval_ops import strides_of_shared

_library = ops.library()
_library.define("mask_bits(Tensor q, Tensor k, Tensor tables, SymInt[] sizes, str layout, "
                "str spec) -> Tensor", tags=ops.TAGS)  # fmt: skip


def _sizes_of_bits(problem, spec):
    """The shape of the bits: of one sequence or head where the mask is the same for all."""
    batch, heads, _, queries, keys = problem
    told = checked(spec)
    _, of_batch, of_heads = facts_of(spec)
    blocks = -(keys // -told.sparse_kv)
    return (batch if of_batch else 1, heads if of_heads else 1, -(queries // -told.sparse_q),
            2 * (blocks // 32 + 1))  # fmt: skip


def _check(problem, tables, sizes, bits, spec, device):
    of_spec = facts_of(spec)[0]
    if len(sizes) != 2 * len(of_spec) or tables.dtype != torch.int32 or tables.dim() != 1:
        raise options.SpecError(
            f"the tables are {tables.dtype} of {tuple(tables.shape)} with sizes {tuple(sizes)}; "
            f"the expressions index {len(of_spec)}, which are torch.int32 of one dimension, each "
            "with rows and columns"
        )
    if bits is None:
        if checked(spec).mask:
            raise options.SpecError("the spec has a mask, and no bits are given: mask_bits gives "
                                    "them")  # fmt: skip
        bits = tables[:0]
        expected = (0,)
    else:
        expected = _sizes_of_bits(problem, spec)
    if tuple(bits.shape) != expected or bits.dtype != torch.int32:
        raise options.SpecError(f"the bits are {bits.dtype} of {tuple(bits.shape)}; mask_bits "
                                f"gives torch.int32 of {expected}")  # fmt: skip
    for name, t in (("the tables are", tables), ("the bits are", bits)):
        if t.device != device:
            raise options.SpecError(f"{name} on {t.device} and q on {device}: move the mask")


def each_of(tables, sizes):
    """The tables of a call, each by itself."""
    counts = [rows * columns for rows, columns in zip(sizes[::2], sizes[1::2])]
    if len(counts) == 1 and tables.shape[0] == counts[0]:
        return (tables,)
    return torch.split_with_sizes(tables, counts) if counts else ()


def _pairs(sizes):
    return list(zip(sizes[::2], sizes[1::2]))


class _Form(forms.Form):
    """A `Form` of such calls. The bits and the tables are the last of its passes' tensors."""

    _NO_SHARES = (0, 0, 0, 1, 0, 0)
    of_backward = "masked_backward"

    def __init__(self, q, k, v, tables, sizes, bits, softmax_scale, layout, text):
        problem = problem_of(q, k, v, layout, ops.DEVICES)
        _check(problem, tables, sizes, bits, text, q.device)
        of_bits = (0, 0) if bits is None else strides_of_shared(bits)
        self._of_lists = of_bits, self._NO_SHARES, (0, 0), _pairs(sizes)
        self._sizes_of_bits = None if bits is None else tuple(bits.shape)
        self.table_sizes = sizes
        with torch.inference_mode(False):  # autograd may save it
            self._no_tables = torch.empty(0, dtype=torch.int32, device=q.device)
        self._beside = tuple(forms.about(t) for t in (tables, bits) if t is not None)
        self._of_score = [of_score for *_, of_score in facts_of(text)[0]]
        super().__init__(q, k, v, softmax_scale, layout, text, ops.DEVICES)

    def _more(self, packing, k_mean):
        return (k_mean, *packing)

    @functools.cached_property
    def _pack(self):
        operation = forms.operation(self._device, self.given[2])
        return _packing(operation, self._sizes_of_bits, self._problem, self.table_sizes,
                        self.given[2])  # fmt: skip

    def new_beside(self, q, given):
        """The tables, and the bits where there is a mask, of a call past the operators. `given`:
        the tensors that the expressions index, as `_rows_of` lets them pass."""
        tables = self._no_tables
        if given:
            tables = _joined(list(map(_numbers_of, given, self._of_score)))
        if self._sizes_of_bits is None:
            return (tables,)
        bits = q.new_empty(self._sizes_of_bits, dtype=torch.int32)
        self._pack(tables.data_ptr(), bits.data_ptr(), self._stream())
        return tables, bits

    def kept_beside(self, q, given):
        """The same of a call with the bits and the tables of a mask. They come first in `given`,
        and what a score function indexes behind them."""
        bits, *rows = given
        rows[1:] = [_numbers_of(t, True) for t in rows[1:]]
        return _joined(rows), bits

    def packing_of(self, beside):
        tables, *bits = beside
        return *bits, *each_of(tables, self.table_sizes)

    def told_of(self, beside):
        tables, *bits = beside
        return tables, self.table_sizes, *(bits or [None])

    def saved_beside(self, beside):
        return tuple(map(forms.about, beside)) == self._beside


_forms = forms.Table()


def _form_of(q, k, v, tables, sizes, bits, *told):
    """The form of a call, and its tensors as kernels read them."""
    tables, sizes = tables.contiguous(), tuple(sizes)
    of_mask = () if bits is None else (bits.contiguous(),)
    form = _forms.of((q, k, v, tables, *of_mask), (sizes, *told),
                     lambda: _Form(q, k, v, tables, sizes, *(of_mask or [None]), *told))
    return form, (*of_mask, *each_of(tables, sizes))


def _bits(q, k, tables, sizes, layout, spec):
    problem = problem_of(q, k, k, layout, ops.DEVICES)
    shape = _sizes_of_bits(problem, spec)
    _check(problem, tables, sizes, tables.new_empty(shape), spec, q.device)
    if 0 in problem:
        return tables.new_zeros(shape)
    bits, device, tables = tables.new_empty(shape), q.get_device(), tables.contiguous()
    each_of(tables, sizes)  # raises an error unless there are as many numbers
    pack = _packing(forms.operation(device, spec), shape, problem, sizes, spec)
    pack(tables.data_ptr(), bits.data_ptr(), forms.stream_of(device))
    return bits


def _packing(operation, shape, problem, sizes, spec):
    """A function that writes the bits, of this shape, of a mask: of the addresses of the tables and
    of the bits, and a stream."""
    of_mask = _pairs(sizes)[: sum(not of_score for *_, of_score in facts_of(spec)[0])]
    counts = [rows * columns for rows, columns in of_mask]
    begins = [4 * sum(counts[:i]) for i in range(len(counts))]
    problem = (*shape[:2], 1, *problem[3:])

    def pack(tables, bits, stream):
        addresses = [tables + begin for begin in begins]
        operation.pack_mask(problem, addresses, of_mask, bits, stream)

    return pack


for _key in ops.BACKENDS:
    _library.impl("mask_bits", _bits, _key)


@torch.library.register_fake("sagebwd::mask_bits", lib=_library)
def _bits_fake(q, k, tables, sizes, layout, spec):
    return tables.new_empty(_sizes_of_bits(problem_of(q, k, k, layout, ops.DEVICES), spec))


def _check_told(problem, q, tables, sizes, bits, softmax_scale, layout, spec):
    told = options.spec_of_text(spec, head_dim=int(q.shape[3]), dtype=q.dtype)
    check_scale(softmax_scale, q.shape[3], told)
    _check(problem, tables, sizes, bits, spec, q.device)


@torch.library.register_vmap("sagebwd::mask_bits", lib=_library)
def _bits_of_each(info, in_dims, q, k, tables, sizes, layout, spec):
    """Of q and k only the sizes count."""
    q, k = (t if dim is None else t.select(dim, 0) for t, dim in zip((q, k), in_dims))
    each = (tables,) if in_dims[2] is None else tables.unbind(in_dims[2])
    bits = [torch.ops.sagebwd.mask_bits(q, k, of, sizes, layout, spec) for of in each]
    return (bits[0], None) if in_dims[2] is None else (torch.stack(bits), 0)


op_pairs.add_pair("masked", "Tensor tables, SymInt[] sizes, Tensor? bits, float? softmax_scale",
                  sys.modules[__name__])  # fmt: skip


# ---- calls ---------------------------------------------------------------------------------------


def _rows_of(name, indices, of_score, t):
    """A tensor that an expression indexes as kernels read it: 4 bytes a number, in one dimension;
    with its sizes."""
    what = "score" if of_score else "mask"
    if not of_score and (t.is_floating_point() or t.is_complex()):
        raise options.SpecError(f"the mask indexes {name}, which is {t.dtype}; masks compare ints: "
                                "pass an integer or bool tensor")  # fmt: skip
    if t.dim() != indices or 0 in t.shape:
        raise options.SpecError(f"the {what} indexes {name} with {indices} numbers, and it has "
                                f"shape {tuple(t.shape)}: pass a tensor of as many dimensions, "
                                "none of them empty")  # fmt: skip
    return _numbers_of(t, of_score), (1, *t.shape)[-2:]


def _numbers_of(t, of_score):
    """The numbers of such a tensor, as the operators take them."""
    transforms.refuse_tangents(t)
    if t.requires_grad:
        t = t.detach()  # table_gradients has their gradients
    wanted = torch.float32 if of_score else torch.int32
    t = forms.saveable((t if t.dtype == wanted else t.to(wanted)).reshape(-1))
    return t.view(torch.int32) if of_score else t


def tables_of(rows, device):
    """(tables, sizes) of what `_rows_of` gives, as the operators take them."""
    sizes = [size for _, of_table in rows for size in of_table]
    if not rows:
        return torch.empty(0, dtype=torch.int32, device=device), sizes
    return _joined([table for table, _ in rows]), sizes


def _joined(rows):
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def rows_of_mask(mask, operands):
    """The tensors that a mask, a text, indexes, for `tables_of`."""
    return [_rows_of(name, indices, False, operands[name])
            for name, indices, _ in facts(mask, "")[0]]  # fmt: skip


def told(of_mask, of_score, q, k, v, layout, text):
    """(tables, sizes, bits) of a call, as the operators take them, for a text with the words and
    the operands that `spoken` gives. SpecError for tensors that no kernel takes."""
    tables, sizes, bits = _tables_and_bits(of_mask, of_score, q, k, v, layout, text)
    if bits is None and " mask=" in text:
        bits = torch.ops.sagebwd.mask_bits(q, k, tables, sizes, layout, text)
    return tables, sizes, bits


def _tables_and_bits(of_mask, of_score, q, k, v, layout, text):
    """The same, with bits that a BlockMask has alone."""
    problem = problem_of(q, k, v, layout, ops.DEVICES)
    found = tables_told(of_mask, of_score, problem, q.device, facts_of(text)[0])
    return *found, of_mask.bits if hasattr(of_mask, "bits") else None


def tables_told(of_mask, of_score, problem, device, named):
    """(tables, sizes) of a call, for the operands that `spoken` gives and what `facts` says of
    tables. SpecError for tensors that no kernel takes."""
    kept = of_mask if hasattr(of_mask, "bits") else None
    rows = [_rows_of(name, indices, is_score, (of_score if is_score else of_mask)[name])
            for name, indices, is_score in named if kept is None or is_score]  # fmt: skip
    if kept is not None:
        batch, heads, _, queries, keys = problem
        kept.check(batch, heads, queries, keys)
        rows = [(kept.tables, kept.table_sizes), *rows]
    return tables_of(rows, device)


def known_form(of_mask, of_score, q, k, v, softmax_scale, layout, text):
    """The form of a call like one that the operators have had, or None. SpecError for some of those
    that they refuse."""
    tables, sizes, bits = _tables_and_bits(of_mask, of_score, q, k, v, layout, text)
    if bits is None and " mask=" in text:
        shape = _sizes_of_bits(problem_of(q, k, v, layout, ops.DEVICES), text)
        bits = tables.new_empty(shape)
    of_bits = () if bits is None else (bits,)
    return _forms.known((q, k, v, tables, *of_bits), (tuple(sizes), softmax_scale, layout, text))
