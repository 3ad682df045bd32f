# Written by python/stubs/write.py: change that.

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, overload
from collections import Counter
from os import PathLike
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, device as Device, dtype as DType
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from sagebwd import arrays as arrays, emulation as emulation, reference as reference

Causal = bool | Literal["none", "top-left", "bottom-right"]
Layout = Literal["bhsd", "bshd"]
Precision = Literal["six-of-seven", "dv16", "qk16", "gradients16"]
Product = Literal["s", "pv", "dv", "dp", "dq", "dk"]

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
    def rows(self) -> list[tuple[str, str, float, float]]: ...
    def to_dict(self) -> dict[str, Any]: ...
    def to_pandas(self) -> Any: ...

class sdpa(TorchFunctionMode):
    fallback: Literal["torch"] | None
    options: dict[str, Any]
    calls: int
    fallbacks: Counter[str]
    def __init__(self, *, fallback: Literal["torch"] | None = None, **options: Any) -> None: ...
    def __enter__(self) -> sdpa: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

class Spec:
    causal: str
    window_left: int
    window_right: int
    granularity: str
    group_q: int
    group_kv: int
    sink_keys: int
    smooth_k: bool
    smooth_q: bool
    rotate: bool
    precision: str
    deterministic: bool
    dq_sums: str
    dp_sums: str
    head_dim: int
    dtype: str
    packed: bool
    numerics: int
    def __init__(
        self,
        line: str | None = None,
        /,
        *,
        causal: Causal = False,
        window_left: int | None = None,
        window_right: int | None = None,
        granularity: Literal["row", "block"] = "row",
        group_q: int | None = None,
        group_kv: int | None = None,
        sink_keys: int | None = None,
        smooth_k: bool = True,
        smooth_q: bool = False,
        rotate: bool = True,
        precision: Precision = "six-of-seven",
        deterministic: bool = True,
        dq_sums: Literal["fp32", "fp16"] = "fp32",
        dp_sums: Literal["fp32", "fp16"] = "fp32",
        head_dim: int = 128,
        dtype: str | DType = "bf16",
        packed: bool = False,
    ) -> None: ...

@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window_left: int | None = None,
    window_right: int | None = None,
    granularity: Literal["row", "block"] = "row",
    group_q: int | None = None,
    group_kv: int | None = None,
    sink_keys: int | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    rotate: bool = True,
    precision: Precision = "six-of-seven",
    deterministic: bool = True,
    dq_sums: Literal["fp32", "fp16"] = "fp32",
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    softmax_scale: float | None = None,
    layout: Layout = "bhsd",
    return_lse: Literal[False] = False,
    sink_logits: Tensor | None = None,
    k_mean: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    causal: Causal = False,
    window_left: int | None = None,
    window_right: int | None = None,
    granularity: Literal["row", "block"] = "row",
    group_q: int | None = None,
    group_kv: int | None = None,
    sink_keys: int | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    rotate: bool = True,
    precision: Precision = "six-of-seven",
    deterministic: bool = True,
    dq_sums: Literal["fp32", "fp16"] = "fp32",
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    softmax_scale: float | None = None,
    layout: Layout = "bhsd",
    sink_logits: Tensor | None = None,
    k_mean: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window_left: int | None = None,
    window_right: int | None = None,
    granularity: Literal["row", "block"] = "row",
    group_q: int | None = None,
    group_kv: int | None = None,
    sink_keys: int | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    rotate: bool = True,
    precision: Precision = "six-of-seven",
    deterministic: bool = True,
    dq_sums: Literal["fp32", "fp16"] = "fp32",
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    softmax_scale: float | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    sink_logits: Tensor | None = None,
    k_mean: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...

def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window_left: int | None = None,
    window_right: int | None = None,
    granularity: Literal["row", "block"] = "row",
    group_q: int | None = None,
    group_kv: int | None = None,
    sink_keys: int | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    rotate: bool = True,
    precision: Precision = "six-of-seven",
    deterministic: bool = True,
    dq_sums: Literal["fp32", "fp16"] = "fp32",
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    softmax_scale: float | None = None,
    layout: Layout = "bhsd",
    k_mean: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...

def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: Causal = False,
    window_left: int | None = None,
    window_right: int | None = None,
    granularity: Literal["row", "block"] = "row",
    group_q: int | None = None,
    group_kv: int | None = None,
    sink_keys: int | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    rotate: bool = True,
    precision: Precision = "six-of-seven",
    deterministic: bool = True,
    dq_sums: Literal["fp32", "fp16"] = "fp32",
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    dlse: Tensor | None = None,
    part: tuple[Tensor, Tensor] | None = None,
    softmax_scale: float | None = None,
    layout: Layout = "bhsd",
    k_mean: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...

