"""These tables say what stubs hold, and the types of parameters and results, by name."""

from head_of_masks import HEAD_OF_MASKS

#: Functions of `sagebwd.masks` by what they give.
_INTERVALS = ("documents", "prefix_lm", "shared_prefix", "spans", "window_and_global", "padding",
              "tree", "from_bool")  # fmt: skip
_SYMBOLS = ("where", "minimum", "maximum", "absolute", "tanh", "exp", "log", "sqrt", "sigmoid",
            "pow", "float_")  # fmt: skip
_EXPRESSIONS = ("trace_mask", "trace_score", "from_flex")
_EXPRESSION = "masks.Expression | str | Callable[..., Any] | None"
#: Types of mask= and score=, where functions of attention take them.
_EXPRESSED = {"mask": f"masks.BlockMask | {_EXPRESSION}", "score": _EXPRESSION}

#: Each stub has these names, by the modules that define them.
STUBS = {
    "__init__": {
        "core/functional": ["attention", "attention_forward", "attention_backward", "warmup"],
        "core/front": ["qk_norm_rope"],
        "core/qk_clip": ["qk_clip_"],
        "core/combining": ["merge", "with_sink"],
        "sla/functional": ["sparse_linear_attention", "block_linear_attention"],
        "sla/router": ["pooled_block_scores", "top_blocks", "soft_top_blocks"],
        "lists/block_sparse": [
            "block_sparse_attention", "block_sparse_attention_forward",
            "block_sparse_attention_backward", "pack_blocks", "check_block_indices"],
        "integrations/dropins": [
            "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func",
            "flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func",
            "flash_attn_varlen_kvpacked_func", "flash_attn_with_kvcache", "flashmask_attention",
            "sageattn", "scaled_dot_product_attention"],
        "core/building": ["KernelSource", "archs", "emit", "build", "cache_stats"],
        "core/crossover": ["crossover_tokens"],
        "core/fastest": ["fastest_precision"],
        "core/prebuilding": ["prebuild"],
        "core/tuning": ["TunedKernel", "tune", "PrecisionFigures", "compare_precisions",
                        "export_records", "import_records"],
        "benchmark/api": ["BenchResult", "bench"],
        "benchmark/lengths": ["LengthFigures", "TunedLengths", "tune_lengths"],
        "numerics/tracing": ["trace"],
        "numerics/inputs": ["named_inputs"],
        "_doctor": ["doctor"],
    },
    "arrays": {"integrations/arrays": ["attention_forward", "attention_backward"]},
    "reference": {"numerics/reference": ["round_to", "random_inputs", "exact", "emulate"],
                  "sla/reference": ["sparse_linear"]},
    "emulation": {"numerics/emulation": ["emulated_attention", "emulated_block_sparse_attention",
                                         "emulated_forward", "emulated_backward"]},
    "distributed/__init__": {"distributed/functional": ["attention"],
                             "distributed/sharding": ["shard", "unshard"]},
    "masks/__init__": {
        "masks/making": [*_INTERVALS[:6]],
        "masks/trees": ["tree"], "masks/from_dense": ["from_bool"],
        "masks/symbols": ["operand", *_SYMBOLS],
        "masks/tracing": ["trace_mask", "trace_score"], "masks/flex": ["from_flex"],
        "masks/block_mask": ["block_mask"], "masks/evaluation": ["dense"],
        "masks/showing": ["show"]},
    "integrations/jax": {"integrations/jax": ["attention", "pack_blocks",
                                              "sparse_linear_attention"],
                         "integrations/_jax_front": ["qk_norm_rope"]},
    "integrations/transformers": {"integrations/_fusing": ["FuseReport"],
                                  "integrations/_fused_layers": ["fuse", "unfuse"]},
    "integrations/diffusers": {"integrations/_fusing": ["FuseReport"],
                               "integrations/_processor_check": ["fuse", "unfuse"]},
}  # fmt: skip

