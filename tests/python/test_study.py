"""A study of training: its plans, how its arms are run, and what its bands say."""

import json
import math
import random
import re
from dataclasses import asdict, replace

import pytest

torch = pytest.importorskip("torch")

from stand_in import kernels_on_the_cpu  # noqa: E402, F401

from experiments import study, study_summary  # noqa: E402
from experiments.attentions import AttentionChoice  # noqa: E402
from experiments.data import Corpus  # noqa: E402
from experiments.study import Study  # noqa: E402
from experiments.study_plan import ATTENTIONS, PLANS, Arm, stable_rate, toy  # noqa: E402
from experiments.study_worker import Settings, checkpoint_of, run_arm  # noqa: E402
from experiments.training import Trainer  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")
CORPUS = {"sha256": "0"}


def record_of(arm, loss=1.0, status="finished", **more):
    return {"arm": asdict(arm), "regime": arm.regime(), "status": status, "corpus": CORPUS,
            "compile": False,
            "final_val_loss": loss, "tokens_per_second": 1000.0} | more  # fmt: skip


def write(folder, record):
    (folder / f"{record['arm']['name']}.json").write_text(json.dumps(record))


# ---- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_arms_of_a_plan_can_be_run(name):
    arms = PLANS[name]()
    assert len({arm.name for arm in arms}) == len(arms)
    for arm in arms:
        AttentionChoice.parse(arm.attention)
        config = replace(arm, lr=arm.lr or 1e-3).config(8192, "cpu")
        assert config.sequences_per_step() * arm.tokens == arm.tokens_per_step
        assert arm.lr is not None or not arm.sweep
        # A rate that is not given is found by a sweep before it.
        sweeps = [a for a in arms if a.sweep and a.family() == arm.family()]
        assert (len(sweeps) > 1 and arms.index(sweeps[-1]) <= arms.index(arm)) or arm.lr


@pytest.mark.parametrize("name, most", [("pilot", 34e6), ("full", 201e6)])
def test_regimes_differ_by_eight_at_equal_tokens_and_once_at_equal_steps(name, most):
    arms = {arm.name: arm for arm in PLANS[name]()}
    large, small, few = (arms[f"{regime}-sdpa-0"] for regime in ("large", "small", "few-steps"))
    assert large.tokens_per_step == 512 * 1024 == 8 * small.tokens_per_step
    assert abs(large.trained_tokens / small.trained_tokens - 1) < 0.01
    assert few.steps == large.steps and few.tokens_per_step == small.tokens_per_step
    assert max(arm.trained_tokens for arm in arms.values()) < most
    for regime in ("large", "small", "few-steps"):
        assert {f"{regime}-{kind}-{seed}" for kind in ("sdpa", "sdpa-other", "row")
                for seed in range(3)} <= arms.keys()  # fmt: skip


def test_the_largest_stable_rate():
    base = Arm("a", "sdpa", 256, 4, sweep=True)
    family = base.family()

    def rate(**losses):
        arms = []
        for rate, loss in losses.items():
            arm = replace(base, lr=float(rate.strip("_")))
            arms.append((arm, record_of(arm, abs(loss), "finished" if loss > 0 else "diverged")))
        return stable_rate(arms, family)

    assert rate(_1=2.0, _2=1.9, _4=1.99, _8=2.1) == 4
    assert rate(_1=2.0, _2=1.9, _4=-1.8) == 2
    assert rate(_8=1.9, _1=2.5) == 8
    with pytest.raises(ValueError, match="every rate of the sweep diverged"):
        rate(_1=-2.0)
    assert stable_rate([(base, None)], family) is None
    other = replace(base, qk_norm=False)
    assert stable_rate([(base, record_of(replace(base, lr=1.0)))], other.family()) is None


# ---- which arm is next ---------------------------------------------------------------------------


def names(found, seconds_left=None):
    given = []
    while arm := found.next(seconds_left):
        given.append(arm.name)
    return given


