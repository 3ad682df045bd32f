"""A mask with the bits of its blocks, which are computed once and serve many calls."""

import torch

from sagebwd.core import expressions, mask_ops
from sagebwd.core.arguments.checks import SpecError, SpecTypeError, a_kind, whole_number
from sagebwd.masks.tracing import Expression, trace_mask


class BlockMask:
    """A mask for calls of these sizes, as `block_mask` makes it: `sagebwd.attention(mask=...)`.

    It holds what the mask's tensors held when it was made, and which blocks of scores somebody sees
    then, so that calls compute neither again. A tensor that has changed since is not seen until
    `refresh` is called.

    expression: the `Expression`. batch, heads, queries, keys: the sizes. bits: int32 of (batch or
    1, heads or 1, blocks of 128 queries, words), as `torch.ops.sagebwd.mask_bits` gives them; 1
    where the mask is the same for all.
    """

    kind = "mask"

    def __init__(self, expression, batch, heads, queries, keys, device):
        self.expression, self.text, self.operands = expression, expression.text, expression.operands
        self.batch, self.heads, self.queries, self.keys = batch, heads, queries, keys
        self.sizes = batch, heads, queries, keys
        self._device = device
        expressions.check_named(self.text, "", self.operands, {})
        with torch.inference_mode(False):  # else autograd could save neither for a backward
            self.tables, self.table_sizes, self.bits = self._computed()
            self.tables = self.tables.clone()

    def _computed(self):
        rows = mask_ops.rows_of_mask(self.text, self.operands)
        tables, sizes = mask_ops.tables_of(rows, self._device)
        one = torch.empty(1, dtype=torch.bfloat16, device=self._device)
        q, k = (one.expand(self.batch, self.heads, n, 64) for n in (self.queries, self.keys))
        bits = torch.ops.sagebwd.mask_bits(q, k, tables, sizes, "bhsd",
                                           expressions.word_of("mask", self.text))  # fmt: skip
        return tables, sizes, bits

    def refresh(self):
        """Reads the mask's tensors again and computes the bits again, in the same memory, so that a
        captured CUDA graph that is replayed afterwards has them. Between a forward and its backward
        PyTorch raises an error in the backward. Returns the mask.
        """
        tables, _, bits = self._computed()
        self.tables.copy_(tables)
        self.bits.copy_(bits)
        return self

    def check(self, batch, heads, queries, keys):
        """SpecError unless the mask is for calls of these sizes. One that is the same for all
        sequences or heads is for any number of them."""
        given = batch, heads, queries, keys
        own = self.sizes
        counts = *expressions.depends(self.text), True, True
        if any(x != y and counted for x, y, counted in zip(given, own, counts)):
            raise SpecError(
                f"mask is a BlockMask for (batch, heads, queries, keys) = {own}, and the call has "
                f"{given}: make one by sagebwd.masks.block_mask(mask, {', '.join(map(str, given))})"
            )

    def __repr__(self):
        return f"BlockMask({self.text!r}, {', '.join(map(str, self.sizes))}, device={self._device})"


def block_mask(mask, batch, heads, queries, keys, *, device=None):
    """A mask with the bits of its blocks, for several calls of these sizes, such as all layers of a
    model in a step: `sagebwd.attention(q, k, v, mask=block_mask(...))`.

    A launch on the device computes the bits, and the host does not wait for it. Calls that are
    given the mask itself compute them each time.

    Args:
        mask: a function of (b, h, q, k), a text, or an `Expression`, as `sagebwd.attention` takes.
        batch, heads, queries, keys: the sizes of the calls; heads are those of the queries.
        device: a CUDA device; None means that of the tensors that the mask indexes, or the current
            one.

    Returns a `BlockMask`. Raises SpecError for other sizes, for what is no mask, and what
    `sagebwd.attention` raises.
    """
    sizes = dict(batch=batch, heads=heads, queries=queries, keys=keys)
    sizes = {name: whole_number(name, size) for name, size in sizes.items()}
    if isinstance(mask, str) or callable(mask):
        mask = trace_mask(mask)
    if not isinstance(mask, Expression) or mask.kind != "mask":
        raise SpecTypeError(f"mask is {a_kind(mask)}; pass a function of (b, h, q, k), a text such "
                            "as 'q >= k', or what sagebwd.masks.trace_mask gives")  # fmt: skip
    if device is None:
        device = next((t.device for t in mask.operands.values()), "cuda")
    return BlockMask(mask, **sizes, device=torch.device(device))
