"""Tiny diffusion transformers with QK-norm and RoPE in one kernel, beside what they were before."""

import copy
import functools
import pickle

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

import test_diffusers as tiny  # noqa: E402
from diffusers.models.attention_dispatch import AttentionBackendName  # noqa: E402
from diffusers.models.transformers.transformer_flux import FluxAttention  # noqa: E402
from fused_diffusers import MODELS, assert_same, flux, hunyuan, kinds, made, run, wan_of_images  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from test_diffusers import backend_as_before  # noqa: E402, F401

import sagebwd.integrations.diffusers as door  # noqa: E402
from sagebwd.integrations import _fused_processors as processors  # noqa: E402
from sagebwd.integrations import _processor_norms as norms  # noqa: E402
from sagebwd.integrations import _processor_check as check  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")
NO_ROPE = "cross-attention has no RoPE"


each_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


@pytest.fixture
def fronts(monkeypatch):
    """The calls of `qk_norm_rope`."""
    calls, function = [], norms.qk_norm_rope

    def counted(*given, **of):
        calls.append(of)
        return function(*given, **of)

    monkeypatch.setattr(norms, "qk_norm_rope", counted)
    return calls


@each_model
def test_a_fused_model_computes_the_same(build, fronts):
    model, inputs = made(build)
    expected, before = run(model, inputs), kinds(model)
    report = door.fuse(model)
    fronts.clear()
    assert_same(run(model, inputs), expected)
    count = sum(isinstance(attn.processor, processors.Processor)
                for _, attn in check._attentions(model))  # fmt: skip
    assert len(fronts) >= count == len(report.fused) > 0
    assert report.fused.keys() | report.left.keys() == {n for n, _ in check._attentions(model)}
    assert door.unfuse(model) == list(report.fused) and kinds(model) == before
    fronts.clear()
    assert all(map(torch.equal, run(model, inputs).values(), expected.values())) and not fronts


def test_reports():
    report = door.fuse(made(tiny.wan)[0])
    assert report.fused == {f"blocks.{i}.attn1": "QK-norm over all heads and RoPE" for i in (0, 1)}
    assert str(report).splitlines() == [
        "fused: blocks.0.attn1 and 1 more: QK-norm over all heads and RoPE",
        f"left as it was: blocks.0.attn2 and 1 more: {report.left['blocks.0.attn2']}"]  # fmt: skip
    assert report.left["blocks.1.attn2"].startswith(NO_ROPE)
    report = door.fuse(made(hunyuan)[0])
    assert set(report.fused) == {"transformer_blocks.0.attn", "single_transformer_blocks.0.attn"}
    (reason,) = report.left.values()
    assert reason.startswith("AttnProcessor2_0 of diffusers")
    assert set(door.fuse(made(tiny.ltx)[0]).fused.values()) == {"RoPE"}
    (reason,) = door.fuse(made(wan_of_images)[0]).left.values()
    assert reason.startswith(NO_ROPE)


def test_tables_and_norms_are_given_as_they_are(fronts):
    """Wan's 1/rms, no rotation of HunyuanVideo's text, and other tables for Qwen-Image's."""
    for build, text in ((tiny.wan, 0), (hunyuan, 12), (tiny.qwen, 0)):
        model, inputs = made(build)
        door.fuse(model)
        fronts.clear()
        run(model, inputs)
        if build is tiny.wan:
            assert all(call["q_inv_rms"].shape == (1, 32) for call in fronts)
            assert all(call["q_norm"].shape == (2, 32) for call in fronts)
        elif text:  # double: the video, then text; single: both
            rotated, still, single = (call["rope"] for call in fronts)
            assert still is None and rotated[0].shape == (32, 16)
            assert single[0].shape == (44, 16) and (single[0][32:] == 1).all()
            assert (single[1][32:] == 0).all() and not (single[1][:32] == 0).all()
        else:
            assert [call["rope"][0].shape for call in fronts[:2]] == [(12, 16), (16, 16)]