def test_arms_come_in_the_order_of_the_plan_after_their_sweep(tmp_path):
    arms = toy()
    assert names(Study(arms, tmp_path, CORPUS)) == [arm.name for arm in arms[:2]]
    for arm, loss in zip(arms, (2.0, 1.0)):
        write(tmp_path, record_of(arm, loss))
    found = Study(arms, tmp_path, CORPUS)
    assert found.resolved(arms[2]).lr == 1e-2
    assert names(found) == [arm.name for arm in arms[2:]]


def test_arms_whose_sweep_diverged_do_not_start(tmp_path, capsys):
    arms = toy()
    for arm in arms[:2]:
        write(tmp_path, record_of(arm, status="diverged"))
    assert names(Study(arms, tmp_path, CORPUS)) == []
    said = capsys.readouterr().err
    assert said.count("cannot start: every rate of the sweep diverged") == 1


def test_arms_that_are_done_are_skipped_and_others_run_again(tmp_path):
    arms = toy()
    for arm, loss in zip(arms, (2.0, 1.0)):
        write(tmp_path, record_of(arm, loss))
    done, cut, failed, diverged = (replace(arm, lr=1e-2) for arm in arms[2:6])
    write(tmp_path, record_of(done))
    write(tmp_path, record_of(cut, status="cut"))
    write(tmp_path, record_of(failed, status="failed: no reason"))
    write(tmp_path, record_of(diverged, status="diverged"))
    left = names(Study(arms, tmp_path, CORPUS))
    assert left == [cut.name, failed.name, *(arm.name for arm in arms[6:])]
    for change, which in (({"corpus": {"sha256": "1"}}, "corpus sha256 1 (given: 0)"),
                          ({"arm": asdict(replace(done, steps=99))}, "steps 99 (given: 24)"),
                          ({"compile": True}, "compile True (given: False)")):
        for status in ("finished", "cut"):
            write(tmp_path, record_of(done, status=status) | change)
            said = re.escape(f"{done.name}.json in --out is of another run, with {which}: name")
            with pytest.raises(ValueError, match=said):
                Study(arms, tmp_path, CORPUS)
    (tmp_path / f"{done.name}.json").write_text("{")
    with pytest.raises(ValueError, match="is no record of an arm"):
        Study(arms, tmp_path, CORPUS)


def test_arms_that_do_not_fit_into_the_time_are_left_out(tmp_path):
    """By the speed of the same attention, or a share of SDPA's."""
    long, short = Arm("long", "sdpa", 1000, 50, lr=1.0), Arm("short", "sdpa", 1000, 5, lr=1.0)
    other, slow = replace(short, name="other", attention="sagebwd"), replace(
        short, name="slow", attention="emulated")  # fmt: skip
    write(tmp_path, record_of(replace(short, name="before")))
    arms = [Arm("before", "sdpa", 1000, 5, lr=1.0), long, short, other, slow]

    def given(seconds):
        return names(Study(arms, tmp_path, CORPUS), seconds)

    start_and_end = study.START_SECONDS + study.END_SECONDS
    assert given(start_and_end + 60) == ["long", "short", "other", "slow"]
    # Those that will be cut come last, and start where PART_SECONDS of their steps fit.
    assert given(start_and_end + 30) == ["short", "other", "long", "slow"]
    assert given(start_and_end + study.PART_SECONDS - 1) == ["short", "other"]
    assert given(start_and_end + 10) == ["short", "other"]
    assert given(start_and_end + 5.3) == ["short"]
    assert given(start_and_end + 4) == []
    assert given(start_and_end + 100) == ["long", "short", "other", "slow"]
    # Nothing is known of another model: it is tried.
    arms.append(replace(long, name="big", model="110m"))
    assert given(start_and_end + 1) == ["big"]
    assert given(start_and_end - 1) == []


def test_an_arm_that_was_cut_needs_only_its_other_steps(tmp_path):
    arm = Arm("long", "sdpa", 1000, 50, lr=1.0)
    write(tmp_path, record_of(arm, status="cut", steps_done=45))
    around = study.START_SECONDS + study.END_SECONDS
    assert Study([arm], tmp_path, CORPUS).seconds(arm) == around + 50  # its checkpoint is not there
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/long.pt").touch()
    found = Study([arm], tmp_path, CORPUS)
    assert found.seconds(arm) == around + 5
    assert found.rest(0.3) == ("not done: long (cut at step 45 of 50)\nno arm fits into 0.3 "
                               "minutes: the next, long, takes about 19 seconds: pass --minutes "
                               "0.4 or more")
    assert "goes on with long, which takes about 19 seconds" in found.rest(0.4)
    assert names(found, 60 * 0.4) == ["long"]


