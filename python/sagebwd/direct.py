"""`sagebwd.attention` in plain eager code: past what PyTorch's dispatcher does in Python.

An operator that Python implements, with its autograd, is looked up and called through several
layers of Python. Where nobody looks on and the call's form is known, the kernels are run without
them: the same checks have passed, and the same tensors come out. All others go by the operators.

What that leaves, measured on one CPU core with a driver that launches nothing: 7.3 us of a forward
and 50 us of forward and backward, where the operators take 15 and 82 us, and PyTorch's engine alone
with an empty Python function 24 us. An operator in C++ with its autograd there (over the stable
ABI, say), which allocates and launches the same, would take about 5.5 and 34 us: 2 and 16 us less.
"""

import torch
from torch._C import (
    _functorch,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import _profiler_enabled, forward_ad
from torch.compiler import is_compiling

from sagebwd import options
from sagebwd.forms import known_form

#: Quicker to ask than of which device; where it is missing, that is asked.
_is_any_autocast_enabled = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_DEFAULTS = options.defaults()
_texts = {}


def _is_watched(*tensors):
    """Whether somebody may want to see an operator, or other tensors than these: a compiler, a
    tracer, a mode, a functional transform, forward-mode differentiation, a profiler, a subclass."""
    return (
        is_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _profiler_enabled()
        or _get_tracing_state() is not None
        or not _PLAIN.issuperset(map(type, tensors))
    )


def _text_of(chosen):
    """The options' line for the operators, and whether they mean it only for as many queries as
    keys; None for what they do not know."""
    # True is not 1 here.
    key = (*chosen.items(), *map(type, chosen.values()))
    found = _texts.get(key)
    if found is None and chosen.keys() <= _DEFAULTS.keys():
        told = {**_DEFAULTS, **chosen}
        found = options.text_of(options.with_mask(told, 1, 1)), options.needs_as_many(told)
        _texts[key] = found
    return found


def attention(q, k, v, *, softmax_scale=None, layout="bhsd", return_lse=False, **chosen):
    """What `sagebwd.attention` gives, or None where it must go by the operators."""
    if _is_watched(q, k, v) or (return_lse is not True and return_lse is not False):
        return None
    if softmax_scale is not None and type(softmax_scale) is not float:
        return None
    try:
        told = _text_of(chosen)
    except (TypeError, options.SpecError):  # said again, with all that belongs to it
        return None
    if told is None:
        return None
    text, needs_as_many = told
    form = known_form(q, k, v, softmax_scale, layout, text)
    if form is None or (needs_as_many and not form.as_many_queries_as_keys):
        return None
    if (
        _is_any_autocast_enabled()
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") != q.dtype
    ):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return (_OutAndLse if return_lse else _Out).apply(form, q, k, v)
    out, lse = form.forward(q, k, v, return_lse)
    return (out, lse) if return_lse else out


def _gradients(ctx, dout, dlse):
    q, k, v, out, lse = ctx.saved_tensors  # hooks may have made them anew
    form = ctx.form
    if (
        torch.is_grad_enabled()  # create_graph=True: leave a node that refuses
        or _is_watched(dout, q, k, v)
        or dout.layout is not torch.strided
        or (q.stride(), k.stride(), v.stride()) != form.strides
    ):
        gradients = torch.ops.sagebwd.backward(dout, q, k, v, out, lse, dlse, *form.given)
    else:
        gradients = form.backward(dout, q, k, v, out, lse, dlse)
    return None, *gradients


class _Out(torch.autograd.Function):
    """`out` alone, by a `Form`."""

    @staticmethod
    def forward(ctx, form, q, k, v):
        out, lse = form.forward(q, k, v)
        ctx.form = form
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        return _gradients(ctx, dout, None)


class _OutAndLse(torch.autograd.Function):
    """(out, lse), by a `Form`."""

    @staticmethod
    def forward(ctx, form, q, k, v):
        out, lse = form.forward(q, k, v)
        ctx.form = form
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # an unused lse costs nothing
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return None, None, None, None
        if dout is None:
            dout = torch.zeros_like(ctx.saved_tensors[3])
        return _gradients(ctx, dout, dlse)
