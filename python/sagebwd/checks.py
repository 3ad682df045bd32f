"""Checks of single arguments, which raise errors that say what to pass."""

import operator

from sagebwd._core import SpecError


class SpecTypeError(SpecError, TypeError):
    """An option of a wrong type: whoever catches SpecError or TypeError catches it."""


def whole_number(name, value, least=1, values=None):
    """`value` as an int. SpecError if it is no whole number (then also a TypeError) or below
    `least`; the message asks for `values`."""
    wanted = values or f"a whole number of at least {least}"
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        text = " is a str" if isinstance(value, str) else ""  # which '64' is easily overlooked
        raise SpecTypeError(f"{name}={value!r}{text}: pass {wanted}")
    if number < least:
        raise SpecError(f"{name}={value!r}: pass {wanted}")
    if number >= 1 << 62:
        raise SpecError(f"{name}={value!r} is too large: pass a whole number below 2**62")
    return number


def yes_or_no(name, value):
    """`value`; SpecError unless it is True or False."""
    if value is not True and value is not False:
        raise SpecError(f"{name}={value!r}: pass True or False")
    return value


def word(name, value, hint):
    """`value`; SpecError unless it is one word, of characters that the C++ library reads."""
    if not isinstance(value, str) or not value.isascii() or len(value.split()) != 1:
        raise SpecError(f"{name}={value!r}: pass {hint}")
    return value


def a_kind(x):
    """The type of `x` with its article, for messages."""
    kind = type(x).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' or kind == 'ndarray' else 'a'} {kind}"


def check_callback(name, value):
    """Raises SpecError for anything but a function or None."""
    if value is not None and not callable(value):
        raise SpecError(f"{name}={value!r}: pass a function, or None")

def refuse_double_backward(ctx, *gradients):
    """Stands for the backward of the backward, and always raises NotImplementedError."""
    raise NotImplementedError(
        "this attention cannot be differentiated twice: its backward has no gradient. For gradient "
        "penalties and Hessians use another attention in that part of the model"
    )