def test_too_little_time_for_any_arm(corpus_file, tmp_path, capsys):
    words = ["toy", "--corpus", str(corpus_file), "--device", "cpu", "--out",
             str(tmp_path / "new"), "--minutes", "0.1"]  # fmt: skip
    assert study.main(words) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == (
        "no arm fits into 0.1 minutes: the next, sweep-sdpa-0-lr-0.001, takes more than 14 "
        "seconds: pass --minutes 0.3 or more")
    assert not said.out and "starts" not in said.err


# ---- bands ---------------------------------------------------------------------------------------


def test_the_band_of_three_seeds():
    """By hand: deviation 1, Student's t 4.303 for two degrees of freedom."""
    band = study_summary.band_of([1.0, 2.0, 3.0])
    assert band == {"seeds": 3, "mean": 2.0, "deviation": 1.0,
                    "half_width": pytest.approx(4.303 * math.sqrt(4 / 3))}  # fmt: skip
    assert study_summary.band_of([1.0, 2.0]) is None


def of_arms(**losses):
    """A regime of arms with these losses by seed."""
    records = []
    for attention, found in losses.items():
        for seed, loss in enumerate(found):
            arm = Arm(f"{attention}-{seed}", attention, 256, 4, seed, lr=1.0)
            status = "diverged" if loss is None else "finished"
            records.append(record_of(arm, loss, status))
    (regime,) = study_summary.summarised(records).values()
    return regime


def test_one_arm_in_twenty_leaves_the_bands_by_chance():
    """Of arms that are as good as SDPA, by either band and for one seed or three."""
    draw = random.Random(0)
    outside = {"seeds": [], "pairs, one": [], "pairs, three": []}

    def drawn(seeds, scale, middles):
        return [middles[i] + draw.gauss(0, scale) for i in range(seeds)]

    for _ in range(2000):
        means = [3 + draw.gauss(0, 0.01) for _ in range(3)]
        alone = of_arms(sdpa=drawn(3, 0, means), one=[3 + draw.gauss(0, 0.01)])["arms"]["one"]
        assert alone["by"] == "seeds"
        outside["seeds"].append(alone["verdict"].startswith("outside"))
        # SDPA has noise of its own, which all differences to it share.
        found = of_arms(sdpa=drawn(3, 0.002, means), other=drawn(3, 0.002, means),
                        ours=drawn(3, 0.002, means), one=drawn(1, 0.002, means))["arms"]
        assert found["one"]["by"] == found["other"]["by"] == "pairs"
        outside["pairs, one"].append(found["one"]["verdict"].startswith("outside"))
        outside["pairs, three"].append(found["other"]["verdict"].startswith("outside"))
    for kind, verdicts in outside.items():
        assert 0.035 < sum(verdicts) / 2000 < 0.065, kind


def test_the_noise_of_pairs():
    """By hand. Two seeds of two attentions have one degree of freedom, which is too few."""
    two = {"sdpa": {0: 1.0, 1: 2.0}, "other": {0: 1.5, 1: 3.5}}
    assert study_summary.paired_deviation(two) is None
    alone = two | {"one": {0: 9.0}}  # tells nothing of noise
    assert study_summary.paired_deviation(alone) is None
    three = {"sdpa": {0: 1.0, 1: 2.0, 2: 5.0}, "other": {0: 2.0, 1: 3.0, 2: 9.0}}
    found = study_summary.paired_deviation(three)  # differences 1, 1 and 4: deviation sqrt(3)
    assert found == {"deviation": pytest.approx(math.sqrt(3)), "freedom": 2}
    with_one = study_summary.paired_deviation(three | {"one": {2: 7.0}})
    assert with_one == pytest.approx(found)


