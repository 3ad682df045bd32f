"""`sagebwd.emulation`: attention as the kernels round it, by PyTorch on any device."""

from sagebwd.numerics.emulation import (
    emulated_attention,
    emulated_backward,
    emulated_block_sparse_attention,
    emulated_forward,
)

__all__ = ["emulated_attention", "emulated_backward", "emulated_block_sparse_attention",
           "emulated_forward"]  # fmt: skip
