"""sagebwd: trainable INT8 attention (SageBwd, arXiv 2603.02170), generated for the GPU it runs on.

    out = sagebwd.attention(q, k, v, causal=True)     # torch tensors on a GPU; differentiable
    sagebwd.merge([(out, lse), ...])                  # of parts of the keys: ring attention
    sagebwd.flash_attn_func(q, k, v, causal=True)     # and sageattn, scaled_dot_product_attention
    with sagebwd.sdpa(): ...                          # torch.nn.functional's, in this block
    sagebwd.warmup(head_dim=64)                       # before capturing a CUDA graph
    sagebwd.trace(q, k, v, dout)                      # error of every tensor against FP64
    sagebwd.trace(inputs="sink", causal=True)         # of inputs as trained models have them
    sagebwd.reference.exact(q, k, v, dout)            # NumPy, on the CPU
    sagebwd.emit('sm_90a'), sagebwd.build('sm_90a')   # the kernels' source; their machine code
    sagebwd.prebuild('a.pack', arch=['sm_80'])        # for machines that may not compile
    sagebwd.tune(head_dim=128, seq_len=8192)          # the fastest tiles for this GPU
    sagebwd.compare_plans(seq_len=8192)               # speed and error of each precision here
    sagebwd.cache_stats()                             # what the cache of kernels did here
    sagebwd.doctor()                                  # what this machine has and lacks

Importing needs neither a GPU nor a driver. Without PyTorch everything but `attention` and its
relatives works.
"""

import importlib

try:
    from sagebwd import _core  # noqa: F401
except ImportError as _error:
    from sagebwd import _extension

    raise ImportError(_extension.reason(_error)) from None

from sagebwd import _nvrtc, arrays, reference
from sagebwd._core import (
    CompileError,
    DriverError,
    LibraryError,
    OfflineError,
    PackError,
    SpecError,
    TuneError,
)
from sagebwd._core import __version__ as __version__
from sagebwd._doctor import doctor
from sagebwd.inputs import INPUTS, named_inputs
from sagebwd.kernels import KernelSource, archs, build, cache_stats, emit
from sagebwd.options import PRODUCTS, Spec
from sagebwd.prebuilding import prebuild
from sagebwd.tables import TraceTable
from sagebwd.tracing import trace
from sagebwd.tuning import (
    PlanFigures,
    TunedKernel,
    compare_plans,
    export_records,
    import_records,
    tune,
)

try:
    import torch as _torch  # noqa: F401
except (ImportError, OSError):  # not installed, or not in working order
    from sagebwd._without_torch import (
        attention,
        attention_backward,
        attention_forward,
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
        merge,
        sageattn,
        scaled_dot_product_attention,
        sdpa,
        warmup,
        with_sink,
    )
else:
    from sagebwd.combining import merge, with_sink
    from sagebwd.dropins import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
        sageattn,
        scaled_dot_product_attention,
    )
    from sagebwd.functional import attention, attention_backward, attention_forward, warmup
    from sagebwd.integrations._on_import import when_imported
    from sagebwd.integrations.pytorch import sdpa

    when_imported("transformers.modeling_utils", "sagebwd.integrations.transformers")
    del when_imported


def __getattr__(name):
    if name == "emulation":  # PyTorch's own operations, imported by who asks for it
        return importlib.import_module("sagebwd.emulation")
    raise AttributeError(f"module 'sagebwd' has no attribute {name!r}")


_nvrtc.point_to_wheels()  # after PyTorch, whose NVRTC serves both

__all__ = [
    "INPUTS", "PRODUCTS", "CompileError", "DriverError", "KernelSource", "LibraryError",
    "OfflineError", "PackError", "PlanFigures", "Spec", "SpecError", "TraceTable", "TuneError",
    "TunedKernel",
    "archs", "arrays", "attention", "attention_backward", "attention_forward", "build",
    "cache_stats",
    "compare_plans", "doctor", "emit", "export_records", "flash_attn_func",
    "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache", "import_records",
    "merge", "named_inputs", "prebuild", "reference", "sageattn",
    "scaled_dot_product_attention", "sdpa", "trace", "tune", "warmup", "with_sink",
]  # fmt: skip
