"""bench/cases.py and bench/errors.py: what is drawn, what is called wrong, both without a GPU."""

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import cases  # noqa: E402
import draw  # noqa: E402
import errors  # noqa: E402
from subjects import emulated  # noqa: E402

from sagebwd.exact import exact_attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


def read(path):
    return json.loads(path.read_text())


# ---- cases ---------------------------------------------------------------------------------------


def test_specs_cover_every_value():
    specs = draw.draw_specs(120, random.Random(0))
    assert len(specs) == 120 == len({tuple(spec.items()) for spec in specs})
    plain = {key: values for key, values in draw.CHOICES.items() if key != draw.FORM}
    for key, values in plain.items():
        assert all(sum(spec[key] == value for spec in specs) >= 20 for value in values), key
    forms = [tuple(spec[key] for key in draw.FORM) for spec in specs]
    assert all(forms.count(form) >= 11 for form in draw.CHOICES[draw.FORM])


def test_cases_cover_what_they_promise_and_repeat_themselves():
    specs = draw.draw_specs(120, random.Random(0))
    drawn = [draw.draw_case(i, specs, seed=0) for i in range(3000)]
    assert drawn == [draw.draw_case(i, specs, seed=0) for i in range(3000)]
    for holds in (
        lambda c: c.seq_q == 1, lambda c: c.seq_kv == 1, lambda c: c.seq_q > 300,
        lambda c: c.seq_q > c.seq_kv and c.spec["causal"] != "none",
        lambda c: c.seq_q < c.seq_kv and c.spec["causal"] != "none",
        lambda c: c.group > 1, lambda c: c.with_dlse, lambda c: c.seq_q % 64 and c.seq_kv % 64,
        lambda c: bool(c.zeros) and c.zeros[0] == "dout" and c.zeros[2] == 1,
        lambda c: c.value_dim < c.head_dim, lambda c: bool(c.used) and 0 in c.used[0],
        lambda c: bool(c.used) and c.padded,
        lambda c: bool(c.used) and not c.padded and c.batch > 3,
        lambda c: c.window[1] is not None, lambda c: c.softmax_scale == 0,
        lambda c: c.softmax_scale is not None and c.softmax_scale < 0,
        lambda c: c.window[0] == 0 and c.spec["causal"] == "bottom-right",
    ):  # fmt: skip
        assert sum(map(holds, drawn)) >= 20
    assert {c.layout for c in drawn} == set(draw.LAYOUTS)
    assert {c.head_dim for c in drawn} == {*range(32, 257, 8)}


