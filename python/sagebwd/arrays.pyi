# Written by python/stubs/write.py: change that.

from collections.abc import Callable
from typing import Any, Literal
Causal = bool | Literal["none", "top-left", "bottom-right"]
Layout = Literal["bhsd", "bshd"]
Precision = Literal["six-of-seven", "dv16", "qk16", "gradients16"]
Product = Literal["s", "pv", "dv", "dp", "dq", "dk"]

def attention_forward(
    q: Any,
    k: Any,
    v: Any,
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
    k_mean: Any = None,
    stream: Any = None,
    empty: Callable[[tuple[int, ...], str], Any] | None = None,
) -> tuple[Any, Any]: ...

def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
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
    dlse: Any = None,
    softmax_scale: float | None = None,
    layout: Layout = "bhsd",
    k_mean: Any = None,
    stream: Any = None,
    empty: Callable[[tuple[int, ...], str], Any] | None = None,
) -> tuple[Any, Any, Any]: ...
