"""Attention of diffusers fused with recompute_qk=True keeps queries and keys once, and gives the
same bits."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("diffusers", reason="needs diffusers")

import test_diffusers as tiny  # noqa: E402
from alike import bytes_kept  # noqa: E402
from fused_diffusers import assert_same, flux, hunyuan, made, run  # noqa: E402

import sagebwd.integrations.diffusers as door  # noqa: E402
from sagebwd import SpecError  # noqa: E402
from sagebwd.core import not_kept  # noqa: E402
from sagebwd.integrations import _processor_check as check  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")
hooks_can_be_seen = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="needs PyTorch 2.8")
MODELS = {"wan": tiny.wan, "flux": flux, "hunyuan": hunyuan, "ltx": tiny.ltx}


def fused(build, recompute_qk):
    model, inputs = made(build)
    return model, inputs, door.fuse(model, recompute_qk=recompute_qk)


@hooks_can_be_seen
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_the_same_bits(build):
    wanted, found = (run(*fused(build, again)[:2]) for again in (False, True))
    assert wanted.keys() == found.keys() and len(found) > 2
    for name, right in wanted.items():
        assert torch.equal(found[name], right), name


def kept_by(model, inputs):
    """The bytes that a forward keeps for the backward, beside parameters."""
    return bytes_kept(lambda: model(**inputs, return_dict=False), but=model.parameters())


@hooks_can_be_seen
@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_it_saves_the_bytes_of_q_and_k(name, monkeypatch):
    """Self-attention alone is fused in these."""
    sizes, dispatch = [], check.fused.dispatch_attention_fn

    def seen(query, key, *given, **named):
        sizes.append(query.untyped_storage().nbytes() + key.untyped_storage().nbytes())
        return dispatch(query, key, *given, **named)

    twice, once = (kept_by(*fused(MODELS[name], again)[:2]) for again in (False, True))
    model, inputs, report = fused(MODELS[name], True)
    monkeypatch.setattr(check.fused, "dispatch_attention_fn", seen)
    model(**inputs, return_dict=False)
    assert len(sizes) == len(report.fused) and twice - once == sum(sizes) > 0


@hooks_can_be_seen
def test_reports():
    """Double blocks of Flux join text and picture."""
    again, joined = ", formed again in the backward", ", kept as well, as text and picture are"
    _, _, report = fused(flux, True)
    found = {name.partition(".")[0]: (again in said, joined in said)
             for name, said in report.fused.items()}  # fmt: skip
    assert found == {"transformer_blocks": (False, True),
                     "single_transformer_blocks": (True, False)}  # fmt: skip
    model, _ = made(flux)
    before = door.fuse(model)
    assert not any(again in said or joined in said for said in before.fused.values())
    with pytest.raises(SpecError, match=r"single_transformer_blocks\.0\.attn was fused with rec"
                       r"ompute_qk=False, and recompute_qk=True is asked for: call unfuse"):
        door.fuse(model, recompute_qk=True)
    door.unfuse(model)
    assert door.fuse(model, recompute_qk=True) == report == door.fuse(model, recompute_qk=True)


@hooks_can_be_seen
def test_what_it_cannot_do_is_said(monkeypatch):
    qwen, _ = made(tiny.qwen)
    before = [attn.processor for _, attn in check._attentions(qwen)]
    with pytest.raises(SpecError, match="saves nothing in QwenImage.* leave it out"):
        door.fuse(qwen, recompute_qk=True)
    assert before == [attn.processor for _, attn in check._attentions(qwen)]
    with pytest.raises(SpecError, match="recompute_qk=1: pass True or False"):
        door.fuse(qwen, recompute_qk=1)
    monkeypatch.setattr(not_kept, "_hooks_of_caller", None)
    with pytest.raises(SpecError, match="recompute_qk=True needs PyTorch 2.8"):
        door.fuse(qwen, recompute_qk=True)


@hooks_can_be_seen
def test_a_compiler_leaves_it_out():
    model, inputs, _ = fused(tiny.wan, True)
    expected = run(model, inputs)
    torch._dynamo.reset()
    whole = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="recompute_qk=True is not compiled: compile without"):
        whole(**inputs, return_dict=False)
    torch._dynamo.reset()
    model.blocks[0].compile(backend="aot_eager")
    assert_same(run(model, inputs), expected)