def test_what_is_worse_better_or_not_to_be_told():
    sdpa = [3.0, 3.02, 2.98]
    found = of_arms(sdpa=sdpa, other=[3.001, 3.019, 2.98], worse=[3.05], better=[2.9],
                    within=[3.002], diverges=[None])["arms"]  # fmt: skip
    assert "verdict" not in found["sdpa"]
    assert found["worse"]["verdict"] == "outside, worse"
    assert found["worse"]["paired"] == pytest.approx(0.05)
    assert found["better"]["verdict"] == "outside, better"
    assert found["within"]["verdict"] == found["other"]["verdict"] == "within"
    assert found["diverges"]["verdict"] == "diverged" and found["diverges"]["diverged_seeds"] == [0]
    wide = of_arms(sdpa=[3.0, 3.5, 2.5], one=[3.1])["arms"]["one"]
    assert wide["verdict"] == "cannot tell" and "wider than 0.054" in wide["why"]
    few = of_arms(sdpa=[3.0, 3.5], one=[3.1])["arms"]["one"]
    assert few["verdict"] == "cannot tell" and "fewer than three" in few["why"]


def test_regimes_are_judged_alone_and_sweeps_not_at_all(tmp_path):
    arm = Arm("a", "sdpa", 256, 4, lr=1.0)
    arms = [arm, replace(arm, name="b", lr=2.0), replace(arm, name="c", qk_norm=False),
            replace(arm, name="d", attention="emulated"), replace(arm, name="e", sweep=True)]
    for one in arms:
        write(tmp_path, record_of(one))
    records = study_summary.records_of(tmp_path)
    summary = study_summary.summarised(records)
    assert [sorted(found["arms"]) for found in summary.values()] == [
        ["emulated", "sdpa"], ["sdpa"], ["sdpa"]]  # fmt: skip
    assert "lr 1: finished, 1.0000" in study_summary.write(tmp_path)
    with pytest.raises(ValueError, match="has no records of arms"):
        study_summary.records_of(tmp_path / "absent")


# ---- running arms --------------------------------------------------------------------------------


