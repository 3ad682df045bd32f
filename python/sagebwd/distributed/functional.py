"""`sagebwd.distributed.attention`."""

import torch

from sagebwd.core import combining, options
from sagebwd.core.arguments.shapes import check_scale, check_value_channels
from sagebwd.core.arguments.tensors import problem_of
from sagebwd.core.compat import not_compiled
from sagebwd.core.fastest import of_q
from sagebwd.core.front_arguments import ARGUMENTS
from sagebwd.core.functional import inputs
from sagebwd.core.gate import check_gate, gated
from sagebwd.core.keywords import RECOMPUTE, WINDOWS
from sagebwd.core.ops import DifferentiatedOnce, as_autocast_wants
from sagebwd.core.transforms import refuse_batches, refuse_tangents, refuse_transforms
from sagebwd.distributed import front as own_front
from sagebwd.distributed import heads as of_heads
from sagebwd.distributed.agreement import agree, next_number
from sagebwd.distributed.passes import Passes
from sagebwd.distributed.ring import Ring
from sagebwd.distributed.sharding import (
    by_place,
    check_lengths,
    even_order,
    pair_of,
    place_of,
    refuse_dtensor,
)


#: What to pass instead of arguments that `sagebwd.attention` has.
_OTHERWISE = dict.fromkeys(
    RECOMPUTE, "messages between ranks need queries and keys as they are: leave it out, or wrap "
    "the layer in torch.utils.checkpoint.checkpoint on every rank")


@not_compiled("sagebwd.distributed")
@options.takes(otherwise=_OTHERWISE, fastest=of_q())
def attention(
    q, k, v, *, mesh, method="ring", softmax_scale=None, layout="bhsd", return_lse=False,
    sink_logits=None, q_norm=None, k_norm=None, norm_eps=1e-6, q_inv_rms=None, k_inv_rms=None,
    rope=None, rope_k=None, rope_style="halves", rope_begin=0, gate=None, chosen,
):  # fmt: skip
    """`sagebwd.attention` over a sequence that the ranks of a mesh share, each with its tokens.

    All ranks of the mesh call this function, and its backward, in the same order and with the same
    arguments, except for the tensors' values and numbers of tokens. Results are those of one GPU
    with all tokens, except for the order of FP32 sums and roundings of out to 16 bits in between.

    Args:
        q, k, v: this rank's tokens, as `sagebwd.distributed.shard` gives them with this mesh and
            method; otherwise as in `sagebwd.attention`. On a CPU `sagebwd.emulation` computes,
            slowly.
        mesh: a torch DeviceMesh of one dimension; of two with 'both', the ring's and then that of
            heads. Several sequences at once have several meshes, each a part of a larger one.
        method: 'ring': keys and values travel while a rank computes with those that it has, and
            under a causal mask all ranks have the same work. 'ulysses': two all-to-all exchanges
            give each rank all tokens of some heads; heads must be a multiple of the ranks, and
            heads_kv need not be. 'both': 'ulysses' in each place of a ring.
        {options}
        softmax_scale, layout, return_lse, sink_logits: as in `sagebwd.attention`. The gradient of
            sink_logits is this rank's part of a sum over ranks, as that of other parameters is.
        q_norm, k_norm, norm_eps, q_inv_rms, k_inv_rms, rope, rope_k, rope_style, rope_begin, gate:
            as in `sagebwd.attention`, of this rank's tokens: tables, 1/rms and gate are cut up by
            `shard`, as q is. Gradients of gains are this rank's parts, as that of sink_logits is.

    In a ring the mean of all keys is subtracted (smooth_k), only the first key of all is computed
    separately (sink_keys), and windows are not supported. Causal masks require as many keys as
    queries. 'ulysses' has no such limits. Memory is that of this rank's tokens and, in a ring, of
    keys and values of two more ranks.

    Returns what `sagebwd.attention` returns, for this rank's queries.

    Raises what `sagebwd.attention` raises; if one rank raises it, so do the others, with a message
    that quotes it: SpecError for a SpecError, otherwise RuntimeError. If a rank has ended or
    calls something else, RuntimeError follows once the group's timeout is over.
    """
    front = dict(q_norm=q_norm, k_norm=k_norm, norm_eps=norm_eps, q_inv_rms=q_inv_rms,
                 k_inv_rms=k_inv_rms, rope=rope, rope_k=rope_k, rope_style=rope_style,
                 rope_begin=rope_begin)  # fmt: skip
    return over_ranks(q, k, v, mesh, method, softmax_scale, layout, return_lse, sink_logits, chosen,
                      front=front, gate=gate)  # fmt: skip


