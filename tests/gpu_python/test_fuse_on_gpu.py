"""Models of transformers whose norm and RoPE are fused, by kernels, beside the models before."""

import pytest
from inputs import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")

from alike import relative  # noqa: E402
from fused_models import model_of, results, tokens  # noqa: E402

import sagebwd.integrations.transformers as door  # noqa: E402

SIZES = {"hidden_size": 256, "head_dim": 64}
FAMILIES = ["qwen3", "llama", "gemma3", "olmo2", "glm4", "gpt_oss", "qwen3_next"]


@pytest.fixture
def launches(front_passes):
    """How many calls took the kernels since the last question: (forward, backward)."""

    def asked():
        found = front_passes.count("front"), front_passes.count("front_gradients")
        front_passes.clear()
        return found

    return asked


def on_gpu(family, implementation="sagebwd", dtype=torch.bfloat16):
    sizes = SIZES if family != "llama" else SIZES | {"attention_dropout": 0.0}
    return model_of(family, implementation, dtype, **sizes).cuda()


def right_of(family, ids):
    """Logits and gradients of the model with the same weights, in FP32 and not fused."""
    model = on_gpu(family, "eager", torch.bfloat16).float()
    return flat(results(model, ids))


def flat(found):
    """Logits, and all gradients as one."""
    gradients = [t.flatten().float() for name, t in found.items() if "." in name]
    return found["logits"].float(), torch.cat(gradients)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", ["sdpa", "sagebwd"])
def test_fused_models_are_as_near_to_fp32(family, implementation, launches):
    if family == "gpt_oss" and implementation == "sdpa":
        implementation = "eager"  # as sdpa has no sinks
    ids = tokens(2, 200, device="cuda")
    model = on_gpu(family, implementation)
    before = flat(results(model, ids))
    report = door.fuse(model)
    layers = 1 if family == "qwen3_next" else 2
    assert len(report.fused) == layers
    launches()
    after = flat(results(model, ids))
    assert launches() == (layers, layers)
    for x, y, z in zip(after, before, right_of(family, ids)):
        assert relative(x.cpu(), z.cpu()) < 1.2 * relative(y.cpu(), z.cpu()) + 0.002


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_compiled_by_inductor(family):
    ids = tokens(2, 200, device="cuda")
    model = on_gpu(family)
    door.fuse(model)
    expected = flat(results(model, ids))
    torch._dynamo.reset()
    found = flat(results(torch.compile(model, fullgraph=True), ids))
    right = right_of(family, ids)
    for x, y, z in zip(found, expected, right):
        assert relative(x.cpu(), z.cpu()) < 1.2 * relative(y.cpu(), z.cpu()) + 0.002


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_queries_and_keys_formed_again_give_the_same_bits(family, launches):
    ids, found = tokens(2, 200, device="cuda"), []
    for again in (False, True):
        model = on_gpu(family)
        door.fuse(model, recompute_qk=again)
        launches()
        found.append(flat(results(model, ids)))
        assert launches() == (4 if again else 2, 2)
    assert torch.equal(found[1][0], found[0][0])
    # The gradient of an embedding is summed in any order.
    assert relative(found[1][1].cpu(), found[0][1].cpu()) < 1e-3


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, launches):
    ids = tokens(2, 200, device="cuda")
    model = on_gpu("qwen3").train()
    door.fuse(model)
    expected = flat(results(model, ids))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    launches()
    found = flat(results(model, ids))
    assert launches() == (4, 2)
    assert torch.equal(found[0], expected[0])
    # The gradient of an embedding is summed in any order.
    assert relative(found[1].cpu(), expected[1].cpu()) < 1e-3


def test_lora_in_16_bits(launches):
    peft = pytest.importorskip("peft", reason="needs peft")
    ids, found = tokens(2, 200, device="cuda"), []
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    for is_fused in (False, True):
        model = on_gpu("qwen3")
        torch.manual_seed(0)
        model = peft.get_peft_model(model, config)
        if is_fused:
            assert len(door.fuse(model).fused) == 2
        launches()
        found.append(flat(results(model, ids)))
        assert launches() == ((2, 2) if is_fused else (0, 0))
    for x, y in zip(*found):
        assert relative(x.cpu(), y.cpu()) < 0.06


def test_generation():
    model, ids = on_gpu("qwen3", "sdpa").eval(), tokens(1, 20, device="cuda")

    def scores():
        out = model.generate(ids, max_new_tokens=4, do_sample=False, output_scores=True,
                             return_dict_in_generate=True, disable_compile=True)  # fmt: skip
        return out.scores[0].float()

    expected = scores()
    door.fuse(model)
    assert relative(scores().cpu(), expected.cpu()) < 0.03
