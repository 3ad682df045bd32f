"""torch.ops.sagebwd.block_sparse_forward, .block_sparse_backward, .pack_block_mask and
.pack_block_indices: attention over lists of blocks as PyTorch operators.

`bits` are the lists: int32 of (batch or 1, heads or 1, blocks of queries, words), where bit b % 32
of word b / 32 lists block b of the keys. There is at least one bit more than there are blocks, and
bit 31 of the last word marks a list that names a block which does not exist.
"""

import functools

import torch

from sagebwd.core import forms, max_logits, ops, options
from sagebwd.core.arguments.shapes import check_scale
from sagebwd.core.arguments.tensors import check_backward, problem_of
from sagebwd.lists.blocks import count_of, words_of

_library = ops.library()
_OPTIONS = "Tensor bits, float? softmax_scale, str layout, str spec"
_library.define(
    f"block_sparse_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=ops.TAGS,
)
_library.define(
    "block_sparse_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor? dlse, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=ops.TAGS,
)
_library.define("pack_block_mask(Tensor mask, int[2] block_size) -> Tensor", tags=ops.TAGS)
_library.define(
    "pack_block_indices(Tensor indices, Tensor? counts, int blocks, int[2] block_size) -> Tensor",
    tags=ops.TAGS,
)


def check_bits(bits, problem, sizes, device):
    """SpecError for a tensor that is not the lists of a problem in blocks of these sizes."""
    batch, heads, _, seq_q, seq_kv = problem
    lists, words = count_of(seq_q, sizes[0]), words_of(count_of(seq_kv, sizes[1]))
    shape = tuple(bits.shape)
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads)
    if not fits or shape[2:] != (lists, words) or bits.dtype != torch.int32:
        raise options.SpecError(
            f"the lists of blocks are {shape} {bits.dtype}; {seq_q} queries and {seq_kv} keys in "
            f"blocks of {tuple(sizes)} need int32 of ({batch} or 1, {heads} or 1, {lists}, {words})"
        )
    if bits.device != device:
        raise options.SpecError(f"the lists of blocks are on {bits.device} and q on {device}: "
                                "move them")  # fmt: skip


# ---- the kernels ---------------------------------------------------------------------------------

_forms = forms.Table()


class ListedForm(forms.Form):
    """A `Form` of calls with lists, which are the last of the tensors told to its passes."""

    def __init__(self, bits, q, k, v, softmax_scale, layout, text, *of_shares):
        if not of_shares and checked(text).linear != "none":
            raise options.SpecError(f"spec={text!r} has linear attention: leave linear= out, or "
                                    "call sparse_linear_forward")  # fmt: skip
        check_bits(bits, problem_of(q, k, v, layout, ops.DEVICES), sizes_of(text), q.device)
        batch, heads = bits.shape[:2]
        strides = bits.stride(0) if batch > 1 else 0, bits.stride(1) if heads > 1 else 0
        self._of_lists = (strides, *of_shares)
        super().__init__(q, k, v, softmax_scale, layout, text, ops.DEVICES)

    def _more(self, packing, k_mean):
        return (k_mean, *packing)


def sizes_of(text):
    """The block's sizes in a line of options."""
    spec = checked(text)
    return spec.sparse_q, spec.sparse_kv


checked = functools.cache(options.spec_of_text)


def as_kernels_read(bits):
    """The lists as kernels read them: those of a head are contiguous."""
    if bits.dim() == 4 and (bits.stride(3) != 1 or bits.stride(2) != bits.shape[3]):
        return bits.contiguous()
    return bits


def _form_of(bits, q, k, v, *told):
    """The form of a call, and the lists as kernels read them."""
    bits = as_kernels_read(bits)
    form = _forms.of((bits, q, k, v), told, lambda: ListedForm(bits, q, k, v, *told))
    return form, (bits,)


def _forward(q, k, v, bits, softmax_scale, layout, spec):
    form, lists = _form_of(bits, q, k, v, softmax_scale, layout, spec)
    return form.forward(q, k, v, packing=lists)


def _backward(dout, q, k, v, out, lse, dlse, bits, softmax_scale, layout, spec):
    check_backward(dout, q, k, v, out, lse, dlse, layout, ops.DEVICES)
    form, lists = _form_of(bits, q, k, v, softmax_scale, layout, spec)
    return form.backward(dout, q, k, v, out, lse, dlse, packing=lists)


def forward(q, k, v, bits, softmax_scale, layout, spec):
    """block_sparse_forward without the dispatcher and autograd, for tensors that `direct` has found
    to be watched by nobody."""
    return _forward(q, k, v, bits, softmax_scale, layout, spec)


