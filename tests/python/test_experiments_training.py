"""Training, comparing and capturing, at sizes a CPU does in seconds."""

import csv
import json
import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from sagebwd.experiments import capture, compare, train  # noqa: E402
from sagebwd.experiments.attentions import AttentionChoice, make_attention  # noqa: E402
from sagebwd.experiments.compare import PlannedRun, differences  # noqa: E402
from sagebwd.experiments.config import config_of_record  # noqa: E402
from sagebwd.experiments.data import Text  # noqa: E402
from sagebwd.experiments.language_model import LanguageModel, ModelConfig  # noqa: E402
from sagebwd.experiments.train import NonFinite, TrainConfig  # noqa: E402

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--steps", "12", "--batch", "2", "--tokens", "48", "--dim", "32",
        "--layers", "2", "--head-dim", "16", "--hidden", "64", "--warmup", "2", "--lr", "0.01",
        "--eval-every", "4", "--log-every", "4", "--val-sequences", "4"]  # fmt: skip
TINY_CONFIG = TrainConfig(
    model=ModelConfig(dim=32, layers=2, head_dim=16, hidden=64), steps=12, batch=2, tokens=48,
    warmup=2, lr=0.01, eval_every=4, log_every=4, val_sequences=4, device="cpu",
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("tiny_tensors")


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "folder of a machine" / "text.txt"
    path.parent.mkdir()
    path.write_bytes(b"".join(b"line %d of a text that is easy to learn\n" % i for i in range(400)))
    return path


@pytest.fixture
def text(text_file):
    return Text.read([text_file])


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
     ("sagebwd:plan=s", "no option 'plan'"),
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


# ---- data ----------------------------------------------------------------------------------------


def test_batches_depend_on_seed_and_step_alone(text):
    first = text.batch(seed=3, step=7, batch=4, tokens=32)
    torch.manual_seed(99)
    torch.rand(5)
    assert torch.equal(first, text.batch(3, 7, 4, 32))
    assert not torch.equal(first, text.batch(3, 8, 4, 32))
    assert not torch.equal(first, text.batch(4, 7, 4, 32))


def test_held_out_text_is_never_trained_on(text):
    assert len(text.train) + len(text.held_out) == text.files[0]["bytes"]
    assert bytes(text.validation(3, 16)[-1].tolist()) == bytes(text.held_out[-17:].tolist())
    last = text.batch(seed=0, step=0, batch=4096, tokens=len(text.train) - 1)
    assert torch.equal(last[0], text.train.long())


def test_too_little_text_is_refused(text):
    with pytest.raises(ValueError, match="that is held out has"):
        text.validation(4, len(text.held_out))


# ---- model ---------------------------------------------------------------------------------------


def test_default_model_is_large_enough_for_the_claim():
    with torch.device("meta"):
        model = LanguageModel(ModelConfig(), lambda q, k, v: v)
    assert model.parameter_count() >= 25_000_000
    assert model.config.head_dim == 64 and TrainConfig().tokens == 1024
    assert TrainConfig().steps >= 1000


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


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["sdpa", "emulated"])
def test_training_learns_and_repeats_itself(text, line):
    runs = [train.train(TINY_CONFIG, attention(line), text) for _ in range(2)]
    curve = list(train.validation_curve(runs[0].rows).values())
    assert curve[-1] < curve[0] - 0.1 and curve[0] < math.log(256) + 0.1
    without_time = [[row | {"ms_per_step": 0} for row in run.rows] for run in runs]
    assert without_time[0] == without_time[1]


def test_every_attention_sees_the_same_batches_and_weights(text):
    runs = {line: train.train(TINY_CONFIG, attention(line), text)
            for line in ("sdpa", "emulated:plan=none", "emulated:plan=s+pv+dv+dp+dq+dk")}
    assert len({run.batches_sha256 for run in runs.values()}) == 1
    first, plain, int8 = (train.validation_curve(run.rows) for run in runs.values())
    assert differences(plain, first)["max_abs"] < 0.01
    assert int8 != plain
    initial = [train.build_model(TINY_CONFIG, attention(line)).state_dict()
               for line in ("sdpa", "emulated")]
    assert all(torch.equal(initial[0][name], initial[1][name]) for name in initial[0])


