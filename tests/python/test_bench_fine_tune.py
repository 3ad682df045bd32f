"""bench/fine_tune.py and its table without a GPU: a tiny Llama, and the emulation for INT8."""

import json
import statistics

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

import fine_tune  # noqa: E402
from tables_trained import tuned  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")

TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip


@pytest.fixture
def llama(monkeypatch):
    """It is opened in the place of a file, with a tokenizer of bytes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    monkeypatch.setattr(fine_tune, "opened", lambda path: (
        model, lambda text: {"input_ids": list(text.encode())}))  # fmt: skip
    return model


@pytest.fixture
def words(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("what was said is said, and again. " * 30)
    out = tmp_path / "fine-tune.json"
    return ["--model", str(text), "--text", str(text), "--device", "cpu", "--out", str(out),
            *"--length 32 --batch 2 --steps 25 --rate 1e-2 --processes 1".split()]  # fmt: skip


def test_a_whole_run(llama, words, tmp_path, capsys):
    more = ["--seeds", "3", "--attentions", "sdpa", "emulated"]
    assert fine_tune.main([*words, *more]) == 0
    record = json.loads((tmp_path / "fine-tune.json").read_text())
    assert record["parameters"]["weights"] == llama.num_parameters()
    runs = {(of["attention"], of["seed"]): of for of in record["runs"]}
    assert [*runs] == [(a, seed) for a in ("sdpa", "emulated") for seed in range(3)]
    for (attention, seed), run in runs.items():
        assert run["held_out"] < record["held_out_before"] - 0.5
        assert len(run["train_loss"]) == 25 and run["ms_per_step"] > 0
        first, of_sdpa = run["train_loss"][0], runs["sdpa", seed]["train_loss"][0]
        assert first == pytest.approx(of_sdpa, abs=0.02)  # the same weights and batches
        assert (run["held_out"] == run["held_out_by_sdpa"]) == (attention == "sdpa")
    assert runs["sdpa", 0]["train_loss"] != runs["sdpa", 1]["train_loss"]
    told = record["verdicts"]["attentions"]["emulated"]
    pairs = [runs["emulated", s]["held_out"] - runs["sdpa", s]["held_out"] for s in range(3)]
    assert told["pairs"] == pytest.approx(pairs) and any(pairs)
    assert told["paired"] == pytest.approx(statistics.fmean(pairs))
    assert record["verdicts"]["paired"]["freedom"] == 2 and told["verdict"]
    said = capsys.readouterr().out
    assert "emulated, seed 2: " in said and f"{told['paired']:+.4f} ±" in said
    record["verdicts"]["attentions"]["sagebwd"] = record["verdicts"]["attentions"].pop("emulated")
    for run in record["runs"]:
        run["attention"] = run["attention"].replace("emulated", "sagebwd")
    lines = tuned(record)
    assert lines[2].startswith(f"| none | {record['held_out_before']:.4f} | ")
    assert lines[-1].startswith("| the default | ") and f"{told['paired']:+.5f} ±" in lines[-1]


def test_what_is_late_does_not_begin(llama, words, tmp_path, capsys, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(fine_tune.time, "monotonic", lambda: next(now))  # a second at each look
    more = ["--steps", "1", "--attentions", "sdpa", "--within", "1.5"]
    assert fine_tune.main([*words, *more]) == 0
    record = json.loads((tmp_path / "fine-tune.json").read_text())
    assert [of["seed"] for of in record["runs"]] == [0]
    assert "2 runs did not begin within 1.5 seconds" in capsys.readouterr().out


def test_bands_are_those_of_the_study():
    losses = {"sdpa": (3.0, 3.1, 3.2), "sagebwd": (3.001, 3.1, 3.202), "other": (3.4, 3.5, 3.6)}
    runs = [{"attention": attention, "seed": seed, "held_out": loss}
            for attention, found in losses.items() for seed, loss in enumerate(found)]  # fmt: skip
    told = fine_tune.verdicts(list(reversed(runs)))
    assert told["paired"]["freedom"] == 4
    assert told["attentions"]["sagebwd"]["paired"] == pytest.approx(0.001)
    assert told["attentions"]["sagebwd"]["verdict"] == "within"
    assert told["attentions"]["other"]["verdict"] == "outside, worse"
    only = fine_tune.verdicts(runs[:1])
    assert only["attentions"] == {"sdpa": {"mean": 3.0}} and only["paired"] is None


@pytest.mark.parametrize(("given", "told"), [
    (["--attentions", "sagebwd"], "needs a CUDA GPU"),
    (["--attentions", "sdpa:no-rotate"], "has no option"),
    (["--model", "nowhere"], "there is no such folder or file"),
    (["--length", "1024", "--attentions", "sdpa"], "ten sequences"),
])  # fmt: skip
def test_wrong_use_is_told(given, told, llama, words, capsys):
    with pytest.raises(SystemExit):
        fine_tune.main([*words, *given])
    assert told in capsys.readouterr().err
