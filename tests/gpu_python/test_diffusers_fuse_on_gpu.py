"""Fused diffusion transformers on the GPU, beside themselves before that and beside FP32."""

import copy

import pytest
from inputs import relative, torch

pytest.importorskip("diffusers", reason="needs diffusers")

import fused_diffusers as models
import test_diffusers as tiny
from test_diffusers import backend_as_before  # noqa: F401
from torch.nn.attention import SDPBackend, sdpa_kernel

import sagebwd.integrations.diffusers as door
from sagebwd.core import front_direct, front_kernels

each_model = pytest.mark.parametrize("name", ["wan", "flux", "qwen", "hunyuan", "ltx"])
pytestmark = pytest.mark.filterwarnings("ignore:set_attention_backend")  # of HunyuanVideo's refiner


def made(name, dtype=torch.bfloat16):
    model, inputs = models.made(models.MODELS[name], dtype)
    inputs = {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}
    return model.cuda(), inputs


def run(model, inputs):
    """The output, and all gradients as one. PyTorch's attention is the plain one: with PyTorch 2.11
    others gave Flux's gradients numbers of 1e36 at these lengths, fused or not."""
    model.zero_grad()
    with sdpa_kernel(SDPBackend.MATH):
        out = model(**inputs, return_dict=False)[0]
        (out.float() * tiny.randn(*out.shape).to(out.device).float()).sum().backward()
    gradients = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten().double()
                 for p in model.parameters()]  # fmt: skip
    return [out.detach().double(), torch.cat(gradients)]


@each_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models(name, dtype, front_passes):
    model, inputs = made(name, dtype)
    wide = copy.deepcopy(model).float()
    exact = run(wide, {name: t.float() if isinstance(t, torch.Tensor) and t.is_floating_point()
                       else t for name, t in inputs.items()})  # fmt: skip
    before = run(model, inputs)
    report = door.fuse(model)
    front_passes.clear()
    found = run(model, inputs)
    assert front_passes.count("front") == front_passes.count("front_gradients")
    assert front_passes.count("front") >= len(report.fused) > 0
    for x, plain, right in zip(found, before, exact):
        assert relative(x, right) < 1.1 * relative(plain, right) + 1e-4


@each_model
def test_by_kernels_of_attention_too(name):
    model, inputs = made(name)
    before = run(model, inputs)
    door.fuse(model)
    model.set_attention_backend("sagebwd")
    found = run(model, inputs)
    for x, plain in zip(found, before):
        assert not torch.equal(x, plain) and relative(x, plain) < 0.05


@pytest.mark.parametrize("name", ["wan", "flux"])
def test_checkpoints(name, front_passes):
    model, inputs = made(name)
    report = door.fuse(model)
    model.set_attention_backend("sagebwd")
    expected = run(model.train(), inputs)
    front_passes.clear()
    model.enable_gradient_checkpointing()
    for x, right in zip(run(model, inputs), expected):
        assert relative(x, right) < 1e-3
    assert front_passes.count("front") >= 2 * len(report.fused)


@each_model
@pytest.mark.parametrize("backend", ["native", "sagebwd"])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled(name, backend, compiler, front_passes):
    model, inputs = made(name)
    report = door.fuse(model)
    model.set_attention_backend(backend)
    expected = run(model, inputs)
    torch._dynamo.reset()
    front_passes.clear()
    for place in report.fused:
        attn = model.get_submodule(place)
        attn.forward = torch.compile(attn.forward, fullgraph=True, backend=compiler)
    for x, right in zip(run(model, inputs), expected):
        assert relative(x, right) < 0.03
    assert front_passes.count("front") >= len(report.fused)


def test_the_check_is_on_the_gpu_in_16_bits(front_passes, monkeypatch):
    """A mistake that kernels alone make is found."""
    model, _ = made("flux")
    monkeypatch.setattr(front_direct, "_known", {})  # the first call takes the operators
    forward = front_kernels._forward
    monkeypatch.setattr(front_kernels, "_forward", lambda *given: tuple(
        1.1 * y for y in forward(*given)))  # fmt: skip
    with pytest.raises(ValueError, match=r"queries would differ by 0\.1"):
        door.fuse(model)
    assert front_passes.count("front") >= 1
