"""bench/tuning.py with a stand-in for `sagebwd tune`."""

import json
import sys

import pytest

pytest.importorskip("torch")

import tuning


def candidate(tile, median_ms, outcome="timed"):
    return {"tile": tile, "outcome": outcome, "detail": "", "ms": [median_ms] * 3,
            "median_ms": median_ms, "mad_ms": 0.01}  # fmt: skip


KERNEL = {
    "kernel": "forward", "gpu": "Some GPU", "bucket": "q2048 kv2048 full", "tile": "b",
    "default_tile": "a", "default_ms": 1.5, "tuned_ms": 1.0, "speedup": 1.5,
    "candidates": [candidate("a", 1.5), candidate("b", 1.0), candidate("c", 0, "crashed")],
}  # fmt: skip


@pytest.fixture
def tool(tmp_path):
    """A program that writes down how it is called and prints one kernel, or fails."""

    def make(code=0):
        path = tmp_path / "sagebwd"
        path.write_text(
            f"#!{sys.executable}\nimport sys\n"
            f"open({str(tmp_path / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
            f"print({json.dumps({'kernels': [KERNEL]})!r})\nsys.exit({code})\n"
        )
        path.chmod(0o755)
        return path

    return make


def run(tool, tmp_path):
    out = tmp_path / "tuning.json"
    code = tuning.main(["--tool", str(tool), "--out", str(out)])
    return code, json.loads(out.read_text())


def test_every_case_is_tuned_anew_and_recorded(tool, tmp_path, capsys):
    code, record = run(tool(), tmp_path)
    assert code == 0 and record["passed"]
    assert len(record["cases"]) == 8
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == len(set(calls)) == 8
    assert all(call.startswith("tune ") and "--force --json" in call for call in calls)
    case = record["cases"][0]
    assert case["wall_s"] > 0 and case["gpu"] == "Some GPU"
    (kernel,) = case["kernels"]
    assert kernel["default_ms"] == 1.5 and kernel["tuned_ms"] == 1.0 and kernel["speedup"] == 1.5
    assert kernel["outcomes"] == {"timed": 2, "crashed": 1}
    assert set(kernel["timings"]) == {"a", "b"}
    assert "x1.500" in capsys.readouterr().out


def test_a_failure_is_recorded_and_fails(tool, tmp_path):
    code, record = run(tool(code=1), tmp_path)
    assert code == 1 and not record["passed"]
    assert all("failed" in case["error"] for case in record["cases"])


def test_over_the_limit_fails(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "LIMIT_S", 0.0)
    code, record = run(tool(), tmp_path)
    assert code == 1 and not any(case["passed"] for case in record["cases"])


def test_without_the_tool(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out.json")]
    with pytest.raises(SystemExit) as left:
        tuning.main(["--tool", str(tmp_path / "none"), *out])
    assert left.value.code == 2 and "build it" in capsys.readouterr().err
