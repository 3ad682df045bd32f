"""Attention and its gradients in FP64, by PyTorch on any device: the reference of all errors.

`sagebwd.reference.exact` is the same operation in C++, on NumPy arrays and the CPU, for machines
without PyTorch; a test holds the two against each other.
"""

from dataclasses import dataclass

import torch

from sagebwd.core import options
from sagebwd.numerics import emulation, numerics
from sagebwd.numerics.expressions import both


@dataclass(frozen=True)
class Attended:
    """(B, H, M, D) out and dq, (B, H, M) lse, (B, Hk, N, D) dk and dv; or in the other layout."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor

    def named(self):
        """All results except lse, by the names of `sagebwd.trace`."""
        return {"O": self.out, "dQ": self.dq, "dK": self.dk, "dV": self.dv}


@options.takes(options.Mask)
def exact_attention(
    q, k, v, dout, *, dlse=None, softmax_scale=None, layout="bhsd", scales=False,
    startend_row_indices=None, chosen,
):  # fmt: skip
    """The exact results of (B, H, M, D) and (B, Hk, N, D) tensors, as `Attended` in float64.

    A query that sees no key has out = 0, lse = -inf and no gradient. With `scales` a pair: the
    second holds each element's scale, the root of the sum of the squares of the terms that it sums.
    Independent relative errors e of the terms give it an error of e times that, also where the
    terms cancel: the yardstick where a result itself is (nearly) zero.
    """
    options.check_layout(layout)
    q, k, v, dout = emulation.swapped(layout, q, k, v, dout)
    mask = options.Mask.among(options.with_mask(chosen, q.shape[2], k.shape[2]))
    tau = options.check_softmax_scale(softmax_scale, q.shape[3])
    _, hidden = emulation.intervals_of(startend_row_indices, q, k)

    def results(q, k, v, dout, dlse, hidden):
        t = exact_chunk(q, k, v, dout, mask, tau, dlse, hidden)
        found = [t[name] for name in ("O", "lse", "dQ", "dK", "dV")]
        return found + _scales(q, k, v, dout, dlse, t, tau) if scales else found

    def attended(out, lse, *gradients):
        (out,) = emulation.swapped(layout, out)
        return Attended(out, lse, *emulation.swapped(layout, *gradients))

    found = emulation.by_chunks(results, k.shape[1], q, k, v, dout, dlse, hidden)
    return (attended(*found[:5]), attended(*found[5:])) if scales else attended(*found)


def exact_chunk(q, k, v, dout, mask, scale, dlse=None, listed=None, sink=None, expressed=None):
    """For q (n, G, M, D) and k, v (n, 1, N, D): lse and the tensors of `sagebwd.trace` by name.

    listed, expressed: as in `numerics.forward_chunk`; None: all. sink: (n, G, 1), logits beside the
    scores, whose weight is dropped; None: none.
    """
    q, k, v, dout = (t.double() for t in (q, k, v, dout))
    s = (q @ k.mT) * scale
    visible = numerics.visible_keys(mask, q.shape[-2], k.shape[-2], q.device)
    if listed is not None:
        visible = both(visible, numerics.shown_keys(listed, mask, q.shape[-2]))
    slope = None
    if expressed is not None:
        visible = both(visible, expressed.seen(*s.shape[-2:]))
        if expressed.of.score:
            s, slope = expressed.scored(s)
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    lse = s.logsumexp(-1)
    p = torch.softmax(s, -1)
    if sink is not None:
        p = p * torch.sigmoid(lse - sink)[..., None]
        lse = torch.logaddexp(lse, sink)
    if visible is not None:
        p = p.masked_fill(~visible.any(-1, keepdim=True), 0)  # rows that see no key
    out = p @ v
    delta = (dout * out).sum(-1, keepdim=True)
    dp = dout @ v.mT
    ds = p * (dp - (delta if dlse is None else delta - dlse[..., None]))
    if slope is not None:  # which may be NaN where a key is not seen
        ds = ds * (slope if visible is None else slope.masked_fill(~visible, 0))
    dk, dv = (x.sum(1, keepdim=True) for x in (ds.mT @ q, p.mT @ dout))
    gradients = {"dQ": scale * (ds @ k), "dK": scale * dk, "dV": dv}
    return {"lse": lse, "delta": delta, "P": p, "dP": dp, "dS": ds, "O": out, **gradients}


def _scales(q, k, v, dout, dlse, exact, tau):
    """Returns scales of a chunk's exact results, in the order of `Attended`; that of lse is lse."""
    q2, k2, v2, dout2 = (t.double().square() for t in (q, k, v, dout))
    p2 = exact["P"].square()
    delta = exact["delta"] if dlse is None else exact["delta"] - dlse[..., None]
    terms = (exact["dP"].square() + delta.square()) * p2
    return [
        (p2 @ v2).sqrt(),
        exact["lse"],
        tau * (terms @ k2).sqrt(),
        tau * (terms.mT @ q2).sum(1, keepdim=True).sqrt(),
        (p2.mT @ dout2).sum(1, keepdim=True).sqrt(),
    ]
