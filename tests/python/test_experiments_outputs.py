"""What training runs leave: none replaces what another left, and nothing is lost silently."""

import argparse
import io
import json
import math
import resource
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from corpus_cases import corpus_of  # noqa: E402
from training_cases import TINY, TINY_CONFIG, attention, curve_of, run_of  # noqa: E402

from experiments import capture, command, errors, lora, plot, sparse_workers, study_worker, train  # noqa: E402
from experiments.config import add_training_arguments, config_of  # noqa: E402
from experiments.data import Corpus  # noqa: E402
from experiments.training import Trainer  # noqa: E402
from sagebwd.benchmark import environment  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as left:
        train.main([*words])
    assert left.value.code == 2
    return capsys.readouterr().err


def test_no_run_replaces_what_another_left(corpus_file, tmp_path, capsys):
    given = ["--corpus", str(corpus_file), "--attention", "sdpa", *TINY, "--out", str(tmp_path)]
    save = tmp_path / "a.pt"
    assert train.main([*given, "--save", str(save)]) == 0
    kept = save.read_bytes(), (tmp_path / "train-sdpa.json").read_bytes()
    said = refusal(capsys, *given, "--save", str(save))
    assert "a.pt is there, a checkpoint of step 12: pass --resume" in said
    assert "no checkpoint" in refusal(capsys, *given, "--save", str(corpus_file))
    said = refusal(capsys, *given, "--lr", "0.02")
    assert "record of another run: the options say lr 0.02 (not 0.01); pass another" in said
    said = refusal(capsys, *given, "--resume", str(tmp_path / "b.pt"))
    assert "b.pt: there is no such file; its folder has a.pt" in said
    assert "--device tpu: pass cuda" in refusal(capsys, *given, "--device", "tpu")
    (tmp_path / "of-3.pt").write_text("notes")
    assert "of-3.pt is there, and no" in refusal(capsys, *given, "--save",
                                                 str(tmp_path / "of-{step}.pt"))
    assert kept == (save.read_bytes(), (tmp_path / "train-sdpa.json").read_bytes())


def test_rows_that_are_of_no_run_stay(corpus_file, tmp_path, capsys):
    """Such as the log of a Monitor."""
    rows = tmp_path / "train-sdpa.jsonl"
    rows.write_text("mine")
    said = refusal(capsys, "--corpus", str(corpus_file), "--attention", "sdpa", *TINY, "--out",
                   str(tmp_path))  # fmt: skip
    assert f"{rows} is there without train-sdpa.json, and would be replaced: pass another" in said
    assert rows.read_text() == "mine" and [*tmp_path.iterdir()] == [rows]


