# Written by python/stubs/write.py: change that.

from collections.abc import Iterable
from typing import Any, Literal, overload
from torch import Tensor, dtype as DType

Causal = bool | Literal["none", "top-left", "bottom-right"]
Layout = Literal["bhsd", "bshd"]
Precision = Literal["six-of-seven", "dv16", "qk16", "gradients16"]
Product = Literal["s", "pv", "dv", "dp", "dq", "dk"]

@overload
def emulated_attention(
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
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    softmax_scale: float | None = None,
    layout: Layout = "bhsd",
    precision: Precision | Iterable[Product] = "six-of-seven",
    return_lse: Literal[False] = False,
    math_dtype: DType = ...,
    k_mean: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Tensor: ...
@overload
def emulated_attention(
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
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    softmax_scale: float | None = None,
    layout: Layout = "bhsd",
    precision: Precision | Iterable[Product] = "six-of-seven",
    math_dtype: DType = ...,
    k_mean: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def emulated_attention(
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
    dp_sums: Literal["fp32", "fp16"] = "fp32",
    softmax_scale: float | None = None,
    layout: Layout = "bhsd",
    precision: Precision | Iterable[Product] = "six-of-seven",
    return_lse: bool = False,
    math_dtype: DType = ...,
    k_mean: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...

def emulated_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout = "bhsd",
    k_mean: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, Tensor]: ...

def emulated_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    layout: Layout = "bhsd",
    k_mean: Tensor | None = None,
    **given: Any,
) -> list[Tensor]: ...