_ULYSSES = "pass method='ulysses'"


@not_compiled("sagebwd.distributed")
def over_ranks(
    q, k, v, mesh, method, softmax_scale, layout, return_lse, sink_logits, chosen, even=False,
    instead=_ULYSSES, front=ARGUMENTS, gate=None,
):  # fmt: skip
    """`attention`. With `even`, chunks are as long as each other, and of C ranks the i-th has the
    i-th and the i-th last of 2 C (PyTorch's order), with 'both', too. `instead`: what to do about
    what a ring does not have. `front`: the arguments of norm and RoPE."""
    place = place_of(mesh, method)
    error, facts, lengths = None, {}, {}
    try:
        options.yes_or_no("return_lse", return_lse)
        for name, x in (("q", q), ("k", k), ("v", v)):
            refuse_dtensor(name, x)
        q, k, v = own_front.behind(q, k, v, front, layout, method)
        q, k, v = _inputs(q, k, v)
        refuse_tangents(q, k, v)
        refuse_transforms("sagebwd.distributed", "sagebwd.attention on one GPU")
        facts, lengths = _facts(place, q, k, v, method, softmax_scale, layout, chosen,
                                instead)  # fmt: skip
        facts["even chunks"] = even
        if sink_logits is not None:
            heads = q.shape[of_heads.head_dim_of(layout)]
            combining.check_sink_logits(sink_logits, heads, q.device)
        facts["sink_logits"] = sink_logits is not None
        facts |= own_front.facts_of(front, gate)
        if gate is not None:
            check_gate(gate, q, (*q.shape[:3], v.shape[3]))
    except (options.SpecError, TypeError) as wrong:
        error = wrong
    everybodys = agree(mesh, error, lengths, "the forward of attention", **facts)
    call = _Call(place, everybodys, softmax_scale, layout, chosen, even, instead)
    out, lse = _Attention.apply(call, q, k, v, _anchor(place, q, k, v))
    if sink_logits is not None:
        out, lse = combining.with_sink(out, lse, sink_logits, layout=layout)
    if gate is not None:
        out = gated(out, gate)
    return (out, lse) if return_lse else out


def _anchor(place, *tensors):
    """Returns an empty part of a tensor that requires a gradient, in its graph, or None.

    With heads the backward computes from copies that messages brought. They have no graph, so only
    this empty part shows autograd that the backward is differentiated.
    """
    if place.across == 1 or not torch.is_grad_enabled():
        return None
    return next((t[..., :0].clone() for t in tensors if t.requires_grad), None)


def _inputs(q, k, v):
    q, k, v = inputs(q, k, v)
    return as_autocast_wants("cpu", q, k, v) if q.device.type == "cpu" else (q, k, v)


