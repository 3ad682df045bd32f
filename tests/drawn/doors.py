"""The functions by which drawn cases call the operation, for the kernels and for the emulation."""

from __future__ import annotations

from draw import Case
from draw_lists import NAMES
from drawn_inputs import Given
from frame import torch
from torch import Tensor

import sagebwd
from sagebwd.core import combining, sequences
from sagebwd.lists import block_sparse
from sagebwd.numerics import emulation


class Kernels:
    """The package's own functions; those for lists of blocks where there are some."""

    @staticmethod
    def attention(*tensors, sink_logits=None, **options):
        if "block_size" in options:
            return sagebwd.block_sparse_attention(*tensors, **options)
        return sagebwd.attention(*tensors, sink_logits=sink_logits, **options)

    @staticmethod
    def forward(*tensors, **options):
        if "block_size" in options:
            return sagebwd.block_sparse_attention_forward(*tensors, **options)
        return sagebwd.attention_forward(*tensors, **options)

    @staticmethod
    def backward(*tensors, part=None, **options):
        if "block_size" in options:
            return sagebwd.block_sparse_attention_backward(*tensors, **options)
        return sagebwd.attention_backward(*tensors, part=part, **options)


class Emulated:
    """The emulation has the same functions, and computes sequence by sequence."""

    @staticmethod
    def attention(q, k, v, *, layout, sink_logits, **options):
        if "block_size" in options:
            return emulation.emulated_block_sparse_attention(
                q, k, v, layout=layout, **_emulated(options))
        out, lse = emulation.emulated_attention(q, k, v, layout=layout, **_emulated(options))
        if sink_logits is not None:
            out, lse = combining.with_sink(out, lse, sink_logits, layout=layout)
        return out, lse

    @staticmethod
    def forward(q, k, v, **options):
        if "block_size" in options:
            return _forward_of_lists(q, k, v, options)

        def one(q, k, v, **options):
            return emulation.emulated_forward(q, k, v, **options)

        with torch.no_grad():
            return _by_sequences(one, (q, k, v), "qkv", "ol", options)

    @staticmethod
    def backward(dout, q, k, v, out, lse, *, dlse=None, part=None, **options):
        if "block_size" in options:
            return _backward_of_lists(dout, q, k, v, out, lse, dlse, options)
        if part is not None:
            dout, out, lse, dlse = combining.of_part(
                part, dout, out, lse, dlse, layout=options["layout"])

        def one(dout, q, k, v, out, lse, dlse, **options):
            return emulation.emulated_backward(dout, q, k, v, out, lse, dlse=dlse, **options)

        with torch.no_grad():
            return _by_sequences(one, (dout, q, k, v, out, lse, dlse), "oqkvoll", "qkv", options)


def with_emulated_gradients(forward_of: type) -> type:
    """The results of another forward, and gradients that are emulated from them.

    The gradients of kernels are compared with these. If the forward rounds an integer the other
    way, both change alike.
    """

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, options):
            ctx.options, results = options, forward_of.forward(q, k, v, **options)
            ctx.save_for_backward(q, k, v, *results)
            return tuple(results)

        @staticmethod
        def backward(ctx, dout, dlse):
            gradients = Emulated.backward(dout, *ctx.saved_tensors, dlse=dlse, **ctx.options)
            return (*gradients, None)

    class Doors:
        forward = staticmethod(forward_of.forward)
        backward = staticmethod(Emulated.backward)

        @staticmethod
        def attention(q, k, v, *, layout, sink_logits, return_lse, **options):
            out, lse = Forward.apply(q, k, v, options | {"layout": layout})
            if sink_logits is not None:
                out, lse = combining.with_sink(out, lse, sink_logits, layout=layout)
            return out, lse

    return Doors


def _emulated(options: dict) -> dict:
    """Options as the emulation takes them."""
    options = {**options, "plan": options["precision"]}
    for name in ("precision", "deterministic", "dq_sums", "gradient_kernels"):
        options.pop(name, None)
    return options


