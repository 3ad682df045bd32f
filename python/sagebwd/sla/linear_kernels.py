"""The linear branch by kernels, which take 16-bit tensors on a GPU, heads of 64 or 128 channels,
blocks of 64 or 128 tokens and lists that are a mask of bool. For all else `linear` has PyTorch's
own products.

The formulas and roundings are those of `linear`, except that dQ and dK take features as they are
rounded, and that the mixture takes the linear output in FP32. Sums over blocks read lists as bits
(templates/kernels/linear_sums.cuh and linear_dsums.cuh).
"""

import functools

import torch

from sagebwd.core import forms, ops
from sagebwd.core.arguments.tensors import DTYPES
from sagebwd.lists import blocks, list_ops
from sagebwd.numerics.emulation import full_precision
from sagebwd.sla.parts import alone

CHANNELS = (64, 128)
_MOST_IN_A_GRID = 65535
_LEAST_MAJOR = 8  #: compute capability
_EVERYTHING = 128  #: queries and keys of a block where no block is listed

#: Whether the forward keeps H and Z for the backward, which takes as much memory as a tensor of Q
#: in blocks of as many queries as there are channels; or the backward forms them again, for about
#: a sixth of the linear branch's time.
KEEPS_SUMS = False


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


class LinearKernels:
    """Launches the kernels of a call. The forward and the backward are calls of their own."""

    def __init__(self, q, k, v, mask, sizes, smooth_k, kept=()):
        """
        Args:
            mask: which blocks are listed, or, int32, what `pack_blocks` gives of it; of any one
                value if nothing is listed and blocks are of no size that lists have.
            kept: what `keep` gave of the same call.
        """
        self.everything = not set(sizes) <= set(blocks.SIZES)
        self.sizes = (_EVERYTHING,) * 2 if self.everything else tuple(sizes)
        self.q, self.k, self.v = map(readable, (q, k, v))
        batch, heads, queries, self.channels = q.shape
        self.batch, self.heads, self.heads_kv = batch, heads, k.shape[1]
        self.problem = (batch, heads, self.heads_kv, queries, k.shape[2])
        self.lists, self.blocks = map(blocks.count_of, (queries, k.shape[2]), self.sizes)
        self.device = q.get_device()
        self.kernels = operation_of(q, self.sizes)
        self.mean, self.norms, self.sums = (*kept, None, None, None)[:3]
        if smooth_k and not kept:
            self.mean = k.mean(2, dtype=torch.float32)
        self.mask = mask

    @functools.cached_property
    def bits(self):
        """Which blocks are listed, as kernels read it, or None where nothing is."""
        if self.everything:
            return None
        bits = self.mask
        if bits.dtype == torch.bool:
            pack = list_ops.pack_mask if bits.is_cuda else torch.ops.sagebwd.pack_block_mask
            bits = pack(bits, self.sizes)
        if bits.shape[1] not in (1, self.heads):  # those of heads of keys
            bits = bits.repeat_interleave(self.heads // self.heads_kv, 1)
        if bits.stride(3) != 1 or bits.stride(2) != bits.shape[3]:
            bits = bits.contiguous()  # a head's lists lie one behind the other
        return bits

    def keep(self):
        """Returns what another `LinearKernels` of this call need not form again: tensors without
        gaps, of sequences and key heads before all else."""
        return (self.mean, *((self.norms, self.sums) if KEEPS_SUMS else ()))

    def _run(self, kernel, **tensors):
        run(self.kernels, self.device, kernel, self.problem, tensors, self.everything)

    def _matrices(self, count):
        """Returns memory for a matrix and a vector of channels, of each of a key head's blocks."""
        shape = (self.batch * self.heads_kv, count, self.channels * self.channels)
        return self.q.new_empty(shape, dtype=torch.bfloat16), self._vectors(count)

    def _vectors(self, count):
        shape = (self.batch * self.heads_kv, count, self.channels)
        return self.q.new_empty(shape, dtype=torch.float32)

    def _sums(self):
        """H and Z of each block of queries, or of all."""
        if self.sums is not None:
            return self.sums, self.norms
        h, z = self._matrices(self.blocks)
        self._run("linear_states", k=self.k, v=self.v, given_k_mean=self.mean, key_states=h,
                  key_norms=z)  # fmt: skip
        sums, norms = self._matrices(
            1 if self.everything else self.heads // self.heads_kv * self.lists)
        self._run("linear_sums", key_states=h, key_norms=z, row_bits=self.bits, query_sums=sums,
                  query_norms=norms)  # fmt: skip
        return sums, norms

    def output(self, exact=None, alpha=None):
        """O_l; or its mixture with O_s, alpha O_s + (1 - alpha) O_l. alpha: (batch, heads, queries)
        in FP32, of any strides."""
        sums, norms = self._sums()
        if KEEPS_SUMS:
            self.sums, self.norms = sums, norms
        out = new_like(self.q)
        self._run("linear_out", q=self.q, query_sums=sums, query_norms=norms, alpha=alpha,
                  sparse_out=None if exact is None else exact.contiguous(), out=out)  # fmt: skip
        return out

    def share(self, dout, alpha, to):
        """dO_s = alpha dO, into `to`."""
        self._run("linear_share", dout=readable(dout), alpha=alpha, sparse_dout=to)

    def of_queries(self, dout, exact=None, alpha=None, *, to=None, more=None, d_alpha=None,
                   d_exact=None):  # fmt: skip
        """The first part of the backward: (dq, what `of_keys` takes).

        Args:
            to: where dq goes, by default memory of its own. It may be `exact`, whose rows are read
                before those of dq are written.
            more: another gradient of q, which is added; it may be `to`.
            d_alpha, d_exact: with alpha, where dalpha of (batch, heads, queries) goes, and
                dO_s = alpha dO if wanted.
        """
        sums, norms = self._sums()
        d_sums, d_norms = self._matrices(self.heads // self.heads_kv * self.lists)
        dq = new_like(self.q) if to is None else to
        self._run("linear_dout", q=self.q, dout=readable(dout), query_sums=sums,
                  query_norms=norms, alpha=alpha, sparse_out=exact, sparse_dout=d_exact,
                  dalpha=d_alpha, dq_more=more, dq=dq, query_dsums=d_sums,
                  query_dnorms=d_norms)  # fmt: skip
        del sums, norms
        found = self._matrices(1 if self.everything else self.blocks)
        self._run("linear_dsums", query_dsums=d_sums, query_dnorms=d_norms, row_bits=self.bits,
                  key_dsums=found[0], key_dnorms=found[1])  # fmt: skip
        return dq, found

    def of_keys(self, sums, dk=None, dv=None):
        """(dk, dv), added to those that are given in their places."""
        d_states, d_norms = sums
        of_dv = new_like(self.v) if dv is None else dv
        given = dict(k=self.k, v=self.v, given_k_mean=self.mean, key_dsums=d_states,
                     key_dnorms=d_norms, dv_more=dv, dv=of_dv)  # fmt: skip
        if self.mean is None:
            of_dk = new_like(self.k) if dk is None else dk
            self._run("linear_dkv", **given, dk_more=dk, dk=of_dk)
            return of_dk, of_dv
        linear, of_mean = new_like(self.k), self._vectors(self.blocks)
        self._run("linear_dkv", **given, dk=linear, dk_sums=of_mean)
        of_mean = of_mean.sum(1).div_(self.k.shape[2])
        of_dk = linear if dk is None else dk
        self._run("linear_dk", dk_linear=linear, dk_more=dk, dk_mean=of_mean, dk=of_dk)
        return of_dk, of_dv


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
        return LinearKernels(q, k, v, mask, sizes, smooth_k).output()


def _backward(dout, q, k, v, mask, sizes, smooth_k):
    with full_precision(q.device):
        kernels = LinearKernels(q, k, v, mask, sizes, smooth_k)
        dq, sums = kernels.of_queries(dout)
        return dq, *kernels.of_keys(sums)


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
