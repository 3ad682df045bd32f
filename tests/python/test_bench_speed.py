"""The scripts that time, and plot.py, without a GPU."""

import json
import sys
from argparse import Namespace

import pytest

torch = pytest.importorskip("torch")

import compile_time  # noqa: E402
import generation  # noqa: E402
import grid  # noqa: E402
import host_time  # noqa: E402
import masks  # noqa: E402
import plot  # noqa: E402
import speed  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401

from sagebwd.core import forms  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


def read(path):
    return json.loads(path.read_text())


def test_speed_command_and_its_picture(tmp_path, capsys):
    out = tmp_path / "speed.json"
    # sagebwd itself cannot run here: recorded, and the others are measured all the same.
    assert speed.main(["--device", "cpu", "--out", str(out), "--tokens", "64", "--rounds", "2",
                       "--total-tokens", "64", "--head-dim", "64", "--causal", "yes",
                       "--ours", "emulated", "sagebwd"]) == 1  # fmt: skip
    rows = {row["attention"]: row for row in read(out)["rows"]}
    assert rows.keys() == {"fa2", "cudnn", "emulated", "sagebwd"}
    assert "error" in rows["sagebwd"] and not rows["sagebwd"]["correct"]
    assert 0 < rows["fa2"]["rel_l2"]["dQ"] < 0.01 < rows["emulated"]["rel_l2"]["dQ"] < 0.03
    assert rows["emulated"]["correct"] and 0 < rows["emulated"]["rel_l2_to_fa2"]["dQ"] < 0.03
    both = rows["fa2"]["forward+backward"]
    operations = 3.5 * 4 * 32 * 64 * 64 * 64 / 2
    assert both["tflops"] == pytest.approx(operations / both["median_ms"] / 1e9, abs=0.01)
    assert both["ratio_to_fa2"] == 1.0
    pytest.importorskip("matplotlib")
    assert plot.plot_speed(out).read_bytes().startswith(b"\x89PNG")


def test_the_grid_is_of_all_lengths_and_forms(tmp_path, monkeypatch):
    cells = grid.cells_of([64, 128, 256], grid.LENGTHS)
    assert {cell.tokens for cell in cells} == {512 << i for i in range(9)}
    assert {(c.dtype, c.layout, c.heads_kv > 0) for c in cells} == {
        ("bf16", "bhsd", False), ("fp16", "bhsd", False), ("bf16", "bhsd", True),
        ("bf16", "bshd", False)}  # fmt: skip
    assert all(c.heads >= 1 and c.batch * c.tokens * c.heads * c.head_dim == 2048 * 32768
               for c in cells)  # fmt: skip

    out = tmp_path / "speed-grid.json"
    for name, value in {"TOTAL_TOKENS": 64, "VARIED": 64, "HEADS_TIMES_DIM": 512}.items():
        monkeypatch.setattr(grid, name, value)
    assert grid.main(["--device", "cpu", "--out", str(out), "--tokens", "32", "64", "--head-dim",
                      "64", "--ours", "emulated", "--rounds", "1"]) == 0  # fmt: skip
    rows = read(out)["rows"]
    assert len(rows) == 4 * 3 + 2 * 2 + 4 * 3  # plain; deterministic peers; other forms
    assert all(row["correct"] for row in rows)
    grouped = [row for row in rows if row["heads_kv"] == 1 and row["attention"] == "emulated"]
    assert [row["causal"] for row in grouped] == [False, True]
    assert all(0.005 < row["rel_l2"]["dK"] < 0.03 for row in grouped)
    pytest.importorskip("matplotlib")
    assert plot.plot_grid(out).read_bytes().startswith(b"\x89PNG")


