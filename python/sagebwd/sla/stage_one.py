"""Full attention beside SLA2's: the target of stage 1, the best alpha, and figures of a report."""

import torch

from sagebwd.lists import blocks
from sagebwd.lists.given import per_head
from sagebwd.sla import mixing
from sagebwd.sla.exact import Scores
from sagebwd.sla.parts import alone, in_blocks, wide
from sagebwd.sla.router import block_tokens

_HALVINGS = 60  #: of the interval where beta is, down to the last bits of FP64


def full_attention(q, k, v, scale):
    """Attention to all keys, by PyTorch, without a gradient."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    with torch.no_grad():  # not torch.nn.functional's name, which sagebwd.sdpa() replaces
        return torch.ops.aten.scaled_dot_product_attention(q, k, v, None, 0.0, False, scale=scale)


def best_alpha(full, sparse, linear, size, shared, ranks):
    """The alpha of (heads, query blocks), or of (heads, 1), with the least squared distance between
    the mixture and `full`, from 0.01 to 0.99; NaN where the branches are equal.

    It is <full - linear, sparse - linear> / |sparse - linear|^2 over the rows that share it, of all
    ranks (`nn.sharded.Together`).
    """
    acc = wide(full.dtype)
    between = sparse.to(acc) - linear
    along = ((full.to(acc) - linear) * between).sum(-1, keepdim=True)
    square = between.square().sum(-1, keepdim=True)
    along, square = (in_blocks(t, size).sum((0, 3, 4)) for t in (along, square))
    if shared:
        along, square = (t.sum(-1, keepdim=True) for t in (along, square))
    along, square = ranks.sum(torch.stack([along, square]))
    return (along / square).clamp(0.01, 0.99)


def masses(q, k, mask, sizes, scale):
    """(the mean weight of each key block for the queries of a block, in full attention; the logit
    of the weight of the listed keys) of (batch, heads, query blocks, key blocks) and (batch, heads,
    queries).

    The logit is a difference of sums over the keys that are listed and those that are not: neither
    is what another one leaves, where few bits would be left.
    """
    with alone(q.device):
        scores = Scores(q, k, mask, sizes, scale)
        counts = [blocks.count_of(t.shape[2], size) for t, size in zip((q, k), sizes)]
        found = q.new_empty(*q.shape[:2], *counts, dtype=scores.acc)
        logit = q.new_empty(q.shape[:3], dtype=scores.acc)
        tokens = block_tokens(q.shape[2], sizes[0], found)
        of_found, of_logit = (t.unflatten(1, (k.shape[1], -1)) for t in (found, logit))
        for (b, h), rows, of_rows in scores.parts():
            s, listed = scores.of((b, h), rows, of_rows)
            inside, outside = (s.masked_fill(hidden, -torch.inf).logsumexp(-1)
                               for hidden in (~listed, listed))  # fmt: skip
            of_logit[b, h, :, rows] = inside - outside
            p = s.sub_(torch.logaddexp(inside, outside).unsqueeze(-1)).exp_()
            of_found[b, h, :, of_rows] = scores.summed(p) / tokens[of_rows]
    return found, logit


def report(q, k, v, mask, results, alpha, sizes, scale):
    """The figures of `SparseLinearAttention.report`, as a dict of floats."""
    out, sparse, linear, _ = results
    full = full_attention(q, k, v, scale)
    mass, logit = masses(q, k, mask, sizes, scale)
    listed = per_head(mask, q.shape[1]).expand_as(mass)
    best = mass.sort(-1, descending=True).values
    kept = torch.arange(mass.shape[-1], device=mass.device) < listed.sum(-1, keepdim=True)
    exact = torch.sigmoid(logit)
    columns = listed.sum(2)
    share = block_tokens(q.shape[2], sizes[0], mass) / q.shape[2]  # the last block may be short

    def error(x):
        return float((x.to(exact.dtype) - full).norm() / full.to(exact.dtype).norm())

    return {
        "density": float(listed.to(exact.dtype).mean()),
        "mass": float((mass * listed * share).sum((2, 3)).mean()),
        "best_mass": float((best * kept * share).sum((2, 3)).mean()),
        "error": error(out),
        "error_sparse": error(sparse),
        "error_linear": error(linear),
        "alpha": float(alpha.expand_as(exact).mean()),
        "exact_alpha": float(exact.mean()),
        "alpha_distance": float((alpha - exact).square().mean().sqrt()),
        "unlisted": float((columns == 0).to(exact.dtype).mean()),
        "longest_column": float(columns.max()),
    }


def best_beta(q, k, lse, mask, sizes, scale, ranks):
    """The beta of each head with which an estimated alpha is the exact one in the mean; NaN where
    no query has both.

    The mean falls as beta grows, and is on either side of the right one where all queries are.
    """
    estimated = (lse - mixing.estimated_rest(q, k, mask, sizes, scale)).double()
    exact = masses(q, k, mask, sizes, scale)[1].double()
    known = estimated.isfinite() & exact.isfinite()
    gap = (estimated - exact).masked_fill(~known, 0)
    low, high = -ranks.most(-gap.amin((0, 2))), ranks.most(gap.amax((0, 2)))
    count = ranks.sum(known.sum((0, 2)))
    for _ in range(_HALVINGS):
        beta = (low + high) / 2
        more = _between(exact, estimated - beta[:, None]).masked_fill(~known, 0).sum((0, 2))
        above = ranks.sum(more) > 0
        low, high = torch.where(above, beta, low), torch.where(above, high, beta)
    return torch.where(count > 0, (low + high) / 2, torch.nan)


def _between(x, y):
    """sigmoid(y) - sigmoid(x), of which bits are left where both are nearly 1."""
    return torch.where(x > 0, torch.sigmoid(-x) - torch.sigmoid(-y),
                       torch.sigmoid(y) - torch.sigmoid(x))  # fmt: skip
