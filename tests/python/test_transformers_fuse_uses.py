"""Fused models are copied, saved, compiled, checkpointed, adapted and sharded as others are."""

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from alike import relative  # noqa: E402
from fused_models import assert_near, model_of, results, tokens  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention  # noqa: E402

import sagebwd.integrations.transformers as door  # noqa: E402
from sagebwd import SpecError  # noqa: E402
from sagebwd.integrations import _fused_forward  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


@pytest.fixture
def fused(monkeypatch):
    """How many layers called the fused kernel since the last question."""
    made, function = [], _fused_forward.qk_norm_rope

    def counted(*given, **more):
        made.append(1)
        return function(*given, **more)

    def asked():
        count = len(made)
        made.clear()
        return count

    monkeypatch.setattr(_fused_forward, "qk_norm_rope", counted)
    return asked


def layer(model, number=0):
    return model.model.layers[number].self_attn


def test_twice_is_once_and_unfused_is_as_before():
    model, ids = model_of("qwen3"), tokens(2, 12)
    names, attention = list(model.state_dict()), layer(model)
    before = results(model, ids)
    report = door.fuse(model)
    assert door.fuse(model) == report
    assert layer(model) is attention and type(attention).__mro__.count(_fused_forward.Fused) == 1
    assert isinstance(attention, Qwen3Attention) and list(model.state_dict()) == names
    assert "fused: RMSNorm over each head (gain: weight) and RoPE" in repr(model)
    assert door.unfuse(model) == list(report.fused)
    assert type(attention) is Qwen3Attention and "fused" not in repr(model)
    assert door.unfuse(model) == []
    after = results(model, ids)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_cache_that_comes_by_its_place():
    model = model_of("qwen3")
    states = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1))
    given = (states, model.model.rotary_emb(states, torch.arange(4)[None]), None)
    kept = []
    for _ in range(2):
        cache = transformers.DynamicCache()
        layer(model)(*given, cache)
        kept.append(cache.get_seq_length())
        door.fuse(model)
    assert kept == [4, 4]


def test_copies_are_fused_and_apart():
    model, ids = model_of("olmo2"), tokens(2, 12)
    door.fuse(model)
    expected = results(model, ids)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)),
              torch.load(saved, weights_only=False)]  # fmt: skip
    loaded = model_of("olmo2")
    torch.nn.init.zeros_(layer(loaded).q_norm.weight)
    door.fuse(loaded)
    loaded.load_state_dict(model.state_dict())
    with torch.no_grad():
        layer(model).q_norm.weight.zero_()
    for other in (*copies, loaded):
        assert type(layer(other)) is type(layer(model)) and layer(other) is not layer(model)
        assert_near(results(other, ids), expected, 1e-6)
    door.unfuse(copies[0])
    assert door.fuse(model).fused.keys() == door.fuse(copies[1]).fused.keys()


