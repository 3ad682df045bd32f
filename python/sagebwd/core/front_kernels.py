"""torch.ops.sagebwd.front_forward and .front_backward: norm and RoPE of q and k, by kernels or as
PyTorch computes them.

The kernels (templates/kernels/front.cuh, front_gradients.cuh) take 16-bit tensors on a GPU whose
heads have 32 to 512 channels, a multiple of 8. Both operators give contiguous tensors in the layout
that they are told. `core/front` checks what they are given.
"""

import functools

import torch

from sagebwd import _core
from sagebwd.core import forms, ops, options
from sagebwd.core.arguments.tensors import DTYPES

_LEAST_MAJOR = 8  #: compute capability
_LEAST_CHANNELS, _MOST_CHANNELS = 32, 512
MOST_HEADS, MOST_SEQUENCES = 32767, 65535

# Gains are (channels,) or (heads, channels), 1/rms (batch, tokens) or (batch, heads, tokens), and
# tables (batch, tokens, pairs), all of the type of arithmetic. `normed`: q and k.
_GIVEN = (
    "Tensor q, Tensor k, Tensor? q_gain, Tensor? k_gain, Tensor? q_inv_rms, Tensor? k_inv_rms, "
    "Tensor? q_cos, Tensor? q_sin, Tensor? k_cos, Tensor? k_sin, bool[2] normed, float eps, "
    "SymInt rope_begin, bool interleaved, str layout"
)
_library = ops.library()
_library.define(f"front_forward({_GIVEN}) -> (Tensor of_q, Tensor of_k)", tags=ops.TAGS)
_library.define(
    f"front_backward(Tensor dy_q, Tensor dy_k, {_GIVEN}, bool[4] wanted) -> "
    "(Tensor dq, Tensor dk, Tensor dq_gain, Tensor dk_gain, Tensor dq_inv_rms, Tensor dk_inv_rms)",
    tags=ops.TAGS,
)


