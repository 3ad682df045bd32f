"""The passes of `sagebwd.reference.sparse_linear`, step by step."""

import numpy as np

from sagebwd.core.options import SpecError, check_softmax_scale
from sagebwd.lists import blocks


def sigmoid(x):
    return (1 + np.tanh(x / 2)) / 2


def softmax(x):
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def log_sum(x):
    """(log-sum-exp over the last axis, the shares); of nothing but -inf: -inf and zeros."""
    peak = x.max(-1, keepdims=True, initial=-np.inf)
    peak = np.where(np.isneginf(peak), 0.0, peak)
    p = np.exp(x - peak)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(total) + peak
        return lse[..., 0], np.where(total > 0, p / total, 0.0)


def through_softmax(p, dp):
    return p * (dp - (p * dp).sum(-1, keepdims=True))


def members(tokens, size):
    """(blocks, tokens) of 0 and 1: which token is of which block."""
    of = np.arange(tokens) // size
    return (of == np.arange(blocks.count_of(tokens, size))[:, None]).astype(np.float64)


def turned(x):
    return x.swapaxes(-1, -2)


def lambda_of(x, kept):
    """For each row the number with which its sigmoids sum to `kept`, by bisection."""
    odds = np.log(kept / (x.shape[-1] - kept))
    low, high = odds - x.max(-1, keepdims=True), odds - x.min(-1, keepdims=True)
    for _ in range(200):
        middle = (low + high) / 2
        above = sigmoid(x + middle).sum(-1, keepdims=True) > kept
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return (low + high) / 2


