"""`torch.nn.functional.scaled_dot_product_attention` by sagebwd, in code that stays as it is.

    with sagebwd.sdpa():                                             # in one block of code
        loss = model(x).mean()

    torch.nn.attention.activate_flash_attention_impl("sagebwd")      # in the whole process

The second is PyTorch's registry of implementations (torch.nn.attention, from 2.11 on), where this
module enters the name; PyTorch asks it for what it would have FlashAttention-2 do. Its backward is
also handed out and logsumexp that are of more keys than its own, by rings (context_parallel of
torch.distributed.tensor.experimental): it starts from them as they are only where it knows that
they are its forward's, and else computes the forward of its keys again, as under torch.compile.
"""

import collections
import contextlib
import functools
import warnings
import weakref

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint

from sagebwd import options
from sagebwd.dropins import scaled_dot_product_attention
from sagebwd.functional import attention_backward, attention_forward
from sagebwd.integrations import _options

NAME = "sagebwd"


_OF_A_MODULE = (
    "torch.nn.MultiheadAttention computes out of sight of sagebwd.sdpa: activate sagebwd for the "
    f"whole process, torch.nn.attention.activate_flash_attention_impl('{NAME}'), or leave such "
    "modules to PyTorch, sagebwd.sdpa(fallback='torch')"
)


_OF_A_CALL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
#: Of what a context is given the names that are not its own to say.
_OTHERWISE = {
    **dict.fromkeys(_OF_A_CALL, "each call inside says it"),
    "causal": "each call inside says is_causal",
    "softmax_scale": "each call inside says scale",
    "layout": "PyTorch's function has (batch, heads, tokens, head_dim) tensors",
    "return_lse": "PyTorch's function returns out alone; call sagebwd.attention for lse",
}


class sdpa(TorchFunctionMode):
    """Context: scaled_dot_product_attention of this thread is computed by sagebwd.

    Args:
        fallback: None, or 'torch': what sagebwd refuses is left to PyTorch, counted in
            `fallbacks`, and told of in a warning when the context ends.
        options: those of `sagebwd.attention`, such as precision= and granularity=.

    `calls` is how many there were, `fallbacks` how many of them went to PyTorch, by reason. What
    `torch.utils.checkpoint` computes again for the backward, wherever that is called and in which
    thread, it computes in this context too, and it counts among the calls. Other libraries'
    checkpoints and scripted modules (torch.jit.script) are out of its sight: for these activate
    sagebwd for the whole process.

    Raises in calls what `sagebwd.scaled_dot_product_attention` raises, but with fallback='torch'
    no SpecError. Itself SpecError for another fallback and options that no kernel takes, TypeError
    for names that are no option, or are for each call to say.
    """

    def __init__(self, *, fallback=None, **options_of_attention):
        super().__init__()
        if fallback not in (None, "torch"):
            raise options.SpecError(
                f"fallback={fallback!r}: pass 'torch', or None for an error where sagebwd does not "
                "support a call"
            )
        _options.check("sdpa", options_of_attention, scaled_dot_product_attention.known,
                       otherwise=_OTHERWISE)  # fmt: skip
        self.fallback, self.options = fallback, options_of_attention
        self.calls, self.fallbacks = 0, collections.Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        functions = torch.nn.functional
        calls = function is functions.scaled_dot_product_attention
        if not calls and function is not functions.multi_head_attention_forward:
            return function(*args, **kwargs)
        self.calls += 1
        try:
            if not calls:  # what it calls in turn PyTorch does not show
                raise options.SpecError(_OF_A_MODULE)
            return scaled_dot_product_attention(*args, **kwargs, **self.options)
        except options.SpecError as error:
            if self.fallback is None:
                raise
            self.fallbacks[str(error)] += 1
        return function(*args, **kwargs)

    def __enter__(self):
        _keep_in_recomputations()
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        if self.fallbacks:
            reasons = "; ".join(f"{count} x {why}" for why, count in self.fallbacks.items())
            warnings.warn(
                f"sagebwd.sdpa: PyTorch computed {self.fallbacks.total()} of {self.calls} calls: "
                f"{reasons}", stacklevel=2,
            )  # fmt: skip


class _Recomputed:
    """A function that is computed in the contexts of this thread, whenever and wherever that is."""

    def __init__(self, function, contexts):
        self.function, self.contexts = function, contexts

    def __call__(self, *args, **kwargs):
        with contextlib.ExitStack() as stack:
            active = _contexts()
            for context in self.contexts:
                if context not in active:
                    TorchFunctionMode.__enter__(context)  # sdpa's own tells of fallbacks at its end
                    stack.callback(TorchFunctionMode.__exit__, context, None, None, None)
            return self.function(*args, **kwargs)