@pytest.fixture
def settings(corpus_file, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return Settings(corpus_file, tmp_path, tmp_path / "checkpoints", "cpu", compile=False,
                    graph=False, keep=False, environment={})


def test_an_arm_that_was_cut_goes_on_where_it_was(corpus_file, settings):
    corpus = Corpus.open(corpus_file)
    arm = replace(toy()[2], lr=1e-2, attention="emulated")
    whole = run_arm(arm, corpus, settings)
    asked = iter([False] * 10 + [True])
    cut = run_arm(arm, corpus, settings, lambda: next(asked))
    assert cut["status"] == "cut" and cut["steps_done"] == 11
    assert json.loads((settings.out / f"{arm.name}.json").read_text())["status"] == "cut"
    resumed = run_arm(arm, corpus, settings)
    assert resumed["status"] == "finished" and resumed["resumed_at"] == 11
    assert resumed["seconds"] > cut["seconds"] > 0
    for name in ("final_val_loss", "final_val_loss_by_sdpa", "curve", "grad_norm", "gamma"):
        assert resumed[name] == whole[name], name
    assert not checkpoint_of(settings, arm).exists()
    assert 0 < abs(whole["final_val_loss"] - whole["final_val_loss_by_sdpa"]) < 0.01


def test_the_kernels_train_as_their_emulation(corpus_file, kernels_on_the_cpu):  # noqa: F811
    """Kernels that are the emulation, called as a model in 16 bits calls real ones."""
    corpus = Corpus.open(corpus_file)
    arm = replace(toy()[2], lr=1e-2, steps=3, head_dim=64)
    losses = []
    for attention in (ATTENTIONS["row"], ATTENTIONS["emulated"], ATTENTIONS["sdpa"]):
        trainer = Trainer(arm.config(256, "cpu"), AttentionChoice.parse(attention), corpus)
        losses.append(trainer.run().rows[-1]["val_loss"])
    assert losses[0] == losses[1] != losses[2]


def test_an_arm_that_fails_or_diverges_is_recorded(corpus_file, settings, monkeypatch):
    corpus = Corpus.open(corpus_file)
    arm = replace(toy()[2], lr=1e30)
    assert run_arm(arm, corpus, settings)["status"] == "diverged"
    with pytest.raises(Exception, match="CUDA GPU"):
        run_arm(replace(arm, attention="sagebwd"), corpus, settings)
    record = json.loads((settings.out / f"{arm.name}.json").read_text())
    assert record["status"].startswith("failed: Failure: ") and record["arm"]["lr"] == 1e30


@pytest.mark.usefixtures("forked_workers")
def test_a_whole_study_on_the_cpu(corpus_file, tmp_path, capsys):
    """Two processes; and a second study repeats nothing."""
    out = tmp_path / "out"
    words = ["toy", "--corpus", str(corpus_file), "--device", "cpu", "--gpus", "2", "--out",
             str(out)]  # fmt: skip
    assert study.main(words) == 0
    said = capsys.readouterr()
    arms = toy()
    assert said.err.count(": starts, lr ") == said.err.count(": finished, ") == len(arms)
    records = {arm.name: json.loads((out / f"{arm.name}.json").read_text()) for arm in arms}
    for arm in arms:
        record = records[arm.name]
        assert record["status"] == "finished" and record["steps_done"] == arm.steps
        assert record["tokens_per_second"] > 0 and record["max_score"] > 0
        assert record["curve"][-1][3] == pytest.approx(record["final_val_loss"], abs=1e-4)
        assert "command" in record["environment"] and str(tmp_path) not in json.dumps(record)
    best = min(arms[:2], key=lambda arm: records[arm.name]["final_val_loss"])
    assert {records[arm.name]["arm"]["lr"] for arm in arms[2:]} == {best.lr}
    summary = json.loads((out / "study.json").read_text())
    found = next(regime for regime in summary["regimes"].values() if regime["band"])
    assert found["band"]["seeds"] == 3 and found["arms"]["emulated"]["by"] == "pairs"
    assert "emulated" in said.out and "sdpa-other" in said.out
    curves = [p.read_text() for p in out.glob("study-curves-toy-*-qk-norm-*-steps-lr-0.*.csv")]
    assert curves and all(text.startswith("step,sdpa seed 0") for text in curves)
    assert study.main(words) == 0
    again = capsys.readouterr()
    assert "starts" not in again.err and again.out == said.out
    assert f"all {len(arms)} arms are done already" in again.err
    assert study.main(["--summary", "--out", str(out)]) == 0
    assert capsys.readouterr().out == said.out


def test_wrong_use_of_study(corpus_file, tmp_path, capsys):
    given = ["toy", "--device", "cpu", "--out", str(tmp_path), "--corpus", str(corpus_file)]
    for words, part in ((given[:-2], "--corpus FILE is needed"),
                        ([*given, "--gpus", "0"], "--gpus 0: it must be at least 1"),
                        ([*given, "--minutes", "0"], "--minutes 0: pass a positive number"),
                        ([*given, "--graph"], "--graph needs a CUDA GPU"),
                        ([*given, "--only", "medium-*"], "the plan has no such arm"),
                        ([*given, "--only", "small-sdpa-0", "nosuch"], "--only nosuch: the plan"),
                        (["pilot", *given[1:]], "of which none is seen twice"),
                        (["--summary", "--show"], "--show: not allowed with argument --summary"),
                        (["--summary", "--out", str(tmp_path)], "has no records of arms")):
        with pytest.raises(SystemExit) as left:
            study.main(words)
        assert left.value.code == 2
        assert part in capsys.readouterr().err, words
    assert not list(tmp_path.iterdir())


def test_only_some_arms_with_the_sweep_that_they_need(corpus_file, tmp_path, capsys):
    assert study.main(["toy", "--only", "large-*", "small-emulated-0", "--show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [
        "sweep-sdpa-0-lr-0.001", "sweep-sdpa-0-lr-0.01", "small-sdpa-0", "small-sdpa-1",
        "small-sdpa-2", "large-sdpa-0", "small-emulated-0"]  # fmt: skip
    assert study.main(["toy", "--only", "small-sdpa-1", "--show"]) == 0
    assert "small-sdpa-0" not in capsys.readouterr().out
    assert study.main(["pilot", "--only", "few-steps-row-*", "--show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 + 3 + 3 + 1 and "no-qk-norm" not in "".join(lines)
