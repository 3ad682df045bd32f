"""Checks of single arguments, which raise errors that say what to pass."""

import math
import numbers
import operator

from sagebwd import _core

SpecError = _core.SpecError

#: With a smaller scale, except 0, the steps of quantised scores are not normal numbers in FP32.
LEAST_SOFTMAX_SCALE = _core.least_softmax_scale


#: As which precision the GPU's own is asked for.
FASTEST = "fastest"


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


def dtype_name(dtype):
    """'bf16' or 'fp16', also for the same types of PyTorch and NumPy."""
    name = getattr(dtype, "__name__", None) or str(dtype)  # numpy.float16 is a class
    known = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
    short = known.get(name.rsplit(".", 1)[-1])
    if short is None:
        raise SpecError(f"dtype={dtype!r}: pass 'bf16' or 'fp16', or PyTorch's names of them")
    return short


def is_fastest(precision):
    """Whether the GPU's own precision is asked for, whatever type callers give."""
    return isinstance(precision, str) and precision == FASTEST


def refuse_fastest(word):
    """The word; SpecError for FASTEST, where no GPU says what it stands for."""
    if word == FASTEST:
        raise SpecError(
            "precision='fastest' stands for other words on each GPU, and none is known here: "
            "attention functions, tune and warmup take it. Pass what sagebwd.fastest_precision() "
            "says of the GPU, as `sagebwd doctor` does, such as precision='gradients16'"
        )
    return word


def expression_text(name, value):
    """The text of an expression without its spaces, which would end the word; '' for none."""
    text = "".join(value.split()) if isinstance(value, str) else value
    is_none = isinstance(text, str) and not text
    return text if is_none else word(name, text, "the text of an expression")


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
        "this operation cannot be differentiated twice: its backward has no gradient. For gradient "
        "penalties and Hessians use another attention in that part of the model"
    )


def check_layout(layout):
    """Raises SpecError for anything but 'bhsd' and 'bshd'."""
    if layout != "bhsd" and layout != "bshd":
        raise SpecError(
            f"layout={layout!r}: pass 'bhsd' for tensors of (batch, head, token, channel) or "
            "'bshd' for (batch, token, head, channel)"
        )


def check_softmax_scale(scale, head_dim):
    """The scale as a float, 1/sqrt(head_dim) for None. SpecError unless it is finite in FP32 and
    either 0 or large enough for the kernels, which divide by multiples of it."""
    if scale is None:
        return head_dim**-0.5 if head_dim else 1.0  # without channels, which callers refuse
    try:
        real = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
        value = float(scale) if real else math.nan
    except OverflowError:  # an integer beyond any float
        value = math.nan
    if not (value == 0 or LEAST_SOFTMAX_SCALE <= abs(value) < 3.4e38):
        raise SpecError(
            f"softmax_scale={scale!r}: pass a number below 3.4e38 in magnitude, 0 or at least "
            f"{LEAST_SOFTMAX_SCALE}, or None for 1/sqrt(head_dim)"
        )
    return value