def test_random_numbers_modes_and_gradients_are_left_alone():
    model = model_of("llama", dtype=torch.bfloat16)
    layer(model).train(False)
    model.requires_grad_(False)
    layer(model).config.attention_dropout = 0.0
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        door.fuse(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert layer(model).config._attn_implementation == "eager"
    assert not any("sagebwd: " in name for name in
                   transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS)  # fmt: skip
    assert model(tokens(2, 8)).logits.isfinite().all()


def test_dropout_is_told_in_training_alone():
    model, ids = model_of("llama"), tokens(2, 12)  # attention_dropout=0.1
    torch.manual_seed(0)
    expected = results(model.train(), ids)
    door.fuse(model)
    torch.manual_seed(0)
    assert_near(results(model, ids), expected, 1e-5)
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_under_autocast(family):
    """Attention gets queries of the type that projections give."""
    model, ids = model_of(family, "sdpa"), tokens(2, 12)
    door.fuse(model)
    expected = results(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(results(model, ids), expected, 0.1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, fused):
    model, ids = model_of("gemma3").train(), tokens(2, 12)
    door.fuse(model)
    expected = results(model, ids)
    fused()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = results(model, ids)
    assert fused() == 4
    assert_near(found, expected, 1e-6)


@pytest.mark.parametrize("family", ["olmo2", "qwen3_next"])
def test_one_compiled_graph(family, fused):
    model = model_of(family)
    attention = layer(model, 1)
    states = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(1))
    tables = model.model.rotary_emb(states, torch.arange(12)[None])
    mask = torch.full((12, 12), -torch.inf).triu(1)[None, None]

    def found(function):
        attention.zero_grad()
        out = function(states, tables, mask)[0]
        out.square().sum().backward()
        return {"output": out.detach()} | {
            name: p.grad.clone() for name, p in attention.named_parameters()
        }

    expected = found(attention)
    door.fuse(model)
    torch._dynamo.reset()
    fused()
    assert_near(found(torch.compile(attention, fullgraph=True, backend="aot_eager")), expected,
                1e-5)  # fmt: skip
    assert fused() == 1


def test_a_model_that_was_compiled_before(fused):
    model, ids = model_of("qwen3", num_hidden_layers=1), tokens(2, 12)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected = compiled(ids, use_cache=False).logits
        assert list(door.fuse(compiled).fused) == ["_orig_mod.model.layers.0.self_attn"]
        fused()
        found = compiled(ids, use_cache=False).logits
        assert fused() == 1
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        door.unfuse(compiled)
        assert torch.equal(compiled(ids, use_cache=False).logits, expected) and not fused()


def test_hooks_of_accelerate():
    hooks = pytest.importorskip("accelerate.hooks", reason="needs accelerate")
    model, ids = model_of("qwen3"), tokens(2, 12)
    expected = results(model, ids)
    hooks.add_hook_to_module(layer(model), hooks.ModelHook())
    report = door.fuse(model)
    assert "hooks of accelerate: fuse before" in report.left["model.layers.0.self_attn"]
    hooks.remove_hook_from_module(layer(model))
    assert len(door.fuse(model).fused) == 2
    hooks.add_hook_to_module(layer(model), hooks.ModelHook())
    assert_near(results(model, ids), expected, 1e-5)
    with pytest.raises(SpecError, match=r"model.layers.0.self_attn was replaced after fuse"):
        door.unfuse(model)
    hooks.remove_hook_from_module(layer(model))
    assert len(door.unfuse(model)) == 2
    assert_near(results(model, ids), expected, 1e-6)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_attention_by_sagebwd(family, kernels_on_the_cpu):  # noqa: F811
    ids, found = tokens(2, 24), []
    for implementation in ("eager", "sagebwd"):
        model = model_of(family, implementation, torch.bfloat16)
        if implementation == "sagebwd":
            door.fuse(model)
        found.append(results(model, ids))
    assert relative(found[1]["logits"], found[0]["logits"]) < 0.05


@pytest.mark.parametrize("first", ["peft", "fuse"])
def test_lora(first, fused):
    """Adapters of projections are called, and so is a norm of which PEFT trains a copy."""
    peft = pytest.importorskip("peft", reason="needs peft")
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    saved = {"modules_to_save": ["k_norm"]} if first == "fuse" else {}
    config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False, **saved)
    ids, found = tokens(2, 12), []
    for is_fused in (False, True):
        model = model_of("qwen3")
        if is_fused and first == "fuse":
            door.fuse(model)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, config)
        if is_fused and first == "peft":
            assert len(door.fuse(model).fused) == 2
        fused()
        found.append(results(model, ids))
        assert fused() == 2 * is_fused
    assert sum("lora_A" in name for name in found[0]) == 8
    assert sum("k_norm" in name for name in found[0]) == (2 if saved else 0)
    assert_near(found[1], found[0], 1e-5)
    if saved:
        door.unfuse(model)
        with pytest.raises(SpecError, match=r"k_norm \(\w+Wrapper\) has modules within"):
            door.fuse(model)


@pytest.mark.parametrize("first", ["fully_shard", "fuse"])
@pytest.mark.parametrize("part", ["layer", "attention", "norm"])
def test_sharded_by_fsdp2(first, part, fused):
    from torch.distributed.fsdp import fully_shard

    model, ids = model_of("qwen3"), tokens(2, 12)
    expected = results(model, ids)
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        if first == "fuse":
            door.fuse(model)
        for block in model.model.layers:
            parts = {"attention": block.self_attn, "norm": block.self_attn.q_norm}
            for module in (*(parts[name] for name in parts if name == part), block):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if first != "fuse" and part == "norm":
            with pytest.raises(SpecError, match=r"q_norm .*has hooks"):
                door.fuse(model)
            return
        assert len(door.fuse(model).fused) == 2
        for is_fused in (True, False):
            fused()
            found = {name: getattr(t, "full_tensor", lambda t=t: t)()
                     for name, t in results(model, ids).items()}  # fmt: skip
            assert fused() == 2 * is_fused
            assert_near(found, expected, 1e-5)
            door.unfuse(model)
            assert type(layer(model)).__name__ in ("Qwen3Attention", "FSDPQwen3Attention")
    finally:
        dist.destroy_process_group()


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        empty = model_of("qwen3_next")
    assert len(door.fuse(empty).fused) == 1
    model, ids = model_of("qwen3_next"), tokens(2, 12)
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    empty.model.rotary_emb = model.model.rotary_emb
    assert_near(results(empty, ids), results(model, ids), 1e-5)
