"""The kernels' numerics in plain PyTorch, on any device, with any of the products in INT8.

For what kernels cannot be asked: negative controls in training (dP in INT8, no smoothing of K), the
error of one product at a time, machines without a GPU. Every quantiser is the kernels' bit for bit;
integers enter the matrix products already multiplied by their scales, which differs from the
kernels in FP32 rounding only. Sources: SageBwd (arXiv 2603.02170, Algorithms 1 and 2) and, for the
rules it leaves open, the C++ reference, which the tests compare with this file.
"""

import contextlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sagebwd import _core, options
from sagebwd.options import SpecError

#: Elements of one (queries x keys) matrix that are worked on at once; about ten live at a time.
CHUNK_ELEMENTS = 1 << 24

_LOG2E = 1.44269504088896340736
_LOG2_255 = math.log2(255.0)
_LN2 = math.log(2.0)
_SMALLEST = 2.0**-119  # a group below this quantises to zero


@dataclass(frozen=True)
class Rules:
    """What one emulated attention computes."""

    causal: str  #: 'none', 'top-left' or 'bottom-right'
    scale: float
    granularity: str
    group_q: int
    group_kv: int
    smooth_k: bool
    rotate: bool
    plan: frozenset  #: the INT8 products, of options.PRODUCTS
    dtype: torch.dtype  #: of inputs, outputs and 16-bit operands
    math: torch.dtype  #: of everything between, float32 as in the kernels or float64

    @property
    def scale_log2(self):
        """softmax_scale * log2(e), rounded to FP32 as the kernels have it."""
        scale = torch.tensor(self.scale, dtype=torch.float32)
        return float(scale * torch.tensor(_LOG2E, dtype=torch.float32))


def rules_of(
    head_dim,
    *,
    causal,
    softmax_scale,
    granularity,
    group_q,
    group_kv,
    smooth_k,
    rotate,
    plan,
    dtype,
    math_dtype,
):
    """Checked `Rules`; raises SpecError. Groups may have any size here."""
    defaults = _core.Spec(granularity=granularity)
    for name, group in (("group_q", group_q), ("group_kv", group_kv)):
        if group is not None and (type(group) is not int or group < 1):
            raise SpecError(f"{name}={group!r}: pass a positive number of tokens, or None")
    if dtype not in (torch.bfloat16, torch.float16):
        raise SpecError(f"q, k and v are {dtype}: the emulation takes torch.bfloat16 or "
                        "torch.float16, as the kernels do (trace() rounds float32 inputs)")
    if math_dtype not in (torch.float32, torch.float64):
        raise SpecError(f"math_dtype={math_dtype}: pass torch.float32 or torch.float64")
    return Rules(
        causal=causal,
        scale=options.check_softmax_scale(softmax_scale, head_dim),
        granularity=granularity,
        group_q=group_q or defaults.group_q,
        group_kv=group_kv or defaults.group_kv,
        smooth_k=bool(smooth_k),
        rotate=bool(rotate),
        plan=options.plan_of(plan),
        dtype=dtype,
        math=math_dtype,
    )


# ---- quantisers ----------------------------------------------------------------------------------


def _tiles(x, rows, columns, fill=0.0):
    """The last two axes as (row tile, row, column tile, column), padded to whole tiles."""
    m, n = x.shape[-2:]
    if m % rows or n % columns:
        x = F.pad(x, (0, -n % columns, 0, -m % rows), value=fill)
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _untiled(tiles, m, n):
    return tiles.flatten(-2).flatten(-3, -2)[..., :m, :n]


def _psi(tiles, unsigned=False):
    """Integers and scales with one scale per tile: psi of the paper, in FP32.

    A tile whose maximum is not finite gets the scale NaN: it stays visible.
    """
    tiles = tiles.float()
    limit = 255 if unsigned else 127
    top = tiles.abs().amax((-3, -1), keepdim=True)
    delta = top * (1.0 / limit)
    # Not 127 / top: PyTorch computes that as a reciprocal times 127, which rounds twice.
    inverse = torch.full_like(top, limit).div(top)
    integers = (tiles * inverse).round().clamp(0 if unsigned else -limit, limit)
    finite, tiny = top.isfinite(), top < _SMALLEST
    delta = torch.where(finite, delta.masked_fill(tiny, 0), torch.nan)
    return integers.masked_fill(tiny | ~finite, 0), delta