class Problem:
    """One call. Arrays are (batch, heads_kv, heads of a group, ...); t is the softmax scale."""

    def __init__(self, q, k, v, sizes, softmax_scale, smooth_k):
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 4:
                raise SpecError(f"{name} has rank {x.ndim}: pass (batch, heads, tokens, channels)")
        batch, heads, queries, channels = q.shape
        self.heads, self.heads_kv, keys = heads, k.shape[1], k.shape[2]
        alike = k.shape[:3] == v.shape[:3] and (batch, channels) == (k.shape[0], k.shape[3])
        if not alike or not self.heads_kv or heads % self.heads_kv or not queries or not keys:
            raise SpecError(f"q, k and v of {q.shape}, {k.shape} and {v.shape} do not belong "
                            "together: heads must be a multiple of heads_kv, and the rest "
                            "alike")  # fmt: skip
        self.t = check_softmax_scale(softmax_scale, channels)
        self.q, self.k, self.v = self.grouped(q), k[:, :, None], v[:, :, None]
        self.of_q, self.of_k = members(queries, sizes[0]), members(keys, sizes[1])
        self.mean = self.k.mean(-2, keepdims=True) * smooth_k
        self.keys = self.k - self.mean
        self.smooth, self.found = smooth_k, {}
        self.scores = self.soft = None

    def grouped(self, x):
        """(batch, heads or heads_kv or 1, ...) to (batch, heads_kv or 1, group or 1, ...)."""
        if x.shape[1] == self.heads:
            return x.reshape(x.shape[0], self.heads_kv, -1, *x.shape[2:])
        return x[:, :, None]

    def pooled(self, x, of):
        """The mean of each block."""
        return of @ x / of.sum(-1, keepdims=True)

    # ---- which blocks ----------------------------------------------------------------------------

    def take_mask(self, block_mask):
        mask = np.asarray(block_mask, np.float64)
        wanted = len(self.of_q), len(self.of_k)
        fits = mask.ndim == 4 and mask.shape[2:] == wanted and (
            mask.shape[0] in (1, self.q.shape[0])
            and mask.shape[1] in (1, self.heads_kv, self.heads))  # fmt: skip
        if not fits:
            raise SpecError(
                f"block_mask has shape {mask.shape}: pass (batch or 1, heads or heads_kv or 1, "
                f"{wanted[0]}, {wanted[1]}), because these lengths have so many blocks"
            )
        if not ((mask >= 0) & (mask <= 1)).all():
            raise SpecError("block_mask has values outside of 0 to 1")
        self.mask_shape, self.m = mask.shape, self.grouped(mask)

    def route(self, query_map, key_map, density, temperature, score):
        def of_heads(x):
            x = np.eye(self.q.shape[-1]) if x is None else np.asarray(x, np.float64)
            return x, x if x.ndim == 2 else self.grouped(x[None])

        (query_map, self.w_q), (key_map, self.w_k) = of_heads(query_map), of_heads(key_map)
        self.map_shapes = query_map.shape, key_map.shape
        self.q_bar, self.k_bar = self.pooled(self.q, self.of_q), self.pooled(self.keys, self.of_k)
        self.q_proj, self.k_proj = self.q_bar @ turned(self.w_q), self.k_bar @ turned(self.w_k)
        self.x = self.t * self.q_proj @ turned(self.k_proj)
        self.scores = softmax(self.x) if score == "softmax" else self.x
        self.of_softmax = score == "softmax"
        kept, count = blocks.kept_of(density, len(self.of_k)), len(self.of_k)
        if temperature is None or kept == count:
            best = np.argsort(-self.scores, -1, kind="stable")[..., :kept]
            self.m = np.zeros(self.scores.shape)
            np.put_along_axis(self.m, best, 1.0, -1)
        else:
            self.soft = temperature
            scaled = self.scores / temperature
            self.m = sigmoid(scaled + lambda_of(scaled, kept))
        self.mask_shape = (self.m.shape[0], self.heads, *self.m.shape[3:])

    # ---- forward ---------------------------------------------------------------------------------

    def attend(self, linear_sees_all):
        self.chosen = turned(self.of_q) @ self.m @ self.of_k
        self.s = self.t * self.q @ turned(self.keys)
        with np.errstate(divide="ignore"):
            self.lse, self.p = log_sum(self.s + np.log(self.chosen))
        self.lse_full, _ = log_sum(self.s)
        self.out_s = self.p @ self.v
        self.f, self.g = softmax(self.q), softmax(self.keys)
        self.w = self.f @ turned(self.g)
        self.sees_all = linear_sees_all
        self.rest = np.ones_like(self.chosen) if linear_sees_all else 1 - self.chosen
        self.a = self.rest * self.w
        self.u = self.a.sum(-1, keepdims=True)
        self.none, self.all = ~self.chosen.any(-1), ~self.rest.any(-1)
        self.u = np.where(self.all[..., None], 1.0, self.u)
        self.out_l = self.a @ self.v / self.u
        self.raised = self.t * (self.q @ turned(self.mean))[..., 0]

    def mix(self, alpha, beta):
        self.estimated = isinstance(alpha, str)
        rows = self.s.shape[:-1]
        if self.estimated:
            blocks.one_of("alpha", alpha, ("estimated",))
            self.beta = np.zeros(self.heads) if beta is None else np.asarray(beta, np.float64)
            self.raw_bar, counts = self.pooled(self.k, self.of_k), self.of_k.sum(-1)
            self.tokens = turned(self.of_q) @ ((1 - self.m) * counts)
            self.of_bar = self.t * self.q @ turned(self.raw_bar)
            with np.errstate(divide="ignore"):
                self.r, self.of_r = log_sum(self.of_bar + np.log(self.tokens))
            logit = np.where(self.none | self.all, 0.0, self.lse + self.raised - self.r)
            logit = logit - self.grouped(self.beta[None])[..., None]
            per_row = sigmoid(logit)
            # 1 - alpha has no bits left where alpha is nearly 1.
            self.slope = per_row * sigmoid(-logit)
        else:
            self.alpha_shape = np.shape(alpha)
            alpha = np.asarray(alpha, np.float64)
            if alpha.ndim == 2:
                alpha = alpha if alpha.shape[1] == 1 else alpha @ self.of_q
            elif alpha.ndim == 1:
                alpha = alpha[:, None]
            alpha = alpha.reshape((1,) * (3 - alpha.ndim) + alpha.shape)
            per_row = np.broadcast_to(self.grouped(alpha), rows)
        self.alpha = np.where(self.none, 0.0, np.where(self.all, 1.0, per_row))
        a = self.alpha[..., None]
        self.out = a * self.out_s + (1 - a) * self.out_l

    # ---- backward --------------------------------------------------------------------------------

    def backward(self, dout):
        dout = self.grouped(dout)
        a = self.alpha[..., None]
        d_s, d_l = a * dout, (1 - a) * dout
        d_alpha = (dout * (self.out_s - self.out_l)).sum(-1)
        d_alpha = np.where(self.none | self.all, 0.0, d_alpha)
        d_logit = d_alpha * self.slope if self.estimated else 0 * d_alpha

        # The sparse branch; its lse is part of an estimated alpha.
        inner = d_s @ turned(self.v) - (d_s * self.out_s).sum(-1, keepdims=True)
        inner = inner + d_logit[..., None]
        ds = self.p * inner
        lse = np.where(self.none, 0.0, self.lse)[..., None]
        d_chosen = np.where(self.none[..., None], 0.0, np.exp(self.s - lse)) * inner
        dq, d_keys = self.t * ds @ self.keys, self.t * turned(ds) @ self.q
        dv = turned(self.p) @ d_s
        # lse without smoothing has t q mean beside it.
        dq = dq + self.t * d_logit[..., None] * self.mean
        d_mean = self.t * (d_logit[..., None] * self.q).sum(-2, keepdims=True)

        # The linear branch.
        of_a = (d_l @ turned(self.v) - (d_l * self.out_l).sum(-1, keepdims=True)) / self.u
        d_w = self.rest * of_a
        if not self.sees_all:
            d_chosen = d_chosen - of_a * self.w
        dq = dq + through_softmax(self.f, d_w @ self.g)
        d_keys = d_keys + through_softmax(self.g, turned(d_w) @ self.f)
        dv = dv + turned(self.a / self.u) @ d_l
        dm = self.of_q @ d_chosen @ turned(self.of_k)

        dk = 0.0
        if self.estimated:
            of_bar = -d_logit[..., None] * self.of_r
            dq = dq + self.t * of_bar @ self.raw_bar
            dk = self.back_to_tokens(self.t * turned(of_bar) @ self.q, self.of_k)
            r = np.where(np.isneginf(self.r), 0.0, self.r)[..., None]
            each = d_logit[..., None] * np.exp(self.of_bar - r)
            dm = dm + self.of_q @ each * self.of_k.sum(-1)
            self.found["dbeta"] = -d_logit.sum((0, 3)).reshape(-1)
        if self.soft is not None:
            of_q, of_keys = self.through_router(dm)
            dq, d_keys = dq + of_q, d_keys + of_keys
        if self.smooth:
            d_mean = d_mean - d_keys.sum(-2, keepdims=True)
            dk = dk + d_mean / self.k.shape[-2]
        self.found |= dict(dq=dq, dk=(dk + d_keys).sum(2), dv=dv.sum(2),
                           dblock_mask=self.summed(dm, self.mask_shape))  # fmt: skip
        if not self.estimated:
            self.found["dalpha"] = self.of_alpha(d_alpha)

    def back_to_tokens(self, x, of):
        return turned(of) @ (x / of.sum(-1, keepdims=True))

    def through_router(self, dm):
        """Gradients of q and of the smoothed keys; those of the maps are kept."""
        slope = self.m * (1 - self.m)
        mean = (slope * dm).sum(-1, keepdims=True) / slope.sum(-1, keepdims=True)
        dx = slope / self.soft * (dm - mean)
        if self.of_softmax:
            dx = through_softmax(self.scores, dx)
        of_q, of_k = self.t * dx @ self.k_proj, self.t * turned(dx) @ self.q_proj
        sides = (of_q, self.q_bar), (of_k, self.k_bar)
        for name, (d, bar), shape in zip(("dquery_map", "dkey_map"), sides, self.map_shapes):
            found = turned(d) @ bar
            self.found[name] = (found.sum(0).reshape(shape) if len(shape) == 3
                                else found.sum((0, 1, 2)))  # fmt: skip
        return (self.back_to_tokens(of_q @ self.w_q, self.of_q),
                self.back_to_tokens(of_k @ self.w_k, self.of_k))  # fmt: skip

    def summed(self, x, shape):
        """(batch, heads_kv, group, ...) summed to what was shared."""
        x = x.reshape(x.shape[0], self.heads, *x.shape[3:])
        if shape[1] == self.heads_kv != self.heads:
            x = x.reshape(x.shape[0], self.heads_kv, -1, *x.shape[2:]).sum(2)
        over = tuple(i for i, n in enumerate(shape) if n == 1 != x.shape[i])
        return x.sum(over, keepdims=True)

    def of_alpha(self, d):
        shape = self.alpha_shape
        if len(shape) == 3:
            return self.summed(d, shape)
        d = d.sum(0).reshape(self.heads, -1)
        if len(shape) == 2:
            return d.sum(-1, keepdims=True) if shape[1] == 1 else d @ turned(self.of_q)
        return d.sum(-1) if len(shape) == 1 else np.asarray(d.sum())

    def results(self):
        def of_heads(x):
            whole = np.broadcast_to(x, (*self.q.shape[:3], *x.shape[3:]))
            return whole.reshape(whole.shape[0], self.heads, *whole.shape[3:])

        gradients = {name: self.found.get(name) for name in
                     ("dq", "dk", "dv", "dalpha", "dbeta", "dblock_mask", "dquery_map",
                      "dkey_map")}  # fmt: skip
        if gradients["dq"] is not None:
            gradients["dq"] = of_heads(gradients["dq"])
        with np.errstate(invalid="ignore"):
            exact = np.exp(self.lse - self.lse_full)
        return {
            "out": of_heads(self.out), "out_sparse": of_heads(self.out_s),
            "out_linear": of_heads(self.out_l), "lse": of_heads(self.lse + self.raised),
            "lse_full": of_heads(self.lse_full + self.raised), "alpha": of_heads(self.alpha),
            "exact_alpha": of_heads(exact), "block_mask": of_heads(self.m),
            "scores": None if self.scores is None else of_heads(self.scores), **gradients,
        }  # fmt: skip
