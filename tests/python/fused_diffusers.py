"""Tiny diffusion transformers for `fuse`, and what they compute."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

import test_diffusers as tiny  # noqa: E402

from sagebwd.integrations import _processor_check as check  # noqa: E402


def hunyuan():
    return tiny.hunyuan(), tiny.hunyuan_inputs()


def flux():
    """Positions that rotate something."""
    model, inputs = tiny.flux()
    positions = torch.cartesian_prod(*(torch.arange(n).float() for n in (1, 4, 4)))
    return model, inputs | {"img_ids": positions, "txt_ids": torch.arange(36.0).view(12, 3)}


def wan_of_images():
    """I2V of Wan 2.1: text is 512 tokens behind those of the image."""
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=1, rope_max_seq_len=32, image_dim=8,
        added_kv_proj_dim=64)  # fmt: skip
    return model, dict(hidden_states=tiny.randn(2, 4, 2, 4, 4), timestep=torch.tensor([5, 7]),
                       encoder_hidden_states=tiny.randn(2, 512, 16),
                       encoder_hidden_states_image=tiny.randn(2, 3, 8))  # fmt: skip


def with_fused_projections(build):
    def made():
        model, inputs = build()
        model.fuse_qkv_projections()
        assert any(attn.fused_projections for _, attn in check._attentions(model))
        return model, inputs

    return made


MODELS = {
    "wan": tiny.wan, "wan of images": wan_of_images, "flux": flux, "qwen": tiny.qwen,
    "hunyuan": hunyuan, "ltx": tiny.ltx, "wan, fused": with_fused_projections(tiny.wan),
    "flux, fused": with_fused_projections(flux),
}  # fmt: skip


def made(build, dtype=torch.float32):
    """A model with gains unlike 1 and a last layer unlike 0, and its inputs."""
    torch.manual_seed(0)
    model, inputs = build()
    for name, parameter in model.named_parameters():
        if ".norm_" in name and "attn" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
        elif "proj_out" in name or "norm_out" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    inputs = {name: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
              for name, t in inputs.items()}  # fmt: skip
    return model.to(dtype), inputs


def run(model, inputs):
    """The output, and the gradients of all weights by their names."""
    model.zero_grad()
    out = model(**inputs, return_dict=False)[0]
    (out * tiny.randn(*out.shape).to(out.dtype)).sum().backward()
    return {"output": out.detach()} | {
        name.replace("_orig_mod.", ""): p.grad.clone()
        for name, p in model.named_parameters() if p.grad is not None}  # fmt: skip


def assert_same(found, expected, most=1e-5):
    assert found.keys() == expected.keys()
    floor = 1e-7 * max(float(t.norm()) for t in expected.values())  # of sums that are zero
    for name, right in expected.items():
        apart = float((found[name] - right).norm())
        assert apart <= most * float(right.norm()) + floor, (name, apart, float(right.norm()))


def kinds(model):
    return [type(attn.processor).__name__ for _, attn in check._attentions(model)]
