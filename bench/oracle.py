"""What attention is, in FP64 and in 16 bits, written from its documentation alone.

Nothing here comes from the package: not the mask, not the meaning of packed sequences. The
package's own FP64 attention and its emulation share one function for the mask, so that a mask which
is meant wrongly would pass between them.

Tensors are (batch, heads, tokens, channels), of one sequence or of several of one length.
"""

from __future__ import annotations

from dataclasses import dataclass

from needs_torch import torch
from torch import Tensor


def visible(
    queries: int, keys: int, causal: str, left: int | None, right: int | None, device="cpu"
) -> Tensor:
    """A boolean (queries, keys) matrix: which key a query sees, from the two positions.

    As docs/use/sequences.md has it: a query's own key is its own position i under 'top-left', else
    i + keys - queries. It sees `left` keys before its own and `right` behind it at most, None being
    all; under a causal mask none behind it, whatever `right` says.
    """
    position_of_key = torch.arange(keys, device=device).expand(queries, keys)
    own = torch.arange(queries, device=device).unsqueeze(1).expand(queries, keys)
    if causal != "top-left":
        own = own + (keys - queries)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if left is not None:
        seen &= position_of_key >= own - left
    if causal in ("top-left", "bottom-right"):
        seen &= position_of_key <= own
    elif right is not None:
        seen &= position_of_key <= own + right
    return seen


def spans(tokens: int, batch: int, firsts: Tensor | None, used: Tensor | None) -> list[tuple]:
    """(batch, begin, end) of the tokens of each sequence that count.

    `firsts`: where packed sequences begin, and the end; `used`: how many tokens of each sequence
    count, from its first on. What lies outside the tensor is cut off.
    """
    if firsts is None:
        rooms = [(i, 0, tokens) for i in range(batch)]
    else:
        places = firsts.tolist()
        rooms = [(0, begin, end) for begin, end in zip(places[:-1], places[1:])]
    counts = [end - begin for _, begin, end in rooms] if used is None else used.tolist()
    found = []
    for (i, begin, end), count in zip(rooms, counts):
        begin, end = min(begin, tokens), min(end, begin + count, tokens)
        found.append((i, begin, max(begin, end)))
    return found


@dataclass(frozen=True)
class Truth:
    """Of one call; tensors by name: O, dQ, dK, dV, dSink, in FP64."""

    lse: Tensor
    exact: dict[str, Tensor]
    #: Of each element the root of the sum of the squares of the terms that it sums, or itself where
    #: that is larger: independent relative errors e of the terms give it an error of e times that.
    scale: dict[str, Tensor]
    sixteen: dict[str, Tensor]  #: by 16-bit operands and results, exact between them
    sees: Tensor  #: queries that see a key, (batch, heads, queries)
    is_seen: Tensor  #: keys that a query sees, (batch, heads_kv, keys)
    #: The largest |softmax_scale| |q| |k - mean| of any query and key: what INT8 rounds of scores.
    reach: float
    #: The largest magnitude beside the root of the mean square, of q, k - mean, v or dout.
    crest: float
    #: How many times its head's median token the longest of V is, or how many times the longest key
    #: without its own mean one without the given mean is. What lies beside it is rounded away.
    uneven: float
    dtype: torch.dtype  #: of inputs and results


def attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, seen: Tensor, scale: float,
    sink: Tensor | None = None, k_mean: Tensor | None = None, q_mean: Tensor | None = None,
) -> Truth:
    """Attention and its gradients.

    `dlse`: the gradient of lse, or None; `seen`: of `visible`; `sink`: (heads,), a further logit
    whose value is zero; `k_mean`: (batch, heads_kv, channels), what quantised keys lack; `q_mean`:
    like q, what quantised queries lack.
    """
    low, (batch, heads_kv) = q.dtype, k.shape[:2]

    def grouped(x: Tensor) -> Tensor:
        return x.double().reshape(batch, heads_kv, -1, *x.shape[2:])

    q, dout = grouped(q), grouped(dout)
    k, v = k.double().unsqueeze(2), v.double().unsqueeze(2)
    dlse = torch.zeros_like(q[..., 0]) if dlse is None else grouped(dlse)
    dlse = dlse.unsqueeze(-1)
    none = torch.full((heads_kv * q.shape[2],), -torch.inf, dtype=torch.float64, device=q.device)
    sink = (none if sink is None else sink.double()).reshape(1, heads_kv, -1, 1, 1)

    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    top = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1).amax(-1, keepdim=True)
    shift = top.masked_fill(top == -torch.inf, 0)
    weights, of_sink = (scores - shift).exp(), (sink - shift).exp()
    total = weights.sum(-1, keepdim=True) + of_sink
    lse = shift + total.log()
    shares = 1 / total.masked_fill(total == 0, 1)
    p, p_sink = weights * shares, of_sink * shares
    out = p @ v
    dp = dout @ v.mT
    delta = (dout * out).sum(-1, keepdim=True) - dlse
    ds = p * (dp - delta)
    exact = {"O": out, "dQ": scale * (ds @ k), "dK": _over_group(scale * (ds.mT @ q)),
             "dV": _over_group(p.mT @ dout), "dSink": -(p_sink * delta).sum((0, -2))}  # fmt: skip

    # What kernels multiply dS with are keys and queries less their means.
    mean = 0 if k_mean is None else k_mean.double()[:, :, None, None]
    centred = q if q_mean is None else q - grouped(q_mean)
    p2, terms = p.square(), p.square() * (dp.square() + delta.square())
    squares = {"O": p2 @ v.square(),
               "dQ": scale**2 * (terms @ k.square().maximum((k - mean).square())),
               "dK": _over_group(scale**2 * (terms.mT @ q.square().maximum(centred.square()))),
               "dV": _over_group(p2.mT @ dout.square()),
               "dSink": (p_sink * delta).square().sum((0, -2))}  # fmt: skip
    scales = {name: x.sqrt().maximum(exact[name].abs()) for name, x in squares.items()}

    def rounded(x: Tensor) -> Tensor:
        return x.to(low).double()

    out = rounded(rounded(weights) @ v * shares)
    ds = rounded(p * (dp - (dout * out).sum(-1, keepdim=True) + dlse))
    sixteen = {"O": out, "dQ": rounded(scale * (ds @ k)),
               "dK": rounded(_over_group(scale * (ds.mT @ q))),
               "dV": rounded(_over_group(rounded(p).mT @ dout)),
               "dSink": exact["dSink"].float().double()}  # fmt: skip

    def in_heads(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.reshape(-1) if name == "dSink" else x.flatten(1, 2)
                for name, x in tensors.items()}  # fmt: skip

    reach = abs(scale) * (_longest(q) * _longest(k - mean)).max() if seen.numel() else 0
    crest = torch.stack([_crest(x) for x in (q, k - mean, v, dout)]).max() if seen.numel() else 0
    uneven = _unevenness(v, k, mean) if seen.numel() else 0
    rows = seen.any(1).expand(batch, heads_kv * q.shape[2], -1)
    return Truth(
        lse.squeeze(-1).flatten(1, 2), in_heads(exact), in_heads(scales), in_heads(sixteen),
        rows, seen.any(0).expand(batch, heads_kv, -1), float(reach), float(crest), float(uneven),
        low)


def _over_group(x: Tensor) -> Tensor:
    """Of gradients of keys, the sum over the queries' heads that read them."""
    return x.sum(2, keepdim=True)


def _longest(x: Tensor) -> Tensor:
    """The longest token of each key's head."""
    return x.norm(dim=-1).flatten(2).amax(-1)


def _crest(x: Tensor) -> Tensor:
    """The largest over the heads; 0 of zeros."""
    x = x.flatten(2)
    return (x.abs().amax(-1) / x.square().mean(-1).sqrt()).nan_to_num(0).max()


def _unevenness(v: Tensor, k: Tensor, mean: Tensor) -> Tensor:
    of_v = v.norm(dim=-1).flatten(2)
    typical = of_v.median(-1).values
    of_k = _longest(k - mean) / _longest(k - k.mean(-2, keepdim=True))
    both = (of_v.amax(-1) / typical, of_k)
    return torch.stack([x.nan_to_num(0, posinf=0).max() for x in both]).max()


def placed(
    parts: list[tuple[Truth, tuple, tuple]], like: dict[str, Tensor], sink: Tensor | None = None
) -> Truth:
    """The truth of several sequences in one call, from that of each, with the spans of its queries
    and of its keys. `like`: tensors whose shapes the results have, q, k and v.

    Of tokens that count for nothing out and gradients are zero, and lse is what a query has that
    sees no key: the sink's logit, -inf without one.
    """
    q, k, v = (like[name] for name in "qkv")
    shapes = {"O": (*q.shape[:3], v.shape[3]), "dQ": q.shape, "dK": k.shape, "dV": v.shape,
              "dSink": q.shape[1:2]}  # fmt: skip

    def all_of(field: str) -> dict[str, Tensor]:
        whole = {name: torch.zeros(shape, dtype=torch.float64, device=q.device)
                 for name, shape in shapes.items()}  # fmt: skip
        for truth, queries, keys in parts:
            for name, x in getattr(truth, field).items():
                if name == "dSink":
                    _add(whole[name], x, field == "scale")
                else:
                    _put(whole[name], x, queries if name in ("O", "dQ") else keys)
        return whole

    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64, device=q.device)
    if sink is not None:
        lse.copy_(sink.double()[:, None].expand_as(lse))
    sees, is_seen = (torch.zeros(x.shape[:3], dtype=torch.bool, device=q.device) for x in (q, k))
    for truth, queries, keys in parts:
        _put(lse, truth.lse, queries)
        _put(sees, truth.sees, queries)
        _put(is_seen, truth.is_seen, keys)
    return Truth(lse, all_of("exact"), all_of("scale"), all_of("sixteen"), sees, is_seen,
                 *(max((getattr(truth, of) for truth, *_ in parts), default=0.0)
                   for of in ("reach", "crest", "uneven")), q.dtype)  # fmt: skip


def _put(whole: Tensor, part: Tensor, span: tuple) -> None:
    batch, begin, end = span
    whole[batch, :, begin:end] = part[0]


def _add(whole: Tensor, part: Tensor, squares: bool) -> None:
    whole.copy_((whole.square() + part.square()).sqrt() if squares else whole + part)
