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
    shift = 0 if case.causal == "top-left" else case.seq_kv - case.seq_len
    own = torch.arange(first, last, device=device).unsqueeze(1) + shift
    keys = torch.arange(case.seq_kv, device=device)
    right = 0 if case.causal != "none" else case.window_right
    seen = torch.ones(last - first, case.seq_kv, dtype=torch.bool, device=device)
    if case.window_left is not None:
        seen &= keys >= own - case.window_left
    if right is not None:
        seen &= keys <= own + right
    return seen


def exact(case: Case, q, k, v, dout, sink=None) -> dict[str, torch.Tensor]:
    """O, dQ, dK and dV of (heads, queries, head_dim) queries that all read one head of keys.

    k and v are (keys, head_dim). `sink` is a logit for each head, beside the scores, or None. A
    query that sees no key gives zeros.
    """
    heads, queries, head_dim = q.shape
    scale = head_dim**-0.5
    k, v = k.double(), v.double()
    out, dq = (torch.empty(q.shape, dtype=torch.float64, device=q.device) for _ in range(2))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    of_sink = None if sink is None else sink.double().reshape(heads, 1, 1)
    step = max(1, SCORES // (heads * case.seq_kv))
    for first in range(0, queries, step):
        part = slice(first, min(first + step, queries))
        q_part, dout_part = q[:, part].double(), dout[:, part].double()
        seen = visible(case, part.start, part.stop, q.device)
        scores = (q_part @ k.T * scale).masked_fill(~seen, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        top = top if of_sink is None else top.maximum(of_sink)
        top = top.masked_fill(top == -torch.inf, 0)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        total = total if of_sink is None else total + (of_sink - top).exp()
        p = weights / total.masked_fill(total == 0, 1)
        out[:, part] = p @ v
        delta = (dout_part * out[:, part]).sum(-1, keepdim=True)
        ds = p * (dout_part @ v.T - delta)
        dq[:, part] = scale * (ds @ k)
        dk += scale * (ds.mT @ q_part).sum(0)
        dv += (p.mT @ dout_part).sum(0)
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
