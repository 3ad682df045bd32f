"""The attention modules of sparse_video's arms, and 16-bit attention to gathered blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import sagebwd
from sagebwd.core.once import once
from sagebwd.lists import blocks
from sagebwd.lists.given import Lists
from sagebwd.nn import SparseLinearAttention
from sagebwd.sla.parts import alone, product

from .sparse_plan import ARMS, SparseConfig, Way
from .video_model import Dense


class RandomScores(nn.Module):
    """Scores that say nothing: the same for every input."""

    def __init__(self, heads: int, shape: tuple[int, int], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(heads, *shape, generator=generator, device="cpu")
        self.register_buffer("scores", scores.to(torch.get_default_device()))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self.scores.expand(q.shape[0], *self.scores.shape)


class _Gathered(torch.autograd.Function):
    """Attention to as many listed blocks for each query block, in the inputs' type with sums in
    FP32. `forward`: gives (out, lse) in its place."""

    @staticmethod
    def forward(ctx, q, k, v, mask, kept, sizes, scale, forward):
        chosen = mask.to(torch.uint8).sort(dim=-1, descending=True, stable=True)[1][..., :kept]
        ctx.sizes, ctx.scale = sizes, scale
        if forward is None:
            with alone(q.device):
                s, _, values = _scores(q, k, v, chosen, sizes, scale)
                lse = s.logsumexp(-1)
                p = s.sub_(lse[..., None]).exp_().to(q.dtype)
                out = _product(p, values).to(q.dtype).flatten(2, 3)
                lse = lse.flatten(2, 3)
        else:
            out, lse = forward(q, k, v, mask)
        ctx.save_for_backward(q, k, v, chosen, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, chosen, out, lse = ctx.saved_tensors
        sizes = ctx.sizes

        def in_blocks(t):
            return t.unflatten(2, (-1, sizes[0]))

        with alone(q.device):
            s, keys, values = _scores(q, k, v, chosen, sizes, ctx.scale)
            p = s.sub_(in_blocks(lse).unsqueeze(-1)).exp_()
            delta = in_blocks((dout.float() * out).sum(-1) - dlse)
            do = in_blocks(dout)
            ds = _product(do, values.mT).sub_(delta.unsqueeze(-1)).mul_(p).mul_(ctx.scale)
            ds, p = ds.to(q.dtype), p.to(q.dtype)
            dq = _product(ds, keys).to(q.dtype).flatten(2, 3)
            dk = _added(_product(ds.mT, in_blocks(q)), chosen, k, sizes)
            dv = _added(_product(p.mT, do), chosen, v, sizes)
        return *once((dq, dk, dv), dout, dlse, q, k, v), None, None, None, None, None


def _product(a, b):
    """The operands are (batch, heads, blocks, ...), and the product is in FP32."""
    return product(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def _scores(q, k, v, chosen, sizes, scale):
    """Scaled scores in FP32, of (batch, heads, blocks, queries, listed keys); keys and values."""

    def gathered(t):
        cut = t.unflatten(2, (-1, sizes[1]))
        at = chosen.flatten(2)[..., None, None].expand(-1, -1, -1, *cut.shape[3:])
        return cut.gather(2, at).unflatten(2, chosen.shape[2:]).flatten(3, 4)

    keys, values = gathered(k), gathered(v)
    return _product(q.unflatten(2, (-1, sizes[0])), keys.mT).mul_(scale), keys, values


def _added(parts, chosen, like, sizes):
    """Gradients of gathered blocks, added to those of all."""
    parts = parts.unflatten(3, (-1, sizes[1])).flatten(2, 3)
    total = torch.zeros(*like.shape[:2], like.shape[2] // sizes[1], *parts.shape[3:],
                        dtype=parts.dtype, device=like.device)  # fmt: skip
    at = chosen.flatten(2)[..., None, None].expand_as(parts)
    return total.scatter_add_(2, at, parts).flatten(2, 3).to(like.dtype)


def gathered(q, k, v, mask, kept, sizes, scale, forward=None) -> tuple[Tensor, Tensor]:
    """(out, lse) of the listed blocks. Lengths are multiples of the blocks, and every query block
    lists `kept` blocks."""
    return _Gathered.apply(q, k, v, mask, kept, sizes, scale, forward)


class ArmAttention(SparseLinearAttention):
    """The attention of one arm in one layer. `how` may be changed between steps."""

    def __init__(self, arm: Way, how: str, **given: Any) -> None:
        super().__init__(**given)
        self.arm, self.how = arm, how

    def attend_blocks(self, q, k, v, lists, sizes, scale, kernels):
        if self.how == "int8":
            return super().attend_blocks(q, k, v, lists, sizes, scale, kernels)
        kept, forward = blocks.kept_of(self.density, lists.mask.shape[-1]), None
        if self.how == "mixed":
            int8 = super().attend_blocks

            def forward(q, k, v, mask):
                return int8(q, k, v, lists, sizes, scale, kernels)

        return gathered(q, k, v, lists.mask, kept, sizes, scale, forward)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if self.arm.branches == "both":
            return super().forward(q, k, v, routing=self.arm.routing if self.training else "hard")
        if self.arm.branches == "linear":
            nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=q.device)
            return sagebwd.block_linear_attention(
                q, k, v, block_mask=nothing, block_size=(q.shape[2], k.shape[2])
            )
        mask = self.block_mask(q, k)
        return self.attend_blocks(
            q,
            k,
            v,
            Lists(mask, None, dict(block_mask=mask)),
            self.block_size,
            self.softmax_scale,
            self.kernels,
        )[0]


def attention_of(
    name: str, density: float, layer: int, config: SparseConfig, how: str
) -> nn.Module:
    """The module of an arm in a layer, with the router as it is before stage 1."""
    arm = ARMS[name]
    if arm.branches == "dense":
        return Dense()
    heads = config.dim // config.head_dim
    router: Any = arm.router
    if router == "random":
        shape = config.tokens // config.block_size[0], config.tokens // config.block_size[1]
        router = RandomScores(heads, shape, seed=layer)
    return ArmAttention(
        arm, how, head_dim=config.head_dim, heads=heads, density=density or 1.0,
        block_size=config.block_size, seq_len=config.tokens, alpha=arm.alpha, linear=arm.linear,
        router=router, temperature=config.temperature,
        precision="six-of-seven" if config.how == "int8" else "exact",
    )  # fmt: skip
