"""Soft-capping, ALiBi and position biases by other libraries' arguments and models of transformers,
on a simulated GPU: against FP64, and against eager attention."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
from sagebwd.integrations import dropins  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_intervals import made  # noqa: E402
from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mixed import errors, on_the_simulator  # noqa: E402, F401
from test_score import exact, judged  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_simulator")


def flash(function, q, k, v, **given):
    """(out, lse) of a drop-in, of and as (batch, heads, tokens, channels)."""
    tokens_first = (t.transpose(1, 2) for t in (q, k, v))
    out, lse, _ = function(*tokens_first, return_attn_probs=True, **given)
    return out.transpose(1, 2), lse


def alibi_of(slopes, queries, keys):
    """The penalty as flash-attention documents it, of (batch or 1, heads, queries, keys)."""
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
    slopes = slopes.double().reshape(-1, slopes.shape[-1], 1, 1)
    return -slopes * (i + keys - queries - j).abs()


SLOPES = {"heads": torch.tensor([0.05, 0.2]),
          "batches": torch.tensor([[0.05, 0.2], [0.1, 0.01]])}  # fmt: skip


@pytest.mark.parametrize("name", SLOPES)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("queries", [150, 90])
def test_flash_attentions_scores(name, softcap, queries):
    q, k, v = made(150)
    q = q.detach()[:, :, :queries].contiguous().requires_grad_()
    slopes = SLOPES[name]

    def change(s):
        s = softcap * torch.tanh(s / softcap) if softcap else s
        return s + alibi_of(slopes, queries, 150)

    for causal in (False, True):
        seen = torch.ones(queries, 150, dtype=torch.bool)
        seen = seen.tril(150 - queries) if causal else seen
        found = flash(dropins.flash_attn_func, q, k, v, softcap=softcap, alibi_slopes=slopes,
                      causal=causal)  # fmt: skip
        judged(found, exact(q, k, v, change, seen), q, k, v)


def test_packed_sequences_are_capped():
    q, k, v = (t.detach()[0].transpose(0, 1).contiguous() for t in made(150))
    starts = torch.tensor([0, 90, 150], dtype=torch.int32)
    given = (starts, starts, 90, 90)
    out = dropins.flash_attn_varlen_func(q, k, v, *given, softcap=2.0, causal=True)
    for begin, end in ((0, 90), (90, 150)):
        own = (t[begin:end][None] for t in (q, k, v))
        assert torch.equal(out[begin:end], dropins.flash_attn_func(*own, softcap=2.0,
                                                                   causal=True)[0])  # fmt: skip
    assert not torch.equal(out, dropins.flash_attn_varlen_func(q, k, v, *given, causal=True))
    with pytest.raises(sagebwd.SpecError, match="alibi_slopes for packed sequences.*each sequence"):
        dropins.flash_attn_varlen_func(q, k, v, *given, alibi_slopes=torch.ones(2))


@pytest.mark.parametrize("given, message", [
    (dict(softcap=-1.0), "softcap=-1.0: pass a positive number"),
    (dict(softcap=float("nan")), "softcap=nan: pass a positive number"),
    (dict(softcap="2"), "softcap='2': pass a positive number"),
    (dict(alibi_slopes=torch.ones(3)), r"shape \(3,\) on cpu: pass \(2,\) or \(2, 2\) on cpu"),
    (dict(alibi_slopes=torch.ones(2).half()), "alibi_slopes is torch.float16: pass"),
    (dict(alibi_slopes=0.5), "alibi_slopes is float: pass"),
    (dict(softcap=2.0, score="tanh(s)"), "score and softcap or alibi_slopes are given together"),
])  # fmt: skip
def test_refusals(given, message):
    q, k, v = (t.detach().transpose(1, 2) for t in made(70))
    with pytest.raises(sagebwd.SpecError, match=message):
        dropins.flash_attn_func(q, k, v, **given)


@pytest.mark.parametrize("function", [sagebwd.attention, sagebwd.block_sparse_attention])
@pytest.mark.parametrize("name, message", [
    ("softcap", r"score='50.0 \* tanh\(s / 50.0\)'"), ("alibi_slopes", r"slope\[h\] \* abs"),
    ("attn_bias", r"bias\[h, q - k \+ 511\]")])  # fmt: skip
def test_keywords_of_others_point_to_score(function, name, message):
    q, k, v = (t.detach() for t in made(70))
    with pytest.raises(TypeError, match=message):
        function(q, k, v, **{name: 1.0})


# ---- models of transformers ----------------------------------------------------------------------

SIZES = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
         "max_position_embeddings": 256}  # fmt: skip


def gemma2(implementation, cap=2.0, dtype=torch.bfloat16):
    """Its first layer sees windows of 16 tokens."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.Gemma2Config(
        **SIZES, attn_logit_softcapping=cap, sliding_window=16, query_pre_attn_scalar=64,
        layer_types=["sliding_attention", "full_attention"])  # fmt: skip
    return sharpened(transformers.AutoModelForCausalLM, config, implementation, dtype)


def sharpened(kind, config, implementation, dtype):
    """A model whose attention attends to something, with the same weights in all dtypes."""
    torch.manual_seed(0)
    config._attn_implementation = implementation
    make = getattr(kind, "from_config", None) or kind._from_config
    model = make(config, dtype=torch.bfloat16).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "Attention.q.weight")):
            parameter.data *= 10
    return model


def results(model, weights, **given):
    logits = model(**given).logits * weights[..., None]
    direction = drawn(*logits.shape, seed=2, dtype=torch.float32)
    (logits.float() * direction).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return logits, torch.cat(gradients)


def assert_as_eager(make, weights, lost, **given):
    """Near the model in FP32 with eager attention, as BF16 with eager attention is; one that has
    `lost` what it asks for is far away."""
    found, plain = (results(make(kind), weights, **given) for kind in ("sagebwd", "eager"))
    right = results(make("eager", dtype=torch.float32), weights, **given)
    other = results(lost(), weights, **given)
    for x, y, z, w in zip(found, plain, right, other):
        (x, y, w) = errors([x, y, w], [z] * 3)
        assert x < 2 * y + 0.03, (x, y)
        assert w > 2 * x, (w, x)


@pytest.mark.parametrize("padded", [False, True])
def test_gemma_2(padded):
    ids = torch.randint(100, (2, 40), generator=torch.Generator().manual_seed(1))
    padding = torch.ones(2, 40, dtype=torch.int64)
    padding[1, 30:] = 1 - padded
    assert_as_eager(gemma2, padding, lambda: gemma2("eager", None, torch.float32), input_ids=ids,
                    attention_mask=padding)  # fmt: skip


def test_soft_capping_is_refused_of_shared_sequences_and_wrong_numbers(monkeypatch):
    pytest.importorskip("transformers", reason="needs transformers")
    import sagebwd.integrations.transformers as door

    q = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    module = torch.nn.Linear(2, 2)
    with pytest.raises(sagebwd.SpecError, match="softcap=-5.0: pass a positive number"):
        door.attend(module, q, q, q, None, softcap=-5.0)
    with pytest.raises(sagebwd.SpecError, match=r"position_bias has shape \(1, 2, 8\)"):
        door.attend(module, q, q, q, None, position_bias=torch.zeros(1, 2, 8))
    monkeypatch.setattr(door, "_ranks", object())
    with pytest.raises(sagebwd.SpecError, match="softcap=5.0: sequences that ranks share"):
        door.attend(module, q, q, q, None, softcap=5.0)
