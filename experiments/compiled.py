"""The models' functions other than attention, by torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


@functools.cache
def compiled(function: Callable) -> Callable:
    """All blocks of all models share one compilation of it. Attention stays outside: it may be any,
    and may change between steps."""
    # A variant for each of gradients or none, QK-norm or none, and each layout of O.
    settings = torch._dynamo.config
    if hasattr(settings, "recompile_limit"):
        settings.recompile_limit = 64
    else:  # before PyTorch 2.7
        settings.cache_size_limit = 64
    return torch.compile(function)
