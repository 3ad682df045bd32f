"""A run in which a Monitor is to warn before the loss does: steps, departures, and wrong use."""

import csv
import json
import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from corpus_cases import corpus_of  # noqa: E402

from experiments import warning  # noqa: E402
from experiments.attentions import AttentionChoice  # noqa: E402
from experiments.config import ModelConfig, TrainConfig  # noqa: E402
from experiments.data import Corpus  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")
CONFIG = TrainConfig(model=ModelConfig(dim=32, layers=1, head_dim=32, hidden=32, qk_norm=False),
                     steps=7, batch=1, tokens=32, tokens_per_step=64, val_sequences=1, lr=1e-3,
                     eval_every=3, log_every=1, device="cpu")  # fmt: skip


# ---- when the loss leaves SDPA's -----------------------------------------------------------------


def of_losses(*losses, status="finished"):
    return {"steps": list(range(1, len(losses) + 1)), "train_loss": list(losses), "status": status}


def leaves(run, exact, other, gap=0.1, window=1):
    return warning.departure(run, exact, other, gap, window)


def test_the_loss_leaves_where_the_gap_is_exceeded():
    exact = of_losses(5, 4, 3, 2, 1)
    assert leaves(of_losses(5, 4, 3, 2.05, 1.05), exact, exact) is None
    assert leaves(of_losses(5, 4, 3, 2.2, 1), exact, exact) == 4
    assert leaves(of_losses(5, 4, 1, 1, 1), exact, exact) is None  # below SDPA's


def test_what_two_exact_runs_differ_by_is_no_departure():
    exact = of_losses(5, 4, 3, 2, 1)
    other = of_losses(5, 4.25, 3, 2, 1)
    assert leaves(of_losses(5, 4.4, 3.4, 2.4, 1.4), exact, other) is None
    assert leaves(of_losses(5, 4.4, 3.4, 2.6, 1.4), exact, other) == 4
    assert leaves(of_losses(5.2, 4, 3, 2, 1), exact, other) == 1  # they did not differ by then


def test_losses_are_averaged():
    assert warning.smoothed([1, 2, 6, 7], 2) == [1, 1.5, 4, 6.5]
    exact = of_losses(*[1.0] * 6)
    run = of_losses(1, 1, 1.3, 1, 1.4, 1.4)
    assert leaves(run, exact, exact, gap=0.25) == 3
    assert leaves(run, exact, exact, gap=0.25, window=2) == 6


def test_runs_that_diverge():
    exact = of_losses(5, 4, 3, 2)
    assert leaves(of_losses(5, 4, math.nan, status="diverged"), exact, exact) == 3
    assert leaves(of_losses(5, 4, status="diverged"), exact, exact) == 2
    broken = of_losses(5, 4, math.nan, status="diverged")
    assert leaves(of_losses(5, 4, 9, 9), broken, exact) is None


@pytest.mark.parametrize(
    "warned, left, part",
    [(3, 9, "warns at step 3, before the loss leaves SDPA's at step 9"),
     (9, 9, "warns at step 9, not before"), (None, 9, "the monitor does not warn in 3 samples"),
     (3, None, "does not leave"), (None, None, "neither does the monitor warn, in 3 samples, nor")],
)  # fmt: skip
def test_the_verdict(warned, left, part):
    record = {"monitor": {"first_warning": warned, "records": [{}] * 3}, "leaves_at": left,
              "runs": {"sdpa": of_losses(1.0, 2.0, status="finished")}}  # fmt: skip
    assert part in warning.verdict(record) and "itself" not in warning.verdict(record)
    record["runs"]["sdpa"]["status"] = "diverged"
    said = warning.verdict(record)
    assert "SDPA itself diverges at step 2" in said
    assert said.startswith("nothing can be concluded") == (left is None)


# ---- what is watched -----------------------------------------------------------------------------


def test_records_have_the_steps_of_the_training(corpus_file):
    """A step has two forwards and backwards here, and validations come between."""
    corpus, choice = Corpus.open(corpus_file), AttentionChoice.parse("emulated")
    run, found = warning.monitored(CONFIG, choice, corpus, every=2)
    assert [record["step"] for record in found["records"]] == [1, 3, 5, 7]
    assert run["steps"] == [1, 2, 3, 4, 5, 6, 7] and run["status"] == "finished"
    assert found["first_warning"] is None and found["messages"] == []
    assert run == warning.train(CONFIG, choice, corpus, "unwatched")


def test_the_first_warning_is_that_of_the_first_record_past_a_limit(corpus_file):
    corpus, choice = Corpus.open(corpus_file), AttentionChoice.parse("emulated")
    config = replace(CONFIG, lr=0.3, warmup=0, steps=10, clip=100.0)
    _, found = warning.monitored(config, choice, corpus, every=1)
    wrong = [r for r in found["records"]
             if any(not r[name] <= limit for name, limit in found["thresholds"].items())]
    assert wrong and found["first_warning"] == wrong[0]["step"]
    assert f"step {wrong[0]['step']}, attention call 0 of 1" in found["messages"][0]
    for name, step in found["first_warnings"].items():
        past = [r["step"] for r in found["records"] if not r[name] <= found["thresholds"][name]]
        assert past[0] == step


# ---- the command ---------------------------------------------------------------------------------

SIZES = ("--device cpu --model toy --layers 1 --tokens 64 --batch 1 --val-sequences 1 --warmup 2 "
         "--eval-every 30 --steps 24").split()  # fmt: skip


def call(corpus_file, tmp_path, *words):
    return warning.main(["--corpus", str(corpus_file), *SIZES, "--out", str(tmp_path / "out"),
                         *words])  # fmt: skip


