# Written by python/stubs/write.py: change that.

from collections.abc import Iterable
from typing import Any, Literal
import numpy as np
from numpy.typing import NDArray
from torch import Tensor, dtype as DType

Causal = bool | Literal["none", "top-left", "bottom-right"]
Layout = Literal["bhsd", "bshd"]
Precision = Literal["six-of-seven", "dv16", "qk16", "gradients16"]
Product = Literal["s", "pv", "dv", "dp", "dq", "dk"]

Array = NDArray[Any] | Tensor
Inputs = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]

def round_to(array: NDArray[Any], dtype: str | DType) -> NDArray[np.float32]: ...

def random_inputs(
    seq_len: int,
    *,
    head_dim: int = 128,
    heads: int = 1,
    heads_kv: int | None = None,
    batch: int = 1,
    seq_kv: int | None = None,
    dtype: str | DType = "bf16",
    sigma: float = 1.0,
    seed: int = 0,
) -> Inputs: ...

def exact(
    q: Array,
    k: Array,
    v: Array,
    dout: Array | None = None,
    *,
    causal: Causal = False,
    window_left: int | None = None,
    window_right: int | None = None,
    dlse: Array | None = None,
    softmax_scale: float | None = None,
    matrices: bool = False,
) -> dict[str, NDArray[np.float64] | None]: ...

def emulate(
    q: Array,
    k: Array,
    v: Array,
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
    dlse: Array | None = None,
    softmax_scale: float | None = None,
    dtype: str | DType = "bf16",
    matrices: bool = False,
    round_outputs: bool = False,
    out: Array | None = None,
    lse: Array | None = None,
) -> dict[str, NDArray[np.float32] | None]: ...