def _pack(tensor, blocks, block_size, counts, **given):
    """Lists as bits, by a kernel. `given`: addresses of what they are made of."""
    batch, heads, lists, _ = tensor.shape
    is_needed = tensor.numel() and blocks  # the kernels write all words
    new = tensor.new_empty if is_needed else tensor.new_zeros
    bits = new((batch, heads, lists, words_of(blocks)), dtype=torch.int32)
    if is_needed:
        device = tensor.get_device()
        text = f"sparse_q={block_size[0]} sparse_kv={block_size[1]}"
        told = dict(mask=0, indices=0, width=0, counts=0 if counts is None else counts.data_ptr())
        forms.operation(device, text).pack_lists(
            (batch, heads, lists, blocks), **told | given, row_bits=bits.data_ptr(),
            stream=forms.stream_of(device),
        )  # fmt: skip
    return bits


def pack_mask(mask, block_size):
    """pack_block_mask on a GPU, without the dispatcher."""
    mask = mask.contiguous()
    return _pack(mask, mask.shape[3], block_size, None, mask=mask.data_ptr())


def _pack_indices(indices, counts, blocks, block_size):
    indices, counts = indices.contiguous(), None if counts is None else counts.contiguous()
    return _pack(indices, blocks, block_size, counts, indices=indices.data_ptr(),
                 width=indices.shape[3])  # fmt: skip


# These do the same on the CPU, for the emulation: there are no other kernels.


def _pack_mask_on_cpu(mask, block_size):
    return pack_mask_by_sums(mask)


def pack_mask_by_sums(mask):
    """The bits of a mask, on any device."""
    blocks = mask.shape[3]
    bits = mask.new_zeros((*mask.shape[:3], words_of(blocks) * 32), dtype=torch.int64)
    bits[..., :blocks] = mask != 0
    words = (bits.unflatten(-1, (-1, 32)) << torch.arange(32, device=mask.device)).sum(-1)
    return (words - (words >> 31 << 32)).to(torch.int32)


def _pack_indices_on_cpu(indices, counts, blocks, block_size):
    width = indices.shape[3]
    given = indices.new_full(indices.shape[:3], width) if counts is None else counts
    counted = torch.arange(width, device=indices.device) < given[..., None]
    sound = (indices >= 0) & (indices < blocks)
    mask = indices.new_zeros((*indices.shape[:3], blocks + 1), dtype=torch.int32)
    place = indices.where(counted & sound, blocks).long()
    mask.scatter_(-1, place, torch.ones_like(indices))
    bits = _pack_mask_on_cpu(mask[..., :blocks], block_size)
    wrong = (counted & ~sound).any(-1) | (given < 0) | (given > width)
    bits[..., -1] |= wrong.int() << 31
    return bits


for _key in ("CUDA", "CPU", "SparseCUDA", "SparseCPU", "SparseCsrCUDA", "SparseCsrCPU"):
    _library.impl("block_sparse_forward", _forward, _key)
    _library.impl("block_sparse_backward", _backward, _key)
_library.impl("pack_block_mask", pack_mask, "CUDA")
_library.impl("pack_block_indices", _pack_indices, "CUDA")
_library.impl("pack_block_mask", _pack_mask_on_cpu, "CPU")
_library.impl("pack_block_indices", _pack_indices_on_cpu, "CPU")


# ---- shapes without data -------------------------------------------------------------------------


def _check_told(problem, q, bits, softmax_scale, spec):
    told = checked(spec, head_dim=int(q.shape[3]), dtype=q.dtype)
    check_scale(softmax_scale, q.shape[3], told)
    check_bits(bits, problem, (told.sparse_q, told.sparse_kv), q.device)


@torch.library.register_fake("sagebwd::block_sparse_forward", lib=_library)
def _forward_fake(q, k, v, bits, softmax_scale, layout, spec):
    problem = problem_of(q, k, v, layout, ops.DEVICES)
    _check_told(problem, q, bits, softmax_scale, spec)
    rows = (problem[0], problem[1], problem[3])
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake("sagebwd::block_sparse_backward", lib=_library)
def _backward_fake(dout, q, k, v, out, lse, dlse, bits, softmax_scale, layout, spec):
    problem = check_backward(dout, q, k, v, out, lse, dlse, layout, ops.DEVICES)
    _check_told(problem, q, bits, softmax_scale, spec)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.register_fake("sagebwd::pack_block_mask", lib=_library)
def _pack_mask_fake(mask, block_size):
    return mask.new_empty((*mask.shape[:3], words_of(mask.shape[3])), dtype=torch.int32)


@torch.library.register_fake("sagebwd::pack_block_indices", lib=_library)
def _pack_indices_fake(indices, counts, blocks, block_size):
    return indices.new_empty((*indices.shape[:3], words_of(blocks)), dtype=torch.int32)


# ---- torch.func.vmap, and gradients --------------------------------------------------------------


for _name in ("block_sparse_forward", "block_sparse_backward"):
    torch.library.register_vmap(f"sagebwd::{_name}", ops.one_by_one(
        getattr(torch.ops.sagebwd, _name).default), lib=_library)  # fmt: skip

ops.make_differentiable("block_sparse_forward", "block_sparse_backward")
max_logits.define("block_sparse_forward", "block_sparse_backward", _forward, _forward_fake)
