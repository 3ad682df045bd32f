"""The numerics of the kernels in plain PyTorch: quantisers, and both passes for a chunk of heads.

Every quantiser is the kernels' bit for bit; integers enter the matrix products already multiplied
by their scales, which differs from the kernels in FP32 rounding only. Sources: SageBwd (arXiv
2603.02170, Algorithms 1 and 2) and, for the rules it leaves open, the C++ reference, with which
the tests compare this file.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sagebwd.options import Mask

_LOG2E = 1.44269504088896340736
_LOG2_255 = math.log2(255.0)
_LN2 = math.log(2.0)
_SMALLEST = 2.0**-119  # a group below this quantises to zero


@dataclass(frozen=True)
class Rules:
    """What one emulated attention computes."""

    mask: Mask  #: as options.with_mask() gives it
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

    def sharing(self, extent):
        """How many of `extent` neighbours share a scale: 'row' gives each its own."""
        return 1 if self.granularity == "row" else extent


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


def _int8_product(of_queries, of_keys, rules):
    """The integers' (queries x keys) product, and the scales of its rows and of its columns."""
    a, a_scale = _token_integers(of_queries, rules.sharing(rules.group_q))
    b, b_scale = _token_integers(of_keys, rules.sharing(rules.group_kv))
    return a.to(rules.math) @ b.to(rules.math).mT, a_scale, b_scale.mT


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


def visible_keys(mask, m, n, device):
    """A boolean (M, N) matrix, or None where every key is visible."""
    if mask.causal == "none":
        return None
    offset = n - m if mask.causal == "bottom-right" else 0
    return torch.arange(n, device=device) <= torch.arange(m, device=device)[:, None] + offset


class _Scores:
    """S in the log2 domain as `x * factor`, and what the passes share with it."""

    def __init__(self, q, k, rules):
        self.rules = rules
        self.q, self.k = q.float(), k.float()
        self.k_mean = self.k.mean(-2, keepdim=True, dtype=torch.float64).float()
        self.k_smooth = self.k - self.k_mean if rules.smooth_k else self.k
        self.visible = visible_keys(rules.mask, q.shape[-2], k.shape[-2], q.device)
        #: what quantised scores lack of the raw ones, (n, G, M, 1): tau q . mean(K)
        self.shift = None
        if rules.smooth_k and "s" in rules.plan:
            self.shift = _dot(self.q, self.k_mean) * rules.scale
        self.x, self.factor = self._products()

    def _products(self):
        rules = self.rules
        if "s" not in rules.plan:
            factor = torch.full((1,), rules.scale_log2, device=self.q.device)
            return self.q.to(rules.math) @ self.k.to(rules.math).mT, factor
        q, k = self.q, self.k_smooth
        if rules.rotate:
            q, k = hadamard(q), hadamard(k)
        product, q_scale, k_scale = _int8_product(q, k, rules)
        return product * k_scale, rules.scale_log2 * q_scale

    def log2(self):
        """The scores themselves, -inf where a query does not see a key."""
        s = self.x * self.factor
        return s if self.visible is None else s.masked_fill(~self.visible, -torch.inf)

    def exp2(self, addend):
        """2^(S + addend), zero where a query does not see a key.

        The exponent is rounded once, as by a fused multiply-add: hence the detour over FP64, where
        exp2 is rounded once as well.
        """
        exponent = self.x.double() * self.factor.double() + addend
        p = exponent.to(self.rules.math).double().exp2().to(self.rules.math)
        return p if self.visible is None else p.masked_fill(~self.visible, 0)


def _dot(a, b):
    """Sum over the last axis, kept, rounded to FP32 once."""
    return (a.double() * b.double()).sum(-1, keepdim=True).float()