def test_speed_names_a_family_and_knows_what_it_must_reach(monkeypatch):
    ours = [speed.Ours.parse(label) for label in speed.default_ours()]
    assert [one.label() for one in ours] == speed.default_ours() and len(ours) == 12
    with pytest.raises(ValueError, match="sagebwd-mma, sagebwd-wgmma"):
        speed.Ours.parse("sagebwd-tcgen05")
    with pytest.raises(ValueError, match="sdpa-mma"):
        speed.Ours.parse("sdpa-mma")

    made = []
    monkeypatch.setattr(forms._core, "Attention", lambda *given: made.append(given[1:]) or given)
    for label in ("sagebwd", "sagebwd-mma", "sagebwd-wgmma", "sagebwd"):
        with speed.Ours.parse(label).context():
            forms.operation(77, "", head_dim=64, dtype="bf16")
    assert made == [(77, ""), (77, "mma"), (77, "wgmma")]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    cells = speed.cells_of(Namespace(sweep=False, tokens=None, causal="both", head_dim=[64, 128],
                                     dtype="bf16", total_tokens=speed.TOTAL_TOKENS))  # fmt: skip
    musts = {"sagebwd": [1.25, 1.2, 1.5, 1.4, 1.0], "sagebwd-mma": [1.05, 1.03, 1.05, 1.03, None],
             "sagebwd:precision=dv16": 5 * [None]}  # fmt: skip
    for label, least in musts.items():
        assert [speed.Ours.parse(label).must(cell, "cuda") for cell in cells[:5]] == least


def test_speed_times_forward_and_backward_of_the_family_it_names(request, monkeypatch):
    stand_ins = request.getfixturevalue("kernels_on_the_cpu")
    made, operation = [], forms.operation
    monkeypatch.setattr(forms, "operation", lambda *given, **tensors: made.append(
        forms._family) or operation(*given, **tensors))  # fmt: skip
    q, k, v = (torch.randn(1, 2, 24, 64).bfloat16().requires_grad_() for _ in range(3))
    ours = speed.Ours.parse("sagebwd-mma")
    attend = speed.make_attention(ours.choice, torch.device("cpu"), True)
    calls = speed.passes(attend, ours.context, q, k, v, torch.randn(1, 2, 24, 64).bfloat16())
    for call in calls.values():
        call()
    assert made == ["mma"]  # one form, which the graph's backward has too
    (kernels,) = stand_ins.values()
    assert kernels.launches == 2 + 1 + 1 + 2 and forms._family == ""


@pytest.mark.parametrize("slow, code", [("sagebwd", 1), ("sagebwd-mma", 0), (None, 0)])
def test_speed_judges_the_family_that_must_be_fast(tmp_path, monkeypatch, slow, code):
    def row(label, cell, must):
        error = dict.fromkeys(speed.TENSORS, 0.01)
        found = {"attention": label, **vars(cell), "correct": True, "rel_l2": error, "must": must,
                 "reached": label != slow, "judged": label == "sagebwd"}  # fmt: skip
        timing = {"median_ms": 1.0, "tflops": 1.0, "ratio_to_fa2": 1.0}
        return found | dict.fromkeys(speed.PASSES, timing)

    monkeypatch.setattr(speed, "measure", lambda options, cell, ours, record: [
        row(one.label(), cell, 1.25) for one in ours])  # fmt: skip
    out = tmp_path / "speed.json"
    words = ["--device", "cpu", "--out", str(out), "--ours", "sagebwd", "sagebwd-mma"]
    assert speed.main(words) == code
    assert {r["attention"] for r in read(out)["not_reached"]} == ({slow} if slow else set())


def test_host_time_command_judges_our_ratio_to_sdpa(tmp_path, monkeypatch, capsys, tiny_tensors):
    out = tmp_path / "host-time.json"
    words = ["--device", "cpu", "--out", str(out), "--tokens", "8", "--heads", "1", "--calls", "2",
             "--rounds", "3", "--warmup", "1"]  # fmt: skip
    assert host_time.main(words) == 0  # the emulation is not judged
    rows = {(row["pass"], row["attention"]): row for row in read(out)["rows"]}
    assert len(rows) == 9
    for row in rows.values():
        sdpa = rows[row["pass"], "sdpa"]["host_us"]["median"]
        assert row["ratio_to_sdpa"] == pytest.approx(row["host_us"]["median"] / sdpa, abs=1e-3)
        assert row["wall_us"]["median"] >= row["host_us"]["median"] >= row["host_us"]["least"] > 0
    # As on a GPU: ours is the emulation here, far beyond the limit.
    slow = host_time.candidates("cpu", False)
    slow["sagebwd"] = slow.pop("emulated")
    monkeypatch.setattr(host_time, "candidates", lambda *given: slow)
    monkeypatch.setattr(host_time, "LARGEST_RATIO", 1e-3)
    assert host_time.main(words) == 1 and not read(out)["passed"]


