"""Attention by name, the language model, capturing and drawing."""

import json
import shutil
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")


from experiments import capture, training  # noqa: E402
from experiments.attentions import AttentionChoice, make_attention  # noqa: E402
from experiments.config import MODELS, ModelConfig, TrainConfig  # noqa: E402
from experiments.data import Corpus  # noqa: E402
from experiments.language_model import LanguageModel  # noqa: E402
from experiments.training import Trainer  # noqa: E402

CPU = torch.device("cpu")
TINY_CONFIG = TrainConfig(
    model=ModelConfig(dim=32, layers=2, head_dim=16, hidden=64), steps=2, batch=2, tokens=48,
    val_sequences=2, device="cpu",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("tiny_tensors")


def attention(line):
    return AttentionChoice.parse(line)


# ---- attention by name ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    ["sdpa", "sagebwd", "sagebwd:granularity=block,no-smooth-k,precision=qk16",
     "emulated:group-q=32,group-kv=128,smooth-q,no-rotate,precision=s+pv+dv+dp+dq+dk",
     "emulated:precision=none", "emulated:precision=dv16", "sagebwd:smooth-q"],
)  # fmt: skip
def test_attention_choice_prints_what_it_parses(line):
    assert attention(line).label() == line


@pytest.mark.parametrize("value, meant", [("dv16", "dv16"), ("none", "none"), ("dp+s", "s+dp"),
                                          ("dv+s+pv+dk+dq", "")])  # fmt: skip
def test_precision_of_the_emulation_by_its_older_name(value, meant):
    choice = attention(f"emulated:rotate,plan={value}")
    assert choice == attention(f"emulated:precision={value}")
    assert choice.label() == (f"emulated:precision={meant}" if meant else "emulated")


@pytest.mark.parametrize(
    "line, named",
    [("flash", "known: sdpa"), ("sdpa:no-smooth-k", "no option 'smooth_k'"),
     ("sagebwd:plan=s", "no option 'plan'"), ("sdpa:granularity=block", "options: front"),
     ("emulated:no-deterministic", "its options: granularity, .*, dp-sums, precision"),
     ("sagebwd:granularity=row,granularity=block", "has granularity twice"),
     ("emulated:plan=s+xy", "unknown products xy"), ("emulated:precision=dv17", "dv17"),
     ("sagebwd:speed=11", "unknown attention opt")],
)  # fmt: skip
def test_attention_choice_refuses(line, named):
    with pytest.raises(ValueError, match=named):
        attention(line)


def test_emulation_without_int8_is_sdpa():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 40, 16, dtype=torch.bfloat16, requires_grad=True)
               for _ in range(3))
    dout = torch.randn_like(q)
    results = []
    for line in ("sdpa", "emulated:plan=none"):
        out = make_attention(attention(line), CPU)(q, k, v)
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for x, y in zip(*results):
        assert (x.float() - y.float()).norm() < 0.01 * y.float().norm()


