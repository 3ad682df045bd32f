"""The linear branch by kernels, which take 16-bit tensors on a GPU, heads of 64 or 128 channels,
blocks of 64 or 128 tokens and lists that are a mask of bool. For all else `linear` has PyTorch's
own products.

The formulas and roundings are those of `linear`, except that dQ and dK take features as they are
rounded. Sums over blocks read lists as bits (templates/kernels/linear_sums.cuh and
linear_dsums.cuh).
"""

import functools

import torch

from sagebwd.core import forms, ops
from sagebwd.core.arguments.tensors import DTYPES
from sagebwd.lists import blocks, list_ops
from sagebwd.lists.given import per_head
from sagebwd.numerics.emulation import full_precision
from sagebwd.sla.parts import alone

CHANNELS = (64, 128)
_MOST_IN_A_GRID = 65535
_LEAST_MAJOR = 8  #: compute capability
_EVERYTHING = 128  #: queries and keys of a block where no block is listed


def take(q, k, v, mask, sizes):
    """Whether there are kernels for (batch, heads, tokens, channels) tensors and a mask as
    `linear.lists_or_none` gives it."""
    return (
        q.is_cuda
        and q.dtype in DTYPES
        and q.shape[3] == v.shape[3]
        and q.shape[3] in CHANNELS
        and max(q.shape[:2]) <= _MOST_IN_A_GRID
        and mask.dtype == torch.bool
        and (set(sizes) <= set(blocks.SIZES) or _is_everything(q, k, mask, sizes))
        # Compiled code has no other way on GPUs that have no kernels at all.
        and (torch.compiler.is_compiling()
             or torch.cuda.get_device_properties(q.device).major >= _LEAST_MAJOR)
    )


def _is_everything(q, k, mask, sizes):
    return mask.numel() == 1 and tuple(sizes) == (q.shape[2], k.shape[2])


def readable(t):
    """The tensor, or a copy, with channels side by side and tokens at multiples of 16 bytes."""
    if t.is_contiguous() and not (t.data_ptr() | 2 * t.shape[3]) & 15:
        return t
    steps = [stride for size, stride in zip(t.shape[:3], t.stride()) if size > 1]
    if t.stride(3) != 1 or any(step % 8 for step in steps) or t.data_ptr() % 16:
        return t.clone(memory_format=torch.contiguous_format)  # without gaps it may lie anywhere
    return t


def new_like(t):
    """Memory without gaps for another tensor of this shape."""
    return torch.empty_like(t, memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=1024)
def _strides(shape, strides):
    """Returns those of the first three dimensions, 0 where there is one of something."""
    if len(shape) < 3:
        return (0, 0, 0)
    return tuple(stride if size > 1 else 0 for size, stride in zip(shape[:3], strides))


def place_of(t):
    """Address and strides, as kernels are told them."""
    return t.data_ptr(), _strides(t.shape, t.stride())


def operation_of(q, sizes):
    """The `_core.Attention` whose kernels take tensors like this and blocks of these sizes."""
    text = f"sparse_q={sizes[0]} sparse_kv={sizes[1]}"
    return forms.operation(q.get_device(), text, head_dim=q.shape[3], dtype=q.dtype)


def run(operation, device, kernel, problem, tensors, everything=False):
    """Launches a kernel of an operation. `tensors`: by their names there; None for none."""
    given = [(name, *place_of(t)) for name, t in tensors.items() if t is not None]
    operation.run_linear(kernel, problem, given, everything, forms.stream_of(device))


