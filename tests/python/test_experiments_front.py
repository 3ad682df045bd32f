"""Attention of the experiments that norms and rotates queries and keys in place of the model."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import training_cases as cases  # noqa: E402
from alike import relative  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401

from experiments import capture, study, study_plan, study_summary  # noqa: E402
from experiments.training import Trainer  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")
IN_FP32 = replace(cases.TINY_CONFIG, autocast=False)


def gradients(corpus, line, config):
    trainer = Trainer(config, cases.attention(line), corpus)
    with torch.no_grad():  # gains that are not 1
        for name, parameter in trainer.model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
    trainer._gradients(trainer._on_device(trainer.places(0)))
    return {name: p.grad for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("qk_norm", [True, False])
def test_gradients_are_those_of_the_models_norm_and_rope(corpus, qk_norm):
    config = replace(IN_FP32, model=replace(IN_FP32.model, qk_norm=qk_norm))
    expected, found = (gradients(corpus, line, config) for line in ("sdpa", "sdpa:front"))
    assert expected.keys() == found.keys()
    assert any("q_norm" in name for name in found) == qk_norm
    for name, right in expected.items():
        assert right.any() and relative(found[name], right) < 1e-5, name


def test_training_comes_to_the_same(corpus):
    for line, config, most in (("sdpa", IN_FP32, 1e-5), ("emulated", cases.TINY_CONFIG, 0.02)):
        expected, found = (cases.run_of(corpus, of, config).rows for of in (line, line + ":front"))
        for one, other in zip(expected, found):
            for name in ("train_loss", "val_loss"):
                assert other[name] == pytest.approx(one[name], abs=most), (line, name)
        assert found[-1]["max_score"] == pytest.approx(expected[-1]["max_score"], rel=0.02)


def test_layers_are_captured_behind_norm_and_rope(corpus):
    plain, own = (Trainer(IN_FP32, cases.attention(line), corpus)
                  for line in ("sdpa", "sdpa:front"))  # fmt: skip
    for one, other in zip(*(capture.capture(of.model, plain.held_out[:2], IN_FP32)
                            for of in (plain, own))):  # fmt: skip
        assert relative(other.q, one.q) < 1e-6 and relative(other.k, one.k) < 1e-6


def test_kernels_train_as_their_emulation(corpus, kernels_on_the_cpu):  # noqa: F811
    """Kernels that are the emulation, whose arguments norm and rotate."""
    config = replace(cases.TINY_CONFIG, model=replace(cases.TINY_CONFIG.model, dim=128,
                                                      head_dim=64))  # fmt: skip
    losses = [cases.run_of(corpus, line, config).rows[-1]["val_loss"]
              for line in ("sagebwd:front", "emulated:front", "emulated")]  # fmt: skip
    assert losses[0] == losses[1] != losses[2]


def toy_front():
    """The plan `front`, as a CPU trains it."""
    size = study_plan.Size({"sweep": (256, 4), "small": (256, 12)}, {
        "model": "toy", "head_dim": 32, "tokens": 64, "batch": 4, "val_sequences": 4})  # fmt: skip
    arms = size.arms("small", "emulated", "sdpa", "sdpa-other", seeds=2)
    arms += [replace(arm, name=arm.name + "-front", attention="emulated:front")
             for arm in arms if arm.attention == "emulated"]  # fmt: skip
    return [*size.sweep((1e-3, 1e-2), True), *arms]


@pytest.mark.usefixtures("forked_workers")
def test_a_study_prints_the_differences_of_both(corpus_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(study_plan.PLANS, "toy", toy_front)
    assert study.main(["toy", "--corpus", str(corpus_file), "--device", "cpu", "--out",
                       str(tmp_path)]) == 0  # fmt: skip
    records = {r["arm"]["name"]: r for r in study_summary.records_of(tmp_path)}
    (found,) = study_summary.summarised(list(records.values())).values()
    expected = {str(seed): records[f"small-emulated-{seed}-front"]["final_val_loss"]
                - records[f"small-emulated-{seed}"]["final_val_loss"] for seed in range(2)}
    assert found["fronts"] == {"emulated:front": expected}
    assert all(0 < abs(x) < 0.02 for x in expected.values())
    said = ", ".join(f"seed {seed} {x:+.4f}" for seed, x in expected.items())
    assert f"emulated:front, minus that behind the model's norm and RoPE: {said}\n" in (
        capsys.readouterr().out)  # fmt: skip


def test_arms_of_the_plan_are_pairs():
    """Each arm with the front has one without it that differs in nothing else."""
    arms = study_plan.PLANS["front"]()
    others = [replace(arm, name="") for arm in arms]
    fronts = [arm for arm in arms if arm.attention == "sagebwd:front"]
    assert [arm.seed for arm in fronts] == [0, 1, 2] and {arm.steps for arm in fronts} == {500}
    assert all(replace(arm, name="", attention="sagebwd") in others for arm in fronts)
