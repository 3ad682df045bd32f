"""sagebwd: trainable INT8 attention (SageBwd, arXiv 2603.02170), generated for the GPU it runs on.

    out = sagebwd.attention(q, k, v, causal=True)     # torch tensors on a GPU; differentiable
    sagebwd.block_sparse_attention(q, k, v, block_mask=...)   # each query block sees listed keys
    sagebwd.attention(q, k, v, **sagebwd.masks.documents(lengths=[...]).arguments)
    sagebwd.attention(q, k, v, mask="q >= k & q - k < 512")   # or a function of (b, h, q, k)
    sagebwd.merge([(out, lse), ...])                  # results over parts of the keys
    sagebwd.distributed.attention(q, k, v, mesh=mesh) # sequences that several GPUs share
    sagebwd.flash_attn_func(q, k, v, causal=True)     # and sageattn, scaled_dot_product_attention
    with sagebwd.sdpa(): ...                          # torch.nn.functional's, in this block
    sagebwd.sparse_linear_attention(q, k, v, alpha=0.9, block_mask=...)   # SLA2; sagebwd.nn
    sagebwd.qk_norm_rope(q, k, q_norm=gain, k_norm=gain, rope=(cos, sin))   # before attention
    sagebwd.qk_clip_(q_proj, k_proj, max_logits, 100) # QK-clip, by attention's max_logits
    sagebwd.warmup(head_dim=64)                       # before capturing a CUDA graph
    sagebwd.trace(q, k, v, dout)                      # error of every tensor against FP64
    sagebwd.trace(inputs="sink", causal=True)         # ... on inputs as trained models have them
    with sagebwd.Monitor(model, to="errors.jsonl"): ...   # ... and of real calls, in training
    sagebwd.reference.exact(q, k, v, dout)            # NumPy, on the CPU
    sagebwd.emit('sm_90a'), sagebwd.build('sm_90a')   # the kernels' source; their machine code
    sagebwd.prebuild('a.pack', arch=['sm_80'])        # kernels for machines that do not compile
    sagebwd.tune(head_dim=128, seq_len=8192)          # the fastest tiles for this GPU
    sagebwd.tune_lengths((512, 1024, 2048, 4096))     # ... for some, and where PyTorch's is faster
    sagebwd.compare_precisions(seq_len=8192)          # speed and error of each precision here
    sagebwd.fastest_precision()                       # what precision="fastest" stands for here
    sagebwd.crossover_tokens(causal=True)             # from where on PyTorch's attention is slower
    sagebwd.bench("llama-3-8b")                       # PyTorch's attentions and ours, on this GPU
    sagebwd.cache_stats()                             # what the kernel cache did in this process
    sagebwd.doctor()                                  # what this machine has and lacks

Importing needs neither a GPU nor a driver. Without PyTorch everything works except functions on
torch tensors.
"""

import importlib

try:
    from sagebwd import _core
except ImportError as _error:
    from sagebwd import _compat

    raise ImportError(_compat.reason(_error)) from None

from sagebwd import _compat, arrays, reference
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
from sagebwd.benchmark.api import BenchResult
from sagebwd.benchmark.lengths import LengthFigures, TunedLengths
from sagebwd.core.building import KernelSource, archs, build, cache_stats, emit
from sagebwd.core.crossover import crossover_tokens
from sagebwd.core.fastest import fastest_precision
from sagebwd.core.options import PRODUCTS, Spec
from sagebwd.core.prebuilding import prebuild
from sagebwd.core.tuning import (
    PlanFigures,  # noqa: F401  # another name of PrecisionFigures
    PrecisionFigures,
    TunedKernel,
    compare_plans,  # noqa: F401  # another name of compare_precisions
    compare_precisions,
    export_records,
    import_records,
    tune,
)
from sagebwd.monitoring import MonitorWarning
from sagebwd.numerics.inputs import INPUTS, named_inputs
from sagebwd.numerics.tracing import TraceTable, trace

try:
    import torch as _torch  # noqa: F401
except (ImportError, OSError):  # not installed, or broken
    globals().update(_compat.refusals())
