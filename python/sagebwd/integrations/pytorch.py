"""`torch.nn.functional.scaled_dot_product_attention` by sagebwd, in code that stays as it is.

    with sagebwd.sdpa():                                             # in one block of code
        loss = model(x).mean()

    torch.nn.attention.activate_flash_attention_impl("sagebwd")      # in the whole process

The second is PyTorch's registry of implementations (torch.nn.attention, from 2.11 on), where this
module enters the name; PyTorch asks it for what it would have FlashAttention-2 do (_operators.py).
"""

import collections
import contextlib
import functools
import sys
import warnings

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint

from sagebwd.core import options
from sagebwd.core.keywords import Words
from sagebwd.integrations import _operators, _options
from sagebwd.integrations._short_calls import ShortCalls, are_tensors_of_calls
from sagebwd.integrations.dropins import scaled_dot_product_attention

NAME = "sagebwd"

#: torch.nn.functional has this by that name, except where context_parallel puts another there.
_FUNCTION = torch._C._nn.scaled_dot_product_attention

_OF_A_MODULE = (
    "torch.nn.MultiheadAttention computes out of sight of sagebwd.sdpa: activate sagebwd for the "
    f"whole process, torch.nn.attention.activate_flash_attention_impl('{NAME}'), or leave such "
    "modules to PyTorch, sagebwd.sdpa(fallback='torch')"
)


#: Whoever wraps a pipeline meets this at a VAE in FP32, or at heads of more than 512 channels.
_LEFT_TO_PYTORCH = "; with sagebwd.sdpa(fallback='torch') PyTorch computes what sagebwd refuses"


_AS_CONTEXT = (
    "and within it PyTorch's function is sagebwd's: write 'with sagebwd.sdpa():' around the calls, "
    "in a function's body too. To call it with tensors: sagebwd.scaled_dot_product_attention"
)


_OF_A_CALL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
#: A context does not take these names: they are not its own to say.
_OTHERWISE = {
    **dict.fromkeys(_OF_A_CALL, "each call inside says it"),
    "causal": "each call inside says is_causal",
    "softmax_scale": "each call inside says scale",
    "layout": "PyTorch's function has (batch, heads, tokens, head_dim) tensors",
    "return_lse": "PyTorch's function returns out alone; call sagebwd.attention for lse",
    "return_max_logits": "PyTorch's function returns out alone; call sagebwd.attention for them",
}


#: PyTorch's function takes none of our options: the context is given them.
_words = Words({}, {
    "use is_causal=, window_left=, window_right=, or seqused_k= for padding":
        "use is_causal= in the call, or in sagebwd.sdpa() window_left= and window_right=, and "
        "seqused_k= for padding",
})  # fmt: skip


class sdpa(TorchFunctionMode):
    """Context: scaled_dot_product_attention of this thread is computed by sagebwd.

    Args:
        fallback: None, or 'torch': what sagebwd refuses is left to PyTorch, counted in
            `fallbacks`, and told of in a warning when the context ends.
        min_tokens: calls of fewer tokens are left to PyTorch and counted in `short_calls`: a
            number; or 'auto', `sagebwd.crossover_tokens` of the call's GPU, head dimension, mask
            and precision, with a backward, whether or not PyTorch is to be deterministic; or None.
            M queries and N keys count as 2 M N / (M + N) tokens.
        options: those of `sagebwd.attention`, such as precision= and granularity=.

    `calls` is how many there were, `fallbacks` how many of them went to PyTorch, by reason, and
    `short_calls` how many because they were short; `report()` says all of it in a line. Short calls
    in what torch.compile has compiled are not counted. A
    checkpoint of `torch.utils.checkpoint` computes again in this context too, wherever the backward
    is called and in which thread, and it counts among the calls. So does `torch.nn.DataParallel`
    in its threads. Other libraries' checkpoints and scripted modules (torch.jit.script) are out of
    its sight: for these activate sagebwd for the whole process.

    Raises in calls what `sagebwd.scaled_dot_product_attention` raises, but with fallback='torch'
    no SpecError; with 'auto' SpecError in any case for a GPU of which nothing is known. Itself
    SpecError for another fallback, options that no kernel takes and those that short calls would
    lose, TypeError for names that are no option, or are for each call to say.
    """

    def __init__(self, *given, fallback=None, min_tokens=None, **options_of_attention):
        if given:
            raise TypeError(f"sdpa() takes keywords only, {_AS_CONTEXT}")
        super().__init__()
        if fallback not in (None, "torch"):
            raise options.SpecError(
                f"fallback={fallback!r}: pass 'torch', or None for an error where sagebwd does not "
                "support a call"
            )
        known = {*scaled_dot_product_attention.known, "fallback", "min_tokens"}
        _options.check("sdpa", options_of_attention, known,
                       otherwise=_OTHERWISE)  # fmt: skip
        self.fallback, self.options = fallback, options_of_attention
        self.calls, self.fallbacks, self._raised = 0, collections.Counter(), 0
        self._short = ShortCalls(min_tokens, options_of_attention)

    @property
    def short_calls(self):
        """How many calls were left to PyTorch because they were short."""
        return self._short.count

    def report(self):
        """Says in a line what became of the calls so far, except of those in compiled code."""
        ours = self.calls - self.short_calls - self.fallbacks.total() - self._raised
        short = f"; PyTorch {self._short.told()}" if self.short_calls else ""
        refused = "".join(f"; PyTorch {n}: {why}" for why, n in self.fallbacks.items())
        return f"of {self.calls} calls sagebwd computed {ours}{short}{refused}"

    def __call__(self, *given, **more):
        raise TypeError(f"sdpa() is a context and no decorator, {_AS_CONTEXT}")

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        calls = function is _FUNCTION
        if not calls and function is not torch.nn.functional.multi_head_attention_forward:
            return function(*args, **kwargs)
        self.calls += 1
        if calls and self._is_short(*args, **kwargs):
            return function(*args, **kwargs)
        try:
            if not calls:  # what it calls in turn PyTorch does not show
                raise options.SpecError(_OF_A_MODULE)
            return scaled_dot_product_attention(*args, **kwargs, **self.options)
        except options.SpecError as error:
            _words.put_into(error)
            if self.fallback is None:
                self._raised += 1
                if "fallback=" not in str(error):
                    error.args = (f"{error}{_LEFT_TO_PYTORCH}",)
                raise
            self.fallbacks[str(error)] += 1
        return function(*args, **kwargs)

    def _is_short(self, query=None, key=None, *given, is_causal=None, **_):
        if is_causal is None:  # behind value, attn_mask and dropout_p
            is_causal = len(given) > 3 and given[3]
        return are_tensors_of_calls(query, key) and self._short.takes(query, key, bool(is_causal))

    def __enter__(self):
        _keep_in_recomputations()
        _keep_in_replicas()
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


@functools.cache
def _keep_in_replicas():
    """Has torch.nn.DataParallel, with a thread for each GPU, compute in the contexts of its caller.

    transformers' Trainer takes it where a program sees several GPUs and torchrun did not start it.
    """
    module = sys.modules["torch.nn.parallel.data_parallel"]
    apply = module.parallel_apply

    @functools.wraps(apply)
    def parallel_apply(modules, *given, **more):
        return apply([_in_these_contexts(module) for module in modules], *given, **more)

    module.parallel_apply = torch.nn.parallel.parallel_apply = parallel_apply


if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_operators.Active)
