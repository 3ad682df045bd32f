"""Models whose norm and RoPE are fused give what they gave before; what cannot be is named."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from fused_models import FAMILIES, assert_near, model_of, results, tokens  # noqa: E402

import sagebwd.integrations.transformers as door  # noqa: E402
from sagebwd.integrations import _fused_forward  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


@pytest.fixture
def calls(monkeypatch):
    """The keywords of each call of qk_norm_rope."""
    made, function = [], _fused_forward.qk_norm_rope

    def counted(*given, **more):
        made.append(more)
        return function(*given, **more)

    monkeypatch.setattr(_fused_forward, "qk_norm_rope", counted)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_results_and_gradients_are_those_of_before(family, calls):
    model, ids = model_of(family), tokens(2, 12)
    left = torch.ones_like(ids)
    left[0, :4] = 0
    cases = [{}, {"attention_mask": left, "position_ids": (left.cumsum(1) - 1).clamp(0)}]
    expected = [results(model.eval(), ids, **given) for given in cases]
    count = 1 if family == "qwen3_next" else 2
    report = door.fuse(model)
    assert list(report.fused.values()) == [FAMILIES[family][2]] * count
    calls.clear()  # those of the check
    found = [results(model, ids, **given) for given in cases]
    assert len(calls) == len(cases) * count
    for of, wanted in zip(found, expected):
        assert_near(of, wanted, 1e-5)
    # Both are exact where there is no norm: models compute norms in FP32 in any case.
    if "RMSNorm" not in FAMILIES[family][2] and family != "cohere":
        found = results(model.double(), ids)
        assert door.unfuse(model) == list(report.fused)
        assert_near(found, results(model, ids), 1e-12)


def test_packed_sequences_are_told_by_their_positions():
    ids = tokens(1, 30)
    positions = torch.cat([torch.arange(n) for n in (11, 19)])[None]
    model = model_of("qwen3", "sdpa")
    expected = results(model, ids, position_ids=positions)
    door.fuse(model)
    assert_near(results(model, ids, position_ids=positions), expected, 1e-5)
    with pytest.raises(AssertionError):
        assert_near(results(model, ids), expected, 0.01)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "olmo2"])
def test_generation(family, cache):
    model = model_of(family).eval()
    ids = tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0

    def scores():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False,
                             cache_implementation=cache, disable_compile=True, min_new_tokens=5,
                             return_dict_in_generate=True, output_scores=True)  # fmt: skip
        return out.sequences, torch.stack(out.scores)

    expected = scores()
    door.fuse(model)
    found = scores()
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


def test_weights_of_attention_are_recorded_as_before():
    model, ids = model_of("qwen3"), tokens(1, 8)
    expected = model(ids, output_attentions=True).attentions
    door.fuse(model)
    found = model(ids, output_attentions=True).attentions
    assert len(found) == len(expected) == 2
    torch.testing.assert_close(found, expected)


def queries_and_keys(monkeypatch, model, layer, ids):
    """A layer hands these to attention; here they are FP64."""
    kept = []

    def keep(module, query, key, *_, **__):
        kept.extend((query, key))
        return query.transpose(1, 2), None

    monkeypatch.setitem(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS, "keep", keep)
    monkeypatch.setattr(layer, "config", copy.copy(layer.config))
    layer.config._attn_implementation = "keep"
    states = model.model.embed_tokens(ids).to(layer.q_proj.weight.dtype)
    layer(states, model.model.rotary_emb(states, torch.arange(ids.shape[1])[None]), None)
    return torch.cat([t.detach().double().flatten() for t in kept])


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_results_in_16_bits_are_nearer_to_the_exact_ones(monkeypatch, family):
    """The projections and, in most models, the tables round as before."""
    model, ids = model_of(family, dtype=torch.bfloat16), tokens(4, 32)
    layer = model.model.layers[0].self_attn
    exact = queries_and_keys(monkeypatch, model, copy.deepcopy(layer).float(), ids)
    before = queries_and_keys(monkeypatch, model, layer, ids)
    door.fuse(model)
    after = queries_and_keys(monkeypatch, model, layer, ids)
    assert float((after - exact).norm()) < 0.9 * float((before - exact).norm())
