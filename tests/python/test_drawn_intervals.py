"""tests/drawn/cases.py --intervals: what is drawn, and that it can fail, without a GPU."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import cases  # noqa: E402
import cases_of_intervals  # noqa: E402
import doors  # noqa: E402
import draw  # noqa: E402
import draw_intervals  # noqa: E402
import oracle  # noqa: E402
import specs  # noqa: E402
from interval_cases import NUMBERS, numbers_of, seen_by  # noqa: E402
from plain_cases import add_to_first_dq, break_pass, case_of, wrong_of  # noqa: E402
from stand_in import interval_kernels_on_the_cpu, kernels_on_the_cpu  # noqa: E402, F401

from sagebwd.numerics import numerics  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")

PLAIN = draw_intervals.Intervals("kv", False, 3, "anywhere", 0.2, 0.0, None, "contiguous")
FORMS = [(causal, columns) for causal, columns in specs.CHOICES_OF_INTERVALS[specs.MASK]]


def hidden_case(spec=None, intervals=PLAIN, **what):
    spec = {"intervals": 2} | (spec or {})
    return case_of(spec, intervals=intervals, **dict(seq_q=200, seq_kv=330) | what)


@pytest.fixture(scope="module")
def drawn():
    drawn_specs = specs.draw_specs(40, random.Random(0), kind="intervals")
    return [draw.draw_case(i, drawn_specs, 0) for i in range(1000)]


def test_specs_are_those_that_exist_and_each_kind_among_them(drawn):
    drawn_specs = [case.spec for case in drawn[:40]]
    for spec in drawn_specs:
        assert cases.sagebwd.Spec(**specs.warm_spec(spec)).intervals == spec["intervals"]
    for name in ("precision", "causal", "head_dim", "family", "intervals", "dp_sums"):
        times = Counter(spec[name] for spec in drawn_specs)
        assert min(times.values()) >= 5, name


def _numbers(case):
    return cases.inputs_of(case, "cpu").lists["startend_row_indices"]


@pytest.mark.parametrize("name, holds", {
    **{kind: lambda c, kind=kind: c.intervals.kind == kind for kind in draw_intervals.KINDS},
    **{form: lambda c, form=form: c.intervals.layout == form for form in draw_intervals.LAYOUTS},
    **{str(form): lambda c, form=form: (c.spec["causal"], c.spec["intervals"]) == form
       for form in FORMS},
    "one for all heads": lambda c: c.intervals.heads == "one" and c.heads_kv > 1,
    "one for each key head": lambda c: c.intervals.heads == "kv" and c.group > 1 and c.heads_kv > 1,
    "one for all batches": lambda c: c.intervals.one_batch and c.batch > 1,
    "several words of blocks": lambda c: c.seq_kv > 32 * 128,
    "queries that see nothing": lambda c: c.intervals.blind,
    "keys that nobody sees": lambda c: c.intervals.all,
    "a gradient of lse": lambda c: c.dlse != "none",
    "sinks": lambda c: c.sinks,
    "odd lengths": lambda c: c.seq_q % 64 and c.seq_kv % 64 and c.seq_q != c.seq_kv,
    "strides of zero": lambda c: c.intervals.layout == "expanded" and c.intervals.heads == "one",
}.items())  # fmt: skip
def test_cases_cover_what_they_promise(drawn, name, holds):
    assert sum(map(bool, map(holds, drawn))) >= 10, name


def test_numbers_hide_some_keys_and_not_all(drawn):
    shares = []
    for case in drawn[:120]:
        if case.seq_q * case.seq_kv < 1 << 18:
            shown = oracle.shown(_numbers(case), case.spec["causal"], case.seq_q)
            shares.append(float(shown.float().mean()))
    shares.sort()
    assert shares[0] < 0.05 and 0.2 < shares[len(shares) // 2] < 0.95 and shares[-1] > 0.9
    outside = [(_numbers(case).min() < 0, _numbers(case).max() > case.seq_q) for case in drawn[:60]]
    assert all(sum(map(bool, side)) >= 10 for side in zip(*outside))


@pytest.mark.parametrize("layout", draw_intervals.LAYOUTS)
@pytest.mark.parametrize("causal, columns", FORMS)
def test_every_layout_says_the_same(causal, columns, layout):
    told = (2, 3, 200, 330), columns, causal != "none", 3, "cpu"
    for heads, one_batch in (("kv", False), ("one", True)):
        plain = replace(PLAIN, heads=heads, one_batch=one_batch)
        expected = draw_intervals.numbers_of(plain, *told)
        found = draw_intervals.numbers_of(replace(plain, layout=layout), *told)
        assert expected.shape == (1 if one_batch else 2, 1 if heads == "one" else 3, 330, columns)
        assert torch.equal(found, expected.expand_as(found)) and found.dtype == torch.int32
    assert not torch.equal(expected[:, :, :3], expected[:, :, 3:6])
    assert torch.equal(expected[:, :, 3], expected[:, :, 5])  # of one run


@pytest.mark.parametrize("columns, causal", NUMBERS)
def test_the_oracle_reads_numbers_as_a_loop_does(columns, causal):
    numbers = numbers_of(columns, causal, 2, 2, 90)
    shown = oracle.shown(numbers, "top-left" if causal else "none", 90)
    if causal:
        shown = shown & oracle.visible(90, 90, "top-left", None, None)
    assert torch.equal(shown, seen_by(numbers, causal, 2, 90))


# ---- each kind of draw can fail ------------------------------------------------------------------


@pytest.mark.parametrize("door", ["halves", "autograd"])
@pytest.mark.parametrize("causal, columns", FORMS)
def test_intervals_that_emulation_and_package_read_wrongly(monkeypatch, causal, columns, door):
    case = hidden_case({"causal": causal, "intervals": columns}, door=door)
    assert wrong_of(case) == []
    right = numerics.shown_keys
    monkeypatch.setattr(numerics, "shown_keys", lambda *given: right(*given).roll(1, -2))
    assert wrong_of(case)


def _heads_swapped(options):
    options["startend_row_indices"] = options["startend_row_indices"].flip(1)


def _one_behind(options):
    options["startend_row_indices"] = options["startend_row_indices"] + 1


def _none(options):
    options["startend_row_indices"] = None


@pytest.mark.parametrize("change", [_heads_swapped, _one_behind, _none])
@pytest.mark.parametrize("method", ["forward", "backward"])
def test_intervals_that_a_pass_takes_wrongly(monkeypatch, method, change):
    break_pass(monkeypatch, method, change)
    assert wrong_of(hidden_case({"causal": "top-left", "intervals": 2, "sink_keys": 0}))


def test_a_gradient_of_queries_that_see_nothing(monkeypatch):
    case = hidden_case(intervals=replace(PLAIN, blind=(0.2, 0.6)))
    assert wrong_of(case) == []
    add_to_first_dq(monkeypatch)
    assert "dQ: not zero where nothing is seen" in wrong_of(case)


def test_the_package_takes_every_drawn_call(interval_kernels_on_the_cpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cases, "doors_of", lambda device: doors.Kernels)
    drawn_specs = specs.draw_specs(24, random.Random(1), kind="intervals")
    drawn = [draw.draw_case(i, drawn_specs, 1, 20000) for i in range(24)]
    assert {(case.layout, case.door) for case in drawn} == {
        (layout, door) for layout in ("bhsd", "bshd") for door in ("halves", "autograd")}
    assert [cases.outcome_of(case, "cpu")["wrong"] for case in drawn] == [[]] * 24


# ---- the command ---------------------------------------------------------------------------------


def test_cases_command_draws_intervals(tmp_path):
    out = tmp_path / "intervals.json"
    code = cases.main(["--intervals", "--device", "cpu", "--out", str(out), "--scores", "20000",
                       "--specs", "12", "--cases", "12"])  # fmt: skip
    record = json.loads(out.read_text())
    assert code == 0 and record["passed"] and record["right"] == 12
    assert all(spec["intervals"] in (1, 2, 4) for spec in record["parameters"]["specs"])


def test_the_record_of_intervals_has_a_name_of_its_own(monkeypatch):
    monkeypatch.setattr(cases, "prove", lambda options: (options.out.name, options.cases))
    found = cases_of_intervals.main(["--device", "cpu"])
    assert found == ("cases_of_intervals.json", 1000)
    with pytest.raises(SystemExit):
        cases.main(["--lists", "--intervals"])
