# Written by python/stubs/write.py: change that.

from typing import Literal, overload
from jax import Array
from jax.typing import ArrayLike

Causal = bool | Literal["none", "top-left", "bottom-right"]
Layout = Literal["bhsd", "bshd"]
Precision = Literal["six-of-seven", "dv16", "qk16", "gradients16"]
Product = Literal["s", "pv", "dv", "dp", "dq", "dk"]

@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
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
) -> Array: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
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
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
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
) -> Array | tuple[Array, Array]: ...
