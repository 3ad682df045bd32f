"""torch.ops.sagebwd.interval_bits, .interval_forward and .interval_backward: attention whose keys
have intervals of queries that do not see them (FlashMask, arXiv 2410.01359, section 4).

`intervals` is int32 of (batch or 1, heads_kv or 1, keys, columns), as `Intervals` of sagebwd.masks
describes it. `bits` says which blocks of scores somebody sees, and which of them intervals hide in
part: int32 of (batch or 1, heads or 1, blocks of queries, words), as runtime/attention.h has it.
One launch makes them of `intervals`, on the device. `spec` is a line of options with the number of
columns, `intervals=`.
"""

import functools
import re

import torch

from sagebwd.core import forms, max_logits, ops, options
from sagebwd.core.arguments.shapes import check_scale
from sagebwd.core.arguments.tensors import check_backward, problem_of

_library = ops.library()
_OPTIONS = "Tensor intervals, Tensor bits, float? softmax_scale, str layout, str spec"
_library.define("interval_bits(Tensor intervals, int heads, int queries, str spec) -> Tensor",
                tags=ops.TAGS)  # fmt: skip
_library.define(f"interval_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) "
                "-> (Tensor out, Tensor lse)", tags=ops.TAGS)  # fmt: skip
_library.define("interval_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
                f"Tensor lse, Tensor? dlse, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
                tags=ops.TAGS)  # fmt: skip


@functools.cache
def _checked(text, **tensors):
    """The spec of a line of options. SpecError in words of the caller's arguments."""
    try:
        return options.spec_of_text(text, **tensors)
    except options.SpecError as error:
        message = re.sub(r"^intervals = (\d+) is", r"startend_row_indices of \1 columns is",
                         str(error))  # fmt: skip
        if "with a window" in message:
            message += "; sagebwd.masks.window_and_global says a window by intervals"
        raise options.SpecError(message) from None


