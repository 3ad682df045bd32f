"""A sample computes attention of one key head and its queries, exactly, beside our results.

All of it is FP32 in PyTorch, a few queries at a time, on the device and stream of the call. It sets
nothing that other threads would see. If cuBLAS may use TF32, FP32 operands are split in two that
TF32 holds; the others are the call's own tensors, which it holds anyway.
"""

import dataclasses
import math

import torch

from sagebwd.core import options, sequences
from sagebwd.numerics import expressions, float32, numerics, quantizers

#: The tensors whose relative L2 errors are reported.
ERRORS = ("O", "dQ", "dK", "dV", "dS")
#: Bytes that a score takes while its gradient is computed and emulated, with temporaries.
_BYTES_PER_SCORE = 72
#: Those that a mask or a score function takes besides, whose values are FP64.
_BYTES_OF_EXPRESSIONS = 120

_SUMS = (
    *(f"{kind} of {name}" for name in ERRORS for kind in ("error", "square")),
    "max_logit", "logit_range", "scales", "zero", "saturated", "rows", "weight",
    "mean of q", "square of q", "mean of v", "square of v", "signed error of O", "magnitude of O",
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
    hidden: torch.Tensor | None  #: (1, 1, N, columns), intervals of queries that do not see a key
    expressed: expressions.Expressed | None  #: its mask and score function
    where: dict  #: for the record
    place: float  #: from 0 to 1: the queries whose dS is compared, where memory is short for all


def chosen_head(call, tensors, random):
    """A `Head` of the call at random, or None if no sequence has queries and keys.

    Waits for the device where lengths lie on it.
    """
    *tensors, packing, k_mean = tensors
    hidden, tables, packing = call.told(packing)
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
    if hidden is not None:
        hidden = hidden.expand(batch, heads_kv, -1, -1)[b, head_kv][None, None]
    expressed = _expressed(call.rules.expressions, tables, sequence, head, q.device)
    where = {"sequence": sequence, "head": head.start, "heads": group,
             "queries": of_queries.stop - of_queries.start,
             "keys": of_keys.stop - of_keys.start}  # fmt: skip
    parts = (part(i, t) for i, t in enumerate(tensors))
    return Head(*parts, mean, hidden, expressed, where, random.random())


def _expressed(of, tables, sequence, heads, device):
    """The `Expressed` of query heads, a slice, of a sequence; None of no expressions."""
    if of is None:
        return None
    heads = torch.arange(heads.start, heads.stop, dtype=torch.int32, device=device)
    at = torch.stack([torch.full_like(heads, sequence), heads], -1)[None]
    return expressions.Expressed.of_tables(of, tables, at)


# ---- the exact results, and the sums of our errors -----------------------------------------------


def _may_be_tf32(device):
    return device.type == "cuda" and float32.may_be_rounded(device)


def _product(a, b, split):
    """a @ b, where TF32 holds b."""
    if not split:
        return a @ b
    high = (a.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    return high @ b + (a - high) @ b


def _add_product(sums, a, b, split):
    if split:
        sums += _product(a, b, split)
    else:
        sums.addmm_(a, b)


def _steps(queries, each, rules, memory, place):
    """(first, end) of the queries that are computed at once, and those of one part of one of them
    whose dS is emulated, which takes twice as much. Queries that share a scale or a mean stay
    together."""
    together = 1 if rules.by_rows else rules.group_q
    if rules.smooth_q and rules.by_rows:
        together = quantizers.CHANNEL_TOKENS
    of_score = _BYTES_PER_SCORE + _BYTES_OF_EXPRESSIONS * (rules.expressions is not None)
    part = max(1, memory // (of_score * each * together)) * together
    emulated = int(place * -(-queries // part)) * part
    steps = [(i, min(i + 2 * part, queries)) for i in range(0, queries, 2 * part)]
    return steps, (emulated, min(emulated + part, queries))


def sums_of(head, rules, memory):
    """The sums behind `figures`, of a `Head`: FP64, on its device."""
    q, k, v, dout = (t.float() for t in (head.q, head.k, head.v, head.dout))
    mean = head.k_mean
    if mean is None:
        mean = k.mean(-2, keepdim=True, dtype=torch.float64).float()
    exact, ours, tops = _results(head, rules, (q, k, v, dout), mean, memory)
    sums = {}
    for name in ERRORS:
        sums[f"error of {name}"] = _square(ours[name].float() - exact[name])
        sums[f"square of {name}"] = _square(exact[name])
    sums["max_logit"] = torch.maximum(exact["largest"].amax(), -exact["least"].amin())
    sums["logit_range"] = (exact["largest"] - exact["mean"]).amax()
    some = ours["lse"].isfinite()
    sums["weight"] = ours["weight"].where(some, 0).sum(dtype=torch.float64)
    sums["rows"] = some.sum()
    tops += _scales(q, k - mean if rules.smooth_k else k, v, dout, rules)
    least = torch.cat([torch.as_tensor(smallest, dtype=x.dtype, device=x.device).expand_as(x)
                       .flatten() for x, smallest in tops])  # fmt: skip
    tops = torch.cat([x.flatten() for x, _ in tops])
    sums["scales"] = torch.full((), tops.numel(), dtype=torch.float64, device=q.device)
    sums["zero"], sums["saturated"] = ((tops > 0) & (tops < least)).sum(), (~tops.isfinite()).sum()
    rows = q.shape[1] * q.shape[2]
    sums["mean of q"], sums["square of q"] = _square(q.mean((1, 2))) * rows, _square(q)
    sums["mean of v"], sums["square of v"] = _square(v.mean(2)) * v.shape[2], _square(v)
    sums["signed error of O"] = (ours["O"].double() - exact["O"].double()).sum()
    sums["magnitude of O"] = exact["O"].abs().sum(dtype=torch.float64)
    return torch.stack([sums[name].double() for name in _SUMS])


def _results(head, rules, tensors, k_mean, memory):
    """The exact results of a head as a dict, ours, and `tops` of dS (`_scales` says what they are).
    For each query: the largest logit, the least one (or 0) and their mean."""
    q, k, v, dout = tensors
    (group, m, d), n, split = q.shape[1:], k.shape[2], _may_be_tf32(q.device)
    keys, values = k[0, 0], v[0, 0]
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    o, dq = torch.empty_like(dout), torch.empty_like(q)
    rows = {name: q.new_empty(1, group, m) for name in ("largest", "least", "mean")}
    steps, emulated = _steps(m, group * n, rules, memory, head.place)
    for first, end in steps:
        at = slice(first, end)
        some_q, do = q[0, :, at].reshape(-1, d), dout[0, :, at].reshape(-1, values.shape[1])
        s = torch.addmm(q.new_empty(1), some_q, keys.mT, beta=0, alpha=rules.scale)
        seen, p, slope = _seen(head, rules, (first, end)), s.view(group, end - first, n), None
        scored = None if head.expressed is None else _from(head.expressed, first).scored(p[None])
        top, any_key = _described(p, seen, {name: x[0, :, at] for name, x in rows.items()})
        if scored is not None:
            p, slope = (x[0].float() for x in scored)
            if seen is not None:  # where neither need be finite
                p, slope = p.masked_fill(~seen, -torch.inf), slope.masked_fill(~seen, 0)
            top = p.amax(-1) if any_key is None else p.amax(-1).where(any_key, 0)
        p = _softmax(p, top, any_key).view_as(s)
        out = _product(p, values, split)
        _add_product(dv, p.mT, do, split)
        o[0, :, at] = out.view(group, -1, out.shape[1])
        ds = (do @ values.mT).sub_((do * out).sum(-1, keepdim=True))
        ds.masked_fill_(p == 1, 0)  # a query of one key: the two sums differ by roundings alone
        if head.dlse is not None:
            ds.add_(head.dlse[0, :, at].reshape(-1, 1))
        ds.mul_(p)
        if slope is not None:
            ds.mul_(slope.reshape(ds.shape))
        del p, s, slope
        dq[0, :, at] = _product(ds, keys, split).view(group, -1, d)
        _add_product(dk, ds.mT, some_q, split)
        if first <= emulated[0] < end:
            ours, weight = _emulated_ds(head, rules, k_mean, emulated)
            these = ds.view(1, group, -1, n)[:, :, emulated[0] - first : emulated[1] - first]
            exact_ds = these.clone()
        del ds
    exact = {"O": o, "dQ": dq.mul_(rules.scale), "dK": dk.mul_(rules.scale)[None, None],
             "dV": dv[None, None], "dS": exact_ds, **rows}  # fmt: skip
    results = {"O": head.out, "dQ": head.dq, "dK": head.dk, "dV": head.dv, "dS": ours,
               "weight": weight, "lse": head.lse[:, :, slice(*emulated)]}  # fmt: skip
    return exact, results, [(ours.abs().amax(-1), quantizers._SMALLEST)]


def _seen(head, rules, rows):
    """Which keys the queries from the first of `rows` to before the second see; None: all."""
    m, n = head.q.shape[2], head.k.shape[2]
    seen = numerics.visible_keys(rules.mask, m, n, head.q.device, rows)
    if head.hidden is not None:
        shown = numerics.shown_keys(head.hidden, rules.mask, m, rows)
        seen = expressions.both(seen, shown[0, 0])
    if head.expressed is not None:
        shown = _from(head.expressed, rows[0]).seen(rows[1] - rows[0], n)
        seen = expressions.both(seen, None if shown is None else shown[0])
    return seen


def _from(expressed, first):
    """The expressions of queries from this one on."""
    return None if expressed is None else dataclasses.replace(expressed, first=first)


def _described(s, seen, rows):
    """Fills in the rows' largest and least logits and their mean, and hides what no query sees, of
    logits (G, queries, keys). Returns the largest ones and whether a query sees any key, or None
    for all."""
    if seen is None:
        mean, least, top = s.mean(-1), s.amin(-1), s.amax(-1)
        any_key = None
    else:
        unseen, count = ~seen, seen.sum(-1)
        s.masked_fill_(unseen, 0)
        mean, least = s.sum(-1) / count.clamp(min=1), s.amin(-1)
        s.masked_fill_(unseen, -torch.inf)
        any_key = count > 0
        top = s.amax(-1).where(any_key, 0)
    for name, x in (("largest", top), ("least", least), ("mean", mean)):
        rows[name].copy_(x)
    return top, any_key


def _softmax(s, top, any_key):
    """Turns logits (G, queries, keys) into probabilities, in place. `top` and `any_key` are what
    `_described` says of them."""
    total = s.sub_(top[..., None]).exp_().sum(-1)
    return s.div_((total if any_key is None else total.where(any_key, 1))[..., None])


def _emulated_ds(head, rules, mean, queries):
    """Our dS of these queries, and the sums of P over all keys, which are 1 unless the keys are a
    part of those that lse is of."""
    rows, seen = slice(*queries), _seen(head, rules, queries)
    rules = dataclasses.replace(rules, mask=options.Mask(causal="none"))
    expressed = _from(head.expressed, queries[0])
    if expressed is not None:
        expressed = dataclasses.replace(expressed, of=dataclasses.replace(expressed.of, mask=""))
    q, out, lse, dout = (t[:, :, rows] for t in (head.q, head.out, head.lse, head.dout))
    dlse = None if head.dlse is None else head.dlse[:, :, rows]
    return numerics.score_gradients(q, head.k, head.v, out, lse, dout, dlse, rules, mean, seen,
                                    expressed)  # fmt: skip


def _square(x):
    """The sum of the squares, which FP32 would not hold for gradients below 1e-19."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _scales(q, k, v, dout, rules):
    """Returns, for the groups that share a scale in the copies of q, k, v and dO, pairs of their
    largest magnitudes, and of the least of these whose scale does not flush values to zero."""
    found = []
    if "s" in rules.plan:
        for x, group in ((q, rules.group_q), (k, rules.group_kv)):
            tops = _tops(x.abs().amax(-1, keepdim=True), rules.sharing(group))
            found.append((tops, quantizers._SMALLEST))
    of_products = {"pv": (v, rules.group_kv), "dq": (k, rules.group_kv), "dk": (q, rules.group_q),
                   "dv": (dout, rules.group_q)}  # fmt: skip
    taken = {name: of for name, of in of_products.items() if name in rules.plan}
    if not rules.by_rows:
        found += [(_tops(x.abs().amax(-1, keepdim=True), group), quantizers._SMALLEST)
                  for x, group in taken.values()]  # fmt: skip
        return found
    if "dv" in taken:  # its rows are brought to one magnitude first
        x = dout * quantizers.power_of_two(-quantizers.row_exponents(dout))
        found.append((_tops(x, quantizers.CHANNEL_TOKENS), quantizers._LEAST_BESIDE))
    for x in _stacked([taken[name][0] for name in ("pv", "dq", "dk") if name in taken]):
        least = quantizers._magnitude(x).clamp(max=1) * quantizers._LEAST_BESIDE
        found.append((_tops(x, quantizers.CHANNEL_TOKENS), least))
    return found


def _stacked(tensors):
    """Those of a shape as one: the host takes longer for each operation than the GPU."""
    by_shape = {}
    for x in tensors:
        by_shape.setdefault(x.shape, []).append(x)
    return [torch.stack(alike) for alike in by_shape.values()]


def _tops(x, group):
    """The largest magnitude of each column of `group` tokens."""
    return quantizers.tiled(x.abs(), group, 1).amax((-3, -1))


# ---- what is reported ----------------------------------------------------------------------------


def figures(sums, numbers):
    """From the list of sums: the record's figures; the mean weight of the keys in the softmax; and
    the root mean squares of the exact gradients, with `numbers` of elements by name. The error is
    None if only the exact tensor is all zeros."""
    by = dict(zip(_SUMS, sums))
    found = {}
    for name in ERRORS:
        error, square = by[f"error of {name}"], by[f"square of {name}"]
        found[name] = math.sqrt(error / square) if square else None if error else 0.0
        if not math.isfinite(error) or not math.isfinite(square):
            found[name] = math.nan
    found |= {name: by[name] for name in ("max_logit", "logit_range")}
    scales = max(by["scales"], 1)
    found |= {"zero_scales": by["zero"] / scales, "saturated_scales": by["saturated"] / scales}
    for x in "qv":
        square = by[f"square of {x}"]
        found[f"{x}_offset"] = by[f"mean of {x}"] / square if square else 0.0
    signed, magnitude = by["signed error of O"], by["magnitude of O"]
    found["O_bias"] = signed / magnitude if magnitude else None if signed else 0.0
    sizes = {name: math.sqrt(by[f"square of {name}"] / n) for name, n in numbers.items()}
    return found, by["weight"] / by["rows"] if by["rows"] else 1.0, sizes


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