def test_the_command_with_a_remedy(corpus_file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = "--lr 0.05 --every 2 --window 3 --remedy emulated:precision=qk16".split()
    assert call(corpus_file, tmp_path, *words) == 0
    record = json.loads((tmp_path / "out/warning.json").read_text())
    said = capsys.readouterr().out
    assert said.startswith(record["verdict"]) and "with emulated:precision=qk16 from" in said
    warned = record["monitor"]["first_warning"]
    assert 0 < warned < 24 and f"warns at step {warned}" in record["verdict"]
    assert record["config"]["model"]["qk_norm"] is False
    assert str(tmp_path) not in json.dumps(record)
    runs = record["runs"]
    assert [*runs] == ["sdpa", "sdpa-other", "monitored", "remedied"]
    before, after = (runs[name]["train_loss"] for name in ("monitored", "remedied"))
    assert before[:warned] == after[:warned] and before[warned] != after[warned]
    with (tmp_path / "out/warning.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 25))
    assert float(rows[9]["monitored"]) == pytest.approx(before[9], rel=1e-5)
    assert [int(row["step"]) for row in rows if row["dS"]] == list(range(1, 25, 2))
    assert (tmp_path / "out/warning.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_warning(corpus_file, tmp_path, capsys):
    words = "--lr 0.0001 --steps 4 --qk-norm --remedy sdpa --json --name quiet --every 1".split()
    assert call(corpus_file, tmp_path, *words) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "out/quiet.json").read_text())
    assert "warn, in 4 samples, nor" in record["verdict"] and len(record["runs"]) == 3
    assert record["no_remedy"] == "the monitor does not warn"
    assert call(corpus_file, tmp_path, *(word for word in words if word != "--json")) == 0
    assert "--remedy sdpa did not attend: the monitor does not warn" in capsys.readouterr().out


def test_no_record_is_replaced_by_that_of_other_options(corpus_file, tmp_path, capsys):
    words = "--steps 2 --warmup 1 --every 1 --remedy sdpa".split()
    assert call(corpus_file, tmp_path, *words) == 0
    assert call(corpus_file, tmp_path, *words) == 0  # the same once more
    path = tmp_path / "out/warning.json"
    kept = path.read_bytes()
    elsewhere = corpus_of(tmp_path / "other", files=30)
    for more, part in ((["--lr", "0.02"], "lr 0.02 (not 0.001)"),
                       (["--attention", "emulated:no-rotate"],
                        "attention emulated:no-rotate (not emulated)"),
                       (["--remedy", "sdpa-other"], "remedy sdpa-other (not sdpa)"),
                       (["--every", "2", "--gap", "1"], "every 2 (not 1), gap 1.0 (not 0.054)"),
                       (["--window", "3"], "window 3 (not 10)"),
                       (["--corpus", str(elsewhere)], "another corpus")):  # fmt: skip
        with pytest.raises(SystemExit) as left:
            call(corpus_file, tmp_path, *words, *more)
        said = capsys.readouterr().err
        assert left.value.code == 2 and f"another run: the options say {part}; pass" in said
        assert "pass another --out or --name" in said
    assert path.read_bytes() == kept


def test_the_help_tells_this_commands_own_default(capsys):
    with pytest.raises(SystemExit):
        warning.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "normalise queries and keys (default: no)" in said and "--eval-every N" in said
    for word in ("switch", "graph", "--parallel", "--log-every", "torchrun"):
        assert word not in said


def test_a_remedy_that_diverged_before_it_could_attend(corpus_file, tmp_path, capsys):
    words = "--lr 5 --attention emulated:granularity=block --every 1 --remedy emulated".split()
    call(corpus_file, tmp_path, *words)
    said = capsys.readouterr().out
    record = json.loads((tmp_path / "out/warning.json").read_text())
    assert record["runs"]["remedied"]["steps"][-1] == record["monitor"]["first_warning"]
    assert "did not attend: the run diverged at step" in said and "the warning on" not in said
    assert "remedied_leaves_at" not in record


def test_nothing_can_be_concluded_where_sdpa_diverges(corpus_file, tmp_path, capsys):
    words = "--lr 1e30 --steps 6 --attention emulated --every 1".split()
    assert call(corpus_file, tmp_path, *words) == 1
    assert capsys.readouterr().out.startswith("nothing can be concluded: SDPA itself diverges")


def test_wrong_use_of_warning(corpus_file, tmp_path, capsys):
    for words, part in ((["--every", "0"], "--every 0: it must be at least 1"),
                        (["--window", "0"], "--window 0"), (["--gap", "nan"], "--gap nan"),
                        (["--attention", "sdpa"], "a monitor sees sagebwd and emulated"),
                        (["--remedy", "flash"], "unknown attention 'flash'"),
                        (["--switch-at", "2"], "unrecognized arguments: --switch-at 2"),
                        (["--switch-to", "sdpa"], "unrecognized arguments: --switch-to sdpa"),
                        (["--graph"], "unrecognized arguments: --graph"),
                        (["--parallel", "fsdp"], "unrecognized arguments: --parallel fsdp"),
                        (["--log-every", "2"], "unrecognized arguments: --log-every 2"),
                        (["--steps", "99999"], "of which none is seen twice"),
                        (["--name", "a/b"], "--name a/b")):  # fmt: skip
        with pytest.raises(SystemExit) as left:
            call(corpus_file, tmp_path, *words)
        assert left.value.code == 2 and part in capsys.readouterr().err, words
    assert call(corpus_file, tmp_path, "--attention", "sagebwd") == 1
    assert "CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