def _forward_of_lists(q, k, v, options: dict) -> list:
    rules, listed, layout = _with_lists(q, k, v, options)
    out, lse, _ = emulation.forward(*emulation.swapped(layout, q, k, v), rules, None, listed)
    return [*emulation.swapped(layout, out), lse]


def _backward_of_lists(dout, q, k, v, out, lse, dlse, options: dict) -> list:
    rules, listed, layout = _with_lists(q, k, v, options)
    dout, q, k, v, out = emulation.swapped(layout, dout, q, k, v, out)
    gradients = emulation.backward(dout, q, k, v, out, lse, dlse, rules, None, listed)
    return emulation.swapped(layout, *gradients)


def _with_lists(q, k, v, options: dict) -> tuple:
    """The emulation's rules, which keys each query lists, and the layout."""
    options = _emulated(options)
    sizes, layout = options["block_size"], options["layout"]
    lists = [options.pop(name, None) for name in NAMES]
    rules = emulation.emulation_rules(q, k, v, **options)
    bits = block_sparse.bits_of(q, k, v, layout, sizes, None, *lists)
    return rules, block_sparse.tokens_of(bits, *emulation.swapped(layout, q, k), sizes)[0], layout


def _by_sequences(compute, tensors: tuple, kinds: str, results: str, options: dict) -> list:
    """Calls `compute` for each sequence, and puts its results into tensors of all sequences.
    `kinds` says for each tensor whether it is like q, k, v, out (o) or lse (l), and so does
    `results`."""
    options = _emulated(options)
    layout = options.pop("layout")
    packing = [options.pop(name, None) for name in sequences.NAMES]
    packed = packing[0] is not None

    def in_order(x: Tensor | None, kind: str) -> Tensor | None:
        """(batch, heads, tokens, channels), or the same view back."""
        if x is None or (layout == "bhsd" and not packed) or kind == "l":
            return x[None] if packed and x is not None else x
        return x.transpose(0, 1)[None] if packed else x.transpose(1, 2)

    def given_back(x: Tensor, kind: str) -> Tensor:
        if packed:
            return x[0] if kind == "l" else x[0].transpose(0, 1)
        return x.transpose(1, 2) if layout == "bshd" and kind != "l" else x

    tensors = [in_order(x, kind) for x, kind in zip(tensors, kinds)]
    if all(t is None for t in packing):
        found = compute(*tensors, **options)
        return [given_back(x, kind) for x, kind in zip(found, results)]
    like = dict(zip(kinds, tensors))
    q, k, v = (like[kind] for kind in "qkv")
    whole = {"q": torch.zeros_like(q), "k": torch.zeros_like(k), "v": torch.zeros_like(v),
             "o": q.new_zeros(*q.shape[:3], v.shape[3]),
             "l": q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)}  # fmt: skip
    mean = options.pop("k_mean", None)
    problem = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    for i, (batch, queries, keys) in enumerate(sequences.spans(problem, packing)):
        spans = [keys if kind in "kv" else queries for kind in kinds]
        one = [None if x is None else x[batch, :, span][None] for x, span in zip(tensors, spans)]
        found = compute(*one, k_mean=None if mean is None else mean[i : i + 1], **options)
        for x, kind in zip(found, results):
            whole[kind][batch, :, keys if kind in "kv" else queries] = x[0]
    return [given_back(whole[kind], kind) for kind in results]


