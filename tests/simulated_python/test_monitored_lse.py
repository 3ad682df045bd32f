"""Tests what sagebwd.Monitor makes of the kernels' own lse, on the simulator."""

import random

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from sagebwd.core import forms  # noqa: E402
from sagebwd.monitoring import calls, sample  # noqa: E402

import simulator_needed  # noqa: E402, F401


def aligned(t):
    """Copies the numbers to a multiple of 256 bytes, as PyTorch allocates on a GPU."""
    raw = torch.zeros(t.numel() * t.element_size() + 256, dtype=torch.uint8)
    start = -raw.data_ptr() % 256
    found = raw[start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
    return found.copy_(t)


@pytest.mark.parametrize("options", ["", "smooth_k=no", "smooth_k=no granularity=block",
                                     "smooth_k=no rotate=no"])  # fmt: skip
@pytest.mark.parametrize("sigma", [1.0, 15.0])
def test_a_whole_call_weighs_one_however_large_its_errors(options, sigma, monkeypatch):
    operation = forms.operation
    monkeypatch.setattr(forms, "operation", lambda device, *told, **of: operation(0, *told, **of))
    monkeypatch.setattr(forms, "stream_of", lambda device: 0)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape, dtype=None: aligned(
        torch.zeros(*shape, dtype=dtype or self.dtype)))  # fmt: skip
    torch.manual_seed(0)
    q, k, v, dout = (aligned((torch.randn(1, 2, 256, 64) * scale).bfloat16())
                     for scale in (sigma, sigma, 1, 1))  # fmt: skip
    form = forms.Form(q, k, v, None, "bhsd", f"causal=top-left {options}".strip(), ("cpu",))
    out, lse = form.forward(q, k, v)
    gradients = form.backward(dout, q, k, v, out, lse, None)

    def figures(of_lse):
        tensors = dout, q, k, v, out, of_lse, None, *gradients, (), None
        head = sample.chosen_head(calls.call_of(form), tensors, random.Random(0))
        sums = sample.measured(head, calls.call_of(form).rules, 1 << 28)
        return sample.figures(sums.tolist(), {})

    found, weight, _ = figures(lse)
    assert (found["dQ"] > 0.3) == (sigma > 1) and abs(weight - 1) < 2e-3
    # Here the keys have a third of the weight.
    assert figures(lse + torch.tensor(3.0).log())[1] == pytest.approx(1 / 3, abs=1e-3)
