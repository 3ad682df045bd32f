"""Which calls a monitor shall see: those of models, or those that a function chooses."""

import inspect

import torch

from sagebwd.core.arguments import checks


def models_or_function(given):
    """The models, and the function that chooses calls or None."""
    if given is None:
        return [], None
    models = list(given) if isinstance(given, (list, tuple)) else [given]
    if all(isinstance(m, torch.nn.Module) for m in models) and models:
        return models, None
    what = checks.a_kind(given)
    if isinstance(given, type):
        what = f"the class {given.__name__}"
    elif callable(given):
        try:
            inspect.signature(given).bind({})
            return [], given
        except ValueError:  # it does not say what it takes
            return [], given
        except TypeError as error:
            what = f"a function that does not take one argument ({error})"
    raise TypeError(
        f"model_or_calls is {what}; pass a torch.nn.Module, a list of them, a function of a dict "
        "that says which calls to sample, or None for all"
    )


class _Hook:
    """A function that the model's copies, such as averages of its weights and files, do without: a
    monitor is no part of them, and cannot be copied."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *of_call):
        self.function(*of_call)

    def __reduce__(self):
        return _Hook, (_nothing,)


def _nothing(*of_call):
    pass


def hooks_of(model, enter, leave):
    """Has `enter` and `leave` called around the model's forward; returns what ends that."""
    compiled = getattr(model, "_compiled_call_impl", None)
    if compiled is None:
        hooks = (model.register_forward_pre_hook(_Hook(enter)),
                 model.register_forward_hook(_Hook(leave), always_call=True))  # fmt: skip
        return [hook.remove for hook in hooks]

    removed = False

    def called(*given, **named):  # after model.compile(), in whose graph hooks lie
        if removed:
            return compiled(*given, **named)
        enter()
        try:
            return compiled(*given, **named)
        finally:
            leave()

    def remove():
        nonlocal removed
        removed = True
        if model._compiled_call_impl is called:  # not what another monitor made of it
            model._compiled_call_impl = compiled

    model._compiled_call_impl = called
    return [remove]
