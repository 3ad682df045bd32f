"""Attention in FP64 for one key/value head of a case, in parts of the queries, so that it fits."""

from __future__ import annotations

from sagebwd.benchmark.cases import Case
from sagebwd.benchmark.common import torch

#: Scores that exist at a time; five FP64 matrices of this size are 640 MiB.
SCORES = 1 << 24
TENSORS = ("O", "dQ", "dK", "dV")


def relative_l2(x: torch.Tensor, reference: torch.Tensor) -> float:
    """||x - reference|| / ||reference|| in FP64; of two zeros 0."""
    x, reference = x.double(), reference.double()
    error, norm = float((x - reference).norm()), float(reference.norm())
    return error / norm if norm else (0.0 if error == 0 else float("inf"))


def visible(case: Case, first: int, last: int, device) -> torch.Tensor:
    """For the queries first .. last - 1 which keys each sees: (last - first, keys) of booleans."""
    from sagebwd.core.options import Mask
    from sagebwd.numerics.numerics import shown_keys, visible_keys

    mask = Mask(case.causal, case.window_left, case.window_right)
    seen = visible_keys(mask, case.seq_len, case.seq_kv, device, (first, last))
    everything = torch.ones(last - first, case.seq_kv, dtype=torch.bool, device=device)
    if seen is not None:
        everything &= seen
    if case.intervals:
        from sagebwd.benchmark.masks import intervals_of

        hidden = intervals_of(case.intervals, case.seq_len, device).startend_row_indices
        everything &= shown_keys(hidden, mask, case.seq_len, (first, last))[0, 0]
    return everything


def exact(case: Case, q, k, v, dout, sink=None) -> dict[str, torch.Tensor]:
    """O, dQ, dK and dV of (heads, queries, head_dim) queries that all read one head of keys.

    k and v are (keys, head_dim). `sink` is a logit for each head, beside the scores, or None. A
    query that sees no key gives zeros.
    """
    from sagebwd.core.options import Mask
    from sagebwd.numerics.exact import exact_chunk

    heads, queries, head_dim = q.shape
    out, dq = (torch.empty(q.shape, dtype=torch.float64, device=q.device) for _ in range(2))
    dk, dv = (torch.zeros_like(t, dtype=torch.float64) for t in (k, v))
    of_sink = None if sink is None else sink.double()[None, :, None]
    step = max(1, SCORES // (heads * case.seq_kv))
    for first in range(0, queries, step):
        part = slice(first, min(first + step, queries))
        seen = visible(case, part.start, part.stop, q.device)
        found = exact_chunk(q[None, :, part], k[None, None], v[None, None], dout[None, :, part],
                            Mask("none"), head_dim**-0.5, listed=seen, sink=of_sink)  # fmt: skip
        out[:, part], dq[:, part] = found["O"][0], found["dQ"][0]
        dk += found["dK"][0, 0]
        dv += found["dV"][0, 0]
    return {"O": out, "dQ": dq, "dK": dk, "dV": dv}


class Slice:
    """The last key/value head of the last sequence, with the query heads that read it."""

    def __init__(self, case: Case, q, k, v, dout, sink=None) -> None:
        self.group = case.heads // case.heads_kv
        tensors = (q, k, v, dout)
        like = ("O", "dK", "dV", "O")
        q, k, v, dout = (self.of(name, x.detach()) for name, x in zip(like, tensors))
        sink = None if sink is None else sink.detach()[-self.group :]
        self.exact = exact(case, q, k, v, dout, sink)

    def of(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The part of a (batch, heads, tokens, head_dim) result, by its name among TENSORS."""
        return x[-1, -1] if name in ("dK", "dV") else x[-1, -self.group :]

    def errors(self, results) -> dict[str, float]:
        """Relative L2 errors of O, dQ, dK and dV."""
        return {name: relative_l2(self.of(name, x), self.exact[name])
                for name, x in zip(TENSORS, results)}  # fmt: skip