#: A stub has these types before its functions.
TYPES = """\
Causal = bool | Literal["none", "top-left", "bottom-right"]
Layout = Literal["bhsd", "bshd"]
Precision = Literal["six-of-seven", "dv16", "qk16", "gradients16", "fastest"]
Product = Literal["s", "pv", "dv", "dp", "dq", "dk"]
"""
_USE = """
def use(
    *, granularity: Literal["row", "block"] = ..., group_q: int | None = ...,
    group_kv: int | None = ..., sink_keys: int | None = ..., smooth_k: bool = ...,
    smooth_q: bool = ..., smooth_v: bool = ..., rotate: bool = ..., precision: Precision = ...,
    deterministic: bool = ..., dq_sums: Literal["fp32", "fp16"] = ...,
    dp_sums: Literal["fp32", "fp16"] = ...,
    gradient_kernels: Literal["any", "split", "fused"] = ...,{more}
) -> None: ...
"""
_MORE = """
    mesh: DeviceMesh | None = None, method: Literal["ring", "ulysses", "both"] = "ring",
    positions_checked: bool = True, min_tokens: float | Literal["auto"] | None = None,"""
HEADS = {
    "__init__": """
from collections import Counter, deque
from os import PathLike
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, device as Device, dtype as DType
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from sagebwd import (
    arrays as arrays, distributed as distributed, emulation as emulation, masks as masks, nn as nn,
    reference as reference,
)
from sagebwd.masks import BlockMask as BlockMask

""" + TYPES + """
Path = str | bytes | PathLike[str] | PathLike[bytes]
Array = NDArray[Any] | Tensor
Inputs = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]

__version__: str
INPUTS: dict[str, str]
PRODUCTS: tuple[Product, ...]

class SpecError(ValueError): ...
class LibraryError(RuntimeError): ...
class OfflineError(RuntimeError): ...
class PackError(RuntimeError): ...
class TuneError(RuntimeError): ...

PlanFigures = PrecisionFigures
compare_plans = compare_precisions

class DriverError(RuntimeError):
    code: int

class CompileError(RuntimeError):
    log: str
    numbered_source: str

class TraceTable(dict[str, Any]):
    def rows(self) -> list[tuple[str, str, float | None, float | None]]: ...
    def to_dict(self) -> dict[str, Any]: ...
    def to_pandas(self) -> Any: ...

class MonitorWarning(UserWarning): ...

class MonitorTable(list[dict[str, Any]]):
    def to_pandas(self) -> Any: ...

class Monitor:
    every: int
    thresholds: dict[str, float]
    records: deque[dict[str, Any]]
    def __init__(
        self,
        model_or_calls: Module | list[Module] | Callable[[dict[str, Any]], bool] | None = None, *,
        every: int = 200, to: Any = None, thresholds: dict[str, float | None] | None = None,
        seed: int = 0, memory: int = ..., keep: int = 1000,
    ) -> None: ...
    def start(self) -> Monitor: ...
    def stop(self) -> None: ...
    def __enter__(self) -> Monitor: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def step(self, step: int | None = None) -> None: ...
    @property
    def latest(self) -> dict[str, Any] | None: ...
    @property
    def overhead(self) -> float: ...
    def table(self) -> MonitorTable: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

class sdpa(TorchFunctionMode):
    fallback: Literal["torch"] | None
    options: dict[str, Any]
    calls: int
    fallbacks: Counter[str]
    def __init__(
        self, *, fallback: Literal["torch"] | None = None,
        min_tokens: float | Literal["auto"] | None = None, **options_of_attention: Any,
    ) -> None: ...
    @property
    def short_calls(self) -> int: ...
    def report(self) -> str: ...
    def __enter__(self) -> sdpa: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
""",
    "arrays": f"\n{TYPES}",
    "reference": f"""
import numpy as np
from numpy.typing import NDArray
from torch import Tensor, dtype as DType

from sagebwd import masks

{TYPES}
Array = NDArray[Any] | Tensor
Inputs = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]
""",
    "emulation": "\nfrom torch import Tensor, dtype as DType\n\nfrom sagebwd import masks\n"
    f"\n{TYPES}",
    "distributed/__init__": "\nfrom torch import Tensor\n"
    f"from torch.distributed.device_mesh import DeviceMesh\n\n{TYPES}",
    "masks/__init__": HEAD_OF_MASKS,
    "integrations/jax": f"\nfrom jax import Array\nfrom jax.typing import ArrayLike\n\n{TYPES}",
    "integrations/transformers": "\nfrom torch.distributed.device_mesh import DeviceMesh\n"
    f"from torch.nn import Module\n\n{TYPES}\nNAME: str\n{_USE.format(more=_MORE)}"
    "\ndef report() -> str: ...\n",
    "integrations/diffusers":
    f"\nfrom torch.nn import Module\n\n{TYPES}\nNAME: str\n{_USE.format(more='')}",
}  # fmt: skip