def _quantized(x, rows, columns, math_dtype, unsigned=False):
    """`x` after quantisation with one scale per rows x columns tile of its last two axes."""
    integers, delta = _psi(_tiles(x, rows, columns), unsigned)
    return _untiled(integers.to(math_dtype) * delta, *x.shape[-2:])


def _token_integers(x, group):
    """Integers and one scale per token, (…, tokens, 1); tokens of a group share theirs."""
    m, n = x.shape[-2:]
    integers, delta = _psi(_tiles(x, group, n))
    return _untiled(integers, m, n), delta[..., 0, 0].repeat_interleave(group, -2)[..., :m, :]


def hadamard(x):
    """The normalised Hadamard transform of the last axis (Sylvester order), in FP32.

    In blocks of the largest power of two that divides the axis.
    """
    shape, size = x.shape, x.shape[-1] & -x.shape[-1]
    x = x.unflatten(-1, (-1, size))
    stride = 1
    while stride < size:
        x = x.unflatten(-1, (-1, 2, stride))
        low, high = x.unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        stride *= 2
    return (x * size**-0.5).reshape(shape)


# ---- the operation on a chunk of heads: q (n, G, M, D), k and v (n, 1, N, D) ---------------------


def _visible(causal, m, n, device):
    """A boolean (M, N) matrix, or None where every key is visible."""
    if causal == "none":
        return None
    offset = n - m if causal == "bottom-right" else 0
    return torch.arange(n, device=device) <= torch.arange(m, device=device)[:, None] + offset


class _Scores:
    """S in the log2 domain and what the passes share with it."""

    def __init__(self, q, k, rules):
        self.rules = rules
        self.q, self.k = q.float(), k.float()
        self.k_mean = self.k.mean(-2, keepdim=True) if rules.smooth_k else None
        self.k_smooth = self.k - self.k_mean if rules.smooth_k else self.k
        self.visible = _visible(rules.causal, q.shape[-2], k.shape[-2], q.device)
        #: what quantised scores lack of the raw ones, (n, G, M, 1): tau q . mean(K)
        self.shift = None
        if rules.smooth_k and "s" in rules.plan:
            self.shift = (self.q * self.k_mean).sum(-1, keepdim=True) * rules.scale

    def log2(self):
        rules = self.rules
        if "s" in rules.plan:
            q, k = self.q, self.k_smooth
            if rules.rotate:
                q, k = hadamard(q), hadamard(k)
            row = rules.granularity == "row"
            q, q_scale = _token_integers(q, 1 if row else rules.group_q)
            k, k_scale = _token_integers(k, 1 if row else rules.group_kv)
            x = (q.to(rules.math) @ k.to(rules.math).mT) * k_scale.mT
            s = x * (q_scale * rules.scale_log2)
        else:
            s = (self.q.to(rules.math) @ self.k.to(rules.math).mT) * rules.scale_log2
        return s if self.visible is None else s.masked_fill(~self.visible, -torch.inf)


def _forward(q, k, v, rules):
    """out (n, G, M, D) and lse (n, G, M), not rounded to the output type."""
    scores = _Scores(q, k, rules)
    s = scores.log2()
    m, n = s.shape[-2:]
    tiles = _tiles(s, 1, rules.group_kv, fill=-torch.inf)
    tile_max = tiles.amax(-1, keepdim=True)
    unseen = tile_max == -torch.inf
    p255 = (tiles - tile_max.masked_fill(unseen, 0) + _LOG2_255).exp2()
    row_max = tile_max.amax(-2, keepdim=True)
    weight = (tile_max - row_max.masked_fill(row_max == -torch.inf, 0)).exp2()
    total = (p255 * weight).sum((-3, -2, -1)).unsqueeze(-1)
    v = v.float()
    if "pv" in rules.plan:
        p = p255.clamp(0, 255).round()
        v = _quantized(v, *_transposed_tile(rules, rules.group_kv, v), rules.math)
    else:
        p = p255.to(rules.dtype).to(rules.math)
    out = _untiled(p * weight, m, n) @ v.to(rules.math)
    row_max = row_max[..., 0, 0]
    nothing = row_max == -torch.inf
    out = (out / total).masked_fill(nothing, 0)
    lse = (row_max + (total / 255).log2()) * _LN2
    if scores.shift is not None:
        lse = lse + scores.shift
    return out, lse.masked_fill(nothing, -torch.inf)[..., 0]


