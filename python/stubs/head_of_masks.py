"""The classes and types of `sagebwd.masks`, which its stub has before its functions."""

HEAD_OF_MASKS = """
from os import PathLike
from typing import TypedDict

from torch import Tensor, device as Device

Path = str | bytes | PathLike[str] | PathLike[bytes]
Causal = bool | Literal["none", "top-left", "bottom-right"]
Lengths = Tensor | Iterable[int] | Iterable[Iterable[int]]
Number = Symbol | int | float

class Arguments(TypedDict):
    causal: Causal
    startend_row_indices: Tensor

class Intervals:
    startend_row_indices: Tensor
    causal: Causal
    def __init__(self, startend_row_indices: Tensor, causal: Causal = False) -> None: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def arguments(self) -> Arguments: ...
    def hidden(self, queries: int) -> list[tuple[Tensor, Tensor]]: ...
    def validate(self, queries: int) -> Intervals: ...
    def dense(self, queries: int) -> Tensor: ...
    def to(self, device: Device | str) -> Intervals: ...

class Expression:
    kind: Literal["mask", "score"]
    text: str
    operands: dict[str, Tensor]
    def dense(
        self, batch: int, heads: int, queries: int, keys: int, scores: Tensor | None = None,
    ) -> Tensor: ...

class BlockMask:
    kind: Literal["mask"]
    text: str
    expression: Expression
    batch: int
    heads: int
    queries: int
    keys: int
    bits: Tensor
    def refresh(self) -> BlockMask: ...

class Symbol:
    def __add__(self, other: Number) -> Symbol: ...
    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__
    __floordiv__ = __mod__ = __pow__ = __lt__ = __le__ = __gt__ = __ge__ = __add__
    def __and__(self, other: Symbol | bool) -> Symbol: ...
    __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __and__
    def __eq__(self, other: object) -> Symbol: ...  # type: ignore[override]
    def __ne__(self, other: object) -> Symbol: ...  # type: ignore[override]
    def __neg__(self) -> Symbol: ...
    __invert__ = __abs__ = __neg__

class Operand:
    def __getitem__(self, index: Number | tuple[Number, ...]) -> Symbol: ...
"""
