"""Attention on the CPU, on NumPy arrays: exact in FP64, and as the kernels compute it.

Arrays are (batch, head, token, channel): q and dout (B, H, M, D), k and v (B, Hk, N, D), with H a
multiple of Hk; lse, dlse and delta are (B, H, M). Everything is multi-threaded and releases the
GIL. Invalid arguments raise SpecError.
"""

import math
import numbers

from sagebwd import _core
from sagebwd.options import SpecError, check_softmax_scale, plan_of, spec

__all__ = ["emulate", "exact", "random_inputs", "round_to"]


def round_to(array, dtype):
    """`array` rounded to nearest even in 'bf16' or 'fp16', as float32."""
    return _core.round_to(array, dtype)


def random_inputs(
    seq_len,
    *,
    head_dim=128,
    heads=1,
    heads_kv=None,
    batch=1,
    seq_len_kv=None,
    dtype="bf16",
    sigma=1.0,
    seed=0,
):
    """(q, k, v, dout) with q, k ~ N(0, sigma^2) and v, dout ~ N(0, 1), rounded to `dtype`.

    The same seed gives the same numbers on every machine.
    """
    heads_kv = heads if heads_kv is None else heads_kv
    seq_len_kv = seq_len if seq_len_kv is None else seq_len_kv
    sizes = dict(seq_len=seq_len, head_dim=head_dim, heads=heads, heads_kv=heads_kv, batch=batch,
                 seq_len_kv=seq_len_kv)  # fmt: skip
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
            raise SpecError(f"{name}={size!r}: pass a whole number of at least 1")
    if batch * head_dim * max(heads * seq_len, heads_kv * seq_len_kv) > 1 << 36:
        raise SpecError(f"more than 2**36 elements in one tensor: {sizes}")
    if not isinstance(sigma, numbers.Real) or not 0 <= sigma < math.inf:
        raise SpecError(f"sigma={sigma!r}: pass a finite number of at least 0")
    if not isinstance(seed, numbers.Integral) or not 0 <= seed < 1 << 64:
        raise SpecError(f"seed={seed!r}: pass a whole number from 0 to 2**64 - 1")
    return _core.random_inputs(
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seq_q=seq_len,
        seq_kv=seq_len_kv,
        head_dim=head_dim,
        dtype=dtype,
        sigma=sigma,
        seed=seed,
    )


def exact(q, k, v, dout=None, *, dlse=None, causal="none", softmax_scale=None, matrices=False):
    """Attention in FP64, and its gradients where `dout` is given.

    Returns a dict of float64 arrays: out, lse (natural log, scaled scores), delta, dq, dk, dv, and
    with `matrices` p, dp, ds of (B, H, M, N); None for what was not computed. `ds` is without the
    softmax scale. `causal`: 'none', 'top-left' or 'bottom-right'.
    """
    scale = check_softmax_scale(softmax_scale, q.shape[-1])
    return _core.exact(q, k, v, dout, dlse, scale, causal, matrices)


def emulate(
    q,
    k,
    v,
    dout=None,
    *,
    dlse=None,
    causal="none",
    softmax_scale=None,
    dtype="bf16",
    granularity="row",
    group_q=None,
    group_kv=None,
    smooth_k=True,
    rotate=True,
    precision="six-of-seven",
    matrices=False,
    round_outputs=False,
    out=None,
    lse=None,
):
    """Attention with the kernels' quantisers bit for bit and FP32 accumulation, on the CPU.

    Inputs are first rounded to `dtype`. `precision` is 'six-of-seven', 'qk16' or any collection
    of sagebwd.PRODUCTS. `round_outputs` rounds out, dq, dk, dv to `dtype`, as the kernels do. With
    `out` and `lse` given, the backward starts from them. Returns the dict of `exact()`, in float32.
    """
    if (out is None) != (lse is None):
        raise SpecError("out and lse go together: pass both, of one forward, or neither")
    plan = plan_of(precision)
    rules = spec(
        head_dim=q.shape[-1],
        dtype=dtype,
        causal=causal,
        granularity=granularity,
        precision="six-of-seven" if "s" in plan else "qk16",
        smooth_k=smooth_k,
        rotate=rotate,
        group_q=group_q,
        group_kv=group_kv,
    )
    q, k, v = (_core.round_to(x, dtype) for x in (q, k, v))
    if dout is not None:
        dout = _core.round_to(dout, dtype)
    scale = check_softmax_scale(softmax_scale, q.shape[-1])
    return _core.emulate(
        rules, sorted(plan), q, k, v, dout, dlse, scale, matrices, round_outputs, out, lse
    )
