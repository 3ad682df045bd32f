"""`sagebwd.attention` in plain eager code, without the Python code of PyTorch's dispatcher.

An operator that Python implements, with its autograd, is looked up and called through several
layers of Python. The kernels are run without them where nobody looks on and the call's form is
known: the same checks have passed, and the same tensors come out. All others go by the operators.

That leaves 7.3 us of a forward and 50 us of forward and backward, measured on one CPU core with a
driver that launches nothing. The operators take 15 and 82 us there, and PyTorch's engine alone with
an empty Python function 24 us. An operator in C++ with its autograd there (over the stable
ABI, say), which allocates and launches the same, would take about 5.5 and 34 us: 2 and 16 us less.

These figures are from before a call asked for the dispatcher's keys of its tensors and thread. To
ask takes 3.8 us of a forward and 5.8 us of a backward on a slower core, where the modes and types
that were asked for before took 1.0 us each: a forward of 12 us became one of 15 us there.

Calls with intervals, masks and score functions go the same way (`direct_masks`). With such a driver
on another core a forward takes 12.6 us, 22 with intervals, 18 with a BlockMask and 26 with a mask
that indexes a tensor. Forward and backward take 91, 117, 104 and 129 us. By the operators those
with masks took 69, 68 and 128, and 240, 240 and 318 us.
"""

import functools
import operator

import torch
from torch._C import DispatchKey, DispatchKeySet, _dispatch_keys, _len_torch_function_stack
from torch.autograd import _profiler_enabled, forward_ad
from torch.compiler import is_compiling

from sagebwd.core import direct_masks, options
from sagebwd.core.forms import known_form

#: Quicker to ask than of which device; where it is missing, that is asked.
_is_any_autocast_enabled = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_DEFAULTS = options.defaults()
_texts = {}

_keys_of_thread = torch._C._dispatch_tls_local_include_set
_number = getattr(DispatchKeySet, "raw_repr", repr)


def _key_set(*names):
    keys = (DispatchKeySet(getattr(DispatchKey, name)) for name in names)
    return functools.reduce(operator.or_, keys)


#: All that the dispatcher may find on a tensor, or in the thread's modes, and have nothing more to
#: do than what this module does: autocast and autograd.
_ORDINARY = _key_set("CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU",
                     "AutocastCUDA", "BackendSelect")  # fmt: skip
#: The numbers of key sets that were found to hold nothing else.
_ordinary = set()


def _are_ordinary(key_sets):
    """Whether no set has a key that is not in _ORDINARY."""
    for keys in key_sets:
        if _number(keys | _ORDINARY) != _number(_ORDINARY):
            return False
        _ordinary.add(_number(keys))
    return True


def is_watched(*tensors):
    """Whether the dispatcher would do more than call the kernels, or somebody wants to see it."""
    return is_compiling() or _profiler_enabled() or is_wrapped(*tensors)


def is_wrapped(*tensors):
    """`is_watched`, except for profilers, which see kernels in any case.

    Most of that shows as a key, on a tensor (a lazy sign or conjugate, torch.func's and the older
    vmap's wrappers, fakes and other subclasses, names, zeros without memory, layouts) or in the
    thread (dispatch modes, functional transforms, jit.trace); any key that is not known counts.
    The rest has none: compilers, torch function modes and subclasses, forward-mode differentiation.
    """
    return (
        is_compiling()
        or _len_torch_function_stack()
        or forward_ad._current_level >= 0
        or not _PLAIN.issuperset(map(type, tensors))
        or not (
            _ordinary.issuperset(map(_number, map(_dispatch_keys, tensors)))
            or _are_ordinary(map(_dispatch_keys, tensors))
        )
        or not (
            _number(_keys_of_thread()) in _ordinary or _are_ordinary((_keys_of_thread(),))
        )
    )


