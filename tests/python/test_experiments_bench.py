"""The measuring harness: what it records, what it calls wrong, its scripts without a GPU."""

import importlib
import json
import math
import random
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import cases  # noqa: E402
import compile_time  # noqa: E402
import errors  # noqa: E402
import gpu_tests  # noqa: E402
import harness  # noqa: E402
import host_time  # noqa: E402
import plot  # noqa: E402
import speed  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from subjects import emulated  # noqa: E402

from sagebwd import forms  # noqa: E402
from sagebwd.exact import exact_attention  # noqa: E402

ENVIRONMENT = {"date", "command", "torch", "gpu", "commit", "tree", "dirty", "sources_sha256",
               "nvrtc"}  # fmt: skip


pytestmark = pytest.mark.usefixtures("tiny_tensors")


def read(path):
    return json.loads(path.read_text())


# ---- records and timing --------------------------------------------------------------------------


def test_record_is_complete_after_every_figure(tmp_path):
    path = tmp_path / "results" / "some.json"
    record = harness.Record(path, tokens=4)
    assert read(path)["status"] == "running" and read(path)["parameters"] == {"tokens": 4}
    assert read(path)["environment"].keys() >= ENVIRONMENT
    record.add("rows", {"error": math.nan})
    assert read(path)["rows"] == [{"error": "nan"}]
    assert record.finish(passed=False) == 1
    assert read(path)["passed"] is False and not list(path.parent.glob("*.partial"))


def test_command_names_no_folder(monkeypatch):
    from sagebwd.experiments.environment import command

    monkeypatch.setattr(sys, "argv", ["/a/b/speed.py", "--out=/c/d/e.json", "x/y", "row:a=1,b"])
    assert command().split()[1:] == ["speed.py", "--out=e.json", "y", "row:a=1,b"]


def test_sources_digest_sees_sources_and_not_results(tmp_path):
    from sagebwd.experiments.environment import sources_digest

    (tmp_path / "bench" / "results").mkdir(parents=True)
    source = tmp_path / "bench" / "speed.py"
    source.write_text("a")
    before = sources_digest(tmp_path)
    (tmp_path / "bench" / "results" / "x.py").write_text("b")
    assert sources_digest(tmp_path) == before
    source.write_text("c")
    assert sources_digest(tmp_path) != before


def test_candidates_are_timed_in_turn():
    calls = []
    timings = harness.time_interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, "cpu", rounds=3, warmup=1)
    assert "".join(calls) == "ab" * 4
    assert timings["a"].samples == 3 and timings["a"].median_ms > 0


def test_timing_is_robust_to_an_outlier():
    timing = harness.Timing.of([1.0, 2.0, 3.0, 4.0, 1000.0])
    assert (timing.median_ms, timing.mad_ms) == (3.0, 1.0)


