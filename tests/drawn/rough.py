"""The error that INT8 alone explains: attention in FP64, with operands rounded to coarse grids.

It has no code of the package, and is simpler: nothing is rotated, and under every precision the
operands of all products except dP are rounded. The emulation must not be much less exact than this.
"""

from __future__ import annotations

from dataclasses import dataclass

from frame import torch
from torch import Tensor
from torch.nn import functional as F

#: At most this many queries or keys share a scale.
TOKENS = 128
#: The number of tokens for which a channel has one scale.
UNIT = 256
#: The steps of an FP16 number, of its magnitude.
HALF_LEVELS = 1 << 10
SIGNED, UNSIGNED = 127, 255
#: Kernels take a tile for zeros if no magnitude in it reaches this.
SMALLEST = 2.0**-119
#: A query with a score beyond UNSURE has score errors of several units, so chance decides which key
#: gets its weight. One such query may decide the error of a whole tensor. The rounding errors of
#: such a query are multiplied by UNLUCKY, so that no try is lucky.
UNSURE, UNLUCKY = 300, 4
#: Tries differ in the shift of the grids, in steps; in the number of keys that share a scale in
#: Q K^T under 'row' (kernels have one for eight keys among 32); and in whether dS is in INT8 or in
#: 16 bits. The shift is the same for all numbers, so equal numbers are rounded alike, as in
#: kernels. Several tries are needed because a few probabilities decide the result of large scores.
TRIES = ((0.382, 8, True), (-0.118, 32, True), (0.2, 8, False), (-0.3, 32, True))


@dataclass(frozen=True)
class Grids:
    """How operands are rounded."""

    by_row: bool  #: whether every token and channel has its own scale
    scores: bool  #: whether operands of Q K^T are rounded
    first: int  #: how many of the first keys have exact scores
    #: where parts of the keys end that are computed separately; () means one part
    ends: tuple[int, ...]
    shift: float
    keys: int  #: the number of keys that share a scale in the scores under 'row'
    gradients: bool  #: whether dS is rounded to INT8
    half: bool = False  #: whether dP is summed in FP16, less what the mean of all values gives

    @property
    def alone(self) -> int:
        """The tokens whose scores share a scale."""
        return 1 if self.by_row else TOKENS

    def on(self, x: Tensor, rows: int, columns: int, levels: int = SIGNED) -> Tensor:
        """x rounded to steps of a tile's largest magnitude / levels. Zeros stay, and tiles that are
        smaller than what kernels tell from zero become zeros."""
        if not x.numel():
            return x
        m, n = x.shape[-2:]
        rows, columns = min(rows, m), min(columns, n)
        padded = F.pad(x.abs(), (0, -n % columns, 0, -m % rows))
        tiles = padded.unflatten(-2, (-1, rows)).unflatten(-1, (-1, columns))
        steps = tiles.amax((-3, -1), keepdim=True).expand_as(tiles).flatten(-2).flatten(-3, -2)
        steps = torch.where(steps < SMALLEST, torch.inf, steps)[..., :m, :n] / levels
        rounded = steps * ((x / steps + self.shift).round() - self.shift)
        return rounded.masked_fill((x == 0) | (steps == torch.inf), 0)

    def of_queries(self, x: Tensor) -> Tensor:
        return self.on(x, self.alone, x.shape[-1])

    def of_keys(self, x: Tensor) -> Tensor:
        return self.on(x, self.keys if self.by_row else TOKENS, x.shape[-1])

    def of_channels(self, x: Tensor) -> Tensor:
        return self.on(x, UNIT, 1) if self.by_row else self.on(x, TOKENS, x.shape[-1])


def all_grids(
    by_row: bool = True, scores: bool = True, first: int = 0, ends: tuple[int, ...] = (),
    half: bool = False,
) -> list[Grids]:
    """The roundings of all tries."""
    return [Grids(by_row, scores, first, ends, *one, half) for one in TRIES]


