"""Attention in FP64 and in 16 bits is written here from its documentation alone.

Nothing here comes from the package, neither the mask nor the meaning of packed sequences. The FP64
attention of the package and its emulation share one function for the mask, so that a comparison of
the two would not find a wrong mask.

Tensors are (batch, heads, tokens, channels), of one sequence or of several of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from frame import torch
from rough import TRIES, Grids, all_grids, roughly
from torch import Tensor


def visible(
    queries: int, keys: int, causal: str, left: int | None, right: int | None, device="cpu"
) -> Tensor:
    """A boolean (queries, keys) matrix: which key a query sees, from the two positions.

    The rule is that of docs/use/sequences.md: the own key of query i is key i under 'top-left', and
    else key i + keys - queries. It sees at most `left` keys before its own and `right` keys after
    it. None means all. Under a causal mask it sees no key after its own.
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


def listed(mask: Tensor, sizes: tuple[int, int], queries: int, keys: int) -> Tensor:
    """(..., queries, keys) from which blocks are listed, (..., blocks of queries, of keys): a query
    sees a key if its block lists the key's. `sizes`: queries and keys of a block."""
    block_of_query = torch.arange(queries, device=mask.device) // sizes[0]
    block_of_key = torch.arange(keys, device=mask.device) // sizes[1]
    return mask.index_select(-2, block_of_query).index_select(-1, block_of_key)


def shown(numbers: Tensor, causal: str, queries: int) -> Tensor:
    """(batch, heads_kv, queries, keys) from the numbers of each key, (batch, heads_kv, keys,
    columns), by the table of docs/use/masks.md: whether no interval of the key has the query."""
    last = numbers.shape[3] - 1
    query = torch.arange(queries, device=numbers.device).reshape(1, 1, queries, 1)
    number = [numbers[..., i].unsqueeze(2) for i in range(last + 1)]
    if last == 0:
        hidden = query >= number[0]
    elif last == 1 and causal == "none":
        hidden = (query >= number[0]) | (query < number[1])
    else:
        hidden = (query >= number[0]) & (query < number[1])
        if last == 3:
            hidden |= (query >= number[2]) & (query < number[3])
    return ~hidden


