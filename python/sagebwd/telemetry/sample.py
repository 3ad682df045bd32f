"""What a sample computes: attention of one key head and its queries, exactly, beside our results.

All of it is FP32 in PyTorch, a few queries at a time, on the device and stream of the call. It sets
nothing that other threads would see. Where cuBLAS may use TF32, FP32 operands are split in two that
TF32 holds; the others are the call's own tensors, which it holds anyway.
"""

import dataclasses
import math

import torch

from sagebwd import numerics, options, quantizers, sequences

#: The tensors whose relative L2 errors are reported.
ERRORS = ("O", "dQ", "dK", "dV", "dS")
#: Bytes that a score takes while it and its gradient are computed, twice, with temporaries.
_BYTES_PER_SCORE = 72

_SUMS = (
    *(f"{kind} of {name}" for name in ERRORS for kind in ("error", "square")),
    "max_logit", "logit_range", "scales", "zero", "saturated", "rows", "lse gap",
    "mean of q", "square of q",
)  # fmt: skip


@dataclasses.dataclass
class Head:
    """One key head of one sequence, and the query heads that read it: (1, G, M, D) and (1, 1, N, D)
    tensors, (1, G, M) rows."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    k_mean: torch.Tensor | None
    where: dict  #: for the record


def chosen_head(call, tensors, random):
    """A `Head` of the call at random, or None if no sequence has queries and keys.

    Waits for the device where lengths lie on it.
    """
    *tensors, packing, k_mean = tensors
    of_rows = (5, 6)
    if call.layout == "bshd":
        tensors = [t if t is None or i in of_rows else t.transpose(1, 2)
                   for i, t in enumerate(tensors)]  # fmt: skip
    q, k = tensors[1], tensors[2]
    batch, heads, queries, _ = q.shape
    heads_kv, keys = k.shape[1:3]
    if any(t is not None for t in packing):
        packing = (*packing, None, None)[:4]
        spans = sequences.spans((batch, heads, heads_kv, queries, keys), packing)
        spans = [(i, *span) for i, span in enumerate(spans)
                 if all(s.stop > s.start for s in span[1:])]  # fmt: skip
    else:
        spans = [(i, i, slice(0, queries), slice(0, keys)) for i in range(batch)]
        spans = spans if queries and keys else []
    if not spans or not heads_kv:
        return None
    sequence, b, of_queries, of_keys = spans[random.randrange(len(spans))]
    head_kv, group = random.randrange(heads_kv), heads // heads_kv
    head = slice(head_kv * group, (head_kv + 1) * group)

    def part(i, t):
        if t is None:
            return None
        like_k = i in (2, 3, 8, 9)
        at = slice(head_kv, head_kv + 1) if like_k else head
        return t[b : b + 1, at, of_keys if like_k else of_queries]

    mean = None if k_mean is None else k_mean[sequence, head_kv][None, None, None]
    where = {"sequence": sequence, "head": head.start, "heads": group,
             "queries": of_queries.stop - of_queries.start,
             "keys": of_keys.stop - of_keys.start}  # fmt: skip
    return Head(*(part(i, t) for i, t in enumerate(tensors)), mean, where)


# ---- the exact results, and the sums of our errors -----------------------------------------------


def _may_be_tf32(device):
    if device.type != "cuda":
        return False
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # PyTorch does not mix its two ways to set it
        return True


def _product(a, b, split):
    """a @ b, where TF32 holds b."""
    if not split:
        return a @ b
    high = (a.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    return high @ b + (a - high) @ b


def _steps(queries, each, rules, memory):
    """(first, end) of queries that are computed at once: all that share a scale or a mean."""
    together = 1 if rules.by_rows else rules.group_q
    if rules.smooth_q and rules.by_rows:
        together = quantizers.CHANNEL_TOKENS
    step = max(1, memory // (_BYTES_PER_SCORE * each * together)) * together
    return [(i, min(i + step, queries)) for i in range(0, queries, step)]


def sums_of(head, rules, memory):
    """The sums behind `figures`, of a `Head`: FP64, on its device."""
    sums = dict.fromkeys(_SUMS, 0.0)

    def compare(name, ours, exact):
        sums[f"error of {name}"] += _square(ours.float() - exact)
        sums[f"square of {name}"] += _square(exact)

    q, k, v, dout = (t.float() for t in (head.q, head.k, head.v, head.dout))
    _, group, m, _ = q.shape
    n, split = k.shape[2], _may_be_tf32(q.device)
    mean = head.k_mean
    if mean is None:
        mean = k.mean(-2, keepdim=True, dtype=torch.float64).float()
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    unmasked = dataclasses.replace(rules, mask=options.Mask(causal="none"))
    for first, end in _steps(m, group * n, rules, memory):
        rows = slice(first, end)
        seen = numerics.visible_keys(rules.mask, m, n, q.device, (first, end))
        s = q[:, :, rows] @ k.mT * rules.scale
        _logits(sums, s, seen)
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
        lse = s.logsumexp(-1, keepdim=True)
        _gap(sums, head.lse[:, :, rows, None], lse)
        p = (s - lse.masked_fill(lse == -torch.inf, 0)).exp()
        del s
        out, do = _product(p, v, split), dout[:, :, rows]
        compare("O", head.out[:, :, rows], out)
        dv += _product(p.mT, do, split).sum(1, keepdim=True)
        delta = (do * out).sum(-1, keepdim=True)
        dlse = None if head.dlse is None else head.dlse[:, :, rows]
        if dlse is not None:
            delta = delta - dlse[..., None]
        ds = p * (do @ v.mT - delta)
        del p
        compare("dQ", head.dq[:, :, rows], rules.scale * _product(ds, k, split))
        dk += rules.scale * _product(ds.mT, q[:, :, rows], split).sum(1, keepdim=True)
        ours = numerics.score_gradients(
            head.q[:, :, rows], head.k, head.v, head.out[:, :, rows], head.lse[:, :, rows],
            head.dout[:, :, rows], dlse, unmasked, mean, seen,
        )  # fmt: skip
        compare("dS", ours, ds)
        _count(sums, ours.abs().amax(-1), quantizers._SMALLEST)
        del ours, ds
    compare("dK", head.dk, dk)
    compare("dV", head.dv, dv)
    _scales(sums, q, k - mean if rules.smooth_k else k, v, dout, rules)
    sums["mean of q"], sums["square of q"] = _square(q.mean((1, 2))) * group * m, _square(q)
    device = q.device
    return torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device)
                        for x in sums.values()])  # fmt: skip


def _square(x):
    return x.square().sum(dtype=torch.float64)


def _largest(old, x):
    """The larger one, NaN if any is."""
    x = x.amax().double()
    return torch.maximum(x, torch.as_tensor(old, dtype=torch.float64, device=x.device))


def _logits(sums, s, seen):
    """The largest |logit|, and how far one lies above the mean of its query."""
    if seen is None:
        mean, largest, top = s.mean(-1), s.amax(-1), s.abs()
    else:
        count = seen.sum(-1)
        mean = s.masked_fill(~seen, 0).sum(-1) / count.clamp(min=1)
        largest = s.masked_fill(~seen, -torch.inf).amax(-1)
        largest = largest.where(count > 0, mean)
        top = s.masked_fill(~seen, 0).abs()
    sums["max_logit"] = _largest(sums["max_logit"], top)
    sums["logit_range"] = _largest(sums["logit_range"], largest - mean)


def _gap(sums, ours, exact):
    """How far the given log-sum-exp lies above that of these keys."""
    both = ours.isfinite() & exact.isfinite()
    sums["lse gap"] += (ours - exact).where(both, 0).sum(dtype=torch.float64)
    sums["rows"] += both.sum()


def _count(sums, tops, smallest):
    """Scales of groups with these largest magnitudes: those that flush values to zero, and those
    that are not finite."""
    sums["scales"] += tops.numel()
    sums["zero"] += ((tops > 0) & (tops < smallest)).sum()
    sums["saturated"] += (~tops.isfinite()).sum()


def _scales(sums, q, k, v, dout, rules):
    """Those of the copies of q, k, v and dO."""
    if "s" in rules.plan:
        for x, group in ((q, rules.group_q), (k, rules.group_kv)):
            _count(sums, _tops(x.abs().amax(-1, keepdim=True), rules.sharing(group)),
                   quantizers._SMALLEST)  # fmt: skip
    for product, x in (("pv", v), ("dv", dout), ("dk", q), ("dq", k)):
        if product not in rules.plan:
            continue
        if not rules.by_rows:
            group = rules.group_kv if product in ("pv", "dq") else rules.group_q
            _count(sums, _tops(x.abs().amax(-1, keepdim=True), group), quantizers._SMALLEST)
            continue
        least = (quantizers._magnitude(x).clamp(max=1) * quantizers._LEAST_BESIDE)
        if product == "dv":  # its rows are brought to one magnitude first
            x = x * quantizers.power_of_two(-quantizers.row_exponents(x))
            least = quantizers._LEAST_BESIDE
        _count(sums, _tops(x, quantizers.CHANNEL_TOKENS), least)


def _tops(x, group):
    """The largest magnitude of each column of `group` tokens."""
    return quantizers.tiled(x.abs(), group, 1).amax((-3, -1))


# ---- what is reported ----------------------------------------------------------------------------


def figures(sums):
    """The record's figures, from the list of sums."""
    by = dict(zip(_SUMS, sums))
    found = {}
    for name in ERRORS:
        error, square = by[f"error of {name}"], by[f"square of {name}"]
        found[name] = math.sqrt(error / square) if square else math.inf if error else 0.0
        if not math.isfinite(error) or not math.isfinite(square):
            found[name] = math.nan
    found |= {name: by[name] for name in ("max_logit", "logit_range")}
    scales = max(by["scales"], 1)
    found |= {"zero_scales": by["zero"] / scales, "saturated_scales": by["saturated"] / scales}
    of_q = by["square of q"]
    return found | {"q_offset": by["mean of q"] / of_q if of_q else 0.0}, (
        by["lse gap"] / max(by["rows"], 1)
    )


def measured(head, rules, memory):
    """`sums_of`, out of sight of modes and autograd."""
    device = head.q.device
    with torch.no_grad(), torch._C.DisableTorchFunction(), _no_modes(), torch.autocast(
        device.type, enabled=False
    ):
        return sums_of(head, rules, memory)


def _no_modes():
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