def forward_chunk(q, k, v, rules):
    """out (n, G, M, D) and lse (n, G, M), not rounded to the output type."""
    scores = _Scores(q, k, rules)
    m, n = scores.x.shape[-2:]
    levels = _LOG2_255 if "pv" in rules.plan else 0.0
    tile_max = _tiles(scores.log2(), 1, rules.group_kv, fill=-torch.inf).amax(-1)[..., 0, :]
    row_max = tile_max.amax(-1, keepdim=True)
    seen, tile_seen = _seen(scores.visible, m, n, rules.group_kv)
    if seen is not None:  # no -inf - -inf where nothing is seen; where a score is -inf, NaN stays
        tile_max, row_max = tile_max.where(tile_seen, -torch.inf), row_max.where(seen, 0)
    weight = _per_key((tile_max - row_max).exp2(), rules.group_kv, n)
    shift = tile_max if seen is None else tile_max.where(tile_seen, 0)
    p = scores.exp2(_per_key(levels - shift, rules.group_kv, n))
    total = (p * weight).sum(-1, keepdim=True)
    v = v.float()
    if "pv" in rules.plan:
        p = p.clamp(0, 255).round()
        v = _quantized(v, rules.group_kv, rules.sharing(v.shape[-1]), rules.math)
    else:
        p = p.to(rules.dtype).to(rules.math)
    out = (p * weight) @ v.to(rules.math) / total
    lse = (row_max + total.log2() - levels) * _LN2
    if scores.shift is not None:
        lse = lse + scores.shift
    if seen is not None:
        out, lse = out.where(seen, 0), lse.where(seen, -torch.inf)
    return out, lse[..., 0]


def _seen(visible, m, n, group):
    """Whether a row sees any key, (M, 1), and any key of a tile, (M, tiles); None: all do."""
    if visible is None:
        return None, None
    tiles = _tiles(visible.float(), 1, group).amax(-1)[..., 0, :] > 0
    return tiles.any(-1, keepdim=True), tiles


def _per_key(x, group, n):
    return x.repeat_interleave(group, -1)[..., :n]


def backward_chunk(q, k, v, out, lse, dout, dlse, rules):
    """dq, dk, dv for a chunk, dk and dv summed over the group; and delta, p, dp, ds."""
    scores = _Scores(q, k, rules)
    plan, low, exact = rules.plan, rules.dtype, rules.math
    dout, out = dout.float(), out.float()
    delta = _dot(dout, out)
    if dlse is not None:
        delta = delta - dlse[..., None]
    lse = lse[..., None] if scores.shift is None else lse[..., None] - scores.shift
    p = scores.exp2(-(lse * _LOG2E).masked_fill(lse == -torch.inf, torch.inf))
    dp = _dp(dout, v.float(), rules)
    ds = p * (dp - delta)
    if scores.visible is not None:
        ds = ds.masked_fill(~scores.visible, 0)

    along_q = (rules.group_q, rules.sharing(rules.group_kv))
    along_kv = (rules.sharing(rules.group_q), rules.group_kv)

    def product(name, left, left_tile, right, right_group, raw, unsigned=False):
        if name not in plan:
            return left.to(low).to(exact), raw.to(exact)
        left = _quantized(left, *left_tile, exact, unsigned)
        return left, _quantized(right, right_group, rules.sharing(right.shape[-1]), exact)

    weights, operand = product("dv", p, along_q, dout, rules.group_q, dout, unsigned=True)
    dv = (weights.mT @ operand).sum(1, keepdim=True)
    weights, operand = product("dk", ds, along_q, scores.q, rules.group_q, scores.q)
    dk = (weights.mT @ operand).sum(1, keepdim=True) * rules.scale
    weights, operand = product("dq", ds, along_kv, scores.k_smooth, rules.group_kv, scores.k)
    dq = (weights @ operand) * rules.scale
    if dlse is not None and rules.smooth_k and "dq" in plan:
        # The smoothed keys lack mean(K) times the row sum of dS, which is dlse where a query sees
        # any key.
        sums = dlse if scores.visible is None else dlse * scores.visible.any(-1)
        dq = dq + rules.scale * sums[..., None] * scores.k_mean
    return dq, dk, dv, delta, p, dp, ds


def _dp(dout, v, rules):
    if "dp" not in rules.plan:
        return dout.to(rules.math) @ v.to(rules.math).mT
    product, dout_scale, v_scale = _int8_product(dout, v, rules)
    return product * (dout_scale * v_scale)
