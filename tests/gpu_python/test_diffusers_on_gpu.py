"""A small diffusion transformer with random weights on the GPU, beside PyTorch's attention."""

import pytest
from inputs import relative, torch

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

from diffusers.models.attention_dispatch import AttentionBackendName  # noqa: E402
from diffusers.models.attention_dispatch import (  # noqa: E402
    _AttentionBackendRegistry as AttentionBackendRegistry,
)

import sagebwd  # noqa: E402
import sagebwd.integrations.diffusers  # noqa: E402, F401


@pytest.fixture(autouse=True)
def backend_as_before():
    """set_attention_backend sets that of the process too."""
    yield
    AttentionBackendRegistry.set_active_backend(AttentionBackendName("native"))


def randn(*shape, dtype):
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(*shape, generator=generator, device="cuda").bfloat16().to(dtype)


def run(backend, dtype=torch.bfloat16, checkpoints=False, compiler=None):
    """The result of a model, and the gradients of its weights. `compiler`: torch.compile's back
    end."""
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=64, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=64, num_layers=2, rope_max_seq_len=64)  # fmt: skip
    torch.nn.init.normal_(model.proj_out.weight, std=0.1)
    model = model.bfloat16().to("cuda", dtype).train()
    if checkpoints:
        model.enable_gradient_checkpointing()
    model.set_attention_backend(backend)
    call = model if compiler is None else torch.compile(model, backend=compiler)
    out = call(randn(1, 4, 4, 24, 24, dtype=dtype), torch.tensor([5], device="cuda"),
               randn(1, 40, 16, dtype=dtype), return_dict=False)[0]  # fmt: skip
    (out.float() * randn(*out.shape, dtype=torch.float32)).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return [t.detach().double() for t in (out, torch.cat(gradients))]


def test_a_model():
    right = run("native", torch.float32)
    for found, plain, exact in zip(run("sagebwd"), run("native"), right):
        assert not torch.equal(found, plain)
        assert relative(found, exact) < 2 * relative(plain, exact) + 0.02


def test_checkpoints():
    for found, expected in zip(run("sagebwd", checkpoints=True), run("sagebwd")):
        assert relative(found, expected) < 1e-3


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_compiled_model(compiler):
    torch._dynamo.reset()
    for found, expected in zip(run("sagebwd", compiler=compiler), run("sagebwd")):
        assert relative(found, expected) < 0.03
