"""Tiny diffusion transformers with random weights: results and gradients beside PyTorch's."""

import importlib
import os
import warnings

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

import warm  # noqa: E402
from diffusers.models.attention_dispatch import (  # noqa: E402
    AttentionBackendName,
    dispatch_attention_fn,
)
from diffusers.models.attention_dispatch import (  # noqa: E402
    _AttentionBackendRegistry as AttentionBackendRegistry,
)
from stand_in import kernels_on_the_cpu  # noqa: E402, F401

import sagebwd  # noqa: E402
import sagebwd.integrations.diffusers as door  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")


@pytest.fixture(autouse=True)
def backend_as_before():
    """set_attention_backend sets that of the process too."""
    yield
    AttentionBackendRegistry.set_active_backend(AttentionBackendName("native"))


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def wan():
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32)  # fmt: skip
    return model, dict(hidden_states=randn(1, 4, 2, 8, 8), timestep=torch.tensor([5]),
                       encoder_hidden_states=randn(1, 12, 16))  # fmt: skip


def flux():
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=32,
        num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16,
        axes_dims_rope=(8, 12, 12))  # fmt: skip
    return model, dict(
        hidden_states=randn(1, 16, 4), encoder_hidden_states=randn(1, 12, 16),
        pooled_projections=randn(1, 16), timestep=torch.tensor([0.5]).bfloat16(),
        img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(12, 3))  # fmt: skip


def cogvideo():
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4,
        time_embed_dim=16, text_embed_dim=16, num_layers=1, sample_width=8, sample_height=8,
        sample_frames=9, max_text_seq_length=12)  # fmt: skip
    return model, dict(hidden_states=randn(1, 3, 4, 8, 8), encoder_hidden_states=randn(1, 12, 16),
                       timestep=torch.tensor([5]))  # fmt: skip


def made(build):
    torch.manual_seed(0)
    model, inputs = build()
    for name, parameter in model.named_parameters():
        if name.endswith(("to_q.weight", "norm_q.weight")):
            parameter.data *= 4  # attention that attends to something
        elif "proj_out" in name or "norm_out" in name:
            torch.nn.init.normal_(parameter, std=0.1)  # where a new model has zeros
    return model.bfloat16(), inputs


def run(model, inputs):
    """The result, and the gradients of all weights that take them."""
    out = model(**inputs, return_dict=False)[0]
    (out.float() * randn(*out.shape).float()).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return [t.detach().double() for t in (out, torch.cat(gradients))]


def assert_close(found, expected):
    for x, y in zip(found, expected):
        assert not torch.equal(x, y) and float((x - y).norm() / y.norm()) < 0.05


def by(backend, build):
    model, inputs = made(build)
    model.set_attention_backend(backend)
    return model, inputs


@pytest.mark.parametrize("build", [wan, flux])
def test_the_backend(build):
    assert_close(*(run(*by(backend, build)) for backend in ("sagebwd", "native")))


@pytest.mark.parametrize("build", [wan, flux, cogvideo])
def test_sdpa_around_a_model(build):
    with sagebwd.sdpa() as mode:
        found = run(*made(build))
    assert mode.calls > 0
    assert_close(found, run(*made(build)))


@pytest.mark.parametrize("build", [wan, flux])
def test_a_step_of_lora(build):
    peft = pytest.importorskip("peft", reason="needs PEFT")
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)
    results = {}
    for backend in ("sagebwd", "native"):
        model, inputs = made(build)
        model.requires_grad_(False)
        torch.manual_seed(1)
        model.add_adapter(config)
        model.set_attention_backend(backend)
        weights = [p for p in model.parameters() if p.requires_grad]
        assert weights and all("lora" in n for n, p in model.named_parameters() if p.requires_grad)
        results[backend] = run(model, inputs)
        before = [p.detach().clone() for p in weights]
        torch.optim.SGD(weights, 0.1).step()
        assert not any(torch.equal(a, b) for a, b in zip(weights, before))
    assert_close(results["sagebwd"], results["native"])


def test_what_the_dispatcher_is_given_arrives():
    """It leaves out, in silence, what a backend is not known to take."""
    q, name = randn(1, 24, 2, 32), AttentionBackendName("sagebwd")

    def dispatched(**attention_kwargs):
        return dispatch_attention_fn(q, q, q, attention_kwargs=attention_kwargs, backend=name)

    expected = sagebwd.attention(q, q, q, layout="bshd", window_left=3, window_right=3)
    assert torch.equal(dispatched(window_size=(3, 3)), expected)
    assert torch.equal(dispatched(something_new=None), dispatched())
    with pytest.raises(sagebwd.SpecError, match="something_new: the backend 'sagebwd'"):
        dispatched(something_new=1)


