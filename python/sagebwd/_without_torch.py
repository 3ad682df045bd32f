"""Replaces the functions on torch tensors if PyTorch cannot be imported."""


def _reason():
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        return str(error)
    return "it came after sagebwd was imported"


def _refusal(name):
    def refuse(*args, **kwargs):
        raise ImportError(
            f"sagebwd.{name} needs PyTorch ({_reason()}): pip install torch and restart Python. "
            "Without it there are sagebwd.reference, trace, emit, build and doctor"
        )

    refuse.__name__ = name
    refuse.__doc__ = f"sagebwd.{name} needs PyTorch: raises ImportError without it."
    return refuse


_NAMES = (
    "Monitor", "attention", "attention_backward", "attention_forward", "bench",
    "block_linear_attention",
    "block_sparse_attention", "block_sparse_attention_backward", "block_sparse_attention_forward",
    "check_block_indices", "flash_attn_func", "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "merge", "pack_blocks",
    "pooled_block_scores", "sageattn", "scaled_dot_product_attention", "sdpa", "soft_top_blocks",
    "sparse_linear_attention", "top_blocks", "warmup", "with_sink",
)  # fmt: skip
globals().update({name: _refusal(name) for name in _NAMES})
__all__ = [*_NAMES]