else:
    from sagebwd.benchmark.api import bench
    from sagebwd.benchmark.lengths import tune_lengths
    from sagebwd.core import seams
    from sagebwd.core.combining import merge, with_sink
    from sagebwd.core.front import qk_norm_rope
    from sagebwd.core.functional import attention, attention_backward, attention_forward, warmup
    from sagebwd.core.qk_clip import qk_clip_
    from sagebwd.integrations._on_import import when_imported
    from sagebwd.integrations.dropins import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
        flashmask_attention,
        sageattn,
        scaled_dot_product_attention,
    )
    from sagebwd.integrations.pytorch import sdpa
    from sagebwd.lists.block_sparse import (
        block_sparse_attention,
        block_sparse_attention_backward,
        block_sparse_attention_forward,
        check_block_indices,
        pack_blocks,
    )
    from sagebwd.masks.block_mask import BlockMask
    from sagebwd.monitoring.monitor import Monitor
    from sagebwd.sla.functional import block_linear_attention, sparse_linear_attention
    from sagebwd.sla.router import pooled_block_scores, soft_top_blocks, top_blocks

    def _of_dtensors(*given, **chosen):
        from sagebwd.distributed.dtensors import attention_of_dtensors

        return attention_of_dtensors(*given, **chosen)

    def _over_ranks(*given):
        from sagebwd.distributed.in_models import OverRanks

        return OverRanks(*given)

    def _traced(kind, given, operands=None):
        from sagebwd.masks import tracing

        return tracing.traced(kind, given, operands)

    def _table_sums():
        from sagebwd.masks import table_sums

        return table_sums

    def _slopes():
        from sagebwd.masks import slopes

        return slopes

    seams.attention_of_dtensors, seams.over_ranks = _of_dtensors, _over_ranks
    seams.traced, seams.table_sums, seams.slopes = _traced, _table_sums, _slopes
    when_imported("transformers.modeling_utils", "sagebwd.integrations.transformers")
    when_imported("diffusers.utils.constants", "sagebwd.integrations._diffusers_choice")
    when_imported("diffusers.models.modeling_utils", "sagebwd.integrations.diffusers")
    when_imported("torch.utils.flop_counter", "sagebwd.integrations._flops")
    del when_imported


_LAZY = ("distributed", "emulation", "masks", "nn")


def __getattr__(name):
    if name in _LAZY:  # imported on first use, because they need PyTorch
        return importlib.import_module(f"sagebwd.{name}")
    raise AttributeError(f"module 'sagebwd' has no attribute {name!r}")


def __dir__():
    """Lists what users call, and not the modules that the package is made of."""
    return sorted({*__all__, *_LAZY, *(n for n in globals() if n.startswith("__"))})


_compat.point_to_wheels(_core)  # after PyTorch, whose NVRTC serves both

__all__ = [
    "INPUTS", "PRODUCTS", "BenchResult", "BlockMask", "CompileError", "DriverError",
    "KernelSource", "LengthFigures", "LibraryError", "Monitor", "MonitorWarning",
    "OfflineError", "PackError", "PrecisionFigures", "Spec", "SpecError", "TraceTable",
    "TuneError", "TunedKernel", "TunedLengths", "archs", "arrays", "attention",
    "attention_backward", "attention_forward", "bench", "block_linear_attention",
    "block_sparse_attention", "block_sparse_attention_backward",
    "block_sparse_attention_forward", "build", "cache_stats", "check_block_indices",
    "compare_precisions", "crossover_tokens", "doctor", "emit", "export_records",
    "fastest_precision", "flash_attn_func", "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "flashmask_attention",
    "import_records", "merge", "named_inputs", "pack_blocks", "pooled_block_scores", "prebuild",
    "qk_clip_", "qk_norm_rope", "reference", "sageattn", "scaled_dot_product_attention", "sdpa",
    "soft_top_blocks", "sparse_linear_attention", "top_blocks", "trace", "tune", "tune_lengths",
    "warmup", "with_sink",
]  # fmt: skip