def hunyuan():
    return diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=1, patch_size_t=1, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(8, 12, 12))  # fmt: skip


def cosmos():
    """The processors have no place for a backend's name: they ask for that of the process."""
    return diffusers.CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=1,
        text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 8, 8), extra_pos_embed_type=None,
        concat_padding_mask=False)  # fmt: skip


def test_models_that_do_not_ask_for_a_backend():
    """diffusers itself says nothing: PyTorch would compute them."""
    model, _ = cogvideo()
    for name in ("sagebwd", "SageBwd", AttentionBackendName("sagebwd")):
        with pytest.raises(sagebwd.SpecError, match="CogVideoXAttnProcessor2_0.*sagebwd.sdpa"):
            model.set_attention_backend(name)
    assert AttentionBackendRegistry.get_active_backend()[0] == "native"
    model.set_attention_backend("native")
    with pytest.warns(UserWarning, match=r"1 of 3 attentions in Hunyuan.*\(AttnProcessor2_0\)"):
        hunyuan().set_attention_backend("sagebwd")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for model in (cosmos(), wan()[0], flux()[0]):
            model.set_attention_backend("sagebwd")
    importlib.reload(door)  # wraps diffusers' own method again, not ours
    assert [*AttentionBackendName].count("sagebwd") == 1
    assert not hasattr(diffusers.ModelMixin.set_attention_backend.of_sagebwd, "of_sagebwd")


def hunyuan_inputs():
    return dict(
        hidden_states=randn(2, 4, 2, 4, 4), timestep=torch.tensor([5, 7]),
        encoder_hidden_states=randn(2, 12, 16), pooled_projections=randn(2, 8),
        encoder_attention_mask=(torch.arange(12) < torch.tensor([[4], [9]])).long(),
        guidance=torch.tensor([1000.0, 1000.0]))  # fmt: skip


def ltx():
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=2,
        cross_attention_dim=64, caption_channels=16)  # fmt: skip
    return model, dict(
        hidden_states=randn(2, 32, 4), encoder_hidden_states=randn(2, 12, 16),
        timestep=torch.tensor([5, 7]), num_frames=2, height=4, width=4,
        encoder_attention_mask=(torch.arange(12) < torch.tensor([[4], [9]])).long())  # fmt: skip


def hunyuan_15():
    """The masks hide queries, too."""
    model = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=2,
        num_refiner_layers=1, text_embed_dim=16, text_embed_2_dim=8, image_embed_dim=12,
        rope_axes_dim=(8, 12, 12), target_size=16, task_type="t2v")  # fmt: skip
    return model, dict(
        hidden_states=randn(2, 4, 2, 4, 4), timestep=torch.tensor([5.0, 7.0]).bfloat16(),
        encoder_hidden_states=randn(2, 12, 16), encoder_hidden_states_2=randn(2, 6, 8),
        encoder_attention_mask=(torch.arange(12) < torch.tensor([[4], [9]])).long(),
        encoder_attention_mask_2=(torch.arange(6) < torch.tensor([[5], [2]])).long(),
        image_embeds=torch.zeros(2, 3, 12).bfloat16())  # fmt: skip