class _Kernels:
    """Launches the kernels of a call. The forward and the backward are calls of their own."""

    def __init__(self, q, k, v, mask, sizes, smooth_k):
        """`mask`: which blocks are listed; of any one value if nothing is listed and blocks are of
        no size that lists have."""
        self.everything = not set(sizes) <= set(blocks.SIZES)
        self.sizes = (_EVERYTHING,) * 2 if self.everything else tuple(sizes)
        self.q, self.k, self.v = map(readable, (q, k, v))
        batch, heads, queries, self.channels = q.shape
        self.batch, self.heads_kv, self.group = batch, k.shape[1], heads // k.shape[1]
        self.problem = (batch, heads, self.heads_kv, queries, k.shape[2])
        self.lists, self.blocks = map(blocks.count_of, (queries, k.shape[2]), self.sizes)
        self.device = q.get_device()
        self.operation = operation_of(q, self.sizes)
        self.mean = k.mean(2, dtype=torch.float32) if smooth_k else None
        self.bits = None
        if not self.everything:
            pack = list_ops.pack_mask if mask.is_cuda else torch.ops.sagebwd.pack_block_mask
            self.bits = per_head(pack(mask, self.sizes), heads)

    def _run(self, kernel, **tensors):
        run(self.operation, self.device, kernel, self.problem, tensors, self.everything)

    def _matrices(self, count):
        """Returns memory for a matrix and a vector of channels, of each of a key head's blocks."""
        shape = (self.batch * self.heads_kv, count, self.channels * self.channels)
        return self.q.new_empty(shape, dtype=torch.bfloat16), self._vectors(count)

    def _vectors(self, count):
        shape = (self.batch * self.heads_kv, count, self.channels)
        return self.q.new_empty(shape, dtype=torch.float32)

    def _sums(self):
        """H and Z of each block of queries, or of all."""
        h, z = self._matrices(self.blocks)
        self._run("linear_states", k=self.k, v=self.v, given_k_mean=self.mean, key_states=h,
                  key_norms=z)  # fmt: skip
        sums, norms = self._matrices(1 if self.everything else self.group * self.lists)
        self._run("linear_sums", key_states=h, key_norms=z, row_bits=self.bits, query_sums=sums,
                  query_norms=norms)  # fmt: skip
        return sums, norms

    def output(self):
        sums, norms = self._sums()
        out = new_like(self.q)
        self._run("linear_out", q=self.q, query_sums=sums, query_norms=norms, out=out)
        return out

    def gradients(self, dout):
        """(dq, dk, dv)."""
        sums, norms = self._sums()
        dq, dk, dv = map(new_like, (self.q, self.k, self.v))
        d_sums, d_norms = self._matrices(self.group * self.lists)
        self._run("linear_dout", q=self.q, dout=readable(dout), query_sums=sums,
                  query_norms=norms, dq=dq, query_dsums=d_sums, query_dnorms=d_norms)  # fmt: skip
        del sums, norms
        of_keys, of_norms = self._matrices(1 if self.everything else self.blocks)
        self._run("linear_dsums", query_dsums=d_sums, query_dnorms=d_norms, row_bits=self.bits,
                  key_dsums=of_keys, key_dnorms=of_norms)  # fmt: skip
        given = dict(k=self.k, v=self.v, given_k_mean=self.mean, key_dsums=of_keys,
                     key_dnorms=of_norms, dk=dk, dv=dv)  # fmt: skip
        if self.mean is None:
            self._run("linear_dkv", **given)
        else:
            of_mean = self._vectors(self.blocks)
            self._run("linear_dkv", **given, dk_sums=of_mean)
            of_mean = of_mean.sum(1).div_(self.k.shape[2])
            self._run("linear_dk", dk_linear=dk, dk_mean=of_mean, dk=dk)
        return dq, dk, dv


# ---- as operators, for torch.compile -------------------------------------------------------------

_library = ops.library()
_OPTIONS = "Tensor mask, int[2] sizes, bool smooth_k"
_library.define(f"linear_branch_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> Tensor",
                tags=ops.TAGS)  # fmt: skip
_library.define(
    f"linear_branch_backward(Tensor dout, Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> "
    "(Tensor dq, Tensor dk, Tensor dv)",
    tags=ops.TAGS,
)


def _forward(q, k, v, mask, sizes, smooth_k):
    with full_precision(q.device):
        return _Kernels(q, k, v, mask, sizes, smooth_k).output()


def _backward(dout, q, k, v, mask, sizes, smooth_k):
    with full_precision(q.device):
        return _Kernels(q, k, v, mask, sizes, smooth_k).gradients(dout)


_library.impl("linear_branch_forward", _forward, "CUDA")
_library.impl("linear_branch_backward", _backward, "CUDA")


@torch.library.register_fake("sagebwd::linear_branch_forward", lib=_library)
def _forward_fake(q, k, v, mask, sizes, smooth_k):
    return q.new_empty(q.shape)


@torch.library.register_fake("sagebwd::linear_branch_backward", lib=_library)
def _backward_fake(dout, q, k, v, mask, sizes, smooth_k):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def forward(q, k, v, mask, sizes, smooth_k):
    """The linear branch's output."""
    with alone(q.device):
        return torch.ops.sagebwd.linear_branch_forward(q, k, v, mask, sizes, smooth_k)


def backward(dout, q, k, v, mask, sizes, smooth_k):
    """(dq, dk, dv)."""
    with alone(q.device):
        return torch.ops.sagebwd.linear_branch_backward(dout, q, k, v, mask, sizes, smooth_k)