def _is_below_autograd():
    """Whether the caller computes the operators' gradients, and wants none of ours."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradOther)


def _text_of(chosen):
    """The line of options for the operators, and whether it requires as many queries as keys."""
    # True and 1 are different here.
    key = (*chosen.items(), *map(type, chosen.values()))
    found = _texts.get(key)
    if found is None:
        told = {**_DEFAULTS, **chosen}
        found = options.text_of(options.with_mask(told, 1, 1)), options.needs_as_many(told)
        _texts[key] = found
    return found


_default_text = _text_of({})


def attention(
    q, k, v, *, softmax_scale=None, layout="bhsd", return_lse=False, return_max_logits=False,
    startend_row_indices=None, mask=None, score=None, **chosen,
):  # fmt: skip
    """The result of `sagebwd.attention`, or None if the operators must compute it."""
    if chosen and not is_compiling() and not chosen.keys() <= _DEFAULTS.keys():
        return None  # norm and RoPE come first, say
    masked = None
    if mask is None and score is None and startend_row_indices is None:
        if is_watched(q, k, v):
            return None
    else:
        if is_compiling():
            return None
        masked = direct_masks.given_of(startend_row_indices, mask, score)
        if masked is None or is_watched(q, k, v, *masked[-1]):
            return None
    if not isinstance(return_lse, bool) or not isinstance(return_max_logits, bool):
        return None
    if return_max_logits:
        chosen["max_logits"] = True
    if softmax_scale is not None and type(softmax_scale) is not float:
        return None
    try:
        told = _text_of(chosen) if chosen else _default_text
    except (TypeError, options.SpecError):  # the operators raise it again, with the full message
        return None
    text, needs_as_many = told
    if masked is None:
        form = known_form(q, k, v, softmax_scale, layout, text)
    else:
        known = direct_masks.known(q, k, v, softmax_scale, layout, text, masked)
        form, make_beside = known or (None, None)
    if form is None or (needs_as_many and not form.as_many_queries_as_keys):
        return None
    if (
        _is_any_autocast_enabled()
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") != q.dtype
    ):
        return None
    has_graph = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if has_graph and _is_below_autograd():
        return None
    beside = () if masked is None else make_beside(q, masked[-1])
    if has_graph:
        out, lse, *more = _Attention.apply(form, q, k, v, beside)
    else:
        out, lse, *more = form.forward(q, k, v, return_lse, form.packing_of(beside))
    if more:
        return (out, lse, *more) if return_lse else (out, *more)
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """(out, lse) or (out, lse, max_logits), computed by a `Form`."""

    @staticmethod
    def forward(ctx, form, q, k, v, beside):
        form.build_ahead()
        out, lse, *more = form.forward(q, k, v, packing=form.packing_of(beside))
        if more:
            ctx.mark_non_differentiable(*more)
        ctx.form = form
        ctx.save_for_backward(q, k, v, out, lse, *beside)
        ctx.set_materialize_grads(False)  # an unused lse costs nothing
        return out, lse, *more

    @staticmethod
    def backward(ctx, dout, dlse, *_):
        if dout is None and dlse is None:
            return None, None, None, None, None
        q, k, v, out, lse, *beside = ctx.saved_tensors  # once: checkpoints and other hooks count
        if dout is None:
            dout = torch.zeros_like(out)
        form, rows = ctx.form, (lse,) if dlse is None else (lse, dlse)
        if (
            torch.is_grad_enabled()  # create_graph=True: leave a node that refuses
            or is_watched(dout, q, k, v, out, *rows, *beside)
            or not form.saved(q, k, v, out, lse)  # hooks may have replaced them
            or not form.saved_beside(beside)
        ):
            backward = getattr(torch.ops.sagebwd, form.of_backward)
            told = form.told_of(beside)
            gradients = backward(dout, q, k, v, out, lse, dlse, *told, *form.given)
        else:
            packing = form.packing_of(beside)
            gradients = form.backward(dout, q, k, v, out, lse, dlse, packing)
        return None, *gradients, None
