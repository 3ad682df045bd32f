"""Attention on the CPU, on NumPy arrays: exact in FP64, and as the kernels compute it.

Arrays are (batch, head, token, channel): q and dout (B, H, M, D), k and v (B, Hk, N, D), with H a
multiple of Hk; lse, dlse and delta are (B, H, M). v, and with it dout and out, may have fewer
channels. Everything is multi-threaded and releases the GIL. Invalid arguments raise SpecError.
"""

from sagebwd import _core, inputs, options
from sagebwd.values import Arrays

__all__ = ["emulate", "exact", "random_inputs", "round_to"]


def round_to(array, dtype):
    """`array` rounded to nearest even in 'bf16' or 'fp16', as float32."""
    import numpy  # only here, for importing this package needs none

    with numpy.errstate(over="ignore"):  # what is too large is infinite, as in either type
        return _core.round_to(array, options.dtype_name(dtype))


def with_all_channels(q, v, *like_v):
    """v and what has its channels, with zeros for those that q has more: they change no result."""
    import numpy

    channels, missing = v.shape[3], q.shape[3] - v.shape[3]
    if missing <= 0:
        return [v, *like_v]
    for x in like_v:
        if x is not None and x.shape[3] != channels:
            raise options.SpecError(
                f"v has {channels} channels and dout or out {x.shape[3]}; they must have v's"
            )
    return [None if x is None else numpy.pad(x, [(0, 0)] * 3 + [(0, missing)])
            for x in (v, *like_v)]  # fmt: skip


def _of_channels(results, channels):
    """Results of `with_all_channels`: out and dv with V's channels."""
    return {name: x[..., :channels] if name in ("out", "dv") and x is not None else x
            for name, x in results.items()}  # fmt: skip


def random_inputs(
    seq_len, *, head_dim=128, heads=1, heads_kv=None, batch=1, seq_len_kv=None, dtype="bf16",
    sigma=1.0, seed=0,
):  # fmt: skip
    """(q, k, v, dout) with q, k ~ N(0, sigma^2) and v, dout ~ N(0, 1), rounded to `dtype`.

    The same seed gives the same numbers on every machine: `sagebwd.named_inputs("gaussian", ...)`.
    """
    heads_kv = heads if heads_kv is None else heads_kv
    seq_len_kv = seq_len if seq_len_kv is None else seq_len_kv
    sizes = dict(batch=batch, heads=heads, heads_kv=heads_kv, seq_len=seq_len,
                 seq_len_kv=seq_len_kv, head_dim=head_dim)  # fmt: skip
    return inputs.draw("gaussian", sizes, dtype, sigma, 0, seed)


@options.takes(options.Mask)
def exact(q, k, v, dout=None, *, dlse=None, softmax_scale=None, matrices=False, chosen):
    """Attention in FP64, and its gradients where `dout` is given.

    Returns a dict of float64 arrays: out, lse (natural log, scaled scores), delta, dq, dk, dv, and
    with `matrices` p, dp, ds of (B, H, M, N); None for what was not computed. `ds` is without the
    softmax scale. What a query sees is told as to `sagebwd.attention`.
    """
    q, k, v, dout, dlse = Arrays(q=q, k=k, v=v, dout=dout, dlse=dlse).numpy()
    mask = options.Spec(**options.with_mask(chosen, q.shape[2], k.shape[2]))
    scale = options.check_softmax_scale(softmax_scale, q.shape[3])
    inputs = _core.Inputs(q, k, *with_all_channels(q, v, dout), dlse, scale)
    results = _core.exact(inputs, mask, options.yes_or_no("matrices", matrices))
    return _of_channels(results, v.shape[3])


@options.takes(but=("deterministic", "dq_sums"))
def emulate(
    q, k, v, dout=None, *, dlse=None, softmax_scale=None, dtype="bf16", matrices=False,
    round_outputs=False, out=None, lse=None, chosen,
):  # fmt: skip
    """Attention with the kernels' quantisers bit for bit and FP32 accumulation, on the CPU.

    Returns the dict of `exact()`, in float32.

    Args:
        dtype: what inputs are rounded to first.
        matrices: give p, dp and ds too.
        round_outputs: round out, dq, dk and dv to `dtype`, as the kernels do.
        out, lse: where the backward starts; both or neither.
        {options}
            Here also any collection of sagebwd.PRODUCTS.
    """
    if (out is None) != (lse is None):
        raise options.SpecError("out and lse go together: pass both, of one forward, or neither")
    arrays = Arrays(q=q, k=k, v=v, dout=dout, dlse=dlse, out=out, lse=lse)
    q, k, v, dout, dlse, out, lse = arrays.numpy()
    rules, plan = options.emulated_spec(chosen, q, k, head_dim=q.shape[3], dtype=dtype)
    q, k, v, dout = (None if x is None else round_to(x, dtype) for x in (q, k, v, dout))
    scale = options.check_softmax_scale(softmax_scale, q.shape[3])
    channels = v.shape[3]
    v, dout, out = with_all_channels(q, v, dout, out)
    inputs = _core.Inputs(q, k, v, dout, dlse, scale)
    switches = dict(matrices=matrices, round_outputs=round_outputs)
    switches = [options.yes_or_no(*switch) for switch in switches.items()]
    results = _core.emulate(inputs, rules, sorted(plan), *switches, out, lse)
    return _of_channels(results, channels)
