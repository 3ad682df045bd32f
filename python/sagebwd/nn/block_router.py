"""The learned router of SLA2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sagebwd.core import keywords, options
from sagebwd.core.arguments.checks import whole_number
from sagebwd.lists import blocks
from sagebwd.nn.sharded import as_shared
from sagebwd.sla import functional, router

def _hooks_of_all() -> bool:
    """Whether hooks are set that all modules call."""
    modules = torch.nn.modules.module
    return bool(modules._global_forward_hooks or modules._global_forward_pre_hooks)


known_keywords = keywords.known_keywords(functional.OTHERWISE | keywords.OF_MODULES)


class InFP32(nn.Module):
    """Keeps its parameters in FP32 (or FP64) where a model is cast to 16 bits."""

    def _apply(self, fn: Callable[[Tensor], Tensor], *rest: Any, **more: Any) -> nn.Module:
        def moved(t: Tensor) -> Tensor:
            found = fn(t)
            return t.to(found.device) if found.dtype in (torch.bfloat16, torch.float16) else found

        return super()._apply(moved, *rest, **more)


class BlockRouter(InFP32):
    """Scores of pairs of blocks: softmax_scale (pooled Q Wq^T)(pooled K Wk^T)^T (SLA2, arXiv
    2602.12675, Eq. 16).

    Args:
        head_dim: channels of q and k.
        heads: None for one pair of maps that all heads share; a number for a pair per head.
        block_size: queries and keys of a block.
        learned: with False there are no parameters, and pooled queries and keys are compared as
            they are.
        softmax_scale: None means 1/sqrt(head_dim).

    Parameters, in FP32 and the identity at first: query_map and key_map of (head_dim, head_dim), or
    (heads, head_dim, head_dim).
    """

    query_map: Tensor | None
    key_map: Tensor | None

    @known_keywords
    def __init__(
        self, head_dim: int, *, heads: int | None = None, block_size: tuple[int, int] = (128, 64),
        learned: bool = True, softmax_scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.head_dim = whole_number("head_dim", head_dim)
        self.heads = None if heads is None else whole_number("heads", heads)
        self.block_size = blocks.check_block_size(block_size, any_size=True)
        self.softmax_scale = options.check_softmax_scale(softmax_scale, head_dim)
        for name in ("query_map", "key_map"):
            weight = torch.empty(*() if heads is None else (self.heads,), head_dim, head_dim,
                                 dtype=torch.float32)  # fmt: skip
            learns = options.yes_or_no("learned", learned)
            self.register_parameter(name, nn.Parameter(weight) if learns else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Makes the maps the identity."""
        for weight in self.parameters():
            identity = torch.eye(self.head_dim, device=weight.device)
            weight.copy_(as_shared(weight, identity.expand(weight.shape)))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores, in FP32, of (batch, heads, query blocks, key blocks), for q of (batch, heads,
        queries, head_dim) and k of (batch, heads_kv, keys, head_dim)."""
        return router.pooled_block_scores(
            q, k, block_size=self.block_size, query_map=self.query_map, key_map=self.key_map,
            softmax_scale=self.softmax_scale)  # fmt: skip

    def scores_as_it_is(self) -> bool:
        """Whether nothing but this class's `forward` says what the scores are, no subclass, no hook
        and no attribute, so that kernels may form them."""
        return (
            type(self) is BlockRouter
            and "forward" not in self.__dict__
            and not (self._forward_hooks or self._forward_pre_hooks or _hooks_of_all())
        )

    def check_fits(self, head_dim: int, heads: int, block_size: tuple[int, int]) -> None:
        """SpecError unless it scores the blocks of q of so many channels and heads."""
        has = self.head_dim, self.heads or heads, self.block_size
        if has != (head_dim, heads, block_size):
            raise options.SpecError(
                f"the router was made for head_dim={has[0]}, {has[1]} heads and block_size="
                f"{has[2]}, and the module for {head_dim}, {heads} and {block_size}: make both for "
                "the same"
            )

    def extra_repr(self) -> str:
        shape = "none" if self.query_map is None else tuple(self.query_map.shape)
        return f"head_dim={self.head_dim}, block_size={self.block_size}, maps={shape}"