def test_fused_twice_is_fused_once():
    model, inputs = made(flux)
    first, expected = door.fuse(model), run(model, inputs)
    once = [attn.processor for _, attn in check._attentions(model)]
    assert door.fuse(model) == first
    assert once == [attn.processor for _, attn in check._attentions(model)]
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert_same(run(copied, inputs), expected, most=0)
    for one in (copied, model):
        assert door.unfuse(one) == list(first.fused) and not door.unfuse(one)
        assert set(kinds(one)) == {"FluxAttnProcessor"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant, fronts):
    for build in (tiny.wan, flux):
        model, inputs = made(build)
        door.fuse(model)
        expected = run(model.train(), inputs)
        fronts.clear()
        if reentrant:
            again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
            model.enable_gradient_checkpointing(again)
            inputs["hidden_states"].requires_grad_()
        else:
            model.enable_gradient_checkpointing()
        assert_same(run(model, inputs), expected, most=0)
        assert len(fronts) > len(door.fuse(model).fused)  # the backward called them again


@pytest.mark.parametrize(
    "name, place",
    [
        ("wan", "blocks.0"),
        ("qwen", "transformer_blocks.0.attn"),
        ("hunyuan", "single_transformer_blocks.0"),
        ("ltx", "transformer_blocks.0.attn1"),
    ],
)
def test_compiled_blocks(name, place):
    model, inputs = made(MODELS[name])
    expected = run(model, inputs)
    door.fuse(model)
    torch._dynamo.reset()
    compiled = torch.compile(model.get_submodule(place), fullgraph=True, backend="aot_eager")
    model.set_submodule(place, compiled)
    found = run(model, inputs)  # which has zeros for what takes no part
    assert_same(found, {name: torch.zeros_like(t) for name, t in found.items()} | expected)


def test_what_was_compiled_is_compiled_again():
    attn = FluxAttention(64, heads=2, dim_head=32, pre_only=True)
    given = processors.FluxProcessor.sample(attn, torch.randn)
    graphs = []

    def backend(graph, _):
        graphs.append("front_forward" in str(graph.code) or "qk_norm" in str(graph.code))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(attn, fullgraph=True, backend=backend)
    with torch.no_grad():
        expected = compiled(**given)
        assert list(door.fuse(compiled).fused) == ["_orig_mod"]
        torch.testing.assert_close(compiled(**given), expected)
        door.unfuse(compiled)
        assert torch.equal(compiled(**given), expected)
    assert graphs[:2] == [False, True]


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(when):
    peft = pytest.importorskip("peft", reason="needs PEFT")
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "add_q_proj"], lora_dropout=0.5,
                             init_lora_weights=False)  # fmt: skip
    results = []
    for is_fused in (False, True):
        model, inputs = made(flux)
        model.requires_grad_(False)
        if is_fused and when == "before":
            door.fuse(model)
        torch.manual_seed(1)
        model.add_adapter(config)
        model.train()
        if is_fused and when == "after":
            state = torch.get_rng_state()
            assert len(door.fuse(model).fused) == 2
            assert torch.equal(state, torch.get_rng_state())
            assert all(module.training for module in model.modules())
            assert all(p.grad is None for p in model.parameters())
        torch.manual_seed(2)  # dropout
        results.append(run(model, inputs))
    assert all("lora" in name for name in results[0] if name != "output") and len(results[0]) > 5
    assert_same(*reversed(results))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [tiny.wan, flux, tiny.qwen])
def test_models_of_16_bits_are_as_near_to_fp32(build, dtype):
    """In all gradients as one; they round once less."""

    def error(found):
        apart = torch.cat([(found[name].float() - t).flatten() / t.norm().clamp(min=1e-3)
                           for name, t in right.items()])  # fmt: skip
        return float(apart.norm())

    model, inputs = made(build, dtype)
    wide = copy.deepcopy(model).float()
    right = run(wide, {name: t.float() if isinstance(t, torch.Tensor) and t.is_floating_point()
                       else t for name, t in inputs.items()})  # fmt: skip
    before = run(model, inputs)
    assert door.fuse(model).fused
    found = run(model, inputs)
    assert all(found[name].dtype == t.dtype for name, t in before.items())
    assert not torch.equal(found["output"], before["output"])
    assert error(found) < 1.1 * error(before)


