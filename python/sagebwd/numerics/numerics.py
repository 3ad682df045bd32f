"""The numerics of the kernels in plain PyTorch: both passes for a chunk of heads.

Every quantiser (quantizers.py) is the kernels' bit for bit; integers enter the matrix products
already multiplied by their scales, which differs from the kernels in FP32 rounding only. Sources:
SageBwd (arXiv 2603.02170, Algorithms 1 and 2) and, for the rules it leaves open, the C++ reference,
with which the tests compare this file.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sagebwd.core.options import Mask, width_of
from sagebwd.numerics.expressions import Expressions, both
from sagebwd.numerics.half_sums import half_dp
from sagebwd.numerics.quantizers import (
    CHANNEL_TOKENS,
    hadamard,
    key_integers,
    over_tokens,
    power_of_two,
    quantized,
    row_exponents,
    tiled,
    token_integers,
)

_LOG2E = 1.44269504088896340736
_LOG2_255 = math.log2(255.0)
_LN2 = math.log(2.0)
_FARTHEST = -1e30  #: what a score function gives ends there, in units of log2


@dataclass(frozen=True)
class Rules:
    """The options of one emulated attention."""

    mask: Mask  #: as options.with_mask() gives it
    scale: float
    granularity: str
    group_q: int
    group_kv: int
    smooth_k: bool
    smooth_q: bool  #: queries lack their group's mean, which scores regain
    smooth_v: bool  #: quantised values lack their mean, which outputs regain
    rotate: bool
    sink_keys: int  #: 1: the first key is computed separately
    plan: frozenset  #: the INT8 products, of options.PRODUCTS
    dtype: torch.dtype  #: of inputs, outputs and 16-bit operands
    dp_sums: str  #: the format of dP's sums
    math: torch.dtype  #: of everything between, float32 as in the kernels or float64
    expressions: Expressions | None = None  #: a mask and a score function, or neither

    @property
    def scale_log2(self):
        """softmax_scale * log2(e), rounded to FP32 as the kernels have it."""
        scale = torch.tensor(self.scale, dtype=torch.float32, device="cpu")
        return float(scale * _as_float32(_LOG2E))

    @property
    def by_rows(self):
        """Whether every token and every channel has its own scale."""
        return self.granularity == "row"

    def sharing(self, extent):
        """How many of `extent` neighbours share a scale: 'row' gives each its own."""
        return 1 if self.by_rows else extent


# ---- the operation on a chunk of heads: q (n, G, M, D), k and v (n, 1, N, D) ---------------------


def visible_keys(mask, m, n, device, rows=None):
    """A boolean (M, N) matrix, or None if every query sees every key. `rows`: the first of the
    queries wanted, and the end; all by default."""
    left, right = mask.window_left, 0 if mask.causal != "none" else mask.window_right
    if left is None and right is None:
        return None
    diagonal = torch.arange(*rows or (0, m), device=device)[:, None]
    diagonal = diagonal + (0 if mask.causal == "top-left" else n - m)
    behind = torch.arange(n, device=device) - diagonal  # how far each key lies behind its query
    seen = behind >= -left if left is not None else torch.ones_like(behind, dtype=torch.bool)
    return seen & (behind <= right) if right is not None else seen


def shown_keys(listed, mask, m, rows=None):
    """`listed`, which keys a query sees beside the mask, as a boolean matrix (n, G or 1, M, N).

    It is one already, or int32 of (n, 1, N, columns): intervals of queries that do not see a key
    (FlashMask, arXiv 2410.01359, section 3). `rows` is that of `visible_keys`.
    """
    if listed.dtype != torch.int32:
        return listed
    columns = [column[..., None, :] for column in listed.unbind(-1)]
    queries = torch.arange(*rows or (0, m), device=listed.device)[:, None]
    if len(columns) == 1:
        return queries < columns[0]
    if len(columns) == 2 and mask.causal == "none":
        return (queries < columns[0]) & (queries >= columns[1])
    outside = [(queries < begin) | (queries >= end)
               for begin, end in zip(columns[::2], columns[1::2])]  # fmt: skip
    return outside[0] if len(outside) == 1 else outside[0] & outside[1]


class _Scores:
    """S in the log2 domain as `x * factor`, and what the passes share with it.

    Keys that are computed separately are hidden in it, and are zeros in `keys` and `values`.
    """

    def __init__(self, q, k, v, rules, k_mean=None, listed=None, expressed=None):
        self.rules = rules
        self.q, self.k, self.v = q.float(), k.float(), v.float()
        if k_mean is None:
            k_mean = self.k.mean(-2, keepdim=True, dtype=torch.float64).float()
        self.k_mean = k_mean
        self.k_smooth = self.k - self.k_mean if rules.smooth_k else self.k
        self.sinks = rules.sink_keys
        #: what quantised values lack, (n, 1, 1, D), or 0
        self.v_mean = _some_mean(self.v) if rules.smooth_v and "pv" in rules.plan else 0.0
        self.keys = self._without_sinks(self.k_smooth)
        self.values = self._without_sinks(self.v - self.v_mean)
        m, n = q.shape[-2], k.shape[-2]
        self.seen = visible_keys(rules.mask, m, n, q.device)
        if listed is not None:
            self.seen = both(self.seen, shown_keys(listed, rules.mask, m))
        if expressed is not None:
            self.seen = both(self.seen, expressed.seen(m, n))
        self.visible = self.seen
        if self.sinks:
            others = (torch.arange(n, device=q.device) >= self.sinks).expand(m, n)
            self.visible = others if self.seen is None else others & self.seen
        #: the mean of the queries, (n, G, M, D), and its scores, in the log2 domain
        self.q_mean = self.q_mean_scores = None
        if rules.smooth_q and "s" in rules.plan:
            self.q_mean = _means(self.q, CHANNEL_TOKENS if rules.by_rows else rules.group_q)
            self.q_mean_scores = self.q_mean @ self.keys.mT * rules.scale_log2
        #: what quantised scores lack of the raw ones, (n, G, M, 1): tau q . mean(K)
        self.shift = None
        if rules.smooth_k and "s" in rules.plan:
            self.shift = _dot(self.q, self.k_mean) * rules.scale
        self.x, self.factor = self._products()
        self.slope = None  #: of the score function, (n, G, M, N)
        if expressed is not None and expressed.of.score:
            self._apply_score(expressed)

    def _apply_score(self, expressed):
        """Makes scores what the score function makes of them. One that bends scores is given what
        smoothing subtracts, which lse then does not lack."""
        s = self.x.double() * self.factor.double() * _as_float32(_LN2)
        if expressed.of.bends and self.shift is not None:
            s, self.shift = s + self.shift, None
        value, slope = expressed.scored(s)
        self.x = (value * _as_float32(_LOG2E)).clamp(min=_FARTHEST).to(self.rules.math)
        self.slope = slope.to(self.rules.math)
        self.factor = torch.ones_like(self.factor)

    def _without_sinks(self, x):
        return x if not self.sinks else F.pad(x[..., self.sinks :, :], (0, 0, self.sinks, 0))

    def _products(self):
        rules = self.rules
        sign = -1 if rules.scale < 0 else 1  # the factor has no sign
        if "s" not in rules.plan:
            factor = torch.full((1,), abs(rules.scale_log2), device=self.q.device)
            return sign * self.q.to(rules.math) @ self.k.to(rules.math).mT, factor
        q, k = self.centred_q(), self.keys
        if rules.rotate:
            zeros = max(width_of(q.shape[-1]) - q.shape[-1], 0)
            q, k = (hadamard(F.pad(x, (0, zeros))) for x in (q, k))
        q, q_scale = token_integers(sign * q, rules.sharing(rules.group_q))
        k, k_scale = key_integers(k, rules)
        factor = abs(rules.scale_log2) * q_scale
        return (q.to(rules.math) @ k.to(rules.math).mT) * k_scale.mT, factor

    def centred_q(self):
        return self.q if self.q_mean is None else self.q - self.q_mean

    def sink(self):
        """The first key's scores in the log2 domain, (n, G, M, 1); -inf where it is not seen."""
        key = (self.k_smooth if "s" in self.rules.plan else self.k)[..., :1, :]
        score = _dot(self.q, key) * self.rules.scale_log2
        score = score + (score - score)  # makes NaN of infinite scores
        return score if self.seen is None else score.where(self.seen[:, :1], -torch.inf)

    def log2(self):
        """The scores themselves, -inf where a query does not see a key."""
        s = self.x * self.factor
        if self.q_mean is not None:
            s = s + self.q_mean_scores
        return s if self.visible is None else s.masked_fill(~self.visible, -torch.inf)

    def exp2(self, addend):
        """2^(S + addend), zero where a query does not see a key.

        The exponent is rounded once, as by a fused multiply-add: hence the detour over FP64, where
        exp2 is rounded once as well.
        """
        exponent = self.x.double() * self.factor.double() + addend
        if self.q_mean is not None:
            exponent = exponent + self.q_mean_scores
        p = exponent.to(self.rules.math).double().exp2().to(self.rules.math)
        return p if self.visible is None else p.masked_fill(~self.visible, 0)


