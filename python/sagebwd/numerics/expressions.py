"""The mask and the score function of a call, which are expressions, without kernels.

The emulation, FP64 and a `Monitor` ask here what queries see, and what becomes of scores.
"""

import dataclasses
from dataclasses import dataclass

import torch

from sagebwd import _core
from sagebwd.core import expressions as texts_of_calls
from sagebwd.core import functional, mask_ops, seams
from sagebwd.core.arguments.checks import SpecError


@dataclass(frozen=True)
class Expressions:
    """The texts of a call's mask and score function, '' for none, and sizes of what they index."""

    mask: str = ""
    score: str = ""
    sizes: tuple = ()  #: rows and columns of each table, as `mask_ops` has them

    @property
    def bends(self):
        """Whether the score function makes more of s than s + g, for some g without s. Then it is
        given what K-smoothing subtracts from scores, and rows of dS do not sum to zero."""
        return bool(self.score) and _core.score_bends(self.score)


@dataclass(frozen=True)
class Expressed:
    """Expressions with what they index, for a chunk of heads.

    at: (n, G, 2) int32, the batch (or sequence) and the head of all query heads of the chunk.
    first: the position of the chunk's first query.
    """

    of: Expressions
    of_mask: dict
    of_score: dict
    at: torch.Tensor
    first: int = 0

    @classmethod
    def of_tables(cls, of, each, at):
        """Expressions with tables, of which `each` is int32 of one dimension."""
        return cls(of, *texts_of_calls.operands_of(of.mask, of.score, each, of.sizes), at)

    def _places(self, queries, keys):
        device = self.at.device
        of_queries = torch.arange(queries, dtype=torch.int32, device=device) + self.first
        of_keys = torch.arange(keys, dtype=torch.int32, device=device)
        b, h = self.at[..., None, None].unbind(2)
        return {"b": b, "h": h, "q": of_queries[:, None], "k": of_keys}

    def seen(self, queries, keys):
        """Which keys the mask lets queries see: booleans of (n or 1, G or 1, queries, keys), or
        None without a mask."""
        if not self.of.mask:
            return None
        seen = seams.slopes().sees(self.of.mask, self._places(queries, keys), self.of_mask)
        return seen.expand(torch.broadcast_shapes(seen.shape, (1, 1, queries, keys)))

    def scored(self, s):
        """(values, slopes) of the score function, FP64, for scaled scores s, (n, G, queries, keys);
        None without one."""
        if not self.of.score:
            return None
        places = self._places(*s.shape[-2:])
        return seams.slopes().scored(self.of.score, {**places, "s": s.double()}, self.of_score)


def heads_of(q, sequence=0):
    """The `at` of (B, H, M, D) queries, as (B, H, 2). `sequence` is the first of the batch's."""
    batch, heads = (torch.arange(n, dtype=torch.int32, device=q.device) for n in q.shape[:2])
    return torch.cartesian_prod(batch + sequence, heads).view(*q.shape[:2], 2)


def expressed(of, tables, at):
    """`Expressed` of the tables of a call, int32 of one dimension or None; None of no expressions.

    `at` is that of `Expressed`.
    """
    return None if of is None else Expressed.of_tables(of, _each_of(of, tables), at)


def _each_of(of, tables):
    return mask_ops.each_of(tables, of.sizes) if of.sizes else ()


def as_kernels_tell(of, tables):
    """Returns the bits, which are None here, of a call with a mask, and the tables of either, as
    watchers hear of them (core/watching.py)."""
    each = _each_of(of, tables)
    return (None, *each) if of.mask else each


def both(seen, shown):
    """Joins two boolean matrices of what is seen; None says that all is."""
    return seen if shown is None else shown if seen is None else seen & shown


def told(mask, score, problem, device, k_mean=None, packing=(None,) * 4, intervals=None):
    """(`Expressions`, tables) of a call's mask= and score=, or (None, None) for neither.

    problem is (batch, heads, heads_kv, queries, keys), or None for packed sequences. The tables are
    int32 of one dimension on `device`, or anywhere if it is None; they are None if nothing is
    indexed. SpecError and TypeError, as from `attention`, also for what does not go with them.
    """
    words, *operands = texts_of_calls.spoken(mask, score)
    functional.what_is_special(words, operands[1], k_mean, packing, intervals)
    if not words:
        return None, None
    texts = dict(word.split("=", 1) for word in words.split())
    named = texts_of_calls.named_tables(texts.get("mask"), texts.get("score"))
    tables, sizes = mask_ops.tables_told(*operands, problem, device, named)
    if sizes and device is not None and tables.device != device:
        raise SpecError(f"the tables are on {tables.device} and q on {device}: move the mask")
    return Expressions(sizes=tuple(sizes), **texts), tables if sizes else None


def moved(given, device):
    """A mask or score as it was given, with tensors that are on `device` and need no grad."""
    if not dataclasses.is_dataclass(given):
        return given  # a text, a function, or a BlockMask
    operands = {name: t.detach().to(device) for name, t in given.operands.items()}
    return dataclasses.replace(given, operands=operands)


def refuse_gradients(score):
    """SpecError for a score function whose tensors require grad: the emulation gives them none."""
    if hasattr(score, "operands"):
        texts_of_calls.refuse_gradients(score.operands, "the emulation")