def qwen():
    """Padding is in the middle: text comes before the picture."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=32,
        num_attention_heads=2, joint_attention_dim=16, axes_dims_rope=(8, 12, 12))  # fmt: skip
    return model, dict(
        hidden_states=randn(2, 16, 4), encoder_hidden_states=randn(2, 12, 16),
        encoder_hidden_states_mask=torch.arange(12) < torch.tensor([[4], [9]]),
        timestep=torch.tensor([0.5, 0.7]).bfloat16(), img_shapes=[[(1, 4, 4)]] * 2)  # fmt: skip


@pytest.mark.filterwarnings("ignore:set_attention_backend")  # of HunyuanVideo's refiner
@pytest.mark.parametrize("build", [
    lambda: (hunyuan(), hunyuan_inputs()), hunyuan_15, ltx, qwen,
], ids=["hunyuan", "hunyuan_15", "ltx", "qwen"])  # fmt: skip
def test_masks_of_padding(build):
    results = []
    for backend in ("sagebwd", "native"):
        model, inputs = by(backend, build)
        results.append(run(model, inputs))
        (seen,) = (value.bool() for name, value in inputs.items() if name.endswith("_mask"))
        inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].clone()
        inputs["encoder_hidden_states"][~seen] = 5.0
        assert torch.equal(run(model, inputs)[0], results[-1][0])
    assert_close(*results)


def chroma(dtype):
    """The pipeline gives masks of the model's dtype, whose 1 PyTorch adds to scores."""
    model = diffusers.ChromaTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=32,
        num_attention_heads=2, joint_attention_dim=16, axes_dims_rope=(8, 12, 12),
        approximator_num_channels=16, approximator_hidden_dim=16,
        approximator_layers=1)  # fmt: skip
    mask = torch.arange(12 + 16) < torch.tensor([[5], [9]])
    mask[:, 12:] = True
    return model, dict(
        hidden_states=randn(2, 16, 4), encoder_hidden_states=randn(2, 12, 16),
        timestep=torch.tensor([0.5, 0.7]).bfloat16(), img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(12, 3), attention_mask=mask.to(dtype))  # fmt: skip


def test_a_mask_of_bools_hides_pairs():
    assert_close(*(run(*by(backend, lambda: chroma(torch.bool)))
                   for backend in ("sagebwd", "native")))  # fmt: skip


def test_options_and_refusals():
    q = randn(1, 8, 2, 32)
    assert torch.equal(door.attend(q, q, q), sagebwd.attention(q, q, q, layout="bshd"))
    door.use(precision="dv16")
    try:
        expected = sagebwd.attention(q, q, q, layout="bshd", precision="dv16")
        assert torch.equal(door.attend(q, q, q), expected)
    finally:
        door.use()
    for given, match in (
        ({"attn_mask": torch.full((8, 8), 0.5)}, "attn_mask=.* hide the same keys.* 'native'"),
        ({"dropout_p": 0.1}, "dropout_p=0.1"),
        ({"_parallel_config": object()}, "_parallel_config.*'native'"),
    ):
        with pytest.raises(sagebwd.SpecError, match=match):
            door.attend(q, q, q, **given)
    with pytest.raises(TypeError, match="layout"):
        door.use(layout="bshd")
    with pytest.raises(sagebwd.SpecError, match="'foo'"):
        door.use(precision="foo")


CHOSEN = """
{first}
from diffusers.models.attention_dispatch import _AttentionBackendRegistry, dispatch_attention_fn
backend, function = _AttentionBackendRegistry.get_active_backend()
assert (backend.value, function.__module__) == ({name!r}, {module!r}), backend
import torch
x = torch.randn(1, 8, 2, 32).bfloat16()
try:
    dispatch_attention_fn(x, x, x)
except ValueError as error:
    assert {name!r} == "sagebwd" and "the kernels need a CUDA GPU" in str(error), error
else:
    assert {name!r} == "native"
"""


@pytest.mark.parametrize("name, first", [
    ("sagebwd", "import sagebwd"), ("native", "import diffusers, sagebwd"),
    ("sagebwd", "import sagebwd.integrations.diffusers")])  # fmt: skip
def test_a_variable_of_the_environment_says_the_backend(name, first):
    """Which diffusers reads before it can know ours."""
    where = "sagebwd.integrations.diffusers"
    code = CHOSEN.format(first=first, name=name, module=where if name == door.NAME else (
        "diffusers.models.attention_dispatch"))  # fmt: skip
    warm.run(["-c", code], loaded="torch._dynamo",
             env=os.environ | {"DIFFUSERS_ATTN_BACKEND": name}).check_returncode()  # fmt: skip


KNOWN = """
{first}
import diffusers
model = diffusers.WanTransformer3DModel(
    num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=16,
    freq_dim=16, ffn_dim=32, num_layers=1, rope_max_seq_len=32)
{then}
model.set_attention_backend("sagebwd")
print(model.blocks[0].attn1.processor._attention_backend.value)
"""


@pytest.mark.parametrize("first, then", [("import sagebwd", ""), ("", "import sagebwd")],
                         ids=["before", "behind"])  # fmt: skip
def test_both_packages_make_the_name_known(first, then):
    """As they do in transformers, whichever is imported first."""
    done = warm.run(["-c", KNOWN.format(first=first, then=then)], loaded="torch._dynamo")
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["sagebwd"]), done.stderr