TOOL = """#!{python}
import json, os, pathlib, sys
mark = pathlib.Path(os.environ["SAGEBWD_CACHE_DIR"]) / "kernel"
print(json.dumps({{"kernels": [{{"name": "k", "cached": {cached}, "compile_ms": 1}}]}}))
mark.touch()
"""


SPEED = """#!{python}
print('{{"disk_process_ms": 3.5, "disk_ms": 2.5, "lookup_ns": 50}}')
"""


@pytest.mark.parametrize("cached, status", [("mark.exists()", None), ("True", "empty cache"),
                                            ("False", "compiled again")])
def test_compile_time_trusts_no_cache_flag(tmp_path, cached, status):
    tool = tmp_path / "sagebwd"
    tool.write_text(TOOL.format(python=sys.executable, cached=cached))
    speed = tmp_path / "cache_speed"
    speed.write_text(SPEED.format(python=sys.executable))
    for program in (tool, speed):
        program.chmod(0o755)
    out = tmp_path / "compile-time.json"
    words = ["--tool", str(tool), "--out", str(out), "--cold-runs", "1", "--warm-runs", "2"]
    code = compile_time.main(words)
    op = read(out)["ops"][0]
    if status:
        assert code == 1 and status in op["error"]
    else:
        assert op["first_ms"]["runs"] == op["cold_ms"]["runs"] == 1 and op["warm_ms"]["runs"] == 2
        assert op["disk_process_ms"] == 3.5 and op["lookup_ns"] == 50

def test_masks_command(tmp_path, monkeypatch, kernels_on_the_cpu):  # noqa: F811
    monkeypatch.setattr(masks, "HEADS_TIMES_DIM", 64)
    out = tmp_path / "masks.json"
    assert masks.main(["--device", "cpu", "--out", str(out), "--tokens", "64", "--head-dim", "64",
                       "--rounds", "1"]) == 0  # fmt: skip
    record = read(out)
    rows = {(row["case"], row["causal"]): row for row in record["rows"]}
    assert len(rows) == len(record["rows"]) == 11 and record["passed"]
    assert rows["dense", "none"]["forward"]["times_share"] == 1.0
    for row in rows.values():
        beside = "times_parts" if row["sequences"] > 1 else "times_share"
        assert row["forward+backward"].keys() == {"ratio_to_fa2", beside}
        assert 0 < row["rel_l2_to_fa2"]["dK"] < 0.03
    assert rows["packed, halves", "none"]["lengths"] == [32, 16, 8, 4, 2, 1, 1]


def test_a_window_has_its_share():
    cases = {case.name: case for case in masks.cases_of(8, 0)}
    assert cases["dense"].share() == 1 and cases["causal"].share() == 36 / 64
    assert masks.Case("", (4,), window=(1, None)).share() == 7 / 16
    assert masks.Case("", (4,), "none", (1, 2)).share() == (3 + 4 + 3 + 2) / 16


def test_generation_command(tmp_path, kernels_on_the_cpu):  # noqa: F811
    out = tmp_path / "generation.json"
    words = ["--device", "cpu", "--out", str(out), "--keys", "64", "--rounds", "1"]
    assert generation.main(words) == 0
    rows = read(out)["rows"]
    assert [(row["queries"], row["keys"]) for row in rows] == [(1, 64), (16, 64)]
    assert all(0.003 < row["rel_l2_to_fa2"] < 0.03 for row in rows)
    assert all(row["ratio_to_best_peer"] > 0 for row in rows)
