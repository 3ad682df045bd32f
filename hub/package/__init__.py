"""Trainable INT8 attention (SageBwd, arXiv 2603.02170) for NVIDIA GPUs, as a kernel for the Hub.

`attention` is differentiable and compiles with torch.compile. `flash_attn_func` and
`flash_attn_varlen_func` take flash-attention's arguments, which transformers asks for. Kernels are
generated and compiled on your machine by NVRTC, and cached as the package sagebwd caches them.
"""

from ._functions import attention, flash_attn_func, flash_attn_varlen_func
from ._native import SpecError, version

__all__ = ["SpecError", "attention", "flash_attn_func", "flash_attn_varlen_func", "version"]