@pytest.mark.usefixtures("kernels_on_the_cpu")
@pytest.mark.filterwarnings("ignore:set_attention_backend")
def test_any_backend_goes_on():
    model, inputs = tiny.made(hunyuan)
    model.set_attention_backend("sagebwd")
    before = tiny.run(model, inputs)
    model.zero_grad()
    door.fuse(model)
    found = tiny.run(model, inputs)
    tiny.assert_close(found, before)
    model.set_attention_backend("native")
    model.zero_grad()
    native = tiny.run(model, inputs)
    tiny.assert_close(native, before)
    assert not torch.equal(native[0], found[0])
    door.unfuse(model)
    backends = {attn.processor._attention_backend for _, attn in check._attentions(model)
                if hasattr(attn.processor, "_attention_backend")}  # fmt: skip
    assert backends == {AttentionBackendName("native")}


@pytest.mark.parametrize("name", ["wan", "flux", "qwen", "hunyuan", "ltx"])
def test_what_the_dispatcher_is_given(name, monkeypatch):
    model, inputs = made(MODELS[name])
    config, given = object(), []
    for _, attn in check._attentions(model):
        attn.processor._parallel_config = config
    count = len(door.fuse(model).fused)
    dispatch = processors.dispatch_attention_fn

    def seen(*tensors, parallel_config, **named):
        given.append((parallel_config, named))
        return dispatch(*tensors, **named)

    monkeypatch.setattr(processors, "dispatch_attention_fn", seen)
    for _, attn in check._attentions(model):
        if not isinstance(attn.processor, processors.Processor):
            attn.processor._parallel_config = None
    with torch.no_grad():
        model(**inputs)
    assert len(given) == count and all(one is config for one, _ in given)
    has_mask = name in ("qwen", "hunyuan")
    assert all((named["attn_mask"] is not None) == has_mask for _, named in given)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradients_are_checked_anywhere(context, monkeypatch):
    """Models for inference are fused where nothing else wants gradients."""
    gradients, grad = [], torch.autograd.grad

    def counted(*given, **of):
        gradients.append(grad(*given, **of))
        return gradients[-1]

    monkeypatch.setattr(torch.autograd, "grad", counted)
    model, inputs = made(flux)
    with context():
        report = door.fuse(model)
        model(**inputs)
    assert len(report.fused) == 2 and len(gradients) == 4
    run(model, inputs)


def test_norms_with_hooks_or_others_in_their_place_are_called():
    """As PEFT's modules_to_save, and hooks that move weights."""
    for build in (tiny.wan, flux):
        model, inputs = made(build)
        door.fuse(model)
        attn = next(a for _, a in check._attentions(model)
                    if isinstance(a.processor, processors.Processor))  # fmt: skip
        attn.norm_q.register_forward_hook(lambda norm, given, out: 2 * out)
        attn.norm_k = torch.nn.Sequential(attn.norm_k)
        found = run(model, inputs)
        door.unfuse(model)
        assert_same(found, run(model, inputs))


def test_gains_and_eps_of_each_norm(fronts):
    """Also norms without gain, and of two eps, of which `qk_norm_rope` takes one."""
    torch.manual_seed(0)
    attn = FluxAttention(64, heads=2, dim_head=32, elementwise_affine=False, added_kv_proj_dim=48)
    attn.norm_k.eps = 0.5
    door.fuse(attn)
    given = processors.FluxProcessor.sample(attn, torch.randn)
    fronts.clear()
    found = attn(**given)
    assert [of.get("q_norm") is True for of in fronts] == [False, True]
    assert "k_norm" in fronts[0] and "k_norm" not in fronts[1]
    assert door.unfuse(attn) == ["FluxAttention"]
    for x, y in zip(found, attn(**given)):
        torch.testing.assert_close(x, y)
