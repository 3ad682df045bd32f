"""What `fuse` leaves alone and says so, and what fused attention refuses."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("diffusers", reason="needs diffusers")

import test_diffusers as tiny  # noqa: E402
from diffusers.models.transformers.transformer_flux import (  # noqa: E402
    FluxIPAdapterAttnProcessor as IPAdapterProcessor,
)
from diffusers.models.transformers.transformer_wan import WanAttnProcessor  # noqa: E402
from fused_diffusers import flux, hunyuan, kinds, made  # noqa: E402

import sagebwd  # noqa: E402
import sagebwd.integrations.diffusers as door  # noqa: E402
from sagebwd.integrations import _processor_norms as norms  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


class MyProcessor(WanAttnProcessor):
    pass


def test_what_is_left_alone():
    model, _ = made(tiny.wan)
    mine = MyProcessor()
    model.blocks[0].attn1.set_processor(mine)
    report = door.fuse(model)
    assert report.left["blocks.0.attn1"] == f"MyProcessor of {__name__} is not a known processor"
    assert set(report.fused) == {"blocks.1.attn1"} and model.blocks[0].attn1.processor is mine
    door.unfuse(model)
    model.blocks[1].attn1.norm_k = torch.nn.LayerNorm(64)
    with pytest.raises(sagebwd.SpecError) as raised:
        door.fuse(model)
    for said in (
        "nothing in WanTransformer3DModel can be fused", "MyProcessor", "cross-attention has no",
        "its norm_k is a LayerNorm and no RMSNorm", "Known are WanAttnProcessor",
    ):  # fmt: skip
        assert said in str(raised.value)
    assert "WanProcessor" not in kinds(model)
    model, _ = made(flux)
    model.transformer_blocks[0].attn.set_processor(IPAdapterProcessor(64, 16))
    assert "an IP-Adapter" in door.fuse(model).left["transformer_blocks.0.attn"]
    model, _ = made(hunyuan)
    for parameter in model.transformer_blocks.parameters():
        parameter.device_mesh = None  # as parameters of fully_shard have one
    report = door.fuse(model)
    assert "call fuse before fully_shard" in report.left["transformer_blocks.0.attn"]
    for model, error, said in (
        (tiny.cogvideo()[0], sagebwd.SpecError, "CogVideoXAttnProcessor2_0"),
        (torch.nn.Linear(4, 4), sagebwd.SpecError, "It has no processors of attention"),
        (made(tiny.wan)[0].to("meta"), sagebwd.SpecError, "on the meta device: load them"),
        ("a pipeline", TypeError, "pass a model of diffusers, such as pipe.transformer"),
    ):
        with pytest.raises(error, match=said):
            door.fuse(model)
    with pytest.raises(TypeError, match=r"pipe\.transformer"):
        door.unfuse(None)


@pytest.mark.parametrize("name", ["bias", "eps"])
def test_norms_that_are_not_known(name):
    model, _ = made(hunyuan)
    setattr(model.transformer_blocks[0].attn.norm_added_q, name,
            torch.nn.Parameter(torch.zeros(32)) if name == "bias" else None)  # fmt: skip
    said = f"its norm_added_q is an RMSNorm with{'out' if name == 'eps' else ' a'} {name}"
    assert said in door.fuse(model).left["transformer_blocks.0.attn"]


WRONG = {
    "a sign": ("queries would differ by", lambda f: lambda *given, rope=None, **of: f(
        *given, rope=rope and (rope[0], -rope[1]), **of)),
    "pairs": ("queries would differ by", lambda f: lambda *given, **of: f(
        *given, **(of | {"rope_style": "halves"}))),
    "keys": ("keys would differ by", lambda f: lambda q, k, **of: (
        f(q, k, **of)[0], k * 1.001)),
    "no gain": ("queries would differ by", lambda f: lambda *given, **of: f(
        *given, **(of | {"q_norm": True}))),
    "a gradient": ("the gradient of", lambda f: lambda q, k, **of: f(
        q + 0 * q.detach(), k.detach() * 0.001 + 0.999 * k, **of)),
    "a gain's gradient": ("the gradient of norm_k.weight would", lambda f: (
        lambda *given, **of: f(*given, **(of | {"k_norm": of["k_norm"].detach()})))),
    "an error": ("the fused processor fails in a small random call: KeyError", lambda f: (
        lambda *given, **of: f(*given, **of)[of["nothing"]])),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_refuses(wrong, dtype, monkeypatch):
    said, change = WRONG[wrong]
    model, _ = made(flux, dtype)
    before = kinds(model)
    monkeypatch.setattr(norms, "qk_norm_rope", change(norms.qk_norm_rope))
    with pytest.raises(sagebwd.SpecError, match=said):
        door.fuse(model)
    assert kinds(model) == before


def test_what_it_cannot_compute_is_refused():
    model, _ = made(tiny.wan)
    door.fuse(model)
    attn, x = model.blocks[0].attn1, torch.randn(1, 4, 64)
    with pytest.raises(sagebwd.SpecError, match=r"without RoPE: call .*unfuse\(model\)"):
        attn(x)
    with pytest.raises(sagebwd.SpecError, match="as cross-attention: call"):
        attn(x, x, None, (torch.ones(1, 4, 1, 32),) * 2)
    model, _ = made(tiny.qwen)
    door.fuse(model)
    with pytest.raises(sagebwd.SpecError, match="no attention_mask"):
        model.transformer_blocks[0].attn(x, encoder_hidden_states=x, attention_mask=x)
    model, inputs = made(tiny.wan)
    door.fuse(model)
    inputs["hidden_states"].requires_grad_()
    (gradient,) = torch.autograd.grad(model(**inputs, return_dict=False)[0].square().sum(),
                                      inputs["hidden_states"], create_graph=True)  # fmt: skip
    with pytest.raises(RuntimeError, match="twice"):
        gradient.sum().backward()


def test_models_of_the_other_library_are_told_apart():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    import sagebwd.integrations.transformers as other

    config = transformers.GPT2Config(n_embd=64, n_head=2, n_layer=1, vocab_size=100)
    gpt, (wan, _) = transformers.GPT2Model(config), made(tiny.wan)
    for fuse, model, says in ((door.fuse, gpt, r"model of transformers, .*\.transformers\.fuse"),
                              (other.fuse, wan, r"model of diffusers, .*\.diffusers\.fuse")):
        with pytest.raises(sagebwd.SpecError, match=f"can be fused. It is a {says}"):
            fuse(model)
    with pytest.raises(sagebwd.SpecError, match="It has no processors of attention"):
        door.fuse(torch.nn.Sequential(gpt, wan.proj_out, torch.nn.Linear(2, 2), wan.rope))