def _contexts():
    """The contexts that this thread is in."""
    return [mode for mode in _get_current_function_mode_stack() if isinstance(mode, sdpa)]


def _in_these_contexts(function):
    contexts = _contexts()
    return _Recomputed(function, contexts) if contexts else function


@functools.cache
def _keep_in_recomputations():
    """Has checkpoints compute forwards again in the contexts in which they were computed first.

    The mode is a thread's, and off while Tensor.backward runs; PyTorch lets nobody add to what a
    checkpoint restores, such as autocast. So this takes the place of the two functions that are
    handed what is to be computed again, of checkpoints with use_reentrant=True and False.
    """
    reentrant, frame = checkpoint.CheckpointFunction.forward, checkpoint._CheckpointFrame.__init__

    @functools.wraps(reentrant)
    def forward(ctx, run_function, *given):
        return reentrant(ctx, _in_these_contexts(run_function), *given)

    @functools.wraps(frame)
    def init(self, recompute_fn, *given, **more):
        frame(self, _in_these_contexts(recompute_fn), *given, **more)

    checkpoint.CheckpointFunction.forward = staticmethod(forward)
    checkpoint._CheckpointFrame.__init__ = init


def _refuse_unless_neutral(dropout_p, **switches):
    if dropout_p != 0.0 or any(switches.values()):
        named = ", ".join(f"{name}={value}" for name, value in switches.items())
        raise options.SpecError(
            f"dropout_p={dropout_p}, {named}: under activate_flash_attention_impl('{NAME}') pass "
            "neither, or give such calls back to PyTorch: "
            "torch.nn.attention.restore_flash_attention_impl()"
        )


def _layout(query):
    """In which `query` is dense: results shall lie in memory as PyTorch's do, like query."""
    return "bshd" if query.stride(1) < query.stride(2) else "bhsd"


def _as(layout, *tensors):
    return [t.transpose(1, 2) for t in tensors] if layout == "bshd" else tensors


def _given(is_causal, scale, layout):
    return dict(causal="top-left" if is_causal else False, softmax_scale=scale, layout=layout)


def _contents(t):
    """What says that contents are what they were: their memory, place there and changes."""
    return weakref.ref(t.untyped_storage()), t.data_ptr(), t.shape, t.stride(), t._version


def _leave_word(out, lse, *inputs):
    """Where autograd will hand all of these back, `_are_of` shall know that they belong together.

    The word lies with the memory of lse, and goes with it. Elsewhere, in compiled code say, memory
    may change and nobody counts.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        lse.untyped_storage().sagebwd_of = [_contents(t) for t in (out, lse, *inputs)]


def _are_of(out, lse, *inputs):
    """Whether out and lse are as the forward of these inputs gave them. False where not known."""
    said = getattr(lse.untyped_storage(), "sagebwd_of", None)
    return said is not None and said == [_contents(t) for t in (out, lse, *inputs)]


def _forward(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None,
):  # fmt: skip
    """aten::_scaled_dot_product_flash_attention."""
    _refuse_unless_neutral(dropout_p, return_debug_mask=return_debug_mask)
    layout = _layout(query)
    out, lse = attention_forward(*_as(layout, query, key, value),
                                 **_given(is_causal, scale, layout))  # fmt: skip
    out = _as(layout, out)[0]
    _leave_word(out, lse, query, key, value)
    seed, offset = (query.new_zeros(shape, dtype=torch.uint64) for shape in ((2,), ()))
    return (out, lse, None, None, query.shape[2], key.shape[2], seed, offset,
            query.new_empty(0))  # fmt: skip


def _backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_backward."""
    layout = _layout(query)
    given = _given(is_causal, scale, layout)
    known = _are_of(out, logsumexp, query, key, value)
    dout, q, k, v, out = _as(layout, grad_out, query, key, value, out)
    part = None if known else attention_forward(q, k, v, **given)
    gradients = attention_backward(dout, q, k, v, out, logsumexp, part=part, **given)
    return tuple(_as(layout, *gradients))


class _Active:
    """Takes the place of PyTorch's operators, until remove()."""

    def __init__(self, key="CUDA"):
        self.library = torch.library.Library("aten", "IMPL", key)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it takes PyTorch's place, which is asked for
            name = "_scaled_dot_product_flash_attention"
            self.library.impl(name, _forward, key)
            self.library.impl(f"{name}_backward", _backward, key)

    def remove(self):
        self.library = None


if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_Active)