def _facts(place, q, k, v, method, softmax_scale, layout, chosen, instead):
    """Returns what all ranks must have in common, and numbers of tokens. Raises SpecError."""
    options.check_layout(layout)
    if q.is_meta:
        raise options.SpecError(
            f"q is on {q.device}, where ranks have nothing to exchange: for shapes call "
            "sagebwd.attention, which takes meta tensors; out is like q"
        )
    on_cpu = q.device.type == "cpu"
    batch, heads, heads_kv, queries, keys = problem_of(q, k, v, layout, None if on_cpu else (
        "cuda",))  # fmt: skip
    if q.device.type != place.mesh.device_type:
        raise options.SpecError(f"q is on {q.device}, and the mesh is of {place.mesh.device_type}")
    if heads % place.across:
        raise options.SpecError(
            f"{heads} query heads cannot be shared by {place.across} ranks: method={method!r} "
            "needs a multiple. method='ring' needs none"
        )
    if queries == 0 or keys == 0 or batch == 0:
        raise options.SpecError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: "
            + ("each rank needs tokens" if batch else "the batch is empty")
        )
    windows = [f"{name}={chosen[name]}" for name in WINDOWS if chosen[name] is not None]
    if place.ring is not None and windows:
        raise options.SpecError(f"{', '.join(windows)}: a ring has no windows; {instead}")
    causal = options.causal_name(chosen["causal"])
    text = options.text_of(dict(chosen, causal=causal))
    # The CPU refuses what kernels refuse, too: programs are tried there.
    check_value_channels(q.shape, v.shape)
    spec = options.spec_of_text(text, head_dim=int(q.shape[3]), dtype=q.dtype)
    scale = check_scale(softmax_scale, q.shape[3], spec)
    grad = torch.is_grad_enabled() and [t.requires_grad for t in (q, k, v)]
    return {
        "batch, heads and channels": [batch, heads, heads_kv, q.shape[3], v.shape[3]],
        "dtype": str(q.dtype), "layout": layout, "softmax_scale": scale, "method": method,
        "causal": chosen["causal"] if chosen["causal"] is True else causal, "options": text,
        "requires_grad": bool(grad and any(grad)),
    }, {"queries": queries, "keys": keys}  # fmt: skip


class _Call:
    """One call: where everybody's tokens are. SpecError, the same on all ranks, if they do not
    fit together."""

    def __init__(self, place, everybodys, softmax_scale, layout, chosen, even, instead):
        self.place, self.layout, self.number = place, layout, next_number(place.mesh)
        given = [by_place(place, [facts[name] for facts in everybodys])
                 for name in ("queries", "keys")]  # fmt: skip
        queries, keys = (sum(map(sum, lengths)) for lengths in given)
        mask = options.causal_name(chosen["causal"], queries, keys)
        if mask != "none" and place.ring is not None:
            if queries != keys:
                raise options.SpecError(
                    f"{queries} queries and {keys} keys in all: a causal ring needs as many keys "
                    f"as queries; {instead}"
                )
            check_lengths(given[0], queries, place, "q", even)
            check_lengths(given[1], keys, place, "k", even)
        #: numbers of tokens, by the ranks that share heads with this one
        self.queries, self.keys = (lengths[place.at] for lengths in given)
        self.all_keys = keys
        self.passes = Passes(softmax_scale, layout, dict(chosen, causal=mask))
        self.pairs = [(sum(row), 0) for row in given[1]]
        if mask != "none" and place.ring is not None:
            self.pairs = [tuple(end - first for first, end in pair_of(keys, place, at, even))
                          for at in range(place.around)]  # fmt: skip
        self.order = None
        if even and mask != "none" and place.across > 1:
            self.order = even_order(self.queries[0], place)
        facts = everybodys[0]["batch, heads and channels"]
        self.copies = of_heads.copies_of(facts[2], place)

    def ring(self):
        return Ring(self.place, self.passes, self.pairs)

    def to_heads(self, tensors, lengths):
        if self.place.across == 1:
            return tensors
        tensors = of_heads.from_tokens(tensors, lengths, self.place, self.layout)
        return self._reordered(tensors, 0)

    def to_tokens(self, tensors, lengths):
        if self.place.across == 1:
            return tensors
        tensors = self._reordered(tensors, 1)
        return of_heads.from_heads(tensors, lengths, self.place, self.layout)

    def _reordered(self, tensors, which):
        """A place's tokens in order (0), or in the order of the ranks that share them (1)."""
        if self.order is None:
            return tensors
        return [None if t is None else of_heads.joined(t, self.order[which], self.layout)
                for t in tensors]  # fmt: skip

    def forward(self, q, k, v):
        """(out, lse), and what the backward needs."""
        k, v = (of_heads.repeated(t, self.copies, self.layout) for t in (k, v))
        q, k, v = self.to_heads((q, k, v), (self.queries, self.keys, self.keys))
        ring = self.ring()
        k_mean = ring.k_mean(k, self.all_keys)
        found = ring.forward(q, k, v, k_mean)
        if found is None:  # the others wait for messages
            found = [q.new_zeros((*q.shape[:3], v.shape[3])),
                     q.new_zeros(_rows(q, self.layout), dtype=torch.float32)]  # fmt: skip
        results = self.to_tokens(found, (self.queries, self.queries))
        return ring.error, results, (q, k, v, *found, k_mean)

    def backward(self, dout, dlse, saved):
        """(dq, dk, dv)."""
        q, k, v, out, lse, k_mean = saved
        dout, dlse = self.to_heads((dout, dlse), (self.queries, self.queries))
        ring = self.ring()
        found = ring.backward(dout, q, k, v, out, lse, dlse, k_mean)
        if found is None:
            found = [torch.zeros_like(t) for t in (q, k, v)]
        dq, dk, dv = self.to_tokens(found, (self.queries, self.keys, self.keys))
        dk, dv = (of_heads.summed(t, self.copies, self.layout) for t in (dk, dv))
        return ring.error, (dq, dk, dv)


