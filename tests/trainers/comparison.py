"""Compares a trainer's attention as it is with the same where sagebwd computes it."""

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagebwd.core import watching

#: How far relative L2 errors of INT8 attention may go. On Gaussian inputs they are 0.014 to 0.020.
AT_MOST = 0.05


class Kernels:
    """Counts the passes that sagebwd's kernels compute while it watches."""

    def __init__(self):
        self.forwards = self.backwards = 0

    def forward_ran(self, form):
        self.forwards += 1

    def backward_ran(self, form, tensors):
        self.backwards += 1

    def __enter__(self):
        watching.add(self)
        return self

    def __exit__(self, *raised):
        watching.remove(self)


def relative(x, expected):
    x, expected = (t.detach().double() for t in (x, expected))
    return float((x - expected).norm() / expected.norm())


def drawn(*shape, seed, device, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()


def results(attend, inputs, dout=None):
    """The output and the gradients of all inputs, and the output's gradient that gave them."""
    out = attend(*inputs)
    if dout is None:
        generator = torch.Generator().manual_seed(9)
        dout = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
    return (out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))), dout


def assert_near(found, expected, at_most=AT_MOST):
    errors = [relative(x, y) for x, y in zip(found, expected)]
    assert max(errors) <= at_most, errors
    assert min(errors) > 1e-4, f"{errors}: nothing here was rounded to INT8"


def compare(attend, inputs, within, passes=(1, 1), reference=None, at_most=AT_MOST):
    """Raises AssertionError unless `attend(*inputs)` within the context gives what it gives
    outside, or what `reference` gives in FP64, to INT8's errors, and kernels computed so many
    forwards and backwards.

    Outside, PyTorch's function computes by its formula: its fused backward (PyTorch 2.11, an H200)
    gave gradients of no use where a call of the same sizes had had another layout of dout before.
    """
    exact = [t.detach().double().requires_grad_() for t in inputs] if reference else inputs
    with sdpa_kernel(SDPBackend.MATH):
        expected, dout = results(reference or attend, exact)
    with Kernels() as kernels, within or contextlib.nullcontext():
        found, _ = results(attend, inputs, dout)
    ran = kernels.forwards, kernels.backwards
    assert ran == passes, f"kernels computed {ran} forwards and backwards, not {passes}"
    assert all(x.shape == y.shape for x, y in zip(found, expected))
    assert_near(found, expected, at_most)


def model_gradients(model, batch, weights=None):
    """Logits of a model of transformers, times `weights` of tokens, and its parameters' gradients
    as one vector."""
    model.zero_grad()
    logits = model(**batch, use_cache=False).logits
    generator = torch.Generator().manual_seed(2)
    direction = torch.randn(logits.shape, generator=generator).to(logits.device)
    if weights is not None:
        logits = logits * weights[..., None]
    (logits.float() * direction).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def documents(lengths, window=-1):
    """Causal attention within each document of (tokens, heads, channels), by PyTorch, with a window
    of so many keys before a query's own."""

    def attend(q, k, v):
        found = []
        for part in zip(*(t.split(lengths) for t in (q, k, v))):
            at = torch.arange(len(part[0]), device=q.device)
            behind = at[:, None] - at
            mask = (behind >= 0) & (behind <= (window if window >= 0 else len(at)))
            q_, k_, v_ = (t.transpose(0, 1)[None] for t in part)
            out = torch.nn.functional.scaled_dot_product_attention(
                q_, k_, v_, attn_mask=mask, enable_gqa=True)  # fmt: skip
            found.append(out[0].transpose(0, 1))
        return torch.cat(found)

    return attend


def tiny_llama(implementation, device):
    """Two layers whose attention attends to something: scores are six times as large as usual."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=128, intermediate_size=128, num_hidden_layers=2, head_dim=64,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0)  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, dtype=torch.bfloat16)  # fmt: skip
    for name, parameter in model.named_parameters():
        if "q_proj.weight" in name:
            parameter.data *= 6
    return model.train().to(device)


def compare_models(batch, without, device, weights=None):
    """Raises AssertionError unless a model with attn_implementation="sagebwd" gives logits and
    gradients of eager attention, from which those of the batch `without` its packing or padding
    are far."""
    expected = model_gradients(tiny_llama("eager", device), batch, weights)
    other = model_gradients(tiny_llama("eager", device), without, weights)
    with Kernels() as kernels:
        found = model_gradients(tiny_llama("sagebwd", device), batch, weights)
    assert kernels.forwards == kernels.backwards == 2  # one for each layer
    errors = [relative(x, y) for x, y in zip(found, expected)]
    assert errors[0] <= AT_MOST and errors[1] <= 0.12, errors
    assert relative(other[0], expected[0]) > 0.2
