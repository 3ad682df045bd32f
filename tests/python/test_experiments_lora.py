"""Fine-tuning by LoRA with several attentions: adapters, records, bands, and wrong use."""

import json
import shutil

import pytest

torch = pytest.importorskip("torch")

from corpus_cases import corpus_of  # noqa: E402

from experiments import corpus, lora  # noqa: E402
from experiments.attentions import AttentionChoice  # noqa: E402
from experiments.config import ModelConfig, TrainConfig  # noqa: E402
from experiments.data import Corpus  # noqa: E402
from experiments.training import Trainer  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")
MODEL = ModelConfig(dim=32, layers=2, head_dim=32, hidden=48)
BASE = TrainConfig(model=MODEL, steps=40, batch=2, tokens=32, val_sequences=2, lr=1e-2, warmup=4,
                   eval_every=40, log_every=40, device="cpu")  # fmt: skip
WORDS = ("--steps 12 --batch 2 --tokens 32 --val-sequences 2 --lr 0.01 --rank 4 --alpha 8 "
         "--seeds 2 --device cpu").split()  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """base.pt, trained on c.bin, and other.bin of other text."""
    folder = tmp_path_factory.mktemp("lora")
    trainer = Trainer(BASE, AttentionChoice.parse("sdpa"), Corpus.open(corpus_of(folder)))
    trainer.run()
    trainer.save(folder / "base.pt")
    trainer.save(folder / "again.pt")
    (folder / "new").mkdir()
    for name in ("summer", "winter", "spring", "autumn", "morning", "evening"):
        lines = (f"in {name} number {i} goes home, as easy as before\n" for i in range(40))
        (folder / f"new/{name}.txt").write_text("".join(lines))
    words = [str(folder / "new"), "--out", str(folder / "other.bin"), "--validation", "0.2"]
    assert corpus.main(words) == 0
    return folder


@pytest.fixture
def base(place):
    return lora.Base.open(place / "base.pt")


def trainer(base, place, seed=0, attention="sdpa", rank=4):
    arm = lora.Arm("a", attention, 64, 12, seed, lr=1e-2, head_dim=32, tokens=32, batch=2,
                   val_sequences=2)  # fmt: skip
    return lora.trainer_of(base, lora.config_of_arm(arm, base, "cpu"),
                           AttentionChoice.parse(attention), Corpus.open(place / "other.bin"),
                           lora.Adapters(rank, 8.0))  # fmt: skip


# ---- adapters ------------------------------------------------------------------------------------


def test_an_adapter_adds_a_product_of_low_rank():
    torch.manual_seed(0)
    linear = torch.nn.Linear(6, 10, bias=False)
    adapted = lora._adapted(linear, lora.Adapters(2, 6.0), torch.Generator().manual_seed(1))
    x = torch.randn(3, 5, 6)
    assert torch.equal(adapted(x), linear(x))
    with torch.no_grad():
        adapted.up.normal_()
    weight = linear.weight + 3 * adapted.up @ adapted.down
    torch.testing.assert_close(adapted(x), x @ weight.T)


def test_the_adapters_alone_learn(base, place):
    one = trainer(base, place)
    before = one.validate()[0]
    plain = Trainer(one.config, AttentionChoice.parse("sdpa"), one.corpus)
    plain.model.load_state_dict(base.weights)
    assert plain.validate()[0] == before  # they begin as nothing
    run = one.run()
    assert run.status == "finished" and run.rows[-1]["val_loss"] < before - 0.05
    learned = [p for p in one.model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in learned) == 2 * 4 * ((32 + 96) + (32 + 32))
    assert all(p.any() for p in learned)
    now = {name.replace(".linear.", "."): p for name, p in one.model.state_dict().items()}
    for name, weight in base.weights.items():
        assert torch.equal(now[name], weight), name


def test_runs_of_one_seed_begin_alike(base, place):
    def begins(*given):
        one = trainer(base, place, *given)
        return one.places(0), [p for p in one.model.parameters() if p.requires_grad]

    places, weights = begins(0)
    for given, same in (((0, "emulated"), True), ((1, "sdpa"), False)):
        other_places, others = begins(*given)
        assert torch.equal(places, other_places) == same
        assert all(torch.equal(a, b) for a, b in zip(weights, others) if b.any()) == same


# ---- the command ---------------------------------------------------------------------------------


def call(place, out, *words, base="base.pt", text="other.bin"):
    return lora.main([str(place / base), "--corpus", str(place / text), "--out", str(out), *WORDS,
                      *words])  # fmt: skip