def spans(tokens: int, batch: int, firsts: Tensor | None, used: Tensor | None) -> list[tuple]:
    """(batch, begin, end) of the tokens of each sequence that count.

    `firsts`: where packed sequences begin, and the end; `used`: how many tokens of each sequence
    count, from its first on. Tokens outside the tensor are cut off.
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
    """The exact results of one call, by name: O, dQ, dK, dV, dSink, in FP64."""

    exact: dict[str, Tensor]  #: and lse
    #: For each element the root of the sum of the squares of its terms, or the element itself where
    #: that is larger: independent relative errors e of the terms give it an error of e times that.
    scale: dict[str, Tensor]
    sixteen: dict[str, Tensor]  #: with 16-bit operands and results, and exact in between
    rough: list[dict[str, Tensor]]  #: with operands in INT8, and lse; see rough.py
    sees: Tensor  #: queries that see a key, (batch, heads, queries)
    is_seen: Tensor  #: keys that a query sees, (batch, heads_kv, keys)
    reach: float  #: the largest |softmax_scale| |q| |k - mean| of any query and key
    dtype: torch.dtype  #: the dtype of inputs and results


def attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, seen: Tensor, scale: float,
    sink: Tensor | None = None, k_mean: Tensor | None = None, q_mean: Tensor | None = None,
    tries: Sequence[Grids] | None = None,
) -> Truth:
    """Attention and its gradients.

    `dlse`: the gradient of lse, or None; `seen`: of `visible`, or one for each head, (batch, heads,
    queries, keys); `sink`: (heads,), a further logit
    whose value is zero; `k_mean`: (batch, heads_kv, channels), what quantised keys lack; `q_mean`:
    like q, what quantised queries lack; `tries`: how `Truth.rough` is rounded.
    """
    low, (batch, heads_kv) = q.dtype, k.shape[:2]

    def grouped(x: Tensor) -> Tensor:
        return x.double().reshape(batch, heads_kv, -1, *x.shape[2:])

    q, dout = grouped(q), grouped(dout)
    k, v = k.double().unsqueeze(2), v.double().unsqueeze(2)
    dlse = torch.zeros_like(q[..., 0]) if dlse is None else grouped(dlse)
    dlse = dlse.unsqueeze(-1)
    seen = seen.expand(batch, heads_kv * q.shape[2], -1, -1).unflatten(1, (heads_kv, -1))
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
    exact = {"O": out, "lse": lse, "dQ": scale * (ds @ k), "dK": _over_group(scale * (ds.mT @ q)),
             "dV": _over_group(p.mT @ dout), "dSink": -(p_sink * delta).sum((0, -2))}  # fmt: skip

    # Kernels multiply dS with keys and queries less their means.
    mean = k.new_zeros(*k.shape[:3], 1, 1) if k_mean is None else k_mean.double()[:, :, None, None]
    means = torch.zeros_like(q) if q_mean is None else grouped(q_mean)
    centred = q - means
    rough = [roughly(q, k, v, dout, dlse, seen, scale, sink, mean, means, ds, low, grids)
             for grids in tries or all_grids()]  # fmt: skip
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
        found = {name: x.reshape(-1) if name == "dSink" else x.flatten(1, 2)
                 for name, x in tensors.items()}  # fmt: skip
        return found | ({"lse": found["lse"].squeeze(-1)} if "lse" in found else {})

    reach = abs(scale) * (_longest(q) * _longest(k - mean)).max() if seen.numel() else 0
    return Truth(
        in_heads(exact), in_heads(scales), in_heads(sixteen), [in_heads(one) for one in rough],
        seen.any(-1).flatten(1, 2), seen.any(-2).any(2), float(reach), low)


def _over_group(x: Tensor) -> Tensor:
    """The gradients of keys, summed over the query heads that read them."""
    return x.sum(2, keepdim=True)


def _longest(x: Tensor) -> Tensor:
    """The norm of the longest token of each key/value head."""
    return x.norm(dim=-1).flatten(2).amax(-1)


def placed(
    parts: list[tuple[Truth, tuple, tuple]], like: dict[str, Tensor], sink: Tensor | None = None
) -> Truth:
    """The truth of several sequences in one call, from that of each, with the spans of its queries
    and of its keys. `like`: tensors whose shapes the results have, q, k and v.

    For tokens that do not count, out and gradients are zero, and lse is that of a query that sees
    no key: the logit of the sink, or -inf without one.
    """
    q, k, v = (like[name] for name in "qkv")
    shapes = {"O": (*q.shape[:3], v.shape[3]), "dQ": q.shape, "dK": k.shape, "dV": v.shape,
              "dSink": q.shape[1:2], "lse": q.shape[:3]}  # fmt: skip

    def whole(
        find: Callable[[Truth], dict[str, Tensor]], squares: bool = False
    ) -> dict[str, Tensor]:
        found = {name: torch.zeros(shape, dtype=torch.float64, device=q.device)
                 for name, shape in shapes.items()}  # fmt: skip
        found["lse"] += -torch.inf if sink is None else sink.double()[:, None]
        for truth, queries, keys in parts:
            for name, x in find(truth).items():
                if name == "dSink":
                    _add(found[name], x, squares)
                else:
                    _put(found[name], x, keys if name in ("dK", "dV") else queries)
        return found

    sees, is_seen = (torch.zeros(x.shape[:3], dtype=torch.bool, device=q.device) for x in (q, k))
    for truth, queries, keys in parts:
        _put(sees, truth.sees, queries)
        _put(is_seen, truth.is_seen, keys)
    return Truth(
        whole(lambda truth: truth.exact), whole(lambda truth: truth.scale, squares=True),
        whole(lambda truth: truth.sixteen),
        [whole(lambda truth: truth.rough[i]) for i in range(len(TRIES))], sees, is_seen,
        max((truth.reach for truth, *_ in parts), default=0.0), q.dtype)


def _put(whole: Tensor, part: Tensor, span: tuple) -> None:
    batch, begin, end = span
    whole[batch, :, begin:end] = part[0]


def _add(whole: Tensor, part: Tensor, squares: bool) -> None:
    whole.copy_((whole.square() + part.square()).sqrt() if squares else whole + part)