def test_learning_rate_warms_up_and_decays():
    config = TrainConfig(lr=1.0, warmup=10, steps=100, final_lr_fraction=0.1)
    rates = [config.learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("poisoned", ["attention output", "parameter"])
def test_non_finite_training_stops_and_says_where(text, monkeypatch, poisoned):
    calls = []

    def attend(q, k, v):
        calls.append(0)
        # Two layers a step and one step before the poison.
        return v * math.nan if poisoned == "attention output" and len(calls) > 3 else v

    monkeypatch.setattr(train, "make_attention", lambda choice, device: attend)
    config = replace(TINY_CONFIG, log_every=1)
    if poisoned == "parameter":
        config = replace(config, lr=1e30)
    with pytest.raises(NonFinite, match=r"step \d+: loss .*non-finite"):
        train.train(config, attention("sdpa"), text)


def test_non_finite_names_the_first_layer(text):
    def attend(q, k, v):
        return v * math.nan

    model = LanguageModel(TINY_CONFIG.model, attend)
    where = train._first_non_finite(model, TINY_CONFIG, text.batch(0, 0, 2, 48))
    assert where == "first non-finite output: blocks.0.attention.out"


def test_train_command_writes_rows_and_a_record(text_file, tmp_path, capsys):
    out = tmp_path / "out"
    checkpoint = tmp_path / "model.pt"
    assert train.main(["--text", str(text_file), "--attention", "sdpa", "--out", str(out),
                       "--save", str(checkpoint), *TINY]) == 0  # fmt: skip
    with (out / "train-sdpa.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == train.COLUMNS
    assert [row["step"] for row in rows] == ["4", "8", "12"]
    assert all(float(row["val_loss"]) > 0 and float(row["grad_norm"]) > 0 for row in rows)
    content = (out / "train-sdpa.json").read_text()
    record = json.loads(content)
    assert record["status"] == "finished" and record["attention"] == "sdpa"
    assert {"commit", "tree", "gpu", "torch", "command", "date"} <= record["environment"].keys()
    assert record["text"][0]["name"] == "text.txt" and record["config"]["model"]["dim"] == 32
    # Records are committed: no folder of the machine may be in them.
    assert "folder of a machine" not in content and str(tmp_path) not in content
    model, config, choice = capture.load_checkpoint(checkpoint, "cpu", None)
    assert config == config_of_record(record["config"])
    assert model.parameter_count() == record["parameters"] and choice == attention("sdpa")


def test_train_command_refuses_bad_options(text_file, tmp_path, capsys):
    for words, named in ((["--attention", "flash"], "known: sdpa"),
                         (["--dim", "33"], "multiple of head_dim"),
                         (["--text", str(tmp_path / "absent")], "absent")):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            train.main(["--text", str(text_file), *TINY, *words])
        assert stopped.value.code == 2
        assert named in capsys.readouterr().err


# ---- comparing -----------------------------------------------------------------------------------


def test_planned_runs_parse_and_check():
    run = PlannedRun.parse("emulated:plan=none,steps=5,seed=2")
    assert (run.choice.label(), run.steps, run.seed) == ("emulated:precision=none", 5, 2)
    assert PlannedRun.parse(run.label()) == run
    config = run.config(TINY_CONFIG)
    assert (config.run_steps, config.steps, config.seed) == (5, 12, 2)
    with pytest.raises(ValueError, match="1 to 12"):
        PlannedRun.parse("sdpa:steps=13").config(TINY_CONFIG)


def test_differences_are_over_common_steps():
    found = differences({1: 2.0, 2: 1.0, 3: 5.0}, {1: 1.5, 2: 1.25})
    assert found == {"steps_compared": 2, "max_abs": 0.5, "mean_abs": 0.375, "mean": 0.125,
                     "final": -0.25}
    with pytest.raises(ValueError, match="no common step"):
        differences({1: 1.0}, {2: 1.0})


def test_compare_command_survives_a_broken_attention(text_file, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"

    def break_one(choice, device):
        if not choice.rotate:
            raise RuntimeError("broken")
        return make_attention(choice, device)

    monkeypatch.setattr(train, "make_attention", break_one)
    status = compare.main(
        ["--text", str(text_file), "--out", str(out), *TINY,
         "--runs", "sdpa", "emulated:no-rotate", "emulated", "sdpa:seed=1,steps=8"])  # fmt: skip
    assert status == 1
    record = json.loads((out / "training.json").read_text())
    assert record["reference"] == "sdpa"
    assert record["runs"]["emulated:no-rotate"]["status"] == "stopped: RuntimeError: broken"
    against = record["runs"]["emulated"]["against_reference"]
    assert against["same_batches"] is True
    assert 0 <= against["mean_abs"] <= against["max_abs"] < 0.1
    other = record["runs"]["sdpa:seed=1,steps=8"]["against_reference"]
    assert other["same_batches"] is False and other["steps_compared"] == 2
    with (out / "validation-curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["4", "8", "12"]
    assert rows[2]["sdpa:seed=1,steps=8"] == "" and float(rows[2]["emulated"]) > 0
    assert "mean |d|" in capsys.readouterr().out


def test_compare_keeps_finished_runs(text, tmp_path, monkeypatch):
    planned = [PlannedRun.parse("sdpa"), PlannedRun.parse("sdpa:seed=1")]
    first = compare.compare(planned[:1], TINY_CONFIG, text, tmp_path)
    trained = []
    original = compare.recorded_train
    monkeypatch.setattr(
        compare, "recorded_train",
        lambda config, *rest: trained.append(config.seed) or original(config, *rest))
    second = compare.compare(planned, TINY_CONFIG, text, tmp_path, reuse=True)
    assert trained == [1]
    assert second.curves["sdpa"] == pytest.approx(first.curves["sdpa"], rel=1e-5)
    assert second.record["runs"]["sdpa:seed=1"]["against_reference"]["steps_compared"] == 3
    # Another configuration is another run.
    compare.compare(planned[:1], replace(TINY_CONFIG, lr=0.02), text, tmp_path, reuse=True)
    assert trained == [1, 0]


def test_curves_are_plotted_where_matplotlib_is(tmp_path):
    pytest.importorskip("matplotlib")
    from sagebwd.experiments.plot import plot_curves

    path = tmp_path / "validation-curves.csv"
    path.write_text("step,sdpa,sagebwd\n1,3.0,3.1\n2,2.0,\n")
    assert plot_curves(path).read_bytes().startswith(b"\x89PNG")
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no validation curves"):
        plot_curves(path)


# ---- capturing -----------------------------------------------------------------------------------


def test_capture_gives_what_attention_is_handed(text):
    model = train.build_model(TINY_CONFIG, attention("sdpa"))
    before = [block.attention.attend for block in model.blocks]
    layers = capture.capture(model, text.validation(2, 48), TINY_CONFIG)
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


def test_capture_command_traces_every_variant(text_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert capture.main(["--text", str(text_file), "--out", str(out), "--sequences", "1",
                         "--save", str(tmp_path / "tensors.pt"),
                         *TINY, "--dim", "128", "--head-dim", "64"]) == 0  # fmt: skip
    record = json.loads((out / "capture.json").read_text())
    assert record["shape"] == {"batch": 1, "heads": 2, "tokens": 48, "head_dim": 64}
    assert record["layers"].keys() == {"0", "1"}
    for layer in record["layers"].values():
        assert layer["variants"].keys() == capture.VARIANTS.keys()
        for tensors in layer["variants"].values():
            assert tensors.keys() >= capture.PAPER_TABLE_2.keys()
            assert 0 < tensors["O"]["rel_l2"] < 0.1
    assert "paper" in capsys.readouterr().out
    saved = torch.load(tmp_path / "tensors.pt", weights_only=True)
    assert saved[1]["dout"].shape == (1, 2, 48, 64)


def test_capture_command_refuses_a_missing_layer(text_file, tmp_path, capsys):
    with pytest.raises(SystemExit):
        capture.main(["--text", str(text_file), "--out", str(tmp_path), "--layer", "2", *TINY])
    assert "no layer 2" in capsys.readouterr().err
