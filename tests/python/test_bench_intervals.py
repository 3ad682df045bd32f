"""`sagebwd bench --intervals`: its masks, what is measured, and refusals, without a GPU."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import interval_kernels_on_the_cpu, kernels_on_the_cpu  # noqa: E402, F401
from test_bench_command import SMALL, on_the_cpu  # noqa: E402, F401

import sagebwd  # noqa: E402
from sagebwd.benchmark import (  # noqa: E402
    api,
    attentions,
    cases,
    command,
    masks,
    measuring,
    truth,
)

pytestmark = pytest.mark.usefixtures("tiny_tensors")


def case_of(**given):
    given = dict(heads=2, heads_kv=1, seq_len=200, seq_kv=200, head_dim=64) | given
    return cases.Case("", **given)


def of_function(case):
    q, k = torch.arange(case.seq_len)[:, None], torch.arange(case.seq_kv)
    return masks.as_function(case, "cpu")(0, 0, q, k).expand(case.seq_len, case.seq_kv)


@pytest.mark.parametrize("name", cases.INTERVALS)
@pytest.mark.parametrize("tokens", [1, 50, 200, 1000])
def test_masks_are_those_of_their_functions(name, tokens):
    _, causal, columns = cases.INTERVALS[name]
    case = case_of(intervals=name, causal=causal, seq_len=tokens, seq_kv=tokens)
    made = masks.intervals_of(name, tokens, "cpu")
    assert len(made.columns) == columns and (made.causal or "none") == causal
    dense = made.dense(tokens)[0, 0]
    assert torch.equal(dense, of_function(case))
    parts = [truth.visible(case, first, min(first + 70, tokens), "cpu")
             for first in range(0, tokens, 70)]  # fmt: skip
    assert torch.equal(torch.cat(parts), dense)
    if tokens == 1000:
        assert 0.05 < dense.float().mean() < 0.6
        assert not torch.equal(dense, torch.ones_like(dense).tril())


@pytest.mark.parametrize("given", [
    dict(), dict(causal="top-left"), dict(causal="top-left", window_left=9),
    dict(window_left=9, window_right=4), dict(causal="bottom-right", seq_kv=300),
    dict(causal="top-left", seq_kv=120)], ids=str)  # fmt: skip
def test_other_masks_as_functions(given):
    case = case_of(**given)
    assert torch.equal(of_function(case), truth.visible(case, 0, 200, "cpu"))


def test_two_cases_beside_each_other(on_the_cpu, interval_kernels_on_the_cpu):  # noqa: F811
    result = sagebwd.bench(**SMALL | dict(seq_len=200), intervals="documents",
                           backends=["fa2", "sagebwd"], precision="six-of-seven",
                           deterministic=True)  # fmt: skip
    (masked, rows), (plain, plain_rows) = result.cases
    assert (masked.intervals, masked.causal) == ("documents", "top-left")
    assert (plain.intervals, plain.causal) == ("", "top-left")
    assert "D64, bf16, documents by intervals" in result.text and "bf16, causal" in result.text
    found, without = ({row.attention: row for row in of} for of in (rows, plain_rows))
    for of in (found, without):
        assert 0.005 < max(of["sagebwd six-of-seven"].errors.values()) < 0.05
    assert "takes no such mask" in found["fa2"].refusal and not without["fa2"].refusal
    assert result.data["cases"][0]["intervals"] == "documents"


def test_flex_attention_is_measured_where_there_are_intervals_or_it_is_named(monkeypatch):
    """It is compiled for each case, which takes a minute."""
    chosen = []
    monkeypatch.setattr(api, "gpu", lambda device: ("cpu", "sm_90a"))

    def measured(cases, backends, *rest, **more):
        chosen.append(backends)
        return {}, []

    monkeypatch.setattr(api, "_measured", measured)
    for given in ({}, dict(intervals="window"), dict(backends="flex")):
        sagebwd.bench(**given)
    assert ["flex" in backends for backends in chosen] == [False, True, True]
    assert {*chosen[1]} == {*attentions.BACKENDS} and len(chosen[0]) == len(chosen[1]) - 1


def test_errors_are_those_under_the_mask():
    """An attention without the mask is wrong, and so is one with another mask."""
    case = case_of(intervals="prefix", causal="none")
    inputs = measuring.inputs_of(case, 0, "cpu")
    q, k, v = inputs[:3]
    dense = truth.visible(case, 0, 200, "cpu")
    for mask, right in ((dense, True), (torch.ones_like(dense).tril(), False)):
        attend = attentions.sdpa(None, False, mask)
        out = attend(q, k, v)
        found = out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])
        errors = truth.Slice(case, *inputs[:4]).errors(found)
        assert (max(errors.values()) < 0.01) == right


def test_the_command_measures_them(on_the_cpu, interval_kernels_on_the_cpu, capsys):  # noqa: F811
    words = ["--heads", "2", "--seq-len", "64", "--head-dim", "64", "--rounds", "1", "--backends",
             "sagebwd", "--precision", "gradients16", "--deterministic", "yes", "--intervals"]
    assert command.main([*words, "window"]) == 0
    assert "window by intervals" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main([*words, "windows"])
    assert "--intervals 'windows' is not known (did you mean 'window'?)" in capsys.readouterr().err
