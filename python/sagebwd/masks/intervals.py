"""Masks as intervals of hidden queries per key."""

import torch

from sagebwd.core import options
from sagebwd.core.arguments.checks import SpecTypeError, a_kind, whole_number

SpecError = options.SpecError

#: The columns, by whether the mask is causal and how many there are. LTS and LTE begin and end the
#: hidden queries below the diagonal, UTS and UTE those above it.
COLUMNS = {
    (True, 1): ("LTS",), (True, 2): ("LTS", "LTE"),
    (False, 2): ("LTS", "UTE"), (False, 4): ("LTS", "LTE", "UTS", "UTE"),
}  # fmt: skip


def diagonal_of(causal, queries, keys):
    """Query q sees key k only if k <= q + this number; None if all may be seen.

    SpecError for True and unequal numbers, as `sagebwd.attention` has it.
    """
    name = options.causal_name(causal, queries, keys)
    return {"none": None, "top-left": 0, "bottom-right": keys - queries}[name]


class Intervals:
    """A mask that has at most two intervals of hidden queries per key (FlashMask, arXiv 2410.01359,
    section 3), in memory that grows with the keys alone.

    A query sees a key unless one of these hides it, where M is the number of queries:

    | causal | columns | these queries do not see the key |
    |---|---|---|
    | yes | 1 | those before the diagonal, and [LTS, M) |
    | yes | 2 | those before the diagonal, and [LTS, LTE) |
    | no | 2: LTS, UTE | [LTS, M) and [0, UTE) |
    | no | 4: LTS, LTE, UTS, UTE | [LTS, LTE) and [UTS, UTE) |

    These columns are those of `flashmask_attention` in PaddlePaddle.

    Args:
        startend_row_indices: int32 tensor of (batch or 1, 1 or heads_kv, keys, columns), with
            numbers from 0 to M. A dimension of size 1 is the same for all.
        causal: False; 'top-left' (query q sees key k only if k <= q); 'bottom-right' (only if
            k <= q + keys - M); or True, if there are as many queries as keys.

    Raises SpecError for another dtype, shape or number of columns (for what is no tensor it is also
    a TypeError). The numbers are not read; `validate` reads them.
    """

    __hash__ = None  # the tensor may change

    def __init__(self, startend_row_indices, causal=False):
        t = startend_row_indices
        if not isinstance(t, torch.Tensor):
            raise SpecTypeError(f"startend_row_indices is {a_kind(t)}; pass an int32 torch tensor")
        if t.dtype != torch.int32:
            raise SpecError(f"startend_row_indices is {t.dtype}; pass torch.int32: "
                            "startend_row_indices.int()")  # fmt: skip
        is_causal = options.causal_name(causal) != "none"
        allowed = [columns for kind, columns in COLUMNS if kind == is_causal]
        if t.dim() != 4 or t.shape[3] not in allowed:
            raise SpecError(
                f"startend_row_indices has shape {tuple(t.shape)}; with causal={causal!r} pass "
                "(batch or 1, 1 or heads_kv, keys, columns) with "
                f"{' or '.join(map(str, allowed))} columns"
            )
        self.startend_row_indices = t
        self.causal = causal if is_causal else False

    @property
    def columns(self):
        """The names of the columns in order, such as ('LTS', 'UTE')."""
        return COLUMNS[self.causal is not False, self.startend_row_indices.shape[3]]

    @property
    def arguments(self):
        """The keywords that say this mask to `sagebwd.attention`, attention_forward and
        attention_backward: attention(q, k, v, **mask.arguments). They share the tensor."""
        return {"causal": self.causal, "startend_row_indices": self.startend_row_indices}

    def hidden(self, queries):
        """(begin, end) pairs of (batch, heads, keys) tensors: the intervals of queries that do not
        see a key, without what a causal mask hides."""
        column = dict(zip(self.columns, self.startend_row_indices.unbind(-1)))
        zero = torch.zeros_like(column["LTS"])
        below = column["LTS"], column.get("LTE", zero + queries)
        return [below, (column.get("UTS", zero), column["UTE"])] if "UTE" in column else [below]

    def validate(self, queries):
        """Reads the numbers, and returns these intervals.

        Raises SpecError unless 0 <= begin <= end <= queries in every interval, and names the first
        key for which that is wrong; also for causal=True if there are not as many keys as queries.
        """
        queries = whole_number("queries", queries, least=0)
        diagonal_of(self.causal, queries, self.startend_row_indices.shape[2])
        for begin, end in self.hidden(queries):
            wrong = (begin < 0) | (end < begin) | (end > queries)
            if wrong.any():
                batch, head, key = wrong.nonzero()[0].tolist()
                row = self.startend_row_indices[batch, head, key].tolist()
                told = ", ".join(f"{name}={number}" for name, number in zip(self.columns, row))
                raise SpecError(
                    f"startend_row_indices[{batch}, {head}, {key}] is {told}: with {queries} "
                    f"queries pass 0 <= begin <= end <= {queries} in every interval"
                )
        return self

    def dense(self, queries):
        """The mask as a bool tensor of (batch, heads, queries, keys), True where a key is seen.

        `batch` and `heads` are those of startend_row_indices, which `validate` checks first.
        """
        self.validate(queries)
        t = self.startend_row_indices
        places = torch.arange(queries, device=t.device)[:, None]
        seen = torch.ones(*t.shape[:2], queries, t.shape[2], dtype=torch.bool, device=t.device)
        for begin, end in self.hidden(queries):
            seen &= ~((places >= begin[:, :, None]) & (places < end[:, :, None]))
        diagonal = diagonal_of(self.causal, queries, t.shape[2])
        return seen if diagonal is None else seen.tril(diagonal)

    def to(self, device):
        """Copies the intervals to another device."""
        return Intervals(self.startend_row_indices.to(device), self.causal)

    def __eq__(self, other):
        """Whether both have the same causal and the same numbers, on any devices."""
        if not isinstance(other, Intervals):
            return NotImplemented  # Python then asks the other object
        ours, theirs = (x.startend_row_indices.cpu() for x in (self, other))
        return self.causal == other.causal and torch.equal(ours, theirs)

    def __repr__(self):
        batch, heads, keys, _ = self.startend_row_indices.shape
        device = self.startend_row_indices.device
        return (f"Intervals({', '.join(self.columns)} of {batch} x {heads} x {keys} keys, "
                f"causal={self.causal!r}, device='{device}')")  # fmt: skip