def _means(x, group):
    """Each token's mean over its group of tokens."""
    parts = x.split(group, -2)
    return torch.cat([part.mean(-2, keepdim=True).expand_as(part) for part in parts], -2)


def _some_mean(v):
    """The mean of one token in eight, as the kernels have it; 0 where it is not finite."""
    mean = v[..., ::8, :].mean(-2, keepdim=True, dtype=torch.float64).float()
    return mean.where(mean.isfinite(), 0)


def _as_float32(number):
    return float(torch.tensor(number, dtype=torch.float32, device="cpu"))


def _dot(a, b):
    """Sum over the last axis, kept, rounded to FP32 once."""
    return (a.double() * b.double()).sum(-1, keepdim=True).float()


def forward_chunk(q, k, v, rules, k_mean=None, listed=None, expressed=None):
    """out (n, G, M, D), lse (n, G, M) and each query's largest score (n, G, M), -inf where it sees
    no key and NaN where lse is; not rounded to the output type.

    k_mean: (n, 1, 1, D), what smooth_k takes off in place of the keys' mean.
    listed: (n, G, M, N), which keys are in the blocks that a query lists, or intervals, int32 of
        (n, 1, N, columns); None: all.
    expressed: the mask and the score function of `rules.expressions` for these heads, or None.
    """
    scores = _Scores(q, k, v, rules, k_mean, listed, expressed)
    n = scores.x.shape[-1]
    one, levels = (255.0, _LOG2_255) if "pv" in rules.plan else (1.0, 0.0)
    tile_max = tiled(scores.log2(), 1, rules.group_kv, fill=-torch.inf).amax(-1)[..., 0, :]
    tile_seen = _tiles_seen(scores.visible, rules.group_kv)
    if tile_seen is not None:
        tile_max = tile_max.where(tile_seen, -torch.inf)
    row_max = tile_max.amax(-1, keepdim=True)
    if scores.sinks:
        sink = scores.sink()
        row_max = torch.maximum(row_max, sink)
    seen = None if scores.seen is None else scores.seen.any(-1, keepdim=True)
    if seen is not None:  # avoids -inf - -inf for rows that see no key
        row_max = row_max.where(seen, 0)
    weight = _per_key((tile_max - row_max).exp2(), rules.group_kv, n)
    shift = tile_max if tile_seen is None else tile_max.where(tile_seen, 0)
    p = scores.exp2(_per_key(levels - shift, rules.group_kv, n))
    total = (p * weight).sum(-1, keepdim=True)
    if "pv" in rules.plan:
        p = p.clamp(0, 255).round()
        v = over_tokens(scores.values, rules.group_kv, rules, scores.v)
    else:
        p, v = p.to(rules.dtype), scores.v
    out = (p.to(rules.math) * weight) @ v.to(rules.math)
    if scores.sinks:
        of_sink = one * (sink - row_max).exp2()
        first = scores.v[..., :1, :] - scores.v_mean
        out, total = out + of_sink * first, total + of_sink
    out, lse = out / total + scores.v_mean, (row_max + total.log2() - levels) * _LN2
    if scores.shift is not None:
        lse = lse + scores.shift
    largest = row_max.double() * _as_float32(_LN2)
    if scores.shift is not None:
        largest = largest + scores.shift
    if seen is not None:
        out, lse = out.where(seen, 0), lse.where(seen, -torch.inf)
        largest = largest.where(seen, -torch.inf)
    return out, lse[..., 0], largest.masked_fill(lse.isnan(), torch.nan)[..., 0]


