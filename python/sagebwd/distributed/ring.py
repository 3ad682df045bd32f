"""Attention of a ring's places: each has its queries, and sees the others' keys by turns.

In step s a place computes with the keys of the s-th place before it, which come from there at once,
while those of the next step are under way: no place waits for keys to be passed on. Gradients of
keys return to their owner in the same way, in the format in which kernels write them, and are
summed there in FP32. Under a causal mask a place has one early and one late chunk of tokens, so
that each step is half of its attention without a mask, and half of the keys need not travel when
only they are seen.

All sums are in the order of steps, so the same inputs give the same bits.

Keys and values travel in 16 bits. INT8 copies would be half the bytes. For that a prepared pass
would have to run its pre-pass for keys alone, into memory of the caller, and attention from such
copies in place of k and v: no kernel is missing, but a pass has one workspace, in which copies of
queries and keys lie side by side (generator/plan.cpp). In the backward V would travel in 16 bits
all the same, because dP is no INT8 product.
"""

import torch
import torch.distributed as dist


class Ring:
    """The ring of a place, which may be its only one: `pairs` are the numbers of keys of each
    place's two chunks."""

    def __init__(self, place, passes, pairs):
        self.place, self.passes, self.pairs = place, passes, pairs
        self.causal = passes.chosen["causal"] != "none"
        self.at, self.around, self.token_dim = place.at, place.around, passes.token_dim
        self.error = None

    # ---- who sees what ---------------------------------------------------------------------------

    def _keys(self, reader, owner):
        """The span of the owner's keys that a reader sees."""
        first, second = self.pairs[owner]
        return (0, first if self.causal and owner < reader else first + second)

    def _queries(self, owner, rows):
        """The span of this place's queries that see the owner's keys."""
        return (self.pairs[self.at][0] if self.causal and owner > self.at else 0, rows)

    def _before(self, step):
        return (self.at - step) % self.around

    def _behind(self, step):
        return (self.at + step) % self.around

    def _tokens(self, x, span):
        return x.narrow(self.token_dim, span[0], span[1] - span[0])

    # ---- communication ---------------------------------------------------------------------------

    def _send(self, tensors, to):
        rank = self.place.ranks[to][self.place.row]
        return [dist.P2POp(dist.isend, t, rank, self.place.ring) for t in tensors]

    def _receive(self, tensors, source):
        rank = self.place.ranks[source][self.place.row]
        return [dist.P2POp(dist.irecv, t, rank, self.place.ring) for t in tensors]

    def _room(self, like, span):
        shape = list(like.shape)
        shape[self.token_dim] = span[1] - span[0]
        return like.new_empty(shape)

    def _keys_of_step(self, step, k, v):
        """Returns operations that send this place's keys to the reader of a step and receive what
        this place reads, and the tensors of both."""
        reader, owner = self._behind(step), self._before(step)
        own = [self._tokens(t, self._keys(reader, self.at)).contiguous() for t in (k, v)]
        arriving = [self._room(t, self._keys(self.at, owner)) for t in (k, v)]
        return self._send(own, reader) + self._receive(arriving, owner), arriving, own

    def _guarded(self, compute, *given):
        """The results; None after an error, which all ranks hear of when messages are through."""
        if self.error is None:
            try:
                return compute(*given)
            except Exception as error:
                self.error = error
        return None

    def k_mean(self, k, keys):
        """The mean of all places' keys, the same bits in every place: sums in FP64, added in the
        order of places."""
        if self.around == 1 or not self.passes.chosen["smooth_k"]:
            return None
        mine = k.sum(self.token_dim, dtype=torch.float64)
        sums = [torch.empty_like(mine) for _ in range(self.around)]
        dist.all_gather(sums, mine, group=self.place.ring)
        total = sums[0]
        for part in sums[1:]:
            total = total + part
        return (total / keys).float()

    # ---- the passes ------------------------------------------------------------------------------

    def forward(self, q, k, v, k_mean):
        """(out, lse) of this place's queries, for all keys."""
        rows = q.shape[self.token_dim]
        merged, now = _Merged(self.token_dim, self.around == 1), (k, v)
        for step in range(self.around):
            works, coming = [], None
            if step + 1 < self.around:
                ops, *coming = self._keys_of_step(step + 1, k, v)
                works = dist.batch_isend_irecv(ops)
            self._guarded(self._forward_step, step, q, now, k_mean, rows, merged)
            for work in works:
                work.wait()
            now = coming and coming[0]
        if self.error is not None:
            return None
        return merged.out.to(q.dtype), merged.lse

    def _forward_step(self, step, q, kv, k_mean, rows, merged):
        owner = self._before(step)
        span = self._queries(owner, rows)
        part = self.passes.forward(self._tokens(q, span), *kv, step == 0, owner == 0, k_mean)
        merged.add(*part, span)

    def backward(self, dout, q, k, v, out, lse, dlse, k_mean):
        """(dq, dk, dv) of this place's tokens."""
        given = dout, q, out, lse, dlse, k_mean
        lack = None
        if dlse is not None and k_mean is not None and self.around > 1:
            lack = self._of_mean(q, dlse, k_mean)
        sums, now, found = None, (k, v), None
        for step in range(self.around + 1):
            ops, coming, returning = [], None, None
            if step + 1 < self.around:
                ops, *coming = self._keys_of_step(step + 1, k, v)
            if step > 1:
                returning = self._gradients_of_step(step - 1, found, k, v)
                ops += returning[0]
            works = dist.batch_isend_irecv(ops) if ops else []
            found = None
            if step < self.around:
                result = self._guarded(self._backward_step, step, now, sums, lack, *given)
                if result is not None:
                    sums, found = result
            for work in works:
                work.wait()
            if returning is not None and self.error is None:
                self._add(sums, returning[1], self._keys(self._behind(step - 1), self.at))
            now = coming and coming[0]
        if self.error is not None:
            return None
        return [x.to(t.dtype) for x, t in zip(sums, (q, k, v))]

    def _backward_step(self, step, kv, sums, lack, dout, q, out, lse, dlse, k_mean):
        """The sums after the step, which own gradients begin, and those of others' keys."""
        owner = self._before(step)
        span = self._queries(owner, q.shape[self.token_dim])
        of_rows = [None if t is None else t.narrow(2, span[0], span[1] - span[0])
                   for t in (lse, dlse)]  # fmt: skip
        gradients = self.passes.backward(
            self._tokens(dout, span), self._tokens(q, span), *kv, self._tokens(out, span),
            *of_rows, step == 0, owner == 0, k_mean)  # fmt: skip
        if step == 0:
            return [g if self.around == 1 else g.float() for g in gradients], None
        dq = self._tokens(sums[0], span)
        dq += gradients[0]
        if lack is not None:
            dq -= self._tokens(lack, span)
        return sums, gradients[1:]

    def _add(self, sums, gradients, span):
        for total, gradient in zip(sums[1:], gradients):
            part = self._tokens(total, span)
            part += gradient

    def _gradients_of_step(self, step, found, k, v):
        """Returns operations that send a step's gradients to the keys' owner and receive those of
        own keys, and the tensors of both."""
        owner, reader = self._before(step), self._behind(step)
        span = self._keys(self.at, owner)
        if found is None:  # after an error: something of the right size
            found = [torch.zeros_like(self._room(t, span)) for t in (k, v)]
        found = [t.contiguous() for t in found]
        arriving = [self._room(t, self._keys(reader, self.at)) for t in (k, v)]
        return self._send(found, owner) + self._receive(arriving, reader), arriving, found

    def _of_mean(self, q, dlse, k_mean):
        """softmax_scale dlse k_mean, which every part adds to dq, and one is to."""
        scale = self.passes.softmax_scale
        scale = q.shape[3] ** -0.5 if scale is None else scale
        heads = dlse.shape[1] // k_mean.shape[1]
        term = scale * dlse[..., None] * k_mean.repeat_interleave(heads, 1)[:, :, None]
        return term.transpose(1, 2) if self.token_dim == 1 else term


class _Merged:
    """Attention over the keys so far, in FP32; `is_all`: nothing will be added."""

    def __init__(self, token_dim, is_all):
        self.token_dim, self.is_all, self.out, self.lse = token_dim, is_all, None, None

    def add(self, out, lse, span):
        """That over further keys, for a span of the queries."""
        if self.out is None:
            self.out, self.lse = out if self.is_all else out.float(), lse
            return
        n = span[1] - span[0]
        whole, of_rows = self.out.narrow(self.token_dim, span[0], n), self.lse.narrow(2, span[0], n)
        share = torch.sigmoid(lse - of_rows).masked_fill(lse == -torch.inf, 0)
        of_rows.copy_(torch.logaddexp(of_rows, lse))
        if self.token_dim == 1:
            share = share.transpose(1, 2)
        whole.lerp_(out.float(), share[..., None])
