"""tests/drawn/sla_cases.py: its definition of SLA2, that each kind of draw can fail, and the
command."""

import json
from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import draw_lists  # noqa: E402
import sla_cases  # noqa: E402
from doors import Kernels  # noqa: E402
from plain_cases import case_of  # noqa: E402
from stand_in import listed_kernels_on_the_cpu  # noqa: E402, F401

import sagebwd  # noqa: E402
from sagebwd import reference  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")

PLAIN = draw_lists.Lists("mask", "all", False, 0.5, 0.2, 0.2, "any", "contiguous")


def mixed_case(alpha="block", linear="complement", branches=False, **what):
    case = case_of(dict(sparse_q=64, sparse_kv=64), lists=PLAIN, **dict(
        seq_q=140, seq_kv=200, batch=2, key_offset=1.0) | what)  # fmt: skip
    return case, sla_cases.Mix(alpha, linear, branches)


@pytest.mark.parametrize("linear", ["complement", "all"])
@pytest.mark.parametrize("alpha", sla_cases.ALPHAS)
def test_the_definition_is_that_of_the_reference(alpha, linear):
    smooth_k = alpha not in ("head", "estimated")
    case, mix = mixed_case(alpha, linear)
    case = replace(case, spec=case.spec | {"smooth_k": smooth_k}, softmax_scale=0.3)
    given = sla_cases.inputs_of(case, "cpu")
    assert given.mask.all(-1).any() and not given.mask.any(-1).all()
    alpha, beta = sla_cases.alpha_of(case, mix, given.q)
    found = sla_cases.mixture(given, case, mix, alpha, beta, sla_cases.softmax_attention)

    def array(x):
        return x.double().numpy() if isinstance(x, torch.Tensor) else x

    right = reference.sparse_linear(
        *map(array, (given.q, given.k, given.v, given.dout)), alpha=array(alpha), beta=array(beta),
        block_mask=array(given.mask), block_size=(64, 64), linear=linear, smooth_k=smooth_k,
        softmax_scale=0.3)  # fmt: skip
    names = {"O": "out", "Os": "out_sparse", "Ol": "out_linear", "lse": "lse", "dQ": "dq",
             "dK": "dk", "dV": "dv", "dAlpha": "dalpha", "dBeta": "dbeta"}  # fmt: skip
    for name, x in (found.results | found.gradients).items():
        assert torch.allclose(x, torch.tensor(right[names[name]]), 1e-9, 1e-11), name
    assert torch.allclose(found.rows, torch.tensor(right["alpha"]).expand_as(found.rows))


def test_cases_cover_what_they_promise():
    drawn_specs = sla_cases.draw_mixed_specs(24, 0)
    assert {spec["causal"] for spec in drawn_specs} == {"none"}
    drawn = [sla_cases.draw(i, drawn_specs, 0, 1 << 22) for i in range(300)]
    assert drawn[:20] == [sla_cases.draw(i, drawn_specs, 0, 1 << 22) for i in range(20)]
    for name in ("alpha", "linear", "branches"):
        times = Counter(getattr(mix, name) for _, mix in drawn)
        assert min(times.values()) > 20, name


# ---- each kind of draw can fail ------------------------------------------------------------------


def wrong_of(case, mix):
    result = sla_cases.outcome_of(case, mix, "cpu")
    assert result["outcome"] in ("right", "wrong")
    return result["wrong"]


CHANGES = {
    "another alpha": ("block", lambda words: words | {"alpha": words["alpha"].flip(1)}),
    "alpha of a head as that of another": (
        "head", lambda words: words | {"alpha": words["alpha"].flip(0)}),
    "a beta dropped": ("estimated, beta", lambda words: words | {"beta": 0 * words["beta"]}),
    "all keys": ("head", lambda words: words | {"linear": "all"}),
    "no smoothing": ("head", lambda words: words | {"smooth_k": False}),
    "lists of another head": (
        "head", lambda words: words | {"block_mask": words["block_mask"].flip(1)}),
    "another scale": ("estimated", lambda words: words | {"softmax_scale": 0.2}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_taken_wrongly_is_found(monkeypatch, name):
    alpha, change = CHANGES[name]
    case, mix = mixed_case(alpha, branches=alpha == "head", dlse="with dout")
    assert wrong_of(case, mix) == []
    right = sagebwd.sparse_linear_attention
    monkeypatch.setattr(sagebwd, "sparse_linear_attention", lambda *tensors, **words: (
        right(*tensors, **change(words))))  # fmt: skip
    assert wrong_of(case, mix)


def test_the_package_takes_every_drawn_call(listed_kernels_on_the_cpu, monkeypatch):
    monkeypatch.setattr(sla_cases, "doors_of", lambda device: Kernels)
    drawn_specs = sla_cases.draw_mixed_specs(24, 1)
    drawn = [sla_cases.draw(i, drawn_specs, 1, 20000) for i in range(24)]
    assert [sla_cases.outcome_of(*one, "cpu")["wrong"] for one in drawn] == [[]] * 24
    assert len(set(listed_kernels_on_the_cpu)) >= 20


# ---- the command ---------------------------------------------------------------------------------


def run(tmp_path):
    out = tmp_path / "sla.json"
    code = sla_cases.main(["--device", "cpu", "--out", str(out), "--cases", "8", "--specs", "4",
                           "--scores", "20000"])  # fmt: skip
    return code, json.loads(out.read_text())


def test_command(tmp_path):
    code, record = run(tmp_path)
    assert code == 0 and record["passed"] and record["right"] == 8
    assert record["distribution"]["dQ kernels"].keys() == {"p50", "p90", "p99", "p100"}


def test_command_fails_for_a_case_that_raises(tmp_path, monkeypatch):
    def refuse(*tensors, **words):
        raise sagebwd.SpecError("no")

    monkeypatch.setattr(sagebwd, "sparse_linear_attention", refuse)
    code, record = run(tmp_path)
    assert code == 1 and not record["passed"] and record["refused"] == 8