@pytest.mark.parametrize("layout", draw.LAYOUTS)
def test_layouts_hold_the_values_between_nans(layout):
    x = torch.randn(2, 3, 5, 64).to(torch.bfloat16)
    view = draw.laid_out(x, layout)
    assert torch.equal(view, x) and view.stride(3) == 1
    assert all(stride % 8 == 0 for stride in view.stride()[:3]) and view.data_ptr() % 16 == 0
    whole = torch.as_strided(view, (view.untyped_storage().nbytes() // 2,), (1,), 0)
    assert torch.isnan(whole).sum() == whole.numel() - x.numel()


@pytest.fixture(scope="module")
def judged():
    """A case's inputs, its emulation, and the exact results."""
    spec = dict(head_dim=64, dtype="bf16", causal="top-left", granularity="row", windowed=False,
                packed=False, precision="six-of-seven", smooth_k=True, rotate=True,
                group_kv=64)  # fmt: skip
    drawn = draw.draw_case(0, [spec], 0)
    case = replace(drawn, seq_q=200, seq_kv=200, heads_kv=2, group=2, batch=1, sigma=1.0,
                   key_offset=0.0, softmax_scale=None, with_dlse=False, zeros=None)  # fmt: skip
    given = draw.inputs_of(case, "cpu")
    options = case.options()
    exact, scale = exact_attention(**given, causal="top-left", scales=True)
    return given, options, emulated(**given, **options), exact, scale


def test_a_right_result_is_not_called_wrong(judged):
    given, options, expected, exact, scale = judged
    assert cases.judge(expected, expected, exact, scale)["wrong"] == []
    # Nor is one with other groups: as accurate, but of other roundings.
    other = emulated(**given, **options | {"group_kv": 128})
    assert cases.judge(other, expected, exact, scale)["wrong"] == []


@pytest.mark.parametrize("tensor", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("damage", ["nan", "a row zero", "a row of the next head", "scaled"])
def test_damage_is_called_wrong(judged, tensor, damage):
    _, _, expected, exact, scale = judged
    x = getattr(expected, tensor).clone()
    row = x[0, 1, 40]
    if damage == "nan":
        row[3] = math.nan
    elif damage == "a row zero":
        row.zero_()
    elif damage == "a row of the next head":
        row.copy_(x[0, 0, 40])
    else:
        x *= 1.03
    verdict = cases.judge(replace(expected, **{tensor: x}), expected, exact, scale)
    name = {"out": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}[tensor]
    assert verdict["wrong"] and all(reason.startswith(name) for reason in verdict["wrong"])


def test_a_wrong_lse_is_called_wrong(judged):
    _, _, expected, exact, scale = judged
    shifted = replace(expected, lse=expected.lse + 0.05)
    assert cases.judge(shifted, expected, exact, scale)["wrong"][0].startswith("lse: off")
    lse = expected.lse.clone()
    lse[..., 7] = -math.inf
    hidden = replace(expected, lse=lse)
    assert "not -inf just where" in cases.judge(hidden, expected, exact, scale)["wrong"][0]


def test_cases_command(tmp_path):
    out = tmp_path / "cases.json"
    words = ["--device", "cpu", "--out", str(out), "--cases", "12", "--specs", "6"]
    assert cases.main(words) == 0
    record = read(out)
    assert (record["ran"], record["wrong"], record["passed"]) == (12, 0, True)
    assert record["parameters"]["subject"] == "emulated" and len(record["parameters"]["specs"]) == 6
    assert record["distribution"]["dQ kernels"].keys() == {"p50", "p90", "p99", "p100"}


def test_cases_command_counts_what_is_wrong(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        found = emulated(*args, **kwargs)
        return replace(found, dk=found.dk * 1.5)

    monkeypatch.setattr(cases, "subject_of", lambda device: broken)
    out = tmp_path / "cases.json"
    assert cases.main(["--device", "cpu", "--out", str(out), "--cases", "4", "--specs", "4"]) == 1
    record = read(out)
    # A case of one key has dK = 0, and 1.5 times nothing is right.
    assert record["wrong"] >= 3 and record["wrong_cases"][0]["wrong"][0].startswith("dK")
    assert not record["passed"]


def test_fresh_memory_is_poisoned_and_only_there():
    before = torch.utils.deterministic.fill_uninitialized_memory
    with cases.poisoned_allocations():
        assert torch.isnan(torch.empty(1000)).all()
        assert (torch.empty(1000, dtype=torch.uint8) == 255).all()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == before


# ---- errors --------------------------------------------------------------------------------------


def test_errors_command_judges_by_the_limits(tmp_path, monkeypatch, capsys):
    fewer = {"sigma 3": 256, "sink": 256, "heavy channels": 256}
    monkeypatch.setattr(errors, "INPUTS", [replace(given, heads=1, tokens=fewer[given.label])
                                           for given in errors.INPUTS if given.label in fewer])
    out = tmp_path / "errors.json"
    words = ["--device", "cpu", "--out", str(out)]
    errors.main(words)
    rows = {(row["input"], row["scheme"]): row for row in read(out)["rows"]}
    row = rows["sigma 3", "row 64x64"]
    assert row["passed"] and row["limits"]["dQ"] == row["paper_table_1"]["dQ"] == 0.0758
    assert "limits" not in rows["sigma 3", "block 128x64"]
    assert rows["sink", "row"]["limits"] == pytest.approx(
        {"O": 0.010, "dQ": 0.020, "dK": 0.023, "dV": 1.1 * 0.0147})
    for plan in ("row qk16", "row dv16", "row gradients16"):
        assert rows["sink", plan]["limits"] == rows["sink", "row"]["limits"]
    assert rows["heavy channels", "row"]["limits"]["dV"] == pytest.approx(1.1 * 0.0123)
    assert (rows["heavy channels", "row no rotate"]["errors"]["O"]["rel_l2"]
            > 1.5 * rows["heavy channels", "row"]["errors"]["O"]["rel_l2"])
    assert rows["sink", errors.BF16]["errors"]["dQ"]["rel_l2"] < 0.02

    def broken(*args, **kwargs):
        found = emulated(*args, **kwargs)
        return replace(found, dq=found.dq * math.nan)

    monkeypatch.setattr(errors, "subject_of", lambda device: broken)
    assert errors.main([*words, "--only", "sink"]) == 1
    assert not read(out)["passed"]
    judged = [row for row in read(out)["rows"] if row["scheme"] != errors.BF16]
    assert all("dQ against emulation" in row["over_the_limit"] for row in judged)


def test_every_input_has_limits_under_every_plan():
    labels = [given.label for given in errors.INPUTS]
    own = {label for label, limits in errors.OWN_LIMITS.items() if len(limits) == 4}
    assert len(set(labels)) == len(labels) and {*errors.ROW_OF_NUMERICS_1, *own} == {
        given.label for given in errors.INPUTS if not given.like}
    assert {given.name for given in errors.INPUTS} == set(errors.sagebwd.INPUTS)
    for given in errors.INPUTS:
        assert all(set(given.limits(plan)) == set(errors.TENSORS) for plan in errors.PLANS)