def roughly(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, seen: Tensor, scale: float,
    sink: Tensor, k_mean: Tensor, q_mean: Tensor, exact_ds: Tensor, dtype: torch.dtype,
    grids: Grids,
) -> dict[str, Tensor]:
    """O, lse, dQ, dK, dV and dSink, in the shapes that `oracle.attention` gives them.

    k_mean and q_mean are subtracted from keys and queries before these are rounded. exact_ds is dS
    without rounding: the sums of its rows give the part of dQ that k_mean has, as in kernels. dtype
    is that of out.
    """
    centred, keys = q - q_mean, k - k_mean
    # Each part of the keys is given dO times its share, and gives its part of dQ, in the type.
    parts = len(grids.ends) or 1
    dout = (dout / parts).to(dtype).double() * parts
    scores = exact = q @ k.mT
    if grids.scores:
        longest = keys.norm(dim=-1).amax(-1)[..., None, None] if keys.numel() else 0
        unsure = abs(scale) * centred.norm(dim=-1, keepdim=True) * longest > UNSURE
        off = (grids.of_queries(centred) - centred) * torch.where(unsure, UNLUCKY, 1)
        scores = (centred + off) @ grids.of_keys(keys).mT
        scores = scores + q_mean @ keys.mT + (q * k_mean).sum(-1, keepdim=True)
        scores[..., : grids.first] = exact[..., : grids.first]
    scores = (scores * scale).masked_fill(~seen, -torch.inf)
    top = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1).amax(-1, keepdim=True)
    start = top.masked_fill(top == -torch.inf, 0)
    weights, of_sink = (scores - start).exp(), (sink - start).exp()
    total = weights.sum(-1, keepdim=True) + of_sink
    shares = 1 / total.masked_fill(total == 0, 1)
    out = grids.on(weights, 1, TOKENS, UNSIGNED) @ grids.of_channels(v) * shares
    out = out.to(dtype).double()

    p = weights * shares
    delta = (dout * out).sum(-1, keepdim=True) - dlse
    most = torch.finfo(dtype).max
    dp = dout @ v.mT
    if grids.half and dp.numel():  # the mean is of all values, whichever a query sees
        of_mean = dout @ v.mean(-2, keepdim=True).mT
        dp = grids.on(dp - of_mean, 1, dp.shape[-1], HALF_LEVELS) + of_mean
    ds = (p * (dp - delta)).clamp(-most, most)
    ds = ds.to(dtype).double()  # as under 'gradients16' and 'dv16'
    # Under 'row' the rows of dO are brought to one magnitude, which P takes back.
    size = dout.abs().amax(-1, keepdim=True) if grids.by_row else torch.ones_like(delta)
    size = size.masked_fill(size == 0, 1).log2().floor().exp2()
    dv = grids.on(p * size, TOKENS, grids.alone, UNSIGNED).mT @ grids.of_channels(dout / size)
    weights, operand = ds, centred
    if grids.gradients:
        weights, operand = grids.on(ds, TOKENS, grids.alone), grids.of_channels(centred)
    dk = weights.mT @ operand + ds.mT @ q_mean
    weights, operand, dq = ds, keys, 0
    if grids.gradients:
        weights, operand = grids.on(ds, grids.alone, TOKENS), grids.of_channels(keys)
    for begin, end in zip((0, *grids.ends), grids.ends or (k.shape[-2],)):
        part = weights[..., begin:end] @ operand[..., begin:end, :]
        part = scale * (part + exact_ds[..., begin:end].sum(-1, keepdim=True) * k_mean)
        dq += part.to(dtype).double() if parts > 1 else part
    return {"O": out, "lse": start + total.log(), "dQ": dq,
            "dK": (scale * dk).sum(2, keepdim=True), "dV": dv.sum(2, keepdim=True),
            "dSink": -(of_sink * shares * delta).sum((0, -2))}  # fmt: skip