def wide(dtype):
    """The type of arithmetic: FP32, or FP64 for tensors of FP64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bhsd(t, layout):
    """The tensor of a layout as (batch, heads, tokens, channels), a view."""
    return t.transpose(1, 2) if layout == "bshd" else t


def _sides(q, k, q_gain, k_gain, q_inv_rms, k_inv_rms, q_cos, q_sin, k_cos, k_sin, normed):
    """What belongs to the queries, and what to the keys."""
    return ((q, q_gain, q_inv_rms, q_cos, q_sin, normed[0]),
            (k, k_gain, k_inv_rms, k_cos, k_sin, normed[1]))  # fmt: skip


# ---- as PyTorch computes it ----------------------------------------------------------------------


def _rotated(n, cos, sin, begin, interleaved):
    """(batch, heads, tokens, channels), rotated from `begin` on."""
    if cos is None:
        return n
    cos, sin, pairs = cos.unsqueeze(1), sin.unsqueeze(1), cos.shape[-1]
    part = n[..., begin : begin + 2 * pairs]
    if interleaved:
        a, b = part[..., ::2], part[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = part[..., :pairs], part[..., pairs:]
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([n[..., :begin], turned, n[..., begin + 2 * pairs :]], -1)


def _factor(x, inv_rms, normed, eps):
    """1/rms of each token, (batch, heads or 1, tokens, 1); None without a norm."""
    if not normed:
        return None
    if inv_rms is None:
        return (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (inv_rms.unsqueeze(1) if inv_rms.dim() == 2 else inv_rms).unsqueeze(-1)


def _over_heads(gain):
    """The gain beside (batch, heads, tokens, channels)."""
    return gain if gain.dim() == 1 else gain.unsqueeze(1)


def _forward_side(side, eps, begin, interleaved, layout):
    t, gain, inv_rms, cos, sin, normed = side
    x = bhsd(t, layout).to(wide(t.dtype))
    factor = _factor(x, inv_rms, normed, eps)
    n = x if factor is None else x * factor
    if gain is not None:
        n = n * _over_heads(gain)
    y = bhsd(_rotated(n, cos, sin, begin, interleaved), layout)
    return _new(t).copy_(y)


def _backward_side(dy, side, eps, begin, interleaved, layout, wanted):
    t, gain, inv_rms, cos, sin, normed = side
    x, dn = (bhsd(s, layout).to(wide(t.dtype)) for s in (t, dy))
    dn = _rotated(dn, cos, None if sin is None else -sin, begin, interleaved)
    factor = _factor(x, inv_rms, normed, eps)
    dgain, dinv_rms = (t.new_empty(0, dtype=x.dtype) for _ in range(2))
    dx = dn
    if normed:
        unit = x * factor
        h = dn if gain is None else dn * _over_heads(gain)
        if wanted[0]:
            dgain = (dn * unit).sum((0, 2) if gain.dim() == 2 else (0, 1, 2))
        if inv_rms is None:
            dx = factor * (h - unit * (h * unit).mean(-1, keepdim=True))
        else:
            dx = factor * h
            if wanted[1]:
                dinv_rms = (h * x).sum(-1)
                dinv_rms = dinv_rms.sum(1) if inv_rms.dim() == 2 else dinv_rms
    return _new(t).copy_(bhsd(dx, layout)), dgain, dinv_rms


def _new(t):
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _forward_without_kernels(*given):
    return tuple(_forward_side(side, *given[11:]) for side in _sides(*given[:11]))


def _backward_without_kernels(dy_q, dy_k, *given):
    *given, wanted = given
    of_q, of_k = (
        _backward_side(dy, side, *given[11:], wanted[i::2])
        for i, (dy, side) in enumerate(zip((dy_q, dy_k), _sides(*given[:11])))
    )
    return tuple(x for pair in zip(of_q, of_k) for x in pair)


# ---- the kernels ---------------------------------------------------------------------------------


@functools.cache
def _has_kernels(device):
    return torch.cuda.get_device_properties(device).major >= _LEAST_MAJOR


def has_width(channels):
    """Whether kernels take heads of so many channels."""
    return _LEAST_CHANNELS <= channels <= _MOST_CHANNELS and channels % 8 == 0


def _suits(q, k, cos, begin, interleaved, layout):
    """Whether the kernels take such tensors. Four neighbouring channels lie in one half."""
    batch, heads = bhsd(q, layout).shape[:2]
    if not (
        q.dtype in DTYPES
        and has_width(q.shape[3])
        and heads <= MOST_HEADS
        and batch <= MOST_SEQUENCES
        and q.numel() > 0
        and k.numel() > 0
    ):
        return False
    return cos is None or (begin % 4 == 0 and cos.shape[-1] % (2 if interleaved else 4) == 0)


def readable(t):
    """The tensor of four dimensions, or a copy, with channels side by side, which are the last, and
    all vectors of channels at multiples of 16 bytes."""
    steps = [stride for size, stride in zip(t.shape[:3], t.stride()) if size > 1]
    if t.stride(3) == 1 and not any(step % 8 for step in steps) and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _aligned(t):
    """FP32 without gaps, at a multiple of 16 bytes; None for None."""
    if t is None:
        return None
    t = t.to(torch.float32).contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def are_fit(cos, sin):
    """Whether the strides of tables of (batch or 1, tokens, pairs) are such as kernels read."""
    return cos.stride() == sin.stride() and cos.stride(2) == 1 and not any(
        step % 4 for size, step in zip(cos.shape[:2], cos.stride()) if size > 1)  # fmt: skip


def tables(cos, sin):
    """Both in FP32 with the same strides, which are multiples of 4."""
    if cos is None:
        return None, None
    cos, sin = cos.to(torch.float32), sin.to(torch.float32)
    if are_fit(cos, sin) and not (cos.data_ptr() | sin.data_ptr()) % 16:
        return cos, sin
    made = []
    for t in (cos, sin):  # an odd number of twos is given another row of memory
        whole = t.new_empty((*t.shape[:2], -(-t.shape[2] // 4) * 4))
        made.append(whole[..., : t.shape[2]].copy_(t))
    return made


def _address(t):
    return 0 if t is None else t.data_ptr()


def _place(t, layout):
    t = bhsd(t, layout)
    return t.data_ptr(), steps(t, 3)


def steps(t, count):
    """The strides of the first dimensions, 0 where there is one of something."""
    return tuple(step if size > 1 else 0 for size, step in zip(t.shape[:count], t.stride()))


def _check_side(q, y, x, gain, inv_rms, cos, sin, layout):
    """SpecError for what kernels would read beyond its end. `core/front` has checked what callers
    pass, but not what hooks for saved tensors bring back, and what the operators are called with.
    """
    batch, heads, tokens, channels = bhsd(x, layout).shape
    pairs = None if cos is None else cos.shape[-1]
    for name, t, shapes in (
        ("x", x, (x.shape,)),
        ("y", y, (x.shape,)),
        ("gain", gain, ((channels,), (heads, channels))),
        ("1/rms", inv_rms, ((batch, tokens), (batch, heads, tokens))),
        ("cos", cos, ((batch, tokens, pairs),)),
        ("sin", sin, ((batch, tokens, pairs),)),
    ):
        if t is None:
            continue
        wrong_type = name in ("x", "y") and t.dtype != q.dtype
        if tuple(t.shape) not in shapes or wrong_type or t.device != q.device:
            raise options.SpecError(
                f"{name} is {t.dtype} of {tuple(t.shape)} on {t.device} beside q of {q.dtype} on "
                f"{q.device}: pass {' or '.join(str(tuple(shape)) for shape in shapes)}; a hook "
                "for saved tensors has to bring back what it was given"
            )


class _Call:
    """A launch's arguments. It keeps what it made of tensors until it has been launched."""

    def __init__(self, ys, given):
        q, k = given[:2]
        self.eps, self.begin, self.interleaved, self.layout = given[11:]
        of_q, of_k = (bhsd(t, self.layout).shape for t in (q, k))
        self.problem = (*of_q[:2], of_k[1], of_q[2], of_k[2])
        self.device = q.get_device()
        self.operation = forms.operation(self.device, "", head_dim=q.shape[3], dtype=q.dtype)
        self.kept, self.sides, self.pairs = [], [], 0
        for y, side in zip(ys, _sides(*given[:11])):
            _check_side(q, y, *side[:-1], self.layout)
            self.sides.append(self._side(y, *side))

    def _side(self, y, x, gain, inv_rms, cos, sin, normed):
        x, gain, inv_rms = readable(x), _aligned(gain), _aligned(inv_rms)
        cos, sin = tables(cos, sin)
        self.kept += [x, y, gain, inv_rms, cos, sin]
        table = (0, 0, 0, 0)
        if cos is not None:
            self.pairs = cos.shape[2]
            table = (cos.data_ptr(), sin.data_ptr(), *steps(cos, 2))
        return (
            _place(x, self.layout), _place(y, self.layout), normed,
            (_address(gain), gain is not None and gain.dim() == 2),
            (_address(inv_rms), inv_rms is not None and inv_rms.dim() == 3), table,
        )  # fmt: skip

    def arguments(self):
        rope = (self.begin, 2 * self.pairs, self.interleaved)
        return (self.operation, self.problem, *self.sides, self.eps, rope)

    def stream(self):
        return forms.stream_of(self.device)