def test_a_changed_corpus_is_refused(corpus_file, tmp_path):
    for path in (corpus_file, corpus_file.with_name("c.bin.json")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = bytearray((tmp_path / "c.bin").read_bytes())
    content[0] ^= 1
    (tmp_path / "c.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"c\.bin has not the SHA-256 that c\.bin\.json says"):
        Corpus.open(tmp_path / "c.bin")


def test_a_record_that_cannot_be_written_costs_no_step(corpus_file, tmp_path, capsys, monkeypatch):
    def full(self, row):
        raise OSError(28, "No space left on device", "rows")

    save = tmp_path / "a.pt"
    given = ["--corpus", str(corpus_file), "--attention", "sdpa", *TINY, "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(train.Rows, "__call__", full)
        assert train.main([*given, "--save", str(save)]) == 1
    said = capsys.readouterr().err
    assert "rows: No space left on device; " in said and "is the checkpoint of step 4; --re" in said
    assert train.main([*given, "--save", str(save), "--resume", str(save)]) == 0


def test_a_checkpoint_that_cannot_be_written_says_what_there_is(corpus, tmp_path, monkeypatch):
    trainer = Trainer(TINY_CONFIG, attention("sdpa"), corpus)
    trainer.save(tmp_path / "a.pt")

    def fails(*given):
        given[1].touch()
        raise RuntimeError("unexpected pos 1045760 vs 1045712")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(Exception, match=r"b\.pt: the checkpoint of step 0 could not be written "
                                        r"\(RuntimeError: unexpected pos .*\); .*"
                                        r"a\.pt is the checkpoint of step 0"):  # fmt: skip
        trainer.save(tmp_path / "b.pt")
    assert not (tmp_path / "b.pt").exists()


@pytest.fixture
def small_files():
    """A limit that stands for a full disk: PyTorch and Python write up to it, and then fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_does_not_fit_on_a_disk_is_named(corpus, tmp_path, figure, small_files):
    trainer = Trainer(TINY_CONFIG, attention("sdpa"), corpus)
    with pytest.raises(Exception, match=r"a\.pt: the checkpoint of step 0 could not be written "
                                        r"\(File too large\); none was written before"):
        trainer.save(tmp_path / "a.pt")
    for name, write in (
            ("b.json", lambda path: environment.write_json(path, {"a": ["word"] * 1000})),
            ("c.pt", lambda path: sparse_workers.write(path, {}, {"a": torch.ones(9000)})),
            ("d.csv", lambda path: errors.write_csv(path, RECORD)),
            ("e.png", lambda path: plot.saved_beside(path, figure))):  # fmt: skip
        with pytest.raises(OSError) as failed:
            write(tmp_path / name)
        assert command.of_file(failed.value) == f"{tmp_path / name}: File too large"
    assert not list(tmp_path.iterdir())


RECORD = {"stages": [{"step": 1, "layers": [
    {"layer": 0, "errors": {f"setting {i}": {"O": {"cosine": 1.0, "rel_l2": 0.0, "bias": 0.0}}
                            for i in range(999)}}]}]}  # fmt: skip


@pytest.fixture
def figure():
    """Comes before `small_files`, within which matplotlib's bytecode would be cut off and kept."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    found, axes = pyplot.subplots()
    axes.plot(range(9))
    found.savefig(io.BytesIO())
    return found


def test_rows_that_cannot_be_written_are_named_once(corpus_file, tmp_path, capsys):
    (tmp_path / "train-sdpa.jsonl").symlink_to("/dev/full")
    words = ["--corpus", str(corpus_file), "--attention", "sdpa", *TINY, "--out", str(tmp_path)]
    assert train.main(words) == 1
    assert capsys.readouterr().err == (
        f"train: {tmp_path}/train-sdpa.jsonl: No space left on device; step 4 is lost, as there "
        "was no --save FILE\n")  # fmt: skip


def test_gradients_are_not_clipped_with_0(corpus):
    ends = [curve_of(run_of(corpus, config=replace(TINY_CONFIG, clip=clip)))[12]
            for clip in (0.0, 1e9)]  # fmt: skip
    assert ends[0] == ends[1]


def test_capture_attends_as_the_run_did_at_its_step(corpus, tmp_path):
    config = replace(TINY_CONFIG, switch_at=4, switch_to="emulated:precision=qk16")
    for until, line in ((4, "sdpa"), (6, "emulated:precision=qk16")):
        trainer = Trainer(config, attention("sdpa"), corpus)
        trainer.run(until=until)
        trainer.save(tmp_path / "a.pt")
        choice = capture.load_checkpoint(tmp_path / "a.pt", "cpu", None, corpus)[2]
        assert choice == attention(line)
    other = replace(corpus, header=corpus.header | {"sha256": "0"})
    with pytest.raises(ValueError, match="trained on another corpus"):
        capture.load_checkpoint(tmp_path / "a.pt", "cpu", None, other)


def test_rows_of_a_run_that_diverged_are_json(corpus_file, tmp_path, capsys):
    words = ["--corpus", str(corpus_file), "--attention", "sdpa", *TINY, "--out", str(tmp_path),
             "--lr", "1e30", "--log-every", "1", "--save", str(tmp_path / "a.pt")]  # fmt: skip
    assert train.main(words) == 1
    assert "no checkpoint is written" in capsys.readouterr().err

    def none(name):
        raise AssertionError(name)

    lines = (tmp_path / "train-sdpa.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=none) for line in lines]
    assert rows[-1]["grad_norm_max"] in ("nan", "inf")


def test_the_seconds_of_a_resumed_run_are_those_of_all_its_parts(saved, tmp_path):
    path, content = saved
    words = ["--corpus", str(path.with_name("c.bin")), "--attention", "sdpa", *TINY, "--head-dim",
             "32", "--out", str(tmp_path), "--save", str(tmp_path / "b.pt")]  # fmt: skip

    def resumed(content):
        torch.save(content, tmp_path / "b.pt")
        assert train.main([*words, "--resume", str(tmp_path / "b.pt")]) == 0
        found = json.loads((tmp_path / "train-sdpa.json").read_text())
        again = torch.load(tmp_path / "b.pt", weights_only=True)["seconds"]
        assert found["resumed_at"] == 5 and 0 <= found["seconds"] - again < 60
        return found["seconds"]

    assert 1000 < resumed(content | {"seconds": 1000.0}) < 1060
    content = dict(content)
    assert 0 < content.pop("seconds") < 60
    assert 0 < resumed(content) < 60  # of an older version


def test_a_row_with_a_norm_that_is_nan_says_so(corpus, monkeypatch):
    norms = iter([0.5, math.nan, 0.25])
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_",
                        lambda *given: clip(*given) * 0 + next(norms))  # fmt: skip
    config = replace(TINY_CONFIG, log_every=3)
    (row,) = run_of(corpus, config=config, until=3).rows
    assert row["grad_norm"] == 0.25 and math.isnan(row["grad_norm_max"])
    kept = study_worker.figures([row | {"grad_norm_max": 0.5, "val_loss": 1.0}, row])["grad_norm"]
    assert math.isnan(kept["largest"]) and math.isnan(kept["largest_after_warm_up"])


@pytest.mark.parametrize("words, warmup", [
    ("--steps 2000", 100), ("--steps 1000", 100), ("--steps 50", 5), ("--steps 9", 0),
    ("--steps 50 --warmup 49", 49), ("--steps 50 --warmup 0", 0)])  # fmt: skip
def test_the_warm_up_is_a_tenth_of_the_steps_at_most_unless_it_is_given(words, warmup):
    parser = argparse.ArgumentParser()
    add_training_arguments(parser)
    assert config_of(parser.parse_args(words.split()), 256).warmup == warmup


def test_a_warm_up_that_does_not_end_is_refused(corpus_file, tmp_path, capsys):
    given = ["--corpus", str(corpus_file), *TINY, "--attention", "sdpa", "--out", str(tmp_path)]
    for count in ("12", "13"):
        said = refusal(capsys, *given, "--warmup", count)
        assert f"--warmup {count}: it must be less than --steps, which is 12" in said
    with pytest.raises(SystemExit):
        train.main(["--help"])
    assert "(default: 100, and at most a tenth of the steps)" in " ".join(
        capsys.readouterr().out.split())  # fmt: skip


# ---- checkpoints that were altered ---------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(corpus_file):
    """A checkpoint's path and content."""
    config = replace(TINY_CONFIG, model=replace(TINY_CONFIG.model, head_dim=32))
    trainer = Trainer(config, attention("sdpa"), Corpus.open(corpus_file))
    trainer.run(until=5)
    path = corpus_file.with_name("cut.pt")
    trainer.save(path)
    return path, torch.load(path, weights_only=True)


@pytest.mark.parametrize("name, change, part", [
    ("model", lambda model: model | {"more": torch.zeros(1)}, "more"),
    ("model", lambda model: model | {"embedding.weight": torch.zeros(3)}, "embedding.weight"),
    ("model", lambda model: model | {"embedding.weight": "x"}, ""),
    ("model", lambda model: {}, ""), ("model", lambda model: [], "its 'model' is no dict"),
    ("optimiser", lambda optimiser: {}, ""), ("optimiser", lambda optimiser: {"state": 1}, ""),
    ("optimiser", lambda optimiser: optimiser | {"state": {}}, ""),
    ("step", lambda step: "x", "its 'step' is no int"),
    ("rows", lambda rows: None, "its 'rows' is no list"),
    ("pending", lambda pending: [], "its 'pending' is no Tensor"),
    ("seconds", lambda seconds: "x", "its 'seconds' is no float"),
])  # fmt: skip
def test_an_altered_checkpoint_is_no_checkpoint(saved, tmp_path, capsys, name, change, part):
    path, content = saved
    torch.save(content | {name: change(content[name])}, tmp_path / "b.pt")
    said = refusal(capsys, "--corpus", str(path.with_name("c.bin")), "--attention", "sdpa", *TINY,
                   "--head-dim", "32", "--out", str(tmp_path / "out"), "--resume",
                   str(tmp_path / "b.pt"))  # fmt: skip
    assert said.startswith("python -m experiments.train: "), said
    assert f"{tmp_path / 'b.pt'} is no checkpoint of these commands: " in said and part in said


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_named(saved, tmp_path, capsys, value):
    path, content = saved
    model = {name: x.clone() for name, x in content["model"].items()}
    model["embedding.weight"][3, 1] = value
    torch.save(content | {"model": model}, tmp_path / "b.pt")
    found = str(tmp_path / "b.pt")
    corpora = [str(path.with_name("c.bin")), str(corpus_of(tmp_path, lines=80))]
    capsys.readouterr()
    for module, corpus_of_it, *words in (
            (train, 0, *TINY, "--head-dim", "32", "--attention", "sdpa", "--resume", found),
            (capture, 0, "--checkpoint", found), (errors, 0, found),
            (lora, 1, found, "--steps", "2", "--batch", "2", "--val-sequences", "2")):  # fmt: skip
        with pytest.raises(SystemExit) as left:
            module.main([*words, "--corpus", corpora[corpus_of_it], "--device", "cpu", "--out",
                         str(tmp_path / "out")])  # fmt: skip
        said = capsys.readouterr().err
        assert left.value.code == 2 and f"{found}: embedding.weight has values that are NaN" in said
        assert "others" not in said
    torch.save(content | {"model": {name: x * value for name, x in model.items()}}, found)
    with pytest.raises(ValueError, match=f"infinite, and {len(model) - 1} others: its run had"):
        capture.load_checkpoint(tmp_path / "b.pt", "cpu", None)
