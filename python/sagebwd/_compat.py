"""Deals with what surrounds the package: an extension module that does not load, NVRTC in pip's
NVIDIA wheels, and PyTorch that is not installed."""

import glob
import importlib.machinery
import importlib.util
import os
import pathlib
import sys


def reason(error, folder=pathlib.Path(__file__).parent):
    """The message for an ImportError of sagebwd._core."""
    built = sorted(path.name for path in folder.glob("_core.*") if path.suffix in (".so", ".pyd"))
    mine = importlib.machinery.EXTENSION_SUFFIXES
    if any(f"_core{suffix}" in built for suffix in mine):
        return f"sagebwd's extension module cannot be loaded: {error}"
    here = f"this is Python {sys.version_info.major}.{sys.version_info.minor} ({sys.executable})"
    if built:
        return (
            f"sagebwd's extension module is built for another Python ({', '.join(built)} in "
            f"{folder}), and {here}, which loads _core{mine[0]}: install sagebwd with this Python"
        )
    return f"sagebwd's extension module is not built, and {here}: install sagebwd with pip"


def in_wheels():
    """The newest libnvrtc of pip's wheels, wherever this Python imports from, or None.

    The C++ library looks beside itself, beside the executable and in CUDA's places; only Python
    knows sys.path (user site, --target folders, virtual environments entered without `activate`).
    """
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package else ():
        for place in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.1[23]"):
            if found := sorted(glob.glob(os.path.join(folder, place))):
                return found[-1]
    return None


def point_to_wheels(core):
    """Tells the library where the wheels' NVRTC is. A loaded one, or one that the user names, has
    priority. No variable is set, because child processes may use another environment."""
    if path := in_wheels():
        core.suggest_nvrtc(path)


def _missing():
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        return str(error)
    return "it came after sagebwd was imported"


def _refusal(name):
    def refuse(*args, **kwargs):
        raise ImportError(
            f"sagebwd.{name} needs PyTorch ({_missing()}): pip install torch and restart Python. "
            "Without it there are sagebwd.reference, trace, emit, build and doctor"
        )

    refuse.__name__ = name
    refuse.__doc__ = f"sagebwd.{name} needs PyTorch: raises ImportError without it."
    return refuse


_NAMES = (
    "BlockMask", "Monitor", "attention", "attention_backward", "attention_forward", "bench",
    "block_linear_attention",
    "block_sparse_attention", "block_sparse_attention_backward", "block_sparse_attention_forward",
    "check_block_indices", "flash_attn_func", "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "flashmask_attention", "merge",
    "pack_blocks", "pooled_block_scores", "qk_clip_", "qk_norm_rope", "sageattn",
    "scaled_dot_product_attention", "sdpa", "soft_top_blocks", "sparse_linear_attention",
    "top_blocks", "tune_lengths", "warmup", "with_sink",
)  # fmt: skip


def refusals():
    """Returns stand-ins for the functions on torch tensors, by name, for use without PyTorch."""
    return {name: _refusal(name) for name in _NAMES}