def _forward(*given):
    ys = tuple(_new(t) for t in given[:2])
    call = _Call(ys, given)
    _core.front(*call.arguments(), call.stream())
    return ys


def _backward(dy_q, dy_k, *given):
    *given, wanted = given
    call = _Call([readable(dy) for dy in (dy_q, dy_k)], given)
    floats = functools.partial(given[0].new_empty, dtype=torch.float32)
    dx = tuple(_new(t) for t in given[:2])
    gains = [floats(given[2 + i].shape if wanted[i] else 0) for i in range(2)]
    of_parts = _core.front_part_floats(call.operation, call.problem)
    parts = [floats(of_parts[i] if wanted[i] else 0) for i in range(2)]
    batch, heads, heads_kv, queries, keys = call.problem
    shapes = ((batch, heads, queries), (batch, heads_kv, keys))
    inv_rms = [floats(shapes[i] if wanted[2 + i] else 0) for i in range(2)]
    of = [(_place(dx[i], call.layout),
           [t.data_ptr() if t.numel() else 0 for t in (gains[i], parts[i], inv_rms[i])])
          for i in range(2)]  # fmt: skip
    _core.front_gradients(*call.arguments(), *of, call.stream())
    for i in range(2):
        if wanted[2 + i] and given[4 + i].dim() == 2:
            inv_rms[i] = inv_rms[i].sum(1)
    return (*dx, *gains, *inv_rms)


def may_run(q):
    """Whether there are kernels on the tensor's device."""
    return q.is_cuda and _has_kernels(q.get_device())


def takes(q, k, *given):
    """Whether kernels take such arguments of the operators; some tensors may have to be copied."""
    return may_run(q) and _suits(q, k, given[4], *given[10:]) and (
        given[6] is None or _suits(q, k, given[6], *given[10:]))  # fmt: skip


def _forward_on_gpu(*given):
    return (_forward if takes(*given) else _forward_without_kernels)(*given)


def _backward_on_gpu(dy_q, dy_k, *given):
    run = _backward if takes(*given[:-1]) else _backward_without_kernels
    return run(dy_q, dy_k, *given)


_library.impl("front_forward", _forward_on_gpu, "CUDA")
_library.impl("front_backward", _backward_on_gpu, "CUDA")
_library.impl("front_forward", _forward_without_kernels, "CPU")
_library.impl("front_backward", _backward_without_kernels, "CPU")


# ---- shapes without data -------------------------------------------------------------------------


@torch.library.register_fake("sagebwd::front_forward", lib=_library)
def _forward_fake(q, k, *given):
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.register_fake("sagebwd::front_backward", lib=_library)
def _backward_fake(dy_q, dy_k, q, k, q_gain, k_gain, q_inv_rms, k_inv_rms, *given):
    of = functools.partial(q.new_empty, dtype=wide(q.dtype))
    shapes = (t.shape if need else 0 for t, need in
              zip((q_gain, k_gain, q_inv_rms, k_inv_rms), given[-1]))  # fmt: skip
    return (q.new_empty(q.shape), k.new_empty(k.shape), *map(of, shapes))