def _transposed_tile(rules, group, x):
    """Tile of an operand of tokens x channels that is summed over tokens."""
    return group, 1 if rules.granularity == "row" else x.shape[-1]


def _backward(q, k, v, out, lse, dout, dlse, rules, keep=False):
    """dq, dk, dv for a chunk, dk and dv summed over the group; with `keep` delta, p, dp, ds too."""
    scores = _Scores(q, k, rules)
    plan, low, exact = rules.plan, rules.dtype, rules.math
    dout, out = dout.float(), out.float()
    delta = (dout * out).sum(-1, keepdim=True, dtype=exact)
    if dlse is not None:
        delta = delta - dlse[..., None]
    lse = lse[..., None] if scores.shift is None else lse[..., None] - scores.shift
    lse_log2 = (lse * _LOG2E).masked_fill(lse == -torch.inf, torch.inf)
    p = (scores.log2() - lse_log2).exp2()
    if scores.visible is not None:
        p = p.masked_fill(~scores.visible, 0)
    dp = _dp(dout, v.float(), rules)
    ds = p * (dp - delta)
    if scores.visible is not None:
        ds = ds.masked_fill(~scores.visible, 0)

    row = rules.granularity == "row"
    along_q = (rules.group_q, 1 if row else rules.group_kv)
    along_kv = (1 if row else rules.group_q, rules.group_kv)

    def product(name, left, left_tile, right, right_group, raw, unsigned=False):
        if name not in plan:
            return left.to(low).to(exact), raw.to(exact)
        left = _quantized(left, *left_tile, exact, unsigned)
        return left, _quantized(right, *_transposed_tile(rules, right_group, right), exact)

    weights, operand = product("dv", p, along_q, dout, rules.group_q, dout, unsigned=True)
    dv = (weights.mT @ operand).sum(1, keepdim=True)
    weights, operand = product("dk", ds, along_q, scores.q, rules.group_q, scores.q)
    dk = (weights.mT @ operand).sum(1, keepdim=True) * rules.scale
    weights, operand = product("dq", ds, along_kv, scores.k_smooth, rules.group_kv, scores.k)
    dq = (weights @ operand) * rules.scale
    if dlse is not None and rules.smooth_k and "dq" in plan:
        # The smoothed keys lack mean(K) times the row sum of dS, which is dlse.
        dq = dq + rules.scale * dlse[..., None] * scores.k_mean
    return (dq, dk, dv, delta, p, dp, ds) if keep else (dq, dk, dv)


def _dp(dout, v, rules):
    if "dp" in rules.plan:
        row = rules.granularity == "row"
        dout = _quantized(dout, 1 if row else rules.group_q, dout.shape[-1], rules.math)
        v = _quantized(v, 1 if row else rules.group_kv, v.shape[-1], rules.math)
    return dout.to(rules.math) @ v.to(rules.math).mT


# ---- all heads, a chunk at a time ----------------------------------------------------------------