def _tiles_seen(visible, group):
    """Whether a row sees any key of a tile, (M, tiles); None: all do."""
    return None if visible is None else tiled(visible.float(), 1, group).amax(-1)[..., 0, :] > 0


def _per_key(x, group, n):
    return x.repeat_interleave(group, -1)[..., :n]


class _ScoreGradients:
    """P, dP and dS of a chunk, before the products that sum over them.

    P carries 2^exponents of its row, and dP the inverse. Keys that are computed separately are not
    in them; `first()` has these.
    """

    def __init__(self, q, k, v, out, lse, dout, dlse, rules, k_mean=None, listed=None,
                 expressed=None):  # fmt: skip
        self.scores = scores = _Scores(q, k, v, rules, k_mean, listed, expressed)
        low = rules.dtype
        self.dout, out = dout.float(), out.float()
        self.delta = _dot(self.dout, out)
        if dlse is not None:
            self.delta = self.delta - dlse[..., None]
        lse = lse[..., None] if scores.shift is None else lse[..., None] - scores.shift
        self.lse = lse = (lse * _LOG2E).masked_fill(lse == -torch.inf, torch.inf)
        # Under 'row' many rows of dO share a scale: powers of two bring them to one magnitude, and
        # P is divided by these.
        self.scaled, exponents = self.dout, torch.zeros_like(self.delta, dtype=torch.int32)
        if rules.by_rows and "dv" in rules.plan:
            exponents = row_exponents(self.dout)
            self.scaled = self.dout * power_of_two(-exponents)
        self.up, self.down = power_of_two(exponents), power_of_two(-exponents)
        self.p = scores.exp2(-(lse - exponents))
        if rules.dp_sums == "fp16":
            dp, of_centre = half_dp(self.dout, scores.v, exponents, width_of(q.shape[-1]))
            dp = dp.to(rules.math)
        else:
            dp = _dp(self.scaled.to(low).float(), scores.v, rules)
            of_centre = torch.zeros_like(self.delta)
        self.ds = self.p * (dp - (self.delta - of_centre) * self.down)
        if scores.slope is not None:
            self.ds = self.ds * scores.slope
        self.dp = dp + of_centre * self.down
        if scores.visible is not None:
            self.ds = self.ds.masked_fill(~scores.visible, 0)

    def first(self):
        """p, dp and ds of the key that is computed separately, (n, G, M, 1) each."""
        scores = self.scores
        p = (scores.sink() - self.lse).exp2()
        dp = _dot(self.dout, scores.v[..., :1, :])
        return p, dp, p * (dp - self.delta)


