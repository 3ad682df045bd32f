"""The options of the operation, as every front end spells and checks them."""

import difflib
import functools
import inspect
import numbers

from sagebwd import _core

SpecError = _core.SpecError

#: Products of SageBwd that a plan may name: S = tau Q K^T (forward and backward), O = P V,
#: dV = P^T dO, dP = dO V^T, dQ = tau dS K, dK = tau dS^T Q.
PRODUCTS = ("s", "pv", "dv", "dp", "dq", "dk")

# What other attention functions call an option of ours, for error messages.
_FOREIGN_NAMES = {
    "is_causal": "causal",
    "scale": "softmax_scale",
    "sm_scale": "softmax_scale",
    "tensor_layout": "layout",
    "return_softmax_lse": "return_lse",
    "smooth": "smooth_k",
    "plan": "precision",
}
_ABSENT = {
    "dropout_p": "dropout is not supported: leave it out",
    "attn_mask": "arbitrary masks are not supported: use causal=",
    "window_size": "sliding windows are not supported",
    "softcap": "soft-capping is not supported",
    "alibi_slopes": "ALiBi is not supported",
    "enable_gqa": "grouped queries need no switch: pass k and v with fewer heads",
}


def refuses_unknown_keywords(function):
    """Makes an unknown keyword a TypeError that names the near ones."""
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        for name in kwargs:
            if name not in known:
                _refuse_keyword(function.__name__, name, known)
        return function(*args, **kwargs)

    return wrapper


def _refuse_keyword(function, name, known):
    if name in _ABSENT:
        hint = _ABSENT[name]
    elif _FOREIGN_NAMES.get(name) in known:
        hint = f"did you mean {_FOREIGN_NAMES[name]!r}?"
    else:
        near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"known keywords: {', '.join(sorted(known))}"
        )
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {hint}")


def causal_name(causal, seq_q, seq_kv):
    """'none', 'top-left' or 'bottom-right' for what a caller may pass.

    `True` is clear only where there are as many queries as keys.
    """
    if causal is False:
        return "none"
    if causal is True:
        if seq_q != seq_kv:
            raise SpecError(
                f"causal=True is ambiguous for {seq_q} queries and {seq_kv} keys: pass "
                "causal='top-left' (key j is visible to query i iff j <= i, as in PyTorch's "
                "scaled_dot_product_attention) or causal='bottom-right' (iff j <= i + N - M, as "
                "in flash-attention)"
            )
        return "top-left"
    if causal == "none" or causal == "top-left" or causal == "bottom-right":
        return causal
    raise SpecError(f"causal={causal!r}: pass False, True, 'top-left' or 'bottom-right'")


def check_layout(layout):
    """Raises SpecError for anything but 'bhsd' and 'bshd'."""
    if layout != "bhsd" and layout != "bshd":
        raise SpecError(
            f"layout={layout!r}: pass 'bhsd' for tensors of (batch, head, token, channel) or "
            "'bshd' for (batch, token, head, channel)"
        )


def check_softmax_scale(scale, head_dim):
    """The scale as a float, 1/sqrt(head_dim) for None. SpecError unless positive and finite."""
    if scale is None:
        return head_dim**-0.5
    if not isinstance(scale, numbers.Real) or not 0 < scale < float("inf"):
        raise SpecError(
            f"softmax_scale={scale!r}: pass a positive finite number, or None for 1/sqrt(head_dim)"
        )
    return float(scale)


def plan_of(precision):
    """The INT8 products that `precision` means: the name of a plan or an iterable of products.

    Names: 'six-of-seven' (all but dP; SageBwd, arXiv 2603.02170, section 3) and 'qk16' (S from the
    16-bit Q and K as well). Any subset of PRODUCTS is a plan for the reference and the emulation;
    the kernels build the two that have names. Raises SpecError.
    """
    if isinstance(precision, str):
        return frozenset(_core.plan_of(precision))
    plan = frozenset(precision)
    unknown = sorted(map(str, plan - set(PRODUCTS)))
    if unknown:
        raise SpecError(f"unknown products {', '.join(unknown)} in a plan: known are {PRODUCTS}")
    return plan


def precision_of(plan):
    """The name of a plan that the kernels build, or None."""
    for name in ("six-of-seven", "qk16"):
        if plan == plan_of(name):
            return name
    return None


def spec(
    head_dim=128,
    dtype="bf16",
    causal="none",
    granularity="row",
    precision="six-of-seven",
    smooth_k=True,
    rotate=True,
    deterministic=True,
    group_q=None,
    group_kv=None,
    arch=None,
):
    """A resolved `Spec`; None as a group size means the default, which under 'row' depends on the
    architecture (`arch`; None: any but sm_90a). Raises SpecError."""
    for name, group in (("group_q", group_q), ("group_kv", group_kv)):
        if group is not None and (isinstance(group, bool) or not isinstance(group, int)):
            raise SpecError(f"{name}={group!r}: pass a number of tokens, or None for the default")
        if group is not None and group < 1:
            raise SpecError(
                f"{name}={group}: a group holds at least one token; pass None for the default"
            )
    if causal is True or causal is False:
        causal = causal_name(causal, 1, 1)
    return _core.Spec(
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
        granularity=granularity,
        precision=precision,
        smooth_k=smooth_k,
        rotate=rotate,
        deterministic=deterministic,
        group_q=group_q or 0,
        group_kv=group_kv or 0,
        arch=arch or "",
    )


def refuse_double_backward(ctx, *gradients):
    """The backward of the backward: always raises NotImplementedError."""
    raise NotImplementedError(
        "this attention cannot be differentiated twice: its backward has no gradient. For gradient "
        "penalties and Hessians use another attention in that part of the model"
    )
