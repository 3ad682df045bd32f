"""bench/errors.py: what is measured and called wrong, without a GPU."""

import json
import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import errors  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


def read(path):
    return json.loads(path.read_text())


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
        found = errors.emulated(*args, **kwargs)
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