def test_relative_l2():
    assert harness.relative_l2(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == 0.2
    assert harness.relative_l2(torch.zeros(2), torch.zeros(2)) == 0
    assert harness.relative_l2(torch.ones(2), torch.zeros(2)) == math.inf


# ---- cases ---------------------------------------------------------------------------------------


def test_specs_cover_every_value():
    specs = cases.draw_specs(40, random.Random(0))
    assert len(specs) == 40 == len({tuple(spec.items()) for spec in specs})
    for key, values in cases.CHOICES.items():
        for value in values:
            assert sum(spec[key] == value for spec in specs) >= 8, (key, value)


def test_cases_cover_what_they_promise_and_repeat_themselves():
    specs = cases.draw_specs(40, random.Random(0))
    drawn = [cases.draw_case(i, specs, seed=0) for i in range(1000)]
    assert drawn == [cases.draw_case(i, specs, seed=0) for i in range(1000)]
    for holds in (
        lambda c: c.seq_q == 1, lambda c: c.seq_kv == 1, lambda c: c.seq_q > 300,
        lambda c: c.seq_q > c.seq_kv and c.spec["causal"] != "none",
        lambda c: c.seq_q < c.seq_kv and c.spec["causal"] != "none",
        lambda c: c.group > 1, lambda c: c.with_dlse, lambda c: c.seq_q % 64 and c.seq_kv % 64,
    ):  # fmt: skip
        assert sum(map(holds, drawn)) >= 20
    assert {c.layout for c in drawn} == set(cases.LAYOUTS)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts_hold_the_values_between_nans(layout):
    x = torch.randn(2, 3, 5, 64).to(torch.bfloat16)
    view = cases.laid_out(x, layout)
    assert torch.equal(view, x) and view.stride(3) == 1
    assert all(stride % 8 == 0 for stride in view.stride()[:3]) and view.data_ptr() % 16 == 0
    whole = torch.as_strided(view, (view.untyped_storage().nbytes() // 2,), (1,), 0)
    assert torch.isnan(whole).sum() == whole.numel() - x.numel()


@pytest.fixture(scope="module")
def judged():
    """A case's inputs, its emulation, and the exact results."""
    spec = dict(head_dim=64, dtype="bf16", causal="top-left", granularity="row",
                precision="six-of-seven", smooth_k=True, rotate=True, group_kv=64)  # fmt: skip
    drawn = cases.draw_case(0, [spec], 0)
    case = replace(drawn, seq_q=200, seq_kv=200, heads_kv=2, group=2, batch=1, sigma=1.0,
                   key_offset=0.0, softmax_scale=None, with_dlse=False)  # fmt: skip
    given = cases.inputs_of(case, "cpu")
    options = {key: spec[key] for key in spec if key not in ("head_dim", "dtype")}
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
    assert len(set(labels)) == len(labels) and set(errors.ROW_OF_VERSION_0_1) == set(labels)
    assert {given.name for given in errors.INPUTS} == set(errors.sagebwd.INPUTS)
    for given in errors.INPUTS:
        assert all(set(given.limits(plan)) == set(errors.TENSORS) for plan in errors.PLANS)


# ---- speed, compile time, tests on a GPU, plots --------------------------------------------------


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


def test_speed_names_a_family_and_knows_what_it_must_reach(monkeypatch):
    ours = [speed.Ours.parse(label) for label in speed.default_ours()]
    assert [one.label() for one in ours] == speed.default_ours() and len(ours) == 8
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
                                     total_tokens=speed.TOTAL_TOKENS))  # fmt: skip
    musts = {"sagebwd": [1.25, 1.2, 1.5, 1.4, 1.0], "sagebwd-mma": [1.05, 1.03, 1.05, 1.03, None],
             "sagebwd:precision=dv16": 5 * [None]}  # fmt: skip
    for label, least in musts.items():
        assert [speed.Ours.parse(label).must(cell, "cuda") for cell in cells] == least


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
        assert op["cold_ms"]["runs"] == 1 and op["warm_ms"]["runs"] == 2
        assert op["disk_process_ms"] == 3.5 and op["lookup_ns"] == 50


GOOGLETEST = """#!{python}
import json, sys
tests = [{{"name": "a"}}, {{"name": "b", {second}}}]
report = {{"testsuites": [{{"name": "Gpu", "testsuite": tests}}]}}
open(sys.argv[1].split(":", 1)[1], "w").write(json.dumps(report))
"""


@pytest.mark.parametrize(
    "second, counts",
    [('"result": "COMPLETED"', (2, 0, 0)), ('"failures": [{"failure": "x"}]', (1, 1, 0)),
     ('"result": "SKIPPED"', (1, 0, 1))],
)  # fmt: skip
def test_gpu_test_run_counts(tmp_path, second, counts):
    binary = tmp_path / "gpu_tests"
    binary.write_text(GOOGLETEST.format(python=sys.executable, second=second))
    binary.chmod(0o755)
    found = gpu_tests.googletest(binary, 20, tmp_path)
    assert (found["passed"], found["failed"], found["skipped"]) == counts
    assert found["complete"] == (counts == (2, 0, 0))
    assert found["failures"] + found["skips"] == ([] if found["complete"] else ["Gpu.b"])


def test_gpu_test_run_takes_nothing_for_success(tmp_path):
    assert not gpu_tests.googletest(tmp_path / "absent", 5, tmp_path)["complete"]
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no GPU')\n")
    found = gpu_tests.pytest(tmp_path / "test_some.py", 60, tmp_path)
    assert (found["passed"], found["skipped"], found["complete"]) == (1, 1, False)
    assert found["skips"] == ["test_some.test_b"] or found["skips"][0].endswith("test_b")


# ---- programs, and all of them ----------------------------------------------------------------


def test_programs_are_run_with_a_limit_and_tell_why_they_fail(tmp_path):
    done = harness.run([sys.executable, "-c", "import os; print(os.environ['A'])"], A="b")
    assert (done.status, done.output, done.errors) == (0, "b\n", "") and done.seconds > 0
    late = harness.run([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"],
                       timeout=2)
    assert late.status is None and late.output in ("1\n", "") and late.seconds < 20
    with pytest.raises(RuntimeError, match="failed: oh no"):
        harness.run_json([sys.executable, "-c", "import sys; sys.exit('oh no')"])
    with pytest.raises(RuntimeError, match="No such file"):
        harness.run_json([tmp_path / "absent"])
    printed, seconds = harness.run_json([sys.executable, "-c", "print('[1]')"],
                                        cores=harness.first_cores(1))
    assert printed == [1] and seconds > 0


def test_one_that_is_not_built_is_wrong_use(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        compile_time.main(["--tool", str(tmp_path / "none")])
    assert left.value.code == 2 and "build it" in capsys.readouterr().err


def test_all_runs_each_as_its_own_command_and_survives_one(tmp_path, monkeypatch, capsys):
    every = importlib.import_module("all")
    seen = []

    def main_of(name, outcome):
        def main(words):
            seen.append((name, words, sys.argv[0]))
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        return main

    outcomes = {"gpu_tests": 0, "sanitize": SystemExit(2), "compile_time": 0,
                "tuning": RuntimeError("boom"), "host_time": 0, "speed": 1, "errors": 0, "cases": 0}
    for name, outcome in outcomes.items():
        monkeypatch.setattr(importlib.import_module(name), "main", main_of(name, outcome))
    before = list(sys.argv)
    assert every.main(["--out", str(tmp_path)]) == 1
    assert sys.argv == before
    assert [one[0] for one in seen] == list(every.BENCHMARKS) == list(outcomes)
    assert seen[0][1:] == (["--out", str(tmp_path / "gpu-tests.json")], "gpu_tests.py")
    assert "FAILED: sanitize, tuning, speed" in capsys.readouterr().out
    assert every.main(["--out", str(tmp_path), "--only", "cases", "errors"]) == 0
    assert [one[0] for one in seen[-2:]] == ["errors", "cases"]


def test_all_names_the_records_that_there_are():
    every = importlib.import_module("all")
    for name, record in every.BENCHMARKS.items():
        assert f'"{record}"' in (BENCH / f"{name}.py").read_text()