def attend(doors, case: Case, given: Given, layout: str = "bhsd") -> dict[str, Tensor]:
    """O, lse, dQ, dK, dV, and dSink where there are sinks, indexed as the inputs are."""
    packed = "cu_seqlens_q" in given.packing
    options = case.options() | given.packing | given.lists | {"layout": layout}
    if not case.lists:
        options["k_mean"] = given.k_mean

    def as_called(x: Tensor | None) -> Tensor | None:
        """Turns (batch, heads, tokens, ...) into what the call takes, and back."""
        if x is None or (not packed and layout == "bhsd"):
            return x
        if x.dim() == 3 and not packed:  # lse is the same in both layouts
            return x
        return x[0].transpose(0, 1) if packed else x.transpose(1, 2)

    def indexed(x: Tensor) -> Tensor:
        return x.transpose(0, 1)[None] if packed else as_called(x)

    q, k, v, dout = (as_called(x) for x in (given.q, given.k, given.v, given.dout))
    dlse = given.dlse[0] if packed and given.dlse is not None else given.dlse
    arguments = (doors, case, (q, k, v), dout, dlse, options)
    if case.door == "halves":
        out, lse, gradients = _halves(*arguments)
    elif case.door == "autograd" or case.told == "autograd":
        out, lse, gradients = _by_autograd(*arguments, given.sink)
    else:
        out, lse, gradients = _parts(*arguments)
    found = {"O": indexed(out), "lse": lse[None] if packed else lse}
    found |= {name: indexed(x) for name, x in zip(("dQ", "dK", "dV"), gradients)}
    return found | ({"dSink": gradients[3]} if given.sink is not None else {})


def _halves(doors, case: Case, inputs: tuple, dout, dlse, options: dict) -> tuple:
    out, lse = doors.forward(*inputs, **options)
    # dq depends on whether out and lse belong to exactly these keys, as they do here.
    part = (out, lse) if dlse is not None and options.get("k_mean") is not None else None
    gradients = doors.backward(dout, *inputs, out, lse, dlse=dlse, part=part, **options)
    return out, lse, gradients


def _by_autograd(doors, case: Case, inputs: tuple, dout, dlse, options: dict, sink) -> tuple:
    leaves = [x.detach().requires_grad_() for x in inputs]
    if case.door == "parts":
        parts = [doors.attention(leaves[0], *keys, sink_logits=None, return_lse=True, **options)
                 for keys, options in parts_of(case, *leaves[1:], options)]  # fmt: skip
        out, lse = sagebwd.merge(parts, layout=options["layout"])
    else:
        leaves += [] if sink is None else [sink.detach().requires_grad_()]
        out, lse = doors.attention(*leaves[:3], sink_logits=leaves[3] if leaves[3:] else None,
                                   return_lse=True, **options)
    asked = [(out, dout)] if case.dlse != "alone" else []
    asked += [(lse, dlse)] if dlse is not None else []
    gradients = torch.autograd.grad(
        [x for x, _ in asked], leaves, [gradient for _, gradient in asked], allow_unused=True)
    gradients = [torch.zeros_like(x) if gradient is None else gradient
                 for x, gradient in zip(leaves, gradients)]  # fmt: skip
    return out.detach(), lse.detach(), gradients


def _parts(doors, case: Case, inputs: tuple, dout, dlse, options: dict) -> tuple:
    q, k, v = inputs
    parts = [(keys, options, doors.forward(q, *keys, **options))
             for keys, options in parts_of(case, k, v, options)]  # fmt: skip
    out, lse = sagebwd.merge([part for *_, part in parts], layout=options["layout"])
    gradients = [
        doors.backward(dout, q, *keys, out, lse, dlse=dlse,
                       part=part if case.told == "part" else None, **options)
        for keys, options, part in parts]  # fmt: skip
    dq, dk, dv = zip(*gradients)
    tokens = 2 if options["layout"] == "bhsd" else 1
    return out, lse, (sum(x.float() for x in dq), torch.cat(dk, tokens), torch.cat(dv, tokens))


def parts_of(case: Case, k: Tensor, v: Tensor, options: dict):
    """Keys, values and options of each part of the keys.

    If there is a causal mask and there are as many queries as keys, the mask of the first part is
    aligned to the top left, and that of the last part to the bottom right.
    """
    tokens = 2 if options["layout"] == "bhsd" else 1
    begin, last = 0, len(case.ends_of_parts) - 1
    for i, end in enumerate(case.ends_of_parts):
        end = min(end, k.shape[tokens])  # for a sequence by itself
        mine = dict(options)
        if case.spec["causal"] != "none":
            mine["causal"] = "bottom-right" if i == last else "top-left"
        if "seqused_k" in options:
            mine["seqused_k"] = (options["seqused_k"] - begin).clamp(0, end - begin)
        yield [x.narrow(tokens, begin, end - begin) for x in (k, v)], mine
        begin = end