def test_the_other_backend_of_sdpa_rounds_otherwise():
    """And no more than in 16 bits."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 80, 16, dtype=torch.bfloat16) for _ in range(3))
    one, other = (make_attention(attention(line), CPU)(q, k, v) for line in ("sdpa", "sdpa-other"))
    distance = (one.float() - other.float()).norm() / one.float().norm()
    assert 0 < distance < 0.01


# ---- model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, millions", [("26m", 25.7), ("110m", 113.2)])
def test_models_have_the_size_of_their_names(name, millions):
    """Without embedding and head."""
    with torch.device("meta"):
        model = LanguageModel(replace(MODELS[name], vocab=8192), lambda q, k, v: v)
    inside = sum(p.numel() for p in model.blocks.parameters())
    assert inside / 1e6 == pytest.approx(millions, abs=0.1)
    assert model.parameter_count() == inside + (2 * 8192 + 1) * MODELS[name].dim


def test_model_is_causal_and_knows_positions():
    config = ModelConfig(dim=32, layers=1, head_dim=16, hidden=64)
    seen = []

    def attend(q, k, v):
        seen.append((q.detach(), k.detach()))
        return make_attention(attention("sdpa"), CPU)(q, k, v)

    torch.manual_seed(0)
    model = LanguageModel(config, attend)
    tokens = torch.full((1, 8), 65)
    loss_of_repeated = model(tokens, tokens)
    assert torch.isfinite(loss_of_repeated)
    q, k = seen[0]
    scores = q @ k.mT
    # Equal tokens: the score of a pair depends on its distance alone, and it does depend on it.
    assert torch.allclose(scores[..., 1:, 1:], scores[..., :-1, :-1], atol=1e-5)
    assert (scores[..., 0, 0] - scores[..., 5, 0]).abs().max() > 1e-3


def test_qk_norm_is_a_switch():
    def norms(qk_norm):
        config = ModelConfig(dim=32, layers=1, head_dim=16, hidden=64, qk_norm=qk_norm)
        seen = []
        model = LanguageModel(config, lambda q, k, v: seen.append(q) or v)
        model(torch.arange(8)[None], torch.arange(8)[None])
        return seen[0].norm(dim=-1)

    # eps keeps the norm of the small initial activations a little below sqrt(16).
    assert torch.allclose(norms(True), torch.full((1, 2, 8), 4.0), rtol=0.02)
    assert norms(False).max() < 1


def test_parts_are_compiled_once_for_all_layers_and_models(corpus_file, quick_compiler):
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    config = replace(TINY_CONFIG, compile=True)
    corpus = Corpus.open(corpus_file)

    def loss(line, config):
        return Trainer(config, attention(line), corpus).run().rows[-1]["val_loss"]

    compiled, plain = (loss("sdpa", replace(config, compile=how)) for how in (True, False))
    assert compiled == pytest.approx(plain, abs=2e-3)
    graphs = counted["unique_graphs"] - before
    loss("sdpa", replace(config, seed=1))
    # Three parts, with and without gradients, and not once for each layer.
    assert graphs == counted["unique_graphs"] - before == 6


def test_curves_are_plotted_where_matplotlib_is(tmp_path):
    pytest.importorskip("matplotlib")
    from experiments.plot import plot_curves

    path = tmp_path / "validation-curves.csv"
    path.write_text("step,sdpa,sagebwd\n1,3.0,3.1\n2,2.0,\n")
    assert plot_curves(path).read_bytes().startswith(b"\x89PNG")
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no validation curves"):
        plot_curves(path)


# ---- capturing -----------------------------------------------------------------------------------


def test_capture_gives_what_attention_is_handed(corpus_file):
    model = training.build_model(TINY_CONFIG, attention("sdpa"))
    before = [block.attention.attend for block in model.blocks]
    layers = capture.capture(model, Corpus.open(corpus_file).validation(2, 48), TINY_CONFIG)
    assert [block.attention.attend for block in model.blocks] == before
    assert len(layers) == 2
    for layer in layers:
        assert {t.shape for t in (layer.q, layer.k, layer.v, layer.dout)} == {(2, 2, 48, 16)}
        assert {t.dtype for t in (layer.q, layer.k, layer.v, layer.dout)} == {torch.bfloat16}
        assert layer.dout.abs().max() > 0
        assert torch.isfinite(torch.tensor(list(capture.statistics(layer).values()))).all()
    # QK-norm makes every query's norm 4 = sqrt(16), and rotary positions keep it.
    assert torch.allclose(layers[0].q.float().norm(dim=-1), torch.tensor(4.0), rtol=0.05)
    assert not torch.equal(layers[0].dout, layers[1].dout)


@pytest.fixture
def trained(corpus_file, tmp_path):
    """Words that name a checkpoint of a model whose attention can be traced."""
    config = replace(TINY_CONFIG, model=replace(TINY_CONFIG.model, dim=128, head_dim=64))
    trainer = Trainer(config, attention("emulated:precision=dv16"), Corpus.open(corpus_file))
    trainer.run()
    trainer.save(tmp_path / "model.pt")
    return ["--checkpoint", str(tmp_path / "model.pt"), "--corpus", str(corpus_file), "--device",
            "cpu", "--out", str(tmp_path / "out")]  # fmt: skip


def test_capture_command_traces_every_variant(trained, tmp_path, capsys):
    assert capture.main([*trained, "--sequences", "1", "--name", "step-2",
                         "--save", str(tmp_path / "tensors.pt")]) == 0  # fmt: skip
    record = json.loads((tmp_path / "out/step-2.json").read_text())
    assert record["shape"] == {"batch": 1, "heads": 2, "tokens": 48, "head_dim": 64}
    assert record["attention"] == "emulated:precision=dv16"
    assert record["layers"].keys() == {"0", "1"}
    for layer in record["layers"].values():
        assert layer["variants"].keys() == capture.VARIANTS.keys()
        for tensors in layer["variants"].values():
            assert tensors.keys() >= capture.PAPER_TABLE_2.keys()
            assert 0 < tensors["O"]["rel_l2"] < 0.1
    assert "paper" in capsys.readouterr().out
    saved = torch.load(tmp_path / "tensors.pt", weights_only=True)
    assert saved[1]["dout"].shape == (1, 2, 48, 64)
    for there in ("tensors.pt", "model.pt"):
        before = (tmp_path / there).read_bytes()
        with pytest.raises(SystemExit):
            capture.main([*trained, "--name", "again", "--save", str(tmp_path / there)])
        assert f"{there} is there already: name another file" in capsys.readouterr().err
        assert (tmp_path / there).read_bytes() == before


def test_capture_replaces_no_record_of_other_options(trained, tmp_path, capsys):
    words = [*trained, "--sequences", "1", "--layer", "0"]
    assert capture.main(words) == capture.main(words) == 0
    path = tmp_path / "out/capture.json"
    kept = path.read_bytes()
    shutil.copy(tmp_path / "model.pt", tmp_path / "other.pt")
    for more, part in ((["--layer", "1"], "traced_layers [1] (not [0])"),
                       (["--sequences", "2"], "sequences 2 (not 1)"),
                       (["--attention", "sdpa"], "attention sdpa (not emulated:precision=dv16)"),
                       (["--checkpoint", str(tmp_path / "other.pt")], "other.pt (not model.pt)")):
        with pytest.raises(SystemExit) as left:
            capture.main([*words, *more])
        said = capsys.readouterr().err
        assert left.value.code == 2 and f"{part}; pass another --out or --name" in said
    assert path.read_bytes() == kept


def test_capture_command_refuses_a_missing_layer(trained, capsys):
    with pytest.raises(SystemExit):
        capture.main([*trained, "--layer", "2"])
    assert "no layer 2: the model has 2" in capsys.readouterr().err