def test_the_command_judges_and_repeats_nothing(place, tmp_path, capsys):
    out = tmp_path / "out"
    assert call(place, out) == 0
    said = capsys.readouterr()
    names = [f"lora-{name}-{seed}" for seed in (0, 1)
             for name in ("sdpa", "sdpa-other", "emulated")]  # fmt: skip
    assert [line.split(":")[0] for line in said.err.splitlines()
            if line.startswith("lora-")] == names  # fmt: skip
    records = {name: json.loads((out / f"{name}.json").read_text()) for name in names}
    for name, record in records.items():
        assert record["status"] == "finished" and str(tmp_path) not in json.dumps(record)
        assert record["final_val_loss"] < record["val_loss_before"] - 0.05
        by = record["final_val_loss_by"]
        assert [*by] == ["sdpa", "emulated"] and by["sdpa"] == record["final_val_loss_by_sdpa"]
        assert 0 < abs(by["sdpa"] - by["emulated"]) < 0.01
        if (own := record["arm"]["attention"]) in by:
            assert by[own] == record["final_val_loss"], name
        assert record["base"]["step"] == 40 and record["trained_weights"] == 1536
    (summary,) = json.loads((out / "study.json").read_text())["regimes"].values()
    found = summary["arms"]["emulated"]
    pairs = [records[f"lora-emulated-{seed}"]["final_val_loss"]
             - records[f"lora-sdpa-{seed}"]["final_val_loss"] for seed in (0, 1)]
    assert found["pairs"] == pytest.approx(pairs) and found["by"] == "pairs"
    assert "adapters by" in said.out and "by emulated" in said.out
    assert call(place, out) == 0
    again = capsys.readouterr()
    assert again.out == said.out
    assert not [line for line in again.err.splitlines() if line.startswith("lora-")]


def test_records_of_another_run_are_not_mixed_in(place, tmp_path, capsys):
    out = tmp_path / "out"
    few = ("--steps", "2", "--seeds", "1", "--attention", "sdpa")
    assert call(place, out, *few) == 0
    for more, given, which in (
        (("--rank", "2"), {}, "adapters rank 4 (given: 2)"),
        (("--steps", "3"), {}, "steps 2 (given: 3)"),
        ((), {"base": "again.pt"}, "base checkpoint base.pt (given: again.pt)"),
    ):
        with pytest.raises(SystemExit) as left:
            call(place, out, *few, *more, **given)
        assert left.value.code == 2
        said = capsys.readouterr().err
        assert "lora-sdpa-0.json in --out is of another run, with " in said and which in said


def test_runs_of_other_seeds_are_told_from_those_of_the_command(place, tmp_path, capsys):
    few = ("--steps", "2", "--attention", "sdpa")
    assert call(place, tmp_path, *few) == 0
    assert "that --out has" not in capsys.readouterr().out
    assert call(place, tmp_path, *few, "--seeds", "1") == 0
    said = capsys.readouterr().out
    assert said.startswith("all runs that --out has, 2:\n")
    assert "the runs of this command, 1:\nadapters by" in said


def test_runs_that_all_diverge(place, tmp_path, capsys):
    words = ("--steps", "4", "--attention", "sdpa", "--seeds", "1", "--lr", "1e30")
    assert call(place, tmp_path, *words) == 1
    said = capsys.readouterr()
    assert "no run finished" in said.out
    assert "every run diverged: pass a lower --lr than 1e+30" in said.err


def test_wrong_use_of_lora(place, tmp_path, capsys):
    weights = torch.load(place / "base.pt", weights_only=True)
    weights["model"].popitem()
    torch.save(weights, place / "part.pt")
    pairs = corpus_of(tmp_path / "more", files=4)
    header = json.loads(pairs.with_name("c.bin.json").read_text())
    for name in ("c.bin", "c.bin.json"):
        shutil.copy(pairs.with_name(name), place / name.replace("c.bin", "pairs.bin"))
    (place / "pairs.bin.json").write_text(json.dumps(header | {"vocab": 400}))
    for words, given, part in (
        (["--seeds", "0"], {}, "--seeds 0: it must be at least 1"),
        (["--rank", "0"], {}, "--rank 0"), (["--alpha", "nan"], {}, "--alpha nan"),
        (["--steps", "0"], {}, "steps 0"), (["--lr", "nan"], {}, "lr nan"),
        (["--steps", "99999"], {}, "of which none is seen twice"),
        (["--attention", "flash"], {}, "unknown attention 'flash'"),
        ([], {"text": "c.bin"}, "what the base was trained on"),
        ([], {"text": "pairs.bin"}, "400 kinds of tokens, and the base 256: make it "
         "with corpus --tokenizer bytes"),
        ([], {"base": "other.bin"}, "other.bin is no checkpoint"),
        ([], {"base": "part.pt"}, "part.pt is no checkpoint"),
        ([], {"base": "absent.pt"}, "absent.pt: there is no such file; its folder has again.pt"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as left:
            call(place, tmp_path / "out", *words, **given)
        assert left.value.code == 2 and part in capsys.readouterr().err, (words, given)
    assert call(place, tmp_path / "out", "--attention", "sagebwd") == 1
    assert "CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_text_that_the_base_does_not_know_at_all(place, tmp_path, capsys):
    """Its loss is above that of chance, as tokens mean something else."""
    saved = torch.load(place / "base.pt", weights_only=True)
    saved["model"]["head.weight"] *= -1
    torch.save(saved, place / "wrong.pt")
    assert call(place, tmp_path / "out", base="wrong.pt") == 1
    assert "no better than chance" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