@contextlib.contextmanager
def full_precision(device):
    """No autocast and no TF32 while the emulation computes."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def grouped(heads_kv, *tensors):
    """(B, H, ...) tensors as (B * Hk, H / Hk, ...)."""
    return [None if t is None else t.unflatten(1, (heads_kv, -1)).flatten(0, 1) for t in tensors]


def chunks(q, k):
    """Slices of grouped heads, each with at most CHUNK_ELEMENTS scores (or one group)."""
    each = q.shape[1] * q.shape[2] * k.shape[2]
    step = max(1, CHUNK_ELEMENTS // max(1, each))
    return [slice(i, i + step) for i in range(0, q.shape[0], step)]


def forward(q, k, v, rules):
    """(out, lse) of (B, H, M, D) and (B, Hk, N, D) tensors; out in `rules.dtype`."""
    out = torch.zeros(q.shape, dtype=rules.dtype, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    if q.numel() == 0 or k.numel() == 0:
        return out, lse
    tensors = grouped(k.shape[1], q, k, v, out, lse)
    with full_precision(q.device):
        for part in chunks(*tensors[:2]):
            *inputs, out_part, lse_part = (t[part] for t in tensors)
            for to, computed in zip((out_part, lse_part), _forward(*inputs, rules)):
                to.copy_(computed)
    return out, lse


def backward(dout, q, k, v, out, lse, dlse, rules):
    """(dq, dk, dv) in `rules.dtype`."""
    gradients = [torch.zeros(t.shape, dtype=rules.dtype, device=q.device) for t in (q, k, v)]
    if q.numel() == 0 or k.numel() == 0:
        return gradients
    inputs = grouped(k.shape[1], q, k, v, out, lse, dout, dlse)
    outputs = grouped(k.shape[1], *gradients)
    with full_precision(q.device):
        for part in chunks(*inputs[:2]):
            chunk = [None if t is None else t[part] for t in inputs]
            for to, computed in zip(outputs, _backward(*chunk, rules)):
                to[part].copy_(computed)
    return gradients


class _EmulatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, rules):
        out, lse = forward(q, k, v, rules)
        ctx.rules = rules
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None
        if dout is None:
            dout = torch.zeros_like(out)
        gradients = backward(dout, q, k, v, out, lse, dlse, ctx.rules)
        return (*(g if need else None for g, need in zip(gradients, ctx.needs_input_grad)), None)


@options.refuses_unknown_keywords
def emulated_attention(
    q,
    k,
    v,
    *,
    causal=False,
    softmax_scale=None,
    layout="bhsd",
    granularity="row",
    group_q=None,
    group_kv=None,
    smooth_k=True,
    rotate=True,
    plan="six-of-seven",
    return_lse=False,
    math_dtype=torch.float32,
):
    """`sagebwd.attention` by PyTorch's own operations: slow, on any device, differentiable once.

    Args beyond `sagebwd.attention`'s:
        plan: 'six-of-seven', 'qk16', or any collection of the products that are to be INT8, of
            's' (S = tau Q K^T), 'pv' (O = P V), 'dv' (dV = P^T dO), 'dp' (dP = dO V^T), 'dq'
            (dQ = tau dS K), 'dk' (dK = tau dS^T Q). The others use 16-bit operands.
        group_q, group_kv: any positive numbers of tokens.
        math_dtype: torch.float32, as in the kernels, or torch.float64.

    Shapes, dtypes and results are those of `sagebwd.attention`. Memory: about ten matrices of
    CHUNK_ELEMENTS or of one key head's queries x keys, whichever is larger. Raises SpecError.
    """
    options.check_layout(layout)
    q, k, v = _autocast(q, k, v)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise SpecError(f"{name} has rank {t.dim()}; it must have rank 4")
        if t.dtype != q.dtype or t.device != q.device:
            raise SpecError(f"{name} is {t.dtype} on {t.device}, q is {q.dtype} on {q.device}; "
                            "they must agree")
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise SpecError(f"q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)} and "
                        f"{tuple(v.shape)} as (batch, head, token, channel); batch and channels "
                        "must agree, and k's shape be v's")
    if not k.shape[1] or not q.shape[1] or q.shape[1] % k.shape[1]:
        raise SpecError(f"q has {q.shape[1]} heads and k has {k.shape[1]}; the first must be a "
                        "positive multiple of the second")
    rules = rules_of(
        q.shape[3],
        causal=options.causal_name(causal, q.shape[2], k.shape[2]),
        softmax_scale=softmax_scale,
        granularity=granularity,
        group_q=group_q,
        group_kv=group_kv,
        smooth_k=smooth_k,
        rotate=rotate,
        plan=plan,
        dtype=q.dtype,
        math_dtype=math_dtype,
    )
    out, lse = _EmulatedAttention.apply(q, k, v, rules)
    if layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _autocast(q, k, v):
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = (t.to(dtype) if t.dtype != torch.float64 else t for t in (q, k, v))
    return q, k, v