#: Types of parameters, by name, wherever a function's own table says nothing else.
PARAMETERS = {
    **dict.fromkeys(("q", "k", "v", "dout", "out", "lse", "qkv", "kv", "query", "key", "value",
                     "cu_seqlens"), "Tensor"),
    **dict.fromkeys(("dlse", "sink_logits", "cu_seqlens_q", "cu_seqlens_k", "seqused_q",
                     "seqused_k", "k_mean", "startend_row_indices"), "Tensor | None"),
    "part": "tuple[Tensor, Tensor] | None",
    **dict.fromkeys(("q_norm", "k_norm"), "Tensor | bool | None"), "norm_eps": "float",
    **dict.fromkeys(("q_inv_rms", "k_inv_rms", "gate"), "Tensor | None"),
    **dict.fromkeys(("rope", "rope_k"), "tuple[Tensor, Tensor] | None"),
    "rope_style": 'Literal["halves", "interleaved"]', "rope_begin": "int",
    **dict.fromkeys(("softmax_scale", "sm_scale", "scale"), "float | None"),
    "layout": "Layout", "tensor_layout": 'Literal["HND", "NHD"]',
    **dict.fromkeys(("return_lse", "return_attn_probs", "return_softmax_lse", "is_causal",
                     "enable_gqa", "backward", "force", "matrices", "round_outputs", "overwrite",
                     "smooth_q", "smooth_k", "smooth_v", "rotate", "deterministic", "packed",
                     "recompute_qk", "training", "return_max_logits", "max_logits", "check"),
                    "bool"),
    **dict.fromkeys(("window_left", "window_right", "group_q", "group_kv", "sink_keys",
                     "heads_kv", "seq_kv"), "int | None"),
    **dict.fromkeys(("head_dim", "seq_len", "seq_q", "batch", "heads", "rounds", "seed",
                     "sparse_q", "sparse_kv", "keys", "intervals"), "int"),
    **dict.fromkeys(("sigma", "key_offset"), "float"),
    "causal": "Causal", "granularity": 'Literal["row", "block"]', "precision": "Precision",
    **dict.fromkeys(("dq_sums", "dp_sums"), 'Literal["fp32", "fp16"]'),
    "gradient_kernels": 'Literal["any", "split", "fused"]',
    "dtype": "str | DType", "path": "Path",
    "device": "Device | str | int | None", "arch": "str | None",
    "sizes": "tuple[int, int, int, int, int] | None", "parts": "Iterable[tuple[Tensor, Tensor]]",
    "kernels": "str | Iterable[str]", "tiles": "str | Iterable[str]",
    "group": "ProcessGroup | None", "progress": "Callable[..., object] | None", "name": "str",
    **dict.fromkeys(("beta", "block_mask", "block_indices", "block_counts", "block_bits",
                     "query_map", "key_map"), "Tensor | None"),
    "mesh": "DeviceMesh", "method": 'Literal["ring", "ulysses", "both"]', "x": "Tensor",
    "dim": "int", "model": "Module",
    "scores": "Tensor", "feature_map": 'Literal["softmax"]', "return_branches": "bool",
    "block_size": "tuple[int, int]", "density": "float | None", "temperature": "float | None",
    "always": "Tensor | Iterable[int] | slice | None",
    "linear": 'Literal["none", "complement", "all"]', "score": "str",
    **dict.fromkeys(("prefix", "prefixes"), "int | Lengths"), "branches": "Lengths",
    "spans": "Tensor | Iterable[Any]", "window": "int", "global_tokens": "int", "tokens": "int",
    "queries": "int | None", "function": "Callable[..., Any]", "tensor": "Tensor", "text": "str",
    "mask": "str",
    "operands": "dict[str, Tensor] | None", "width": "int", "head": "int",
    "condition": "Symbol | bool", **dict.fromkeys(("y", "exponent"), "Number"),
    # Other libraries' functions take these, and ours refuse them unless they ask for nothing.
    **dict.fromkeys(("dropout_p", "dropout", "softcap"), "float | None"),
    "alibi_slopes": "Tensor | None",
    "block_table": "None", "attn_mask": "None", "window_size": "tuple[int, int]",
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "max_seqlen", "return_seed_offset",
                     "fixed_seed_offset", "rng_name"), "Any"),
}  # fmt: skip

