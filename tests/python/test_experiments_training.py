"""Training runs, at sizes a CPU does in seconds."""

import errno
import json
import math
import os
import re
import sys
import types
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from training_cases import TINY, TINY_CONFIG, attention, curve_of, run_of  # noqa: E402

from experiments import capture, train, training  # noqa: E402
from experiments.config import TrainConfig, config_of_record  # noqa: E402
from experiments.training import Trainer  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


def without_time(rows):
    return [row | {"tokens_per_second": 0} for row in rows]


@pytest.mark.parametrize("line", ["sdpa", "emulated"])
def test_training_learns_and_repeats_itself(corpus, line):
    runs = [run_of(corpus, line) for _ in range(2)]
    curve = list(curve_of(runs[0]).values())
    assert curve[-1] < curve[0] - 0.1 and curve[0] < math.log(256) + 0.1
    assert without_time(runs[0].rows) == without_time(runs[1].rows)
    assert runs[0].status == "finished" and runs[0].rows[-1]["tokens"] == 12 * 2 * 48


def test_every_attention_sees_the_same_batches_and_weights(corpus):
    curves = [curve_of(run_of(corpus, line)) for line in
              ("sdpa", "emulated:plan=none", "emulated:plan=s+pv+dv+dp+dq+dk")]  # fmt: skip
    assert all(abs(curves[0][step] - curves[1][step]) < 0.01 for step in (4, 8, 12))
    assert curves[1] != curves[2]
    trainers = [Trainer(TINY_CONFIG, attention(line), corpus) for line in ("sdpa", "emulated")]
    initial = [trainer.model.state_dict() for trainer in trainers]
    assert all(torch.equal(initial[0][name], initial[1][name]) for name in initial[0])
    assert torch.equal(trainers[0].order, trainers[1].order)
    other = Trainer(replace(TINY_CONFIG, seed=1), attention("sdpa"), corpus)
    assert not torch.equal(trainers[0].order, other.order)


