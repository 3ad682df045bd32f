"""The two computations that are measured, with one interface: GPU kernels and their emulation."""

from __future__ import annotations

from harness import Record, progress
from needs_torch import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sagebwd.benchmark.environment import brief, print_failure
from sagebwd.benchmark.measuring import compiled
from sagebwd.numerics.exact import Attended


def kernels(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, dlse=None, **options) -> Attended:
    """The kernels, by explicit forward and backward. `options` are those of `sagebwd.attention`."""
    import sagebwd

    out, lse = sagebwd.attention_forward(q, k, v, **options)
    gradients = sagebwd.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    return Attended(out, lse, *gradients)


def emulated(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, given: Attended | None = None, dlse=None,
    precision="six-of-seven", **options,
) -> Attended:
    """The emulation of the same spec. Its backward starts from the out and lse of `given`, if any.

    All outputs are rounded to the type of the inputs, as those of the kernels are.
    """
    from sagebwd.numerics import emulation

    options["plan"] = precision
    out, lse = emulation.emulated_forward(q, k, v, **options)
    start = (out, lse) if given is None else (given.out, given.lse)
    gradients = emulation.emulated_backward(dout, q, k, v, *start, dlse=dlse, **options)
    return Attended(out, lse, *gradients)


def subject_of(device: str):
    """What is measured: without a GPU the emulation stands in, to try the scripts themselves."""
    return kernels if torch.device(device).type == "cuda" else emulated


def sixteen_bit(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal="none") -> Attended:
    """PyTorch's attention in the type of the inputs, with as many keys as queries. lse is empty,
    because nobody needs it."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=causal == "top-left",
                                       enable_gqa=q.shape[1] != k.shape[1])
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    return Attended(out.detach(), torch.empty(0, device=q.device), *gradients)


def warm_up(specs: list[dict], device: str, record: Record) -> list[int]:
    """Compiles every spec, several at a time. Specs that do not compile are recorded, and their
    indices are returned."""
    if torch.device(device).type != "cuda":
        return []
    refused = []
    for i, (spec, error) in enumerate(zip(specs, compiled(specs))):
        progress(i + 1, len(specs), "compiled")
        if error:  # a case that uses it will fail and be counted
            refused.append(i)
            print_failure(str(spec), error)
            record.add("not_compiled", {"spec": spec, "error": brief(error)})
    return refused