_NUMPY = {**dict.fromkeys(("q", "k", "v"), "Array"),
          **dict.fromkeys(("dout", "dlse", "out", "lse", "block_mask", "startend_row_indices"),
                          "Array | None")}  # fmt: skip
_ARRAYS = {**dict.fromkeys(("q", "k", "v", "dout", "out", "lse", "dlse", "k_mean"), "Any"),
           "stream": "Any",
           "empty": "Callable[[tuple[int, ...], str], Any] | None"}  # fmt: skip
_OF_JAX = {**dict.fromkeys(("q", "k"), "ArrayLike"),
           **dict.fromkeys(("q_norm", "k_norm"), "ArrayLike | bool | None"),
           **dict.fromkeys(("q_inv_rms", "k_inv_rms"), "ArrayLike | None"),
           **dict.fromkeys(("rope", "rope_k"), "tuple[ArrayLike, ArrayLike] | None")}  # fmt: skip
_PLAN = {"precision": "Precision | Iterable[Product]"}
_SEVERAL, _NAMES = "int | Iterable[int]", "str | Iterable[str] | None"
#: Types that a function, of a stub, has for itself.
OF_FUNCTION = {
    **{("__init__", name): _EXPRESSED
       for name in ("attention", "attention_forward", "attention_backward")},
    **{("emulation", f"emulated_{name}"): _EXPRESSED for name in ("forward", "backward")},
    ("__init__", "flash_attn_func"): {"causal": "bool"},
    ("__init__", "flash_attn_varlen_func"): {
        "causal": "bool", "cu_seqlens_q": "Tensor", "cu_seqlens_k": "Tensor"},
    ("__init__", "flashmask_attention"): {"causal": "bool", "block_mask": "None", "name": "Any",
                                          "window_size": "int | tuple[int, int] | None"},
    ("__init__", "sageattn"): {"smooth_k": "bool"},
    ("__init__", "sparse_linear_attention"): {
        "alpha": 'float | Tensor | Literal["estimated"]',
        "precision": 'Precision | Literal["exact"]', "linear": 'Literal["complement", "all"]'},
    ("__init__", "top_blocks"): {"density": "float", "causal": "Causal", "queries": "int | None",
                                 "keys": "int | None"},
    ("__init__", "soft_top_blocks"): {"density": "float", "temperature": "float"},
    ("__init__", "with_sink"): {"sink_logits": "Tensor"},
    ("__init__", "pack_blocks"): {"keys": "int | None"},
    ("__init__", "qk_clip_"): {
        "max_logits": "Tensor", "tau": "float", "alpha": "float",
        **dict.fromkeys(("q_proj", "k_proj"), "Module | Tensor"),
        **dict.fromkeys(("q_bias", "k_bias"), "Tensor | None")},
    ("__init__", "check_block_indices"): {"block_indices": "Tensor"},
    ("__init__", "trace"): {
        **dict.fromkeys(("q", "k", "v", "dout", "block_mask", "startend_row_indices"),
                        "Array | None"), **_PLAN, **_EXPRESSED,
        "inputs": "str | dict[str, Any] | None", "dtype": "str | DType | None",
        "device": "Device | str | None"},
    ("__init__", "named_inputs"): {"device": "Device | str | None"},
    ("__init__", "bench"): {
        **dict.fromkeys(("models", "backends", "precision"), _NAMES), "intervals": "str | None",
        **dict.fromkeys(("batch", "heads", "seq_len"), "int | None"),
        "deterministic": "bool | None", "sinks": "bool", "plot": "Path | None"},
    ("__init__", "tune_lengths"): {"lengths": "Iterable[int]", "batch": "int | None"},
    ("__init__", "warmup"): {"device": "Device | str | int | None"},
    ("__init__", "prebuild"): {
        "out": "Path", "arch": "str | Iterable[str]", "head_dim": _SEVERAL,
        "dtype": "str | Iterable[str]", "causal": "Causal | Iterable[Causal]",
        "granularity": "str | Iterable[str]", "precision": "str | Iterable[str]",
        "records": "Path | Iterable[Path]"},
    ("arrays", "attention_forward"): _ARRAYS,
    ("arrays", "attention_backward"): _ARRAYS,
    ("reference", "round_to"): {"array": "NDArray[Any]"},
    ("reference", "exact"): {**_NUMPY, **_EXPRESSED},
    ("reference", "emulate"): {**_NUMPY, **_PLAN, **_EXPRESSED},
    ("reference", "sparse_linear"): {
        "score": 'Literal["logits", "softmax"]',
        **dict.fromkeys(("q", "k", "v"), "NDArray[Any]"),
        **dict.fromkeys(("dout", "beta", "block_mask", "query_map", "key_map"),
                        "NDArray[Any] | None"),
        "alpha": 'float | NDArray[Any] | Literal["estimated"]'},
    **{("masks/__init__", name): {**dict.fromkeys(("tokens", "queries", "keys"), "int | None"),
        **dict.fromkeys(("cu_seqlens", "lengths", "entry", "exit", "parents"), "Lengths | None"),
        "mask": "Tensor | Intervals | Expression | str | Callable[..., Any]",
        "path": "Path | None"} for name in ("documents", "shared_prefix", "tree", "show")},
    **{("masks/__init__", name): {"lengths": "int | Lengths", "mask": "Tensor"}
       for name in ("padding", "from_bool")},
    **{("masks/__init__", name): {"x": "Number"} for name in _SYMBOLS},
    ("masks/__init__", "block_mask"): {
        "mask": "Expression | str | Callable[..., Any]", "queries": "int", "keys": "int",
        "device": "Device | str | None"},
    ("masks/__init__", "dense"): {"queries": "int", "keys": "int", "scores": "Tensor | None"},
    **{("masks/__init__", name): {"function": "str | Callable[..., Any]"}
       for name in ("trace_mask", "trace_score")},
    ("emulation", "emulated_attention"): {**_PLAN, **_EXPRESSED, "math_dtype": "DType"},
    ("emulation", "emulated_block_sparse_attention"): {**_PLAN, "math_dtype": "DType"},
    ("integrations/jax", "qk_norm_rope"): _OF_JAX,
    ("integrations/jax", "attention"): {**_OF_JAX, "v": "ArrayLike", "gate": "ArrayLike | None"},
    ("integrations/jax", "pack_blocks"): {"block_mask": "ArrayLike"},
    ("integrations/jax", "sparse_linear_attention"): {
        **_OF_JAX, **dict.fromkeys(("v", "alpha"), "ArrayLike"),
        **dict.fromkeys(("block_mask", "block_bits", "gate"), "ArrayLike | None")},
}  # fmt: skip