def test_no_sequence_is_seen_twice(corpus):
    have = (len(corpus.train) - 1) // 48
    trainer = Trainer(replace(TINY_CONFIG, steps=have // 2), attention("sdpa"), corpus)
    seen = torch.cat([trainer.places(step) for step in range(have // 2)])
    assert len(seen) == have // 2 * 2 == len(set(seen.tolist()))
    with pytest.raises(ValueError, match=rf"takes {(have // 2 + 1) * 96:,} tokens .* of "
                                         rf"which none is seen twice, .*\({have:,} sequences"):
        Trainer(replace(TINY_CONFIG, steps=have // 2 + 1), attention("sdpa"), corpus)


def test_a_step_of_several_batches_is_one_large_batch(corpus):
    """To rounding: gradients are means over the tokens of a step."""
    plain = replace(TINY_CONFIG, autocast=False, steps=4, log_every=1, eval_every=1)
    rows = [run_of(corpus, config=config).rows for config in (
        replace(plain, batch=8), replace(plain, batch=2, tokens_per_step=8 * 48))]  # fmt: skip
    for one, other in zip(*rows):
        assert one["tokens"] == other["tokens"]
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    with pytest.raises(ValueError, match="multiple of 96, which is --batch 2 times"):
        replace(plain, tokens_per_step=100).sequences_per_step()


def test_attention_switches_in_mid_training(corpus, tmp_path):
    def parameters(**how):
        trainer = Trainer(replace(TINY_CONFIG, **how), attention("sdpa"), corpus)
        trainer.run(until=6)
        return trainer, [p.clone() for p in trainer.model.parameters()]

    (_, plain), (switched, same), (_, late) = (
        parameters(), parameters(switch_at=6, switch_to="emulated"),
        parameters(switch_at=5, switch_to="emulated"))  # fmt: skip
    assert all(map(torch.equal, plain, same)) and not all(map(torch.equal, plain, late))
    loss = switched.run().rows[-1]["val_loss"]
    # A run that goes on after the switch attends as before it was cut.
    cut = Trainer(switched.config, attention("sdpa"), corpus)
    cut.run(until=8)
    cut.save(tmp_path / "a.pt")
    resumed = Trainer(switched.config, attention("sdpa"), corpus)
    resumed.load(tmp_path / "a.pt")
    assert resumed.run().rows[-1]["val_loss"] == loss != run_of(corpus).rows[-1]["val_loss"]
    with pytest.raises(ValueError, match="go together"):
        replace(TINY_CONFIG, switch_at=3)


def test_the_largest_score_and_gamma_are_logged(corpus):
    trainer = Trainer(replace(TINY_CONFIG, autocast=False), attention("sdpa"), corpus)
    with torch.no_grad():
        trainer.model.blocks[1].attention.q_norm.weight[3] = -5.0
        trainer.model.blocks[0].attention.k_norm.weight[2] = 3.0
    assert trainer.gamma() == (5.0, 3.0)
    layers = capture.capture(trainer.model, trainer.held_out[:2], trainer.config)
    largest = 0.0
    for layer in layers:
        for head in range(2):
            q, k = layer.q[0, head].double(), layer.k[0, head].double()
            for row in range(48):
                scores = k[: row + 1] @ q[row] / 4
                largest = max(largest, float(scores.abs().max()))
    assert trainer.validate()[1] == pytest.approx(largest, rel=1e-5)


def test_validation_may_have_another_attention(corpus):
    trainer = Trainer(TINY_CONFIG, attention("sdpa"), corpus)
    before = trainer.validate()[0]
    other = trainer.validate(attention("emulated:precision=s+pv+dv+dp+dq+dk"))[0]
    assert 0 < abs(other - before) < 0.01 and trainer.validate()[0] == before


def test_learning_rate_warms_up_and_decays():
    config = TrainConfig(lr=1.0, warmup=10, steps=100, final_lr_fraction=0.1)
    rates = [config.learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("poisoned", ["attention output", "parameter"])
def test_non_finite_training_stops_and_says_where(corpus, monkeypatch, poisoned):
    calls = []

    def attend(q, k, v):
        calls.append(0)
        # Two layers in each of two steps before the poison.
        return v * math.nan if poisoned == "attention output" and len(calls) > 4 else v

    monkeypatch.setattr(training, "make_attention", lambda choice, device: attend)
    config = replace(TINY_CONFIG, log_every=1, lr=1e30 if poisoned == "parameter" else 0.01)
    run = run_of(corpus, config=config)
    assert run.status == "diverged" and run.diverged["step"] == run.rows[-1]["step"] < 12
    assert re.search(r"non-finite at step \d+: loss .*non-finite", run.diverged["why"])
    if poisoned == "attention output":
        assert run.diverged["step"] == 3


def test_non_finite_names_the_first_layer(corpus, monkeypatch):
    monkeypatch.setattr(training, "make_attention",
                        lambda choice, device: lambda q, k, v: v * math.nan)  # fmt: skip
    where = Trainer(TINY_CONFIG, attention("sdpa"), corpus)._first_non_finite(0)
    assert where == "first non-finite output: blocks.0.attention.out"


def test_a_loss_that_rises_has_diverged(corpus):
    config = replace(TINY_CONFIG, lr=3.0, log_every=1, diverged_at=0.5)
    run = run_of(corpus, config=config)
    assert run.status == "diverged" and run.diverged["why"].startswith("the training loss rose")
    losses = [row["train_loss"] for row in run.rows]
    assert losses[-1] > min(losses) + 0.5
    assert all(loss <= min(losses[: i + 1]) + 0.5 for i, loss in enumerate(losses[:-1]))


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [4, 6])  # at a row of the record, and between two
def test_a_resumed_run_is_the_same_bit_for_bit(corpus, tmp_path, cut):
    whole = Trainer(TINY_CONFIG, attention("emulated"), corpus)
    rows = whole.run().rows
    first = Trainer(TINY_CONFIG, attention("emulated"), corpus)
    assert first.run(until=cut).status == "cut"
    first.save(tmp_path / "a.pt")
    second = Trainer(TINY_CONFIG, attention("emulated"), corpus)
    second.load(tmp_path / "a.pt")
    run = second.run()
    assert run.status == "finished" and without_time(run.rows) == without_time(rows)
    for one, other in zip(whole.model.parameters(), second.model.parameters()):
        assert torch.equal(one, other)


def test_a_checkpoint_of_another_run_is_refused(corpus, tmp_path):
    trainer = Trainer(TINY_CONFIG, attention("sdpa"), corpus)
    trainer.run(until=1)
    trainer.save(tmp_path / "a.pt")
    model = replace(TINY_CONFIG.model, hidden=96)
    for config, line, part in ((replace(TINY_CONFIG, lr=0.02), "sdpa", r"lr 0.02 \(not 0.01\)"),
                               (TINY_CONFIG, "emulated", r"attention emulated \(not sdpa\)"),
                               (replace(TINY_CONFIG, model=model), "sdpa", "hidden 96")):
        other = Trainer(config, attention(line), corpus)
        with pytest.raises(ValueError, match=f"of another run: the options say {part}"):
            other.load(tmp_path / "a.pt")
    of_other_text = replace(corpus, header=corpus.header | {"sha256": "0"})
    with pytest.raises(ValueError, match="another corpus"):
        Trainer(TINY_CONFIG, attention("sdpa"), of_other_text).load(tmp_path / "a.pt")
    # Where losses are looked at does not change them.
    Trainer(replace(TINY_CONFIG, eval_every=6), attention("sdpa"), corpus).load(tmp_path / "a.pt")


# ---- the command ---------------------------------------------------------------------------------


def rows_in(folder):
    return [json.loads(line) for line in (folder / "train-sdpa.jsonl").read_text().splitlines()]


def test_train_command_writes_rows_and_a_record(corpus_file, tmp_path, capsys):
    out = tmp_path / "out"
    checkpoint = tmp_path / "model.pt"
    assert train.main(["--corpus", str(corpus_file), "--attention", "sdpa", "--out", str(out),
                       "--save", str(checkpoint), *TINY]) == 0  # fmt: skip
    rows = rows_in(out)
    assert tuple(rows[0]) == training.COLUMNS
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert all(row["val_loss"] > 0 and row["grad_norm_max"] >= row["grad_norm"] > 0 for row in rows)
    content = (out / "train-sdpa.json").read_text()
    record = json.loads(content)
    assert record["status"] == "finished" and record["attention"] == "sdpa"
    assert record["final_val_loss"] == rows[-1]["val_loss"]
    assert {"commit", "tree", "gpu", "torch", "command", "date"} <= record["environment"].keys()
    assert len(record["corpus"]["sha256"]) == 64 and record["config"]["model"]["dim"] == 32
    # Records are committed: no folder of the machine may be in them.
    assert "folder of a machine" not in content and str(tmp_path) not in content
    model, config, choice = capture.load_checkpoint(checkpoint, "cpu", None)
    assert config == config_of_record(record["config"])
    assert model.parameter_count() == record["parameters"] and choice == attention("sdpa")


def test_train_command_saves_and_resumes(corpus_file, tmp_path, capsys, monkeypatch):
    given = ["--corpus", str(corpus_file), "--attention", "sdpa", *TINY]
    save = tmp_path / "a.pt"
    assert train.main([*given, "--out", str(tmp_path / "whole")]) == 0
    calls, original = [], Trainer.save

    def full_disk_after_ten_steps(self, path):
        calls.append(self.step)
        original(self, path)
        if self.step == 10:
            raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save", full_disk_after_ten_steps)
        cut = [*given, "--out", str(tmp_path / "cut"), "--save", str(save), "--save-every", "5"]
        assert train.main(cut) == 1
    assert calls == [5, 10]
    record = json.loads((tmp_path / "cut/train-sdpa.json").read_text())
    assert record["status"] == "stopped: OSError: No space left on device"
    assert train.main([*given, "--out", str(tmp_path / "cut"), "--resume", str(save)]) == 0
    whole, cut = (rows_in(tmp_path / folder) for folder in ("whole", "cut"))
    assert without_time(whole) == without_time(cut)
    with pytest.raises(SystemExit):
        train.main([*given, "--seed", "1", "--resume", str(save)])
    said = capsys.readouterr().err
    assert "is of another run: the options say seed 1 (not 0); pass the options" in said
    # Of the last step nothing is left, and the record stays what it was.
    last = str(tmp_path / "last.pt")  # which need not be there the first time
    end = [*given, "--save", last, "--resume", last, "--out", str(tmp_path / "end")]
    assert train.main(end) == 0 == train.main(end)
    assert "is of step 12 of 12, the last: nothing is left to train" in capsys.readouterr().err
    assert without_time(rows_in(tmp_path / "end")) == without_time(whole)


def train_in_each_way(rank, folder, given):
    """And once more from a checkpoint, as torchrun would start it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    for how in ("ddp", "fsdp"):
        words = [*given, "--parallel", how]
        place = f"{folder}/{how}"
        assert train.main([*words, "--out", place, "--save", place + "/{step}.pt",
                           "--save-every", "5"]) == 0  # fmt: skip
        assert train.main([*words, "--out", f"{place}-resumed", "--resume", f"{place}/5.pt"]) == 0


@pytest.fixture(scope="module")
def by_two(corpus_file, tmp_path_factory):
    """A folder of what two processes trained, and the words of the command."""
    folder = tmp_path_factory.mktemp("two")
    given = ["--corpus", str(corpus_file), "--attention", "sdpa", *TINY, "--no-autocast",
             "--tokens-per-step", "192"]  # fmt: skip
    ranks_of = pytest.importorskip("distributed_ranks", reason="needs torch.distributed")
    found = ranks_of.run(folder, 2, train_in_each_way, folder, given, timeout=300, hangs=300)
    assert found == [None, None]
    return folder, given


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_train_as_one(by_two, corpus, tmp_path, how):
    """To rounding. They resume bit for bit, which another number of processes cannot."""
    folder, given = by_two
    assert train.main([*given, "--out", str(tmp_path)]) == 0
    one, both = rows_in(tmp_path), rows_in(folder / how)
    for a, b in zip(one, both, strict=True):
        assert a["tokens"] == b["tokens"] and a["lr"] == b["lr"]
        for name in ("train_loss", "val_loss", "grad_norm", "gamma_q"):
            assert a[name] == pytest.approx(b[name], rel=2e-4), name
        # Each process looks at a sequence, of which the first process has the same as one alone.
        assert a["max_score"] <= b["max_score"] * 1.0001 < 2 * a["max_score"]
    assert without_time(rows_in(folder / f"{how}-resumed")) == without_time(both)
    config = replace(TINY_CONFIG, autocast=False, tokens_per_step=192)
    with pytest.raises(ValueError, match=r"1 processes \(not 2\); .*start torchrun with 2"):
        Trainer(config, attention("sdpa"), corpus).load(folder / how / "12.pt")
    # What they saved is a model like any other.
    model, *_ = capture.load_checkpoint(folder / how / "12.pt", "cpu", None)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_train_command_refuses_bad_options(corpus_file, tmp_path, capsys):
    torch.save({"step": 3, "weights": torch.zeros(10_000)}, tmp_path / "run-8.pt")
    (tmp_path / "run-4.pt").write_bytes((tmp_path / "run-8.pt").read_bytes()[:20_000])
    for words, named in ((["--attention", "flash"], "known: sdpa"),
                         (["--dim", "33"], "multiple of head_dim"),
                         (["--corpus", str(tmp_path / "absent")], "absent"),
                         (["--resume", str(corpus_file)], "PyTorch cannot load it"),
                         (["--resume", str(corpus_file.parent)], "is a folder: pass a checkpoint"),
                         (["--resume", str(tmp_path / "a.pt")], "folder has run-4.pt, run-8.pt"),
                         (["--resume", str(tmp_path / "a.bin")], "train --save FILE writes"),
                         (["--resume", str(tmp_path / "run-4.pt")], "not the whole of one"),
                         (["--resume", str(tmp_path / "run-8.pt")], "it has no 'model'"),
                         (["--save-every", "3"], "and --save"),
                         (["--switch-at", "3"], "go together"),
                         (["--switch-at", "3", "--switch-to", "flash"], "known: sdpa"),
                         (["--tokens-per-step", "100"], "a multiple of 96, which is"),
                         (["--steps", "100000"], "of which none is seen twice")):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            train.main(["--corpus", str(corpus_file), "--attention", "sdpa", *TINY, *words])
        assert stopped.value.code == 2
        assert named in capsys.readouterr().err


def test_tensorboard_gets_every_figure(corpus_file, tmp_path, capsys, monkeypatch):
    given = ["--corpus", str(corpus_file), "--attention", "sdpa", *TINY, "--out", str(tmp_path),
             "--tensorboard", str(tmp_path / "board")]  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert train.main(given) == 1
    assert "pip install tensorboard" in capsys.readouterr().err
    scalars, folders = {}, []

    class Writer:
        def __init__(self, folder, purge_step):
            assert purge_step is None
            folders.append(folder)

        def add_scalar(self, name, value, step):
            scalars.setdefault(name, {})[step] = value

        def close(self):
            folders.append("closed")

    module = types.ModuleType("tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    assert train.main(given) == 0
    assert folders == [tmp_path / "board/train-sdpa", "closed"]
    assert scalars.keys() == set(training.COLUMNS) - {"step", "tokens"}
    assert scalars["val_loss"] == {row["step"]: row["val_loss"] for row in rows_in(tmp_path)}

    def fail(*of_call):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for broken in ("add_scalar", "close"):
        capsys.readouterr()
        monkeypatch.setattr(Writer, broken, fail)
        assert train.main(given) == 0
        said = capsys.readouterr().err
        assert said.count("No space left on device; this log ends here, and the training goes") == 1
        assert f"--tensorboard {tmp_path / 'board/train-sdpa'}: " in said


def test_a_run_that_diverges_is_recorded_and_fails(corpus_file, tmp_path, capsys):
    assert train.main(["--corpus", str(corpus_file), "--attention", "sdpa", *TINY, "--lr", "1e30",
                       "--out", str(tmp_path)]) == 1  # fmt: skip
    assert "train: diverged by step 4: non-finite at step" in capsys.readouterr().err
    record = json.loads((tmp_path / "train-sdpa.json").read_text())
    assert record["status"] == "diverged" and record["diverged"]["step"] == 4