def score_gradients(*given):
    """dS, (n, G, M, N), and the sums of P's rows, (n, G, M), for the arguments of
    `backward_chunk`."""
    parts = _ScoreGradients(*given)
    if parts.scores.visible is not None:
        parts.p.masked_fill_(~parts.scores.visible, 0)
    weights = (parts.p.sum(-1, keepdim=True) * parts.down)[..., 0]
    if parts.scores.sinks:
        p, _, parts.ds[..., :1] = parts.first()
        weights = weights + p[..., 0]
    return parts.ds, weights


def backward_chunk(q, k, v, out, lse, dout, dlse, rules, k_mean=None, listed=None,
                   expressed=None):  # fmt: skip
    """dq, dk, dv for a chunk, dk and dv summed over the group; and delta, p, dp, ds."""
    parts = _ScoreGradients(q, k, v, out, lse, dout, dlse, rules, k_mean, listed, expressed)
    scores, dout, scaled, p, dp, ds = (
        parts.scores, parts.dout, parts.scaled, parts.p, parts.dp, parts.ds
    )  # fmt: skip
    plan, low, exact = rules.plan, rules.dtype, rules.math

    along_q = (rules.group_q, rules.sharing(rules.group_kv))
    along_kv = (rules.sharing(rules.group_q), rules.group_kv)

    def product(name, left, left_tile, right, right_group, raw, of=None, unsigned=False):
        if name not in plan:
            return left.to(low).to(exact), raw.to(low).to(exact)
        left = quantized(left, *left_tile, exact, unsigned)
        return left, over_tokens(right, right_group, rules, of)

    weights, operand = product("dv", p, along_q, scaled, rules.group_q, dout, unsigned=True)
    dv = (weights.mT @ operand).sum(1, keepdim=True)
    centred = scores.centred_q() if "dk" in plan else scores.q
    weights, operand = product("dk", ds, along_q, centred, rules.group_q, centred, scores.q)
    dk = (weights.mT @ operand).sum(1, keepdim=True)
    if centred is not scores.q:
        dk = dk + (ds.mT.to(exact) @ scores.q_mean.to(exact)).sum(1, keepdim=True)
    weights, operand = product("dq", ds, along_kv, scores.keys, rules.group_kv, scores.k_smooth,
                               scores.k)
    dq = weights @ operand
    p, dp = p * parts.down, dp * parts.up
    if scores.sinks:
        first = parts.first()
        for x, column in zip((p, dp, ds), first):
            x[..., :1] = column  # the matrices are whole after this
        p_first, _, ds_first = first
        dv[..., :1, :] = (p_first * dout).sum((1, 2), keepdim=True)
        dk[..., :1, :] = (ds_first * scores.q).sum((1, 2), keepdim=True)
        dq = dq + ds_first * scores.k_smooth[..., :1, :]
    dq, dk = dq * rules.scale, dk * rules.scale
    bends = expressed is not None and expressed.of.bends
    if rules.smooth_k and (bends or dlse is not None):
        # The smoothed keys lack mean(K) times the row sum of dS, which is dlse where a query sees
        # any key, unless a score function bends scores.
        sums = ds.sum(-1) if bends else dlse
        if not bends and scores.seen is not None:
            sums = dlse * scores.seen.any(-1)
        dq = dq + rules.scale * sums[..., None] * scores.k_mean
    return dq, dk, dv, parts.delta, p, dp, ds


def _dp(dout, v, rules):
    if "dp" not in rules.plan:
        return dout.to(rules.math) @ v.to(rules.math).mT
    dout, dout_scale = token_integers(dout, rules.sharing(rules.group_q))
    v, v_scale = token_integers(v, rules.sharing(rules.group_kv))
    return (dout.to(rules.math) @ v.to(rules.math).mT) * (dout_scale * v_scale.mT)
