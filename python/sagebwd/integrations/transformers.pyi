# Written by python/stubs/write.py: change that.

from typing import Literal
Causal = bool | Literal["none", "top-left", "bottom-right"]
Layout = Literal["bhsd", "bshd"]
Precision = Literal["six-of-seven", "dv16", "qk16", "gradients16"]
Product = Literal["s", "pv", "dv", "dp", "dq", "dk"]

NAME: str

def use(
    *, granularity: Literal["row", "block"] = ..., group_q: int | None = ...,
    group_kv: int | None = ..., sink_keys: int | None = ..., smooth_k: bool = ...,
    smooth_q: bool = ..., rotate: bool = ..., precision: Precision = ..., deterministic: bool = ...,
    dq_sums: Literal["fp32", "fp16"] = ..., dp_sums: Literal["fp32", "fp16"] = ...,
) -> None: ...