def warmup(
    *,
    causal: Causal = False,
    window_left: int | None = None,
    window_right: int | None = None,
    granularity: Literal["row", "block"] = "row",
    group_q: int | None = None,
    group_kv: int | None = None,
    sink_keys: int | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    rotate: bool = True,
    precision: Precision = "six-of-seven",
    deterministic: bool = True,
    dq_sums: Literal["fp32", "fp16"] = "fp32",
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    head_dim: int = 128,
    dtype: str | DType = "bf16",
    packed: bool = False,
    backward: bool = True,
    device: Device | str | int | None = None,
    sizes: tuple[int, int, int, int, int] | None = None,
) -> None: ...

def merge(
    parts: Iterable[tuple[Tensor, Tensor]],
    *,
    layout: Layout = "bhsd",
) -> tuple[Tensor, Tensor]: ...

def with_sink(
    out: Tensor,
    lse: Tensor,
    sink_logits: Tensor,
    *,
    layout: Layout = "bhsd",
) -> tuple[Tensor, Tensor]: ...

@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float | None = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    **more: Any,
) -> Tensor: ...
@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float | None = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
    **more: Any,
) -> tuple[Tensor, Tensor, None]: ...
@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float | None = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **more: Any,
) -> Tensor | tuple[Tensor, Tensor, None]: ...

def flash_attn_qkvpacked_func(qkv: Tensor, *given: Any, **more: Any) -> Any: ...

def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *given: Any, **more: Any) -> Any: ...

@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float | None = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    block_table: None = None,
    **more: Any,
) -> Tensor: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float | None = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
    block_table: None = None,
    **more: Any,
) -> tuple[Tensor, Tensor, None]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float | None = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
    **more: Any,
) -> Tensor | tuple[Tensor, Tensor, None]: ...

def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Any = None,
    *given: Any,
    **more: Any,
) -> Any: ...

def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *given: Any, **more: Any) -> Any: ...

def flash_attn_with_kvcache(*given: Any, **more: Any) -> Any: ...

@overload
def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: Literal["HND", "NHD"] = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: Literal[False] = False,
    *,
    smooth_k: bool = True,
    smooth_q: bool = False,
    **more: Any,
) -> Tensor: ...
@overload
def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: Literal["HND", "NHD"] = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    *,
    return_lse: Literal[True],
    smooth_k: bool = True,
    smooth_q: bool = False,
    **more: Any,
) -> tuple[Tensor, Tensor]: ...
@overload
def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: Literal["HND", "NHD"] = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    smooth_k: bool = True,
    smooth_q: bool = False,
    **more: Any,
) -> Tensor | tuple[Tensor, Tensor]: ...

def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float | None = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **more: Any,
) -> Tensor | tuple[Tensor, Tensor]: ...

@dataclass(frozen=True)
class KernelSource:
    name: str
    kind: str
    pass_: str
    tile: str
    text: str
    threads: int
    shared_bytes: int

def archs() -> list[str]: ...

def emit(
    arch: str | None = None,
    *,
    causal: Causal = False,
    window_left: int | None = None,
    window_right: int | None = None,
    granularity: Literal["row", "block"] = "row",
    group_q: int | None = None,
    group_kv: int | None = None,
    sink_keys: int | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    rotate: bool = True,
    precision: Precision = "six-of-seven",
    deterministic: bool = True,
    dq_sums: Literal["fp32", "fp16"] = "fp32",
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    head_dim: int = 128,
    dtype: str | DType = "bf16",
    packed: bool = False,
    backward: bool = True,
) -> list[KernelSource]: ...

def build(
    arch: str | None = None,
    *,
    causal: Causal = False,
    window_left: int | None = None,
    window_right: int | None = None,
    granularity: Literal["row", "block"] = "row",
    group_q: int | None = None,
    group_kv: int | None = None,
    sink_keys: int | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    rotate: bool = True,
    precision: Precision = "six-of-seven",
    deterministic: bool = True,
    dq_sums: Literal["fp32", "fp16"] = "fp32",
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    head_dim: int = 128,
    dtype: str | DType = "bf16",
    packed: bool = False,
    backward: bool = True,
) -> list[dict[str, Any]]: ...

def cache_stats() -> dict[str, Any]: ...

def prebuild(
    out: Path,
    *,
    window_left: int | None = None,
    window_right: int | None = None,
    group_q: int | None = None,
    group_kv: int | None = None,
    sink_keys: int | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    rotate: bool = True,
    deterministic: bool = True,
    dq_sums: Literal["fp32", "fp16"] = "fp32",
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    packed: bool = False,
    arch: str | Iterable[str],
    head_dim: int | Iterable[int] = ...,
    dtype: str | Iterable[str] = ('bf16', 'fp16'),
    causal: Causal | Iterable[Causal] = ('none', 'top-left'),
    granularity: str | Iterable[str] = "row",
    precision: str | Iterable[str] = "six-of-seven",
    backward: bool = True,
    records: Path | Iterable[Path] = (),
    progress: Callable[..., object] | None = None,
) -> dict[str, Any]: ...

