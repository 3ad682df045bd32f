"""Random inputs of named distributions, the same in every language and on every machine."""

import functools
import inspect
import numbers

from sagebwd import _core
from sagebwd.core import options
from sagebwd.core.keywords import check_keywords, nearest

#: The names of `named_inputs`, and what each imitates.
INPUTS = dict(_core.distributions)


_OTHERWISE = {"seq_len": "pass seq_q, and seq_kv where there are more or fewer keys"}


def names_what_it_does_not_know(otherwise):
    """The function's TypeError for an unknown keyword says which is near."""

    def decorate(function):
        parameters = inspect.signature(function).parameters
        known = frozenset(parameters)

        @functools.wraps(function)
        def call(*given, **named):
            check_keywords(function.__name__, named, known, otherwise)
            if not given and "name" in parameters and "name" not in named:
                raise TypeError(f"{function.__name__}() needs a name: one of {', '.join(INPUTS)}")
            return function(*given, **named)

        return call

    return decorate


@names_what_it_does_not_know(_OTHERWISE)
def named_inputs(
    name, batch=1, heads=4, seq_q=4096, head_dim=128, *, heads_kv=None, seq_kv=None, dtype="bf16",
    sigma=1.0, key_offset=0.0, seed=0, device=None,
):  # fmt: skip
    """(q, k, v, dout) of a named distribution, rounded to `dtype`; `sagebwd.INPUTS` lists them.

    They imitate trained models: channels and tokens far larger than the others, a first key that
    takes half of the weight, local attention, QK-norm, gradients of log-normal size. The project's
    error tables use them with the default sizes. The name does not decide the mask: `sink`,
    `large-first-key`, `heavy-channels`, `local` and `qk-norm` are meant for causal attention.

    Args:
        name: one of INPUTS, such as 'gaussian', 'sink' or 'outlier-channels'.
        batch, heads, seq_q, head_dim: q and dout are (batch, heads, seq_q, head_dim).
        heads_kv, seq_kv: k and v are (batch, heads_kv, seq_kv, head_dim); None means heads and
            seq_q.
        dtype: 'bf16' or 'fp16', or the same types of PyTorch or NumPy.
        sigma: the standard deviation of q and k, for 'gaussian' only.
        key_offset: added to keys, with signs that alternate over the channels, for 'gaussian' only.
        seed: the same seed gives the same numbers on every machine.
        device: None gives NumPy arrays of float32. 'cpu' or 'cuda' gives torch tensors of `dtype`.

    They come from the C++ library (Philox4x32-10 and Box-Muller in FP64). Raises SpecError, also
    for sizes that this machine's memory does not hold, and TypeError for an unknown keyword.
    """
    sizes = _sizes(batch, heads, heads_kv, seq_q, seq_kv, head_dim)
    arrays = draw(name, sizes, dtype, sigma, key_offset, seed)
    return arrays if device is None else _on_device(arrays, device, options.dtype_name(dtype))


def _sizes(batch, heads, heads_kv, seq_q, seq_kv, head_dim):
    return dict(batch=batch, heads=heads, heads_kv=heads if heads_kv is None else heads_kv,
                seq_q=seq_q, seq_kv=seq_q if seq_kv is None else seq_kv,
                head_dim=head_dim)  # fmt: skip


def _check(sizes):
    for key, size in sizes.items():
        options.whole_number(key, size)
    batch, heads, heads_kv, seq_q, seq_kv, head_dim = sizes.values()
    if heads % heads_kv:
        raise options.SpecError(f"heads={heads} must be a multiple of heads_kv={heads_kv}")
    if batch * head_dim * max(heads * seq_q, heads_kv * seq_kv) > 1 << 36:
        raise options.SpecError(f"more than 2**36 elements in one tensor: {sizes}")


def draw(name, sizes, dtype, sigma, key_offset, seed):
    """Returns the arrays. `sizes` has the sizes in the order of `_core.named_inputs`, by the names
    that the caller has for them."""
    if not isinstance(name, str) or name not in INPUTS:
        raise options.SpecError(f"inputs={name!r}{nearest(name, INPUTS)}: pass one of {', '.join(INPUTS)}")
    _check(sizes)
    _finite("sigma", sigma, least=0)
    _finite("key_offset", key_offset, least=-1e30)
    seed = options.whole_number("seed", seed, least=0)
    dtype = options.dtype_name(dtype)
    import numpy  # noqa: F401  by Python, not from within C++, which a thread may not leave at exit

    return _core.named_inputs(name, *sizes.values(), dtype, sigma, key_offset, seed)


def operands(tensors, inputs, dtype, check):
    """The four tensors, or those that `inputs` stands for: a name, or `named_inputs`' arguments.

    `check` raises for a problem and head dimension that are too large, before these are drawn.
    """
    if inputs is None:
        return tensors
    if any(x is not None for x in tensors):
        raise options.SpecError("inputs= stands for q, k, v and dout: leave those out, or it")
    arguments = inputs if isinstance(inputs, dict) else {"name": inputs}
    if "name" not in arguments:
        raise options.SpecError(
            f"inputs={inputs!r} has no name: pass dict(name='sink', ...), with one of "
            f"{', '.join(INPUTS)}"
        )
    if "dtype" in arguments:
        raise options.SpecError("inputs= has a dtype: pass dtype= beside it instead")
    usual = {name: parameter.default
             for name, parameter in inspect.signature(named_inputs).parameters.items()}  # fmt: skip
    given = {**usual, **arguments}
    sizes = _sizes(*(given[key] for key in
                     ("batch", "heads", "heads_kv", "seq_q", "seq_kv", "head_dim")))  # fmt: skip
    _check(sizes)
    *problem, head_dim = sizes.values()
    check(problem, head_dim, given["device"])
    return named_inputs(**arguments, dtype="bf16" if dtype is None else dtype)


def _finite(name, value, least):
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not least <= value <= 1e30:  # in float32
        raise options.SpecError(f"{name}={value!r}: pass a number from {least:g} to 1e30")


def _on_device(arrays, device, dtype):
    try:
        import torch
    except ImportError as error:
        raise options.SpecError(
            f"device={device!r} needs PyTorch ({error}): leave it out for NumPy arrays"
        ) from None
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    try:
        return tuple(torch.from_numpy(x).to(device, low) for x in arrays)
    except (RuntimeError, TypeError, ValueError, OverflowError, AssertionError) as error:
        # No such device, or none that this PyTorch is built for.
        raise options.SpecError(f"device={device!r}: {str(error).partition(chr(10))[0]}") from None
