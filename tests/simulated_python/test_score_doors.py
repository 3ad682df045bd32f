"""Soft-capping, ALiBi and position biases by other libraries' arguments and models of transformers,
on a simulated GPU: against FP64, and against eager attention."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
from sagebwd.integrations import dropins  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_intervals import made  # noqa: E402
from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mixed import errors, on_the_simulator  # noqa: E402, F401
from test_score import exact, judged  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from documents import blocks_of  # noqa: E402

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


#: Any two values of two arguments meet: each row has kernels of its own.
@pytest.mark.parametrize("name, softcap, queries, causal", [
    ("heads", 0.0, 150, False), ("heads", 2.0, 90, True), ("batches", 2.0, 150, True),
    ("batches", 0.0, 90, True), ("batches", 2.0, 90, False)])  # fmt: skip
def test_flash_attentions_scores(name, softcap, queries, causal):
    q, k, v = made(150)
    q = q.detach()[:, :, :queries].contiguous().requires_grad_()
    slopes = SLOPES[name]

    def change(s):
        s = softcap * torch.tanh(s / softcap) if softcap else s
        return s + alibi_of(slopes, queries, 150)

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


def test_slopes_that_require_grad_get_one():
    q, k, v = (t.detach().transpose(1, 2) for t in made(90))
    slopes = torch.tensor([0.05, 0.2], requires_grad=True)
    out = dropins.flash_attn_func(q, k, v, alibi_slopes=slopes)
    wide = slopes.detach().double().requires_grad_()
    right = exact(*(t.transpose(1, 2) for t in (q, k, v)),
                  lambda s: s + alibi_of(wide, 90, 90))[0].transpose(1, 2)  # fmt: skip
    weights = drawn(*out.shape, seed=9, dtype=torch.float64)
    found, = torch.autograd.grad((out.double() * weights).sum(), slopes)
    wanted, = torch.autograd.grad((right * weights).sum(), wide)
    assert errors([found], [wanted])[0] < 0.02


def test_the_blocks_of_the_page_run():
    page = Path(__file__).resolve().parents[2] / "docs/use/scores.md"
    names = {"__name__": "a page"}
    texts = [b.text for b in blocks_of(page.name, page.read_text()) if b.language == "python"]
    for text in texts:
        exec(compile(text.replace('"cuda"', '"cpu"'), str(page), "exec"), names)
    assert len(texts) == 3
    assert names["temperature"].grad.abs().min() > 0
    assert (names["weight"].grad.abs() > 0).sum() > 60  # bucket 9 is beyond every distance


def test_functions_without_scores_say_which_one_has_them():
    q, k, v = (t.detach() for t in made(70))
    with pytest.raises(TypeError, match="score.*it is an argument of sagebwd.attention"):
        sagebwd.block_sparse_attention(q, k, v, score="tanh(s)")


# ---- models of transformers ----------------------------------------------------------------------


@pytest.fixture
def models():
    return pytest.importorskip("score_models", reason="needs transformers")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["gemma2", "t5"])
def test_models(models, name, padded):
    models.check(name, "cpu", padded)


def test_a_model_compiled_in_one_graph(models):
    models.check("gemma2", "cpu", backend="aot_eager")


def test_what_models_cannot_have_is_refused(monkeypatch):
    pytest.importorskip("transformers", reason="needs transformers")
    import sagebwd.integrations.transformers as door

    q = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    module = torch.nn.Linear(2, 2)
    with pytest.raises(sagebwd.SpecError, match="softcap=-5.0: pass a positive number"):
        door.attend(module, q, q, q, None, softcap=-5.0)
    with pytest.raises(sagebwd.SpecError, match=r"position_bias has shape \(1, 2, 8\)"):
        door.attend(module, q, q, q, None, position_bias=torch.zeros(1, 2, 8))
    bias, firsts = torch.zeros(1, 2, 8, 8), torch.tensor([0, 5, 8], dtype=torch.int32)
    with pytest.raises(sagebwd.SpecError, match="position_bias with packed sequences.*padded"):
        door.attend(module, q, q, q, None, position_bias=bias, cu_seq_lens_q=firsts,
                    cu_seq_lens_k=firsts)  # fmt: skip
    monkeypatch.setattr(door, "_ranks", object())
    with pytest.raises(sagebwd.SpecError, match="position_bias: sequences that ranks share"):
        door.attend(module, q, q, q, None, position_bias=bias)
    with pytest.raises(sagebwd.SpecError, match="softcap=5.0: sequences that ranks share"):
        door.attend(module, q, q, q, None, softcap=5.0)