#: Functions give these. A parameter of FLAGS chooses one of two: without it the first. A function
#: that has SECOND_FLAG gives two more, which are for calls with it.
_PAIR, _TRIPLE = "tuple[Tensor, Tensor]", "tuple[Tensor, Tensor, Tensor]"
RETURNS = {
    **dict.fromkeys(("flashmask_attention", "sageattn", "scaled_dot_product_attention"),
                    ("Tensor", _PAIR)),
    **dict.fromkeys(("attention", "block_sparse_attention", "emulated_attention",
                     "emulated_block_sparse_attention"), ("Tensor", _PAIR, _PAIR, _TRIPLE)),
    **dict.fromkeys(("flash_attn_func", "flash_attn_varlen_func"),
                    ("Tensor", "tuple[Tensor, Tensor, None]")),
    "flash_attn_with_kvcache": "Any",
    **{f"flash_attn_{name}packed_func": "Any"
       for name in ("qkv", "kv", "varlen_qkv", "varlen_kv")},
    "attention_forward": _PAIR, "attention_backward": _TRIPLE,
    "qk_norm_rope": _PAIR, "qk_clip_": "Tensor", "warmup": "None", "fuse": "FuseReport", "unfuse": "list[str]",
    "sparse_linear_attention": ("Tensor", "tuple[Tensor, Tensor, Tensor, Tensor]"),
    **dict.fromkeys(("block_linear_attention", "pooled_block_scores", "top_blocks",
                     "soft_top_blocks"), "Tensor"),
    "block_sparse_attention_forward": _PAIR,
    "block_sparse_attention_backward": _TRIPLE, "pack_blocks": "Tensor",
    "check_block_indices": "None",
    "shard": "Tensor", "unshard": "Tensor",
    "merge": _PAIR, "with_sink": _PAIR, "emulated_forward": _PAIR,
    "emulated_backward": "list[Tensor]",
    "archs": "list[str]", "emit": "list[KernelSource]", "build": "list[dict[str, Any]]",
    "cache_stats": "dict[str, Any]", "prebuild": "dict[str, Any]", "tune": "list[TunedKernel]",
    "tune_lengths": "TunedLengths",
    **dict.fromkeys(("speedup", "forward_speed", "both_speed"), "float"),
    "compare_precisions": "list[PrecisionFigures]", "export_records": "int",
    "crossover_tokens": "float", "fastest_precision": "dict[str, Any]",
    "import_records": "dict[str, int]",
    "bench": "BenchResult", "text": "str", "data": "dict[str, Any]",
    "trace": "TraceTable", "doctor": "dict[str, Any]",
    "named_inputs": "Inputs | tuple[Tensor, Tensor, Tensor, Tensor]", "random_inputs": "Inputs",
    "round_to": "NDArray[np.float32]", "exact": "dict[str, NDArray[np.float64] | None]",
    "emulate": "dict[str, NDArray[np.float32] | None]",
    "sparse_linear": "dict[str, NDArray[np.float64] | None]",
    **dict.fromkeys(_INTERVALS, "Intervals"), **dict.fromkeys(_SYMBOLS, "Symbol"),
    **dict.fromkeys(_EXPRESSIONS, "Expression"), "operand": "Operand",
    "block_mask": "BlockMask", "dense": "Tensor",
    "show": "None",
    ("arrays", "attention_forward"): "tuple[Any, Any]",
    ("arrays", "attention_backward"): "tuple[Any, Any, Any]",
    ("integrations/jax", "attention"): ("Array", *["tuple[Array, Array]"] * 2,
                                        "tuple[Array, Array, Array]"),
    ("integrations/jax", "qk_norm_rope"): "tuple[Array, Array]",
    **dict.fromkeys((("integrations/jax", "pack_blocks"),
                     ("integrations/jax", "sparse_linear_attention")), "Array"),
}  # fmt: skip
SECOND_FLAG = "return_max_logits"
FLAGS = ("return_lse", "return_attn_probs", "return_softmax_lse", "return_branches")
