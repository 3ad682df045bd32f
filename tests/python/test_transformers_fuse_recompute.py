"""Models fused with recompute_qk=True keep queries and keys once, and give the same bits."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs transformers")

from alike import bytes_kept  # noqa: E402
from fused_models import assert_near, model_of, results, tokens  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401

import sagebwd.integrations.transformers as door  # noqa: E402
from sagebwd import SpecError  # noqa: E402
from sagebwd.core import not_kept  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")
hooks_can_be_seen = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="needs PyTorch 2.8")


def fused(family, recompute_qk, implementation="sdpa", dtype=torch.float32, **sizes):
    model = model_of(family, implementation, dtype, **sizes)
    door.fuse(model, recompute_qk=recompute_qk)
    return model


@hooks_can_be_seen
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["qwen3", "olmo2", "gemma3", "gpt_oss", "qwen3_next"])
def test_the_same_bits(family, implementation):
    ids = tokens(2, 12)
    implementation = "eager" if family == "gpt_oss" else implementation
    wanted, found = (results(fused(family, again, implementation), ids) for again in (False, True))
    assert wanted.keys() == found.keys() and len(found) > 2
    for name, right in wanted.items():
        assert torch.equal(found[name], right), name


def kept_by(model, ids):
    """The bytes that a forward keeps for the backward, beside parameters."""
    return bytes_kept(lambda: model(ids, use_cache=False), but=model.parameters())


@hooks_can_be_seen
@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_it_saves_the_bytes_of_q_and_k(family, kernels_on_the_cpu):  # noqa: F811
    """4 heads of queries and 2 of keys, with 24 tokens of 32 channels, in 2 layers."""
    ids = tokens(2, 24)
    twice, once = (kept_by(fused(family, again, "sagebwd", torch.bfloat16), ids)
                   for again in (False, True))  # fmt: skip
    assert twice - once == 2 * (2 * 2 * (4 + 2) * 24 * 32)


@hooks_can_be_seen
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    ids, found = tokens(2, 12), []
    for again in (False, True):
        model = fused("qwen3", again).train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        found.append(results(model, ids))
    assert all(torch.equal(found[1][name], right) for name, right in found[0].items())


@hooks_can_be_seen
def test_a_compiler_leaves_it_out():
    model, ids = fused("qwen3", True, num_hidden_layers=1), tokens(2, 12)
    expected = results(model, ids)
    torch._dynamo.reset()
    whole = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="recompute_qk=True is not compiled: compile without"):
        whole(ids, use_cache=False)
    torch._dynamo.reset()
    found = results(torch.compile(model, backend="aot_eager"), ids)
    assert_near({name.removeprefix("_orig_mod."): t for name, t in found.items()}, expected, 1e-5)


@hooks_can_be_seen
def test_generation_and_copies():
    """Keys of a cache are no results of norm and RoPE, and without gradients nothing is kept."""
    model, ids = fused("qwen3", True).eval(), tokens(1, 6)
    twin = copy.deepcopy(model)
    found = twin.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    door.unfuse(twin)
    assert torch.equal(found, twin.generate(ids, max_new_tokens=5, min_new_tokens=5,
                                            do_sample=False))  # fmt: skip
    assert ", formed again in the backward" in repr(model)
    assert ", formed again in the backward" not in repr(twin)


@hooks_can_be_seen
def test_what_it_cannot_do_is_said(monkeypatch):
    model = fused("qwen3", False)
    with pytest.raises(SpecError, match=r"layers\.0\.self_attn was fused with recompute_qk=False, "
                       r"and recompute_qk=True is asked for: call unfuse\(model\) first"):
        door.fuse(model, recompute_qk=True)
    door.unfuse(model)
    report = door.fuse(model, recompute_qk=True)
    assert all(said.endswith(", formed again in the backward") for said in report.fused.values())
    assert door.fuse(model, recompute_qk=True) == report
    with pytest.raises(SpecError, match="recompute_qk=1: pass True or False"):
        door.fuse(model, recompute_qk=1)
    monkeypatch.setattr(not_kept, "_hooks_of_caller", None)
    before = model_of("qwen3")
    with pytest.raises(SpecError, match="recompute_qk=True needs PyTorch 2.8"):
        door.fuse(before, recompute_qk=True)
    assert "fused" not in repr(before)
