"""Tokens for heads, and back: the all-to-all of Ulysses (arXiv 2309.14509).

Messages have tokens outermost, so that what arrives from all ranks is one tensor in the order of
tokens, which kernels read by its strides.
"""

import math

import torch
import torch.distributed as dist

from sagebwd.distributed.sharding import as_bytes


def _tokens_first(x, layout):
    """A view of (tokens, batch, heads, ...) of a tensor in the layout, or of rows (B, H, M)."""
    return x.movedim(1, 0) if x.dim() == 4 and layout == "bshd" else x.movedim(2, 0)


def _in_layout(x, layout):
    """The inverse of `_tokens_first`."""
    return x.movedim(0, 1 if x.dim() == 4 and layout == "bshd" else 2)


def joined(x, spans, layout):
    """Spans (first, count) of the tokens of a tensor, one behind the other."""
    dim = 1 if x.dim() == 4 and layout == "bshd" else 2
    return torch.cat([x.narrow(dim, *span) for span in spans], dim)


class Exchange:
    """One tensor on its way; `wait` gives what has arrived."""

    def __init__(self, message, received, splits_out, splits_in, group, finish):
        self.message, self.received, self.finish = message, received, finish
        each = message.element_size()
        self.work = dist.all_to_all_single(
            as_bytes(received), as_bytes(message), [n * each for n in splits_out],
            [n * each for n in splits_in], group=group, async_op=True)  # fmt: skip

    def wait(self):
        self.work.wait()
        return self.finish(self.received)


def to_heads(x, lengths, place, layout):
    """Sends all heads of this rank's tokens; this rank's heads of all tokens arrive."""
    x = _tokens_first(x, layout)
    message = x.unflatten(2, (place.across, -1)).movedim(2, 0).contiguous()  # (U, n, B, h, ...)
    rest = message.shape[2:]
    received = x.new_empty((sum(lengths), *rest))
    each = math.prod(rest)
    return Exchange(message, received, [n * each for n in lengths],
                    [message[0].numel()] * place.across, place.heads,
                    lambda received: _in_layout(received, layout))  # fmt: skip


def to_tokens(x, lengths, place, layout):
    """The way back; contiguous."""
    message = _tokens_first(x, layout).contiguous()
    rest = message.shape[1:]
    own, each = lengths[place.row], math.prod(rest)
    received = x.new_empty((place.across, own, *rest))

    def finish(received):
        return _in_layout(received.movedim(0, 2).flatten(2, 3), layout).contiguous()

    return Exchange(message, received, [own * each] * place.across, [n * each for n in lengths],
                    place.heads, finish)  # fmt: skip


def head_dim_of(layout):
    """Which dimension has heads."""
    return 2 if layout == "bshd" else 1


def copies_of(heads_kv, place):
    """How often each head of keys and values is sent, so that ranks have as many each."""
    return place.across // math.gcd(heads_kv, place.across)


def repeated(x, copies, layout):
    return x if copies == 1 else x.repeat_interleave(copies, head_dim_of(layout))


def summed(x, copies, layout):
    """Adds up, in FP32, the gradients of the copies that `repeated` made."""
    if copies == 1:
        return x
    dim = head_dim_of(layout)
    each = x.unflatten(dim, (-1, copies)).unbind(dim + 1)
    total = each[0].float()
    for part in each[1:]:
        total = total + part
    return total.to(x.dtype)


def from_tokens(tensors, lengths, place, layout):
    """`to_heads` of all, which travel while the next are packed. None stays None."""
    under_way = [None if t is None else to_heads(t, lengths[i], place, layout)
                 for i, t in enumerate(tensors)]  # fmt: skip
    return [None if e is None else e.wait() for e in under_way]


def from_heads(tensors, lengths, place, layout):
    under_way = [to_tokens(t, lengths[i], place, layout) for i, t in enumerate(tensors)]
    return [e.wait() for e in under_way]
