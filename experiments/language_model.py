"""A small Llama-style language model, whose attention is an argument.

RMSNorm before each block, rotary positions, SwiGLU, and RMSNorm on queries and keys (QK-norm) as
a switch: the paper needs it at many tokens per step.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attentions import Attend, WithFront
from .compiled import compiled
from .config import ModelConfig


class RMSNorm(nn.RMSNorm):
    """Normalises in FP32, whatever autocast says."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def rotary_tables(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of (tokens, 1, head_dim / 2), one angle for each pair of channels."""
    half = config.head_dim // 2
    frequency = config.rope_base ** (-torch.arange(half, device=positions.device) / half)
    angle = positions[:, None] * frequency
    return angle.cos()[:, None], angle.sin()[:, None]


def rotate_pairs(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on (batch, tokens, heads, head_dim); channel i pairs with i + half."""
    cos, sin = tables
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attend = attend
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim) if config.qk_norm else nn.Identity()
        self.qk_norm = config.qk_norm

    def front(self, tables: tuple[Tensor, Tensor]) -> dict:
        """The keywords of a `WithFront` that stand for the norms and `rotate_pairs`."""
        rope = tuple(t.squeeze(1) for t in tables)
        if not self.qk_norm:
            return {"rope": rope}
        return {"rope": rope, "q_norm": self.q_norm.weight, "k_norm": self.k_norm.weight,
                "norm_eps": self.q_norm.eps}  # fmt: skip


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = SelfAttention(config, attend)
        self.feed_forward_norm = RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], parts: Parts) -> Tensor:
        attend = self.attention.attend
        if isinstance(attend, WithFront):
            q, k, v = (t.transpose(1, 2) for t in parts.projected(self, x))
            out = attend(q, k, v, **self.attention.front(tables))
        else:
            out = attend(*parts.before(self, x, tables))
        return parts.after(self, x, out)


def projected(block: Block, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of (batch, tokens, heads, head_dim), neither normed nor rotated."""
    attention = block.attention
    batch, tokens, dim = x.shape
    qkv = attention.qkv(block.attention_norm(x))
    heads = dim // attention.head_dim
    return qkv.view(batch, tokens, 3, heads, attention.head_dim).unbind(2)


def before_attention(
    block: Block, x: Tensor, tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of (batch, heads, tokens, head_dim)."""
    attention = block.attention
    q, k, v = projected(block, x)
    q = rotate_pairs(attention.q_norm(q), tables).to(v.dtype)
    k = rotate_pairs(attention.k_norm(k), tables).to(v.dtype)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def after_attention(block: Block, x: Tensor, out: Tensor) -> Tensor:
    x = x + block.attention.out(out.transpose(1, 2).reshape(x.shape))
    return x + block.feed_forward(block.feed_forward_norm(x))


def loss_of(model: LanguageModel, x: Tensor, targets: Tensor) -> Tensor:
    logits = model.head(model.norm(x))
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Parts:
    """The model's functions other than attention, compiled or not."""

    def __init__(self, compile: bool) -> None:
        functions = projected, before_attention, after_attention, loss_of
        if compile:
            functions = tuple(map(compiled, functions))
        self.projected, self.before, self.after, self.loss = functions


class LanguageModel(nn.Module):
    """Predicts the next token. ``forward(tokens, targets)`` gives the mean loss in nats, of tokens
    at the first positions of their sequences or at those that are passed."""

    def __init__(self, config: ModelConfig, attend: Attend, compile: bool = False) -> None:
        super().__init__()
        self.config = config
        self.parts = Parts(compile)
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        into_residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = into_residual if name.endswith("out.weight") else 0.02
                nn.init.normal_(parameter, std=std)
        if self.config.tied:
            self.head.weight = self.embedding.weight

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def attend_by(self, attend: Attend) -> None:
        """Changes the attention of every layer."""
        for block in self.blocks:
            block.attention.attend = attend

    def forward(
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        tables = rotary_tables(positions, self.config)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, tables, self.parts)
        return self.parts.loss(self, x, targets)