@dataclass(frozen=True)
class TunedKernel:
    kernel: str
    tile: str
    default_tile: str
    default_ms: float
    tuned_ms: float
    fresh: bool
    kept: bool
    record: dict[str, Any]
    @property
    def speedup(self) -> float: ...

def tune(
    *,
    causal: Causal = False,
    window_left: int | None = None,
    window_right: int | None = None,
    granularity: Literal["row", "block"] = "row",
    group_q: int | None = None,
    group_kv: int | None = None,
    sink_keys: int | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    rotate: bool = True,
    precision: Precision = "six-of-seven",
    deterministic: bool = True,
    dq_sums: Literal["fp32", "fp16"] = "fp32",
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    head_dim: int = 128,
    dtype: str | DType = "bf16",
    packed: bool = False,
    seq_len: int = 8192,
    seq_kv: int | None = None,
    batch: int = 1,
    heads: int = 8,
    heads_kv: int | None = None,
    kernels: str | Iterable[str] = ...,
    tiles: str | Iterable[str] = (),
    force: bool = False,
    rounds: int = 15,
    device: Device | str | int | None = None,
    group: ProcessGroup | None = None,
    progress: Callable[..., object] | None = None,
) -> list[TunedKernel]: ...

@dataclass(frozen=True)
class PrecisionFigures:
    precision: str
    int8_products: int
    forward_ms: float
    backward_ms: float
    errors: dict[str, Any]

def compare_precisions(
    *,
    causal: Causal = False,
    window_left: int | None = None,
    window_right: int | None = None,
    granularity: Literal["row", "block"] = "row",
    group_q: int | None = None,
    group_kv: int | None = None,
    sink_keys: int | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    rotate: bool = True,
    deterministic: bool = True,
    dq_sums: Literal["fp32", "fp16"] = "fp32",
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    head_dim: int = 128,
    dtype: str | DType = "bf16",
    packed: bool = False,
    seq_len: int = 8192,
    seq_kv: int | None = None,
    batch: int = 1,
    heads: int = 8,
    heads_kv: int | None = None,
    rounds: int = 15,
    device: Device | str | int | None = None,
    progress: Callable[..., object] | None = None,
) -> list[PrecisionFigures]: ...

def export_records(path: Path) -> int: ...

def import_records(path: Path, overwrite: bool = False) -> dict[str, int]: ...

@dataclass(frozen=True)
class BenchResult:
    machine: dict[str, Any]
    cases: list[tuple[Any, Any]]
    @property
    def text(self) -> str: ...
    @property
    def data(self) -> dict[str, Any]: ...

def bench(
    models: str | Iterable[str] | None = None,
    *,
    causal: Causal = False,
    window_left: int | None = None,
    window_right: int | None = None,
    granularity: Literal["row", "block"] = "row",
    group_q: int | None = None,
    group_kv: int | None = None,
    sink_keys: int | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    rotate: bool = True,
    dq_sums: Literal["fp32", "fp16"] = "fp32",
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    head_dim: int = 128,
    dtype: str | DType = "bf16",
    backends: str | Iterable[str] | None = None,
    precision: str | Iterable[str] | None = None,
    deterministic: bool | None = None,
    batch: int | None = None,
    heads: int | None = None,
    heads_kv: int | None = None,
    seq_len: int | None = None,
    seq_kv: int | None = None,
    sinks: bool = False,
    layout: Layout = "bhsd",
    rounds: int = 15,
    seed: int = 0,
    device: Device | str | int | None = None,
    plot: Path | None = None,
    progress: Callable[..., object] | None = None,
) -> BenchResult: ...

def trace(
    q: Array | None = None,
    k: Array | None = None,
    v: Array | None = None,
    dout: Array | None = None,
    *,
    causal: Causal = False,
    window_left: int | None = None,
    window_right: int | None = None,
    granularity: Literal["row", "block"] = "row",
    group_q: int | None = None,
    group_kv: int | None = None,
    sink_keys: int | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    rotate: bool = True,
    precision: Precision | Iterable[Product] = "six-of-seven",
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    inputs: str | dict[str, Any] | None = None,
    softmax_scale: float | None = None,
    dtype: str | DType | None = None,
    device: Device | str | None = None,
) -> TraceTable: ...

def named_inputs(
    name: str,
    batch: int = 1,
    heads: int = 4,
    seq_q: int = 4096,
    head_dim: int = 128,
    *,
    heads_kv: int | None = None,
    seq_kv: int | None = None,
    dtype: str | DType = "bf16",
    sigma: float = 1.0,
    key_offset: float = 0.0,
    seed: int = 0,
    device: Device | str | None = None,
) -> Inputs | tuple[Tensor, Tensor, Tensor, Tensor]: ...

def doctor() -> dict[str, Any]: ...