def _rows(q, layout):
    return (q.shape[0], q.shape[2], q.shape[1]) if layout == "bshd" else q.shape[:3]


def _together(mesh, function, *given):
    """Returns what the function gives after its error, which all ranks raise if one has any. The
    function's name says to other ranks where this one is."""
    error, results = None, ()
    try:
        error, *results = function(*given)
    except Exception as wrong:
        error = wrong
    agree(mesh, error, call=f"the end of attention's {function.__name__}")
    return results


@not_compiled("the backward of sagebwd.distributed")
def _gradients(call, needed, dout, dlse, anchor, *saved):
    """(dq, dk, dv). Ranks say to each other which of these gradients there are, as one may use what
    another does not; compiled autograd leaves all of it out of its graphs."""
    refuse_tangents(dout, dlse)
    refuse_batches(dout, dlse)
    has = {"out": dout is not None, "lse": dlse is not None}
    name = f"the backward of attention's call {call.number}"
    given = agree(call.place.mesh, numbers=has, call=name)
    if not any(facts["out"] or facts["lse"] for facts in given):
        return None, None, None
    q, _, v, *_ = saved
    own = call.queries[call.place.row]
    batch, heads = q.shape[0], q.shape[of_heads.head_dim_of(call.layout)] * call.place.across
    if dout is None:
        shape = (batch, heads, own) if call.layout == "bhsd" else (batch, own, heads)
        dout = q.new_zeros((*shape, v.shape[3]))
    if dlse is None and any(facts["lse"] for facts in given):
        dlse = q.new_zeros((batch, heads, own), dtype=torch.float32)

    def computed(dout, dlse, anchor, *saved):
        (gradients,) = _together(call.place.mesh, call.backward, dout, dlse, saved)
        return tuple(gradients)

    gradients = DifferentiatedOnce.apply(computed, dout, dlse, anchor, *saved)
    return tuple(g if need else None for g, need in zip(gradients, needed))


class _Attention(torch.autograd.Function):
    """(out, lse) of this rank's queries."""

    @staticmethod
    def forward(ctx, call, q, k, v, anchor):
        (out, lse), saved = _together(call.place.mesh, call.forward, q, k, v)
        ctx.call = call
        ctx.save_for_backward(anchor, *saved)
        ctx.set_materialize_grads(False)  # an unused lse costs nothing
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        call, (anchor, *saved) = ctx.call, ctx.saved_tensors
        found = _gradients(call, ctx.needs_input_grad[1:4], dout, dlse, anchor, *saved)
        return None, *found, None
