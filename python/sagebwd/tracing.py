"""The error of every intermediate tensor of INT8 attention, against FP64."""

import math

from sagebwd import _core
from sagebwd.arrays import Arrays
from sagebwd.kernels import local_arch
from sagebwd.options import (
    SpecError,
    causal_name,
    check_softmax_scale,
    dtype_name,
    emulated_spec,
    plan_of,
    precision_of,
    takes,
)

#: What trace() reports, in the paper's order (SageBwd, arXiv 2603.02170, Table 2).
TENSORS = ("delta", "P", "dP", "dS", "O", "dQ", "dK", "dV")


@takes(but=("deterministic",))
def trace(q, k, v, dout, *, softmax_scale=None, dtype=None, device=None, arch=None, options):
    """Cosine and relative L2 error of delta, P, dP, dS, O, dQ, dK, dV against FP64.

    Args:
        q, dout: (batch, heads, queries, head_dim); k, v: (batch, heads_kv, keys, head_dim). NumPy
            arrays or torch tensors, rounded to `dtype` before either computation.
        softmax_scale: positive; None means 1/sqrt(head_dim).
        dtype: 'bf16' or 'fp16'; None means that of torch tensors of 16 bits, else 'bf16'.
        device: 'cpu' (the C++ reference, bit-exact quantisers, multi-threaded), 'cuda' (the
            PyTorch emulation, same quantisers), or None for where the tensors are.
        arch: the architecture whose kernels are traced on the CPU, for their default groups; None:
            this machine's first GPU's, where there is one.
        {options}
            Here also any collection of the products to be INT8, of sagebwd.PRODUCTS: ('dp',) alone
            shows what that product costs.

    Returns a dict of tensor name -> {'cosine', 'rel_l2'}, NaN where a computation holds one. On a
    GPU, under a plan that kernels are built for, the key 'kernels' holds the same for O, dQ, dK, dV
    as the kernels give them. Raises SpecError, and on a GPU what `sagebwd.attention` raises.
    """
    arrays = Arrays(q=q, k=k, v=v, dout=dout)
    dtype = dtype_name(q.dtype if dtype is None and _is_low(q.dtype) else dtype or "bf16")
    options["causal"] = causal_name(options["causal"], q.shape[2], k.shape[2])
    device = str(device or (q.device if arrays.are_torch else "cpu"))
    if device == "cpu":
        plan = plan_of(options["precision"])
        spec = emulated_spec(
            plan, arch or _arch_here(), head_dim=q.shape[3], dtype=dtype, **options
        )
        scale = check_softmax_scale(softmax_scale, q.shape[3])
        inputs = (_core.round_to(x, dtype) for x in arrays.numpy())
        return _core.trace(spec, sorted(plan), *inputs, scale)
    if not device.startswith("cuda"):
        raise SpecError(f"device={device!r}: pass 'cpu' or 'cuda'")
    return _trace_torch(arrays, device, dtype, softmax_scale, options)


def _is_low(dtype):
    return str(dtype).endswith("float16")


def _arch_here():
    driver = _core.driver()
    return None if driver["missing"] or not driver["devices"] else local_arch()


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


def _trace_torch(arrays, device, dtype, softmax_scale, options):
    try:
        import torch
    except ImportError as error:
        raise SpecError(f"device={device!r} needs PyTorch ({error}): pass device='cpu'") from None

    from sagebwd import emulation, exact, numerics

    if not torch.cuda.is_available():
        raise SpecError(f"device={device!r}: PyTorch sees no CUDA GPU here; pass device='cpu'")
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    tensors = [torch.as_tensor(x, device=device).detach().to(low) for x in arrays.given.values()]
    q, k, v, dout = tensors
    given = {name: x for name, x in options.items() if name != "precision"}
    rules = numerics.rules_of(
        q.shape[3], softmax_scale=softmax_scale, plan=options["precision"], dtype=low,
        math_dtype=torch.float32, device=q.device, **given,
    )  # fmt: skip
    kernels = _kernel_results(tensors, rules, given) if q.is_cuda else {}
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
    precision = precision_of(rules.plan)
    if precision is None:
        return {}
    from sagebwd.functional import attention_backward, attention_forward

    q, k, v, dout = (t.contiguous() for t in tensors)
    given = dict(given, softmax_scale=rules.scale, precision=precision)
    given["causal"] = False if rules.causal == "none" else rules.causal
    out, lse = attention_forward(q, k, v, **given)
    gradients = attention_backward(dout, q, k, v, out, lse, **given)
    return dict(zip(("O", "dQ", "dK", "dV"), (out, *gradients)))
