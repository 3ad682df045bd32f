"""The error of every intermediate tensor of INT8 attention, against FP64."""

import math

from sagebwd import _core, options
from sagebwd.options import SpecError

#: What trace() reports, in the paper's order (SageBwd, arXiv 2603.02170, Table 2).
TENSORS = ("delta", "P", "dP", "dS", "O", "dQ", "dK", "dV")


@options.refuses_unknown_keywords
def trace(
    q,
    k,
    v,
    dout,
    *,
    precision="six-of-seven",
    causal=False,
    softmax_scale=None,
    granularity="row",
    group_q=None,
    group_kv=None,
    smooth_k=True,
    rotate=True,
    dtype=None,
    device=None,
):
    """Cosine and relative L2 error of delta, P, dP, dS, O, dQ, dK, dV against FP64.

    Args:
        q, dout: (batch, heads, queries, head_dim); k, v: (batch, heads_kv, keys, head_dim). NumPy
            arrays or torch tensors, rounded to `dtype` before either computation.
        precision: 'six-of-seven', 'qk16', or any collection of the products to be INT8, of
            sagebwd.PRODUCTS: ('dp',) alone shows what that product costs.
        dtype: 'bf16' or 'fp16'; None means that of torch tensors of 16 bits, else 'bf16'.
        device: 'cpu' (the C++ reference, bit-exact quantisers, multi-threaded), 'cuda' (the
            PyTorch emulation, same quantisers), or None for where the tensors are.
        The other options: as for `sagebwd.attention`.

    Returns a dict of tensor name -> {'cosine', 'rel_l2'}, NaN where a computation holds one. On a
    GPU, under a plan that kernels are built for, the key 'kernels' holds the same for O, dQ, dK, dV
    as the kernels give them. Raises SpecError, and on a GPU what `sagebwd.attention` raises.
    """
    arrays = _Arrays(q, k, v, dout)
    dtype = dtype or arrays.dtype_name()
    causal = options.causal_name(causal, arrays.seq_q, arrays.seq_kv)
    rules = dict(causal=causal, granularity=granularity, group_q=group_q, group_kv=group_kv,
                 smooth_k=smooth_k, rotate=rotate)  # fmt: skip
    device = str(device or arrays.device())
    if device == "cpu":
        spec = options.spec(head_dim=arrays.head_dim, dtype=dtype, **rules)
        scale = options.check_softmax_scale(softmax_scale, arrays.head_dim)
        inputs = (_core.round_to(x, dtype) for x in arrays.numpy())
        return _core.trace(spec, sorted(options.plan_of(precision)), *inputs, scale)
    return _trace_torch(arrays.torch(device), dtype, precision, softmax_scale, rules)


class _Arrays:
    """q, k, v, dout as NumPy arrays or torch tensors."""

    def __init__(self, *arrays):
        self.arrays = arrays
        names = ("q", "k", "v", "dout")
        for name, x in zip(names, arrays):
            if not hasattr(x, "shape"):
                raise TypeError(f"{name} is a {type(x).__name__}; pass a NumPy array or a tensor")
            if len(x.shape) != 4:
                raise SpecError(
                    f"{name} has rank {len(x.shape)}; it must have rank 4: (batch, "
                    "head, token, channel)"
                )
        self.seq_q, self.head_dim = arrays[0].shape[2:]
        self.seq_kv = arrays[1].shape[2]

    def _is_torch(self):
        return type(self.arrays[0]).__module__ != "numpy"

    def dtype_name(self):
        if "float16" in (name := str(self.arrays[0].dtype)) and "bfloat16" not in name:
            return "fp16"
        return "bf16"

    def device(self):
        return self.arrays[0].device if self._is_torch() else "cpu"

    def numpy(self):
        if not self._is_torch():
            return self.arrays
        return [x.detach().float().cpu().numpy() for x in self.arrays]

    def torch(self, device):
        import torch

        return [torch.as_tensor(x, device=device).detach() for x in self.arrays]


class _Error:
    """The figures of one tensor, gathered chunk by chunk in FP64."""

    def __init__(self):
        self.dot = self.squares = self.reference_squares = self.difference = 0.0

    def add(self, x, reference):
        x, reference = x.double().flatten(), reference.double().flatten()
        self.dot += float(x @ reference)
        self.squares += float(x @ x)
        self.reference_squares += float(reference @ reference)
        self.difference += float((x - reference).square().sum())

    def figures(self):
        norms = math.sqrt(self.squares) * math.sqrt(self.reference_squares)
        reference = math.sqrt(self.reference_squares)
        return {
            "cosine": self.dot / norms if norms else math.nan,
            "rel_l2": math.sqrt(self.difference) / reference if reference else math.nan,
        }


def _trace_torch(tensors, dtype, precision, softmax_scale, options_given):
    import torch

    from sagebwd import emulation, exact, numerics

    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype)
    if low is None:
        raise SpecError(f"dtype={dtype!r}: pass 'bf16' or 'fp16'")
    q, k, v, dout = tensors = [t.to(low) for t in tensors]
    rules = numerics.rules_of(q.shape[3], softmax_scale=softmax_scale, plan=precision, dtype=low,
                               math_dtype=torch.float32, device=q.device, **options_given)  # fmt: skip
    kernels = _kernel_results(tensors, rules, options_given) if q.is_cuda else {}
    errors = {name: _Error() for name in TENSORS}
    kernel_errors = {name: _Error() for name in kernels}
    chunked = emulation.grouped(k.shape[1], q, k, v, dout)
    kernels = dict(zip(kernels, emulation.grouped(k.shape[1], *kernels.values())))
    with emulation.full_precision(q.device):
        for part in emulation.chunks(*chunked[:2]):
            q, k, v, dout = (t[part] for t in chunked)
            reference = exact.exact_chunk(q, k, v, dout, rules.causal, rules.scale)
            for name, x in emulated_chunk(q, k, v, dout, rules).items():
                errors[name].add(x, reference[name])
            for name, x in kernels.items():
                kernel_errors[name].add(x[part], reference[name])
    table = {name: error.figures() for name, error in errors.items()}
    if kernels:
        table["kernels"] = {name: error.figures() for name, error in kernel_errors.items()}
    return table


def emulated_chunk(q, k, v, dout, rules):
    """The emulation's tensors by the names of TENSORS."""
    from sagebwd.numerics import backward_chunk, forward_chunk

    out, lse = forward_chunk(q, k, v, rules)
    dq, dk, dv, delta, p, dp, ds = backward_chunk(q, k, v, out, lse, dout, None, rules, True)
    return dict(zip(TENSORS, (delta, p, dp, ds, out, dq, dk, dv)))


def _kernel_results(tensors, rules, given):
    """O, dQ, dK, dV from the kernels; empty for plans that they are not built for."""
    precision = options.precision_of(rules.plan)
    if precision is None:
        return {}
    from sagebwd.functional import attention_backward, attention_forward

    q, k, v, dout = (t.contiguous() for t in tensors)
    given = dict(given, softmax_scale=rules.scale, precision=precision)
    given["causal"] = False if rules.causal == "none" else rules.causal
    out, lse = attention_forward(q, k, v, **given)
    gradients = attention_backward(dout, q, k, v, out, lse, **given)
    return dict(zip(("O", "dQ", "dK", "dV"), (out, *gradients)))