def _sizes_of_bits(intervals, heads, queries, spec):
    """The shape of the bits; those of all heads where each has its own intervals."""
    told = _checked(spec)
    batch, heads_kv, keys, _ = intervals.shape
    blocks = -(keys // -told.sparse_kv)
    of_heads = heads if heads_kv > 1 else 1
    return batch, of_heads, -(queries // -told.sparse_q), 2 * (blocks // 32 + 1)


def _check(problem, intervals, bits, spec, device):
    batch, heads, heads_kv, queries, keys = problem
    columns = _checked(spec).intervals
    shape = tuple(intervals.shape)
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads_kv)
    if not fits or shape[2:] != (keys, columns) or intervals.dtype != torch.int32:
        raise options.SpecError(
            f"startend_row_indices is {intervals.dtype} of {shape}; for these q and k it is "
            f"torch.int32 of ({batch} or 1, {heads_kv} or 1, {keys}, {columns})"
        )
    if intervals.device != device:
        raise options.SpecError(f"startend_row_indices is on {intervals.device} and q on {device}: "
                                "move it")  # fmt: skip
    expected = _sizes_of_bits(intervals, heads, queries, spec)
    if tuple(bits.shape) != expected or bits.dtype != torch.int32 or bits.device != device:
        raise options.SpecError(f"the bits are {bits.dtype} of {tuple(bits.shape)} on "
                                f"{bits.device}; interval_bits gives torch.int32 of {expected}")  # fmt: skip


def _readable(intervals):
    """As kernels read it: a key's numbers lie together, aligned, and keys one behind the other."""
    columns = intervals.shape[3]
    if intervals.is_contiguous() and not intervals.data_ptr() % (4 * columns):
        return intervals
    steps = intervals.stride()
    lies_right = (
        steps[3] == 1 and steps[2] == columns and not any(step % columns for step in steps[:2])
        and not intervals.data_ptr() % (4 * columns)
    )  # fmt: skip
    return intervals if lies_right else intervals.clone(memory_format=torch.contiguous_format)


def strides_of_shared(t):
    """Those of sequences and heads, 0 where they share what there is."""
    return tuple(step if size > 1 else 0 for size, step in zip(t.shape, t.stride()[:2]))


class _Form(forms.Form):
    """A `Form` of calls with intervals. They and their bits are the last of its passes' tensors."""

    _NO_SHARES = (0, 0, 0, 1, 0, 0)
    of_backward = "interval_backward"

    def __init__(self, q, k, v, intervals, bits, softmax_scale, layout, text):
        problem = problem_of(q, k, v, layout, ops.DEVICES)
        _check(problem, intervals, bits, text, q.device)
        self._of_lists = strides_of_shared(bits), self._NO_SHARES, strides_of_shared(intervals)
        self._sizes_of_bits = tuple(bits.shape)
        self._beside = forms.about(intervals), forms.about(bits)
        super().__init__(q, k, v, softmax_scale, layout, text, ops.DEVICES)

    def _more(self, packing, k_mean):
        return (k_mean, *packing)

    def new_beside(self, q, given):
        """(intervals, bits) of a call past the operators."""
        (intervals,) = given
        readable, bits = _readable(intervals), intervals.new_empty(self._sizes_of_bits)
        self._pack(readable.data_ptr(), bits.data_ptr(), self._stream())
        return intervals, bits

    @functools.cached_property
    def _pack(self):
        """Writes bits: a function of the addresses of intervals and bits, and of a stream."""
        (_, heads_kv, *_), *_ = self._beside[0]
        operation = forms.operation(self._device, self.given[2])
        problem = (*self._sizes_of_bits[:2], heads_kv, *self._problem[3:])
        pack, strides = operation.pack_intervals, self._of_lists[2]
        return lambda intervals, *places: pack(problem, intervals, strides, *places)

    def packing_of(self, beside):
        intervals, bits = beside
        return bits, _readable(intervals)

    def told_of(self, beside):
        return beside

    def saved_beside(self, beside):
        intervals, bits = beside
        return (forms.about(_readable(intervals)), forms.about(bits)) == self._beside


_forms = forms.Table()


def known_form(intervals, q, k, v, softmax_scale, layout, text):
    """The form of a call like one that the operators have had, or None. SpecError and TypeError for
    some of those that they refuse."""
    _, heads, _, queries, _ = problem_of(q, k, v, layout, ops.DEVICES)
    spec = spec_of(intervals, q, text)
    if 0 in intervals.shape or queries == 0:
        return None
    bits = intervals.new_empty(_sizes_of_bits(intervals, heads, queries, spec))
    return _forms.known((q, k, v, _readable(intervals), bits), (softmax_scale, layout, spec))


def _form_of(q, k, v, intervals, bits, *told):
    """The form of a call, and its tensors as kernels read them."""
    intervals, bits = _readable(intervals), bits.contiguous()
    form = _forms.of((q, k, v, intervals, bits), told,
                     lambda: _Form(q, k, v, intervals, bits, *told))  # fmt: skip
    return form, (bits, intervals)


def _forward(q, k, v, intervals, bits, softmax_scale, layout, spec):
    form, more = _form_of(q, k, v, intervals, bits, softmax_scale, layout, spec)
    return form.forward(q, k, v, packing=more)


def _backward(dout, q, k, v, out, lse, dlse, intervals, bits, softmax_scale, layout, spec):
    check_backward(dout, q, k, v, out, lse, dlse, layout, ops.DEVICES)
    form, more = _form_of(q, k, v, intervals, bits, softmax_scale, layout, spec)
    return form.backward(dout, q, k, v, out, lse, dlse, packing=more)


def _bits(intervals, heads, queries, spec):
    sizes = _sizes_of_bits(intervals, heads, queries, spec)
    if 0 in intervals.shape or queries == 0:
        return intervals.new_zeros(sizes)
    bits = intervals.new_empty(sizes)
    intervals, device = _readable(intervals), intervals.get_device()
    problem = (sizes[0], sizes[1], intervals.shape[1], queries, intervals.shape[2])
    forms.operation(device, spec).pack_intervals(
        problem, intervals.data_ptr(), strides_of_shared(intervals), bits.data_ptr(),
        forms.stream_of(device),
    )  # fmt: skip
    return bits


for _key in ("CUDA", "CPU", "SparseCUDA", "SparseCPU", "SparseCsrCUDA", "SparseCsrCPU"):
    _library.impl("interval_forward", _forward, _key)
    _library.impl("interval_backward", _backward, _key)
    _library.impl("interval_bits", _bits, _key)


# ---- shapes without data -------------------------------------------------------------------------


@torch.library.register_fake("sagebwd::interval_bits", lib=_library)
def _bits_fake(intervals, heads, queries, spec):
    return intervals.new_empty(_sizes_of_bits(intervals, heads, queries, spec))


def _check_told(problem, q, intervals, bits, softmax_scale, spec):
    check_scale(softmax_scale, q.shape[3], _checked(spec, head_dim=int(q.shape[3]), dtype=q.dtype))
    _check(problem, intervals, bits, spec, q.device)


@torch.library.register_fake("sagebwd::interval_forward", lib=_library)
def _forward_fake(q, k, v, intervals, bits, softmax_scale, layout, spec):
    problem = problem_of(q, k, v, layout, ops.DEVICES)
    _check_told(problem, q, intervals, bits, softmax_scale, spec)
    rows = (problem[0], problem[1], problem[3])
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake("sagebwd::interval_backward", lib=_library)
def _backward_fake(dout, q, k, v, out, lse, dlse, intervals, bits, softmax_scale, layout, spec):
    problem = check_backward(dout, q, k, v, out, lse, dlse, layout, ops.DEVICES)
    _check_told(problem, q, intervals, bits, softmax_scale, spec)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# ---- torch.func.vmap, and gradients --------------------------------------------------------------

for _name in ("interval_forward", "interval_backward"):
    torch.library.register_vmap(f"sagebwd::{_name}", ops.one_by_one(
        getattr(torch.ops.sagebwd, _name).default), lib=_library)  # fmt: skip


@torch.library.register_vmap("sagebwd::interval_bits", lib=_library)
def _bits_of_each(info, in_dims, intervals, heads, queries, spec):
    """One launch for all, as for the sequences of a batch."""
    each = intervals.movedim(in_dims[0], 0)
    bits = torch.ops.sagebwd.interval_bits(each.flatten(0, 1), heads, queries, spec)
    return bits.unflatten(0, each.shape[:2]), 0


ops.make_differentiable("interval_forward", "interval_backward")
max_logits.define("interval_forward", "interval_backward", _forward, _forward_fake)


# ---- calls ---------------------------------------------------------------------------------------


def told(intervals, q, k, v, layout, text):
    """(intervals, bits, spec) of a call, as the operators take them.

    Raises SpecError for tensors that no kernel takes, and TypeError for what is no tensor.
    """
    _, heads, _, queries, _ = problem_of(q, k, v, layout, ops.DEVICES)
    spec = spec_of(intervals, q, text)
    intervals = forms.saveable(intervals)
    return intervals, torch.ops.sagebwd.interval_bits(intervals, heads, queries, spec), spec


def spec_of(intervals, q, text):
    """The line of options of a call with these intervals, if they are such; else as `told`."""
    if not isinstance(intervals, torch.Tensor):
        raise TypeError(f"startend_row_indices is {options.a_kind(intervals)}; pass an int32 torch "
                        "tensor, such as the startend_row_indices of what sagebwd.masks makes")  # fmt: skip
    if intervals.dim() != 4 or intervals.shape[3] == 0:
        raise options.SpecError(f"startend_row_indices has shape {tuple(intervals.shape)}; it is "
                                "(batch or 1, heads_kv or 1, keys, columns), with 1, 2 or 4 "
                                "columns")  # fmt: skip
    if intervals.dtype != torch.int32:
        raise options.SpecError(f"startend_row_indices is {intervals.dtype}; pass torch.int32: "
                                "startend_row_indices.int()")  # fmt: skip
    if intervals.device != q.device:
        raise options.SpecError(f"startend_row_indices is on {intervals.device} and q on "
                                f"{q.device}: move it")  # fmt: skip
    return f"{text} intervals={intervals.shape[3]}"
