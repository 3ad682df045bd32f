"""A small diffusion transformer for videos (rectified flow on pixels), whose attention is a module
that can be replaced: adaLN-zero, QK-norm, rotary positions over (frame, row, column).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compiled import compiled
from .sparse_plan import SparseConfig


class Dense(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def rotary_tables(config: SparseConfig, device) -> Tensor:
    """Cosines and sines, (2, tokens, head_dim / 2): frames, rows and columns share the pairs."""
    side, pairs = config.size // config.patch, config.head_dim // 2
    place = torch.cartesian_prod(*(torch.arange(n, device=device, dtype=torch.float32)
                                   for n in (config.frames, side, side)))  # fmt: skip
    each = pairs // 3
    counts = pairs - 2 * each, each, each
    angles = [place[:, axis, None] * 100.0 ** (-torch.arange(n, device=device) / n)
              for axis, n in enumerate(counts)]  # fmt: skip
    angle = torch.cat(angles, 1)
    return torch.stack([angle.cos(), angle.sin()])


class Attention(nn.Module):
    def __init__(self, config: SparseConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.q_norm, self.k_norm = (nn.RMSNorm(config.head_dim, eps=1e-6) for _ in range(2))
        self.attend: nn.Module = Dense()

    def inputs(self, x: Tensor, tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """These tensors are given to `attend`."""
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        q, k = (self._turned(norm(t.float()), tables).to(v.dtype)
                for norm, t in ((self.q_norm, q), (self.k_norm, k)))  # fmt: skip
        return q, k, v.contiguous()

    @staticmethod
    def _turned(x: Tensor, tables: Tensor) -> Tensor:
        (cos, sin), (first, second) = tables, x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Block(nn.Module):
    def __init__(self, config: SparseConfig) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            nn.LayerNorm(config.dim, elementwise_affine=False) for _ in range(2)
        )
        self.attention = Attention(config)
        self.mlp = nn.Sequential(nn.Linear(config.dim, 4 * config.dim), nn.GELU("tanh"),
                                 nn.Linear(4 * config.dim, config.dim))  # fmt: skip
        self.modulation = nn.Linear(config.dim, 6 * config.dim)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        wrapped = compiled if config.compile else lambda function: function
        self._before, self._after = wrapped(before_attention), wrapped(after_attention)

    def forward(self, x: Tensor, condition: Tensor, tables: Tensor) -> Tensor:
        (q, k, v), changes = self._before(self, x, condition, tables)
        return self._after(self, x, self.attention.attend(q, k, v), changes)


def before_attention(block: Block, x: Tensor, condition: Tensor, tables: Tensor) -> tuple:
    """Attention takes the first; the second says how the condition changes the block."""
    changes = block.modulation(condition)[:, None].chunk(6, -1)
    scale, shift = changes[:2]
    return block.attention.inputs(block.norms[0](x) * (1 + scale) + shift, tables), changes


def after_attention(block: Block, x: Tensor, attended: Tensor, changes: tuple) -> Tensor:
    gate, scale, shift, other = changes[2:]
    x = x + gate * block.attention.out(attended.transpose(1, 2).flatten(2))
    return x + other * block.mlp(block.norms[1](x) * (1 + scale) + shift)


class VideoModel(nn.Module):
    """Predicts noise - video of (batch, tokens, channels) at times (batch,) from 0 to 1."""

    def __init__(self, config: SparseConfig) -> None:
        super().__init__()
        channels = 3 * config.patch**2
        self.config = config
        self.first = nn.Linear(channels, config.dim)
        self.time = nn.Sequential(nn.Linear(256, config.dim), nn.SiLU(),
                                  nn.Linear(config.dim, config.dim), nn.SiLU())  # fmt: skip
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.last = nn.Linear(config.dim, channels)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        self.register_buffer("tables", rotary_tables(config, "cpu"), persistent=False)

    def layers(self) -> list[Attention]:
        return [block.attention for block in self.blocks]

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        rate = torch.exp(-math.log(10_000) * torch.arange(128, device=x.device) / 128)
        angle = 1000 * time[:, None] * rate
        condition = self.time(torch.cat([angle.cos(), angle.sin()], 1))
        x = self.first(x)
        for block in self.blocks:
            x = block(x, condition, self.tables)
        return self.last(self.norm(x))

    def loss(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The mean squared error of the velocity (rectified flow), in FP32, by video."""
        t = time[:, None, None]
        with torch.autocast(clean.device.type, torch.bfloat16):
            found = self((1 - t) * clean + t * noise, time)
        return (found.float() - (noise - clean)).square().mean((1, 2))
