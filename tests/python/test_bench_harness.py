"""The measuring scripts share records, timing, programs, and what runs many of them."""

import importlib
import json
import math
import shlex
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

BENCH = Path(__file__).resolve().parents[2] / "bench"

import compile_time  # noqa: E402
import gpu_tests  # noqa: E402
import harness  # noqa: E402

ENVIRONMENT = {"date", "command", "torch", "gpu", "commit", "tree", "dirty", "sources_sha256",
               "nvrtc"}  # fmt: skip


def read(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("script", ["all", "balance", "balance_lists", "balance_masks",
                                    "../tests/drawn/cases", "errors", "host_time", "speed"])
def test_without_pytorch_a_script_says_so_in_one_line(script):
    code = ("import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
            "sys.path.insert(0, sys.argv[2]); runpy.run_path(sys.argv[0], run_name='__main__')")
    path = BENCH / f"{script}.py"
    done = harness.run([sys.executable, "-c", code, str(path), "--help", str(path.parent)])
    assert done.status == 1
    assert done.errors.startswith(f"{path.name} needs PyTorch") and done.errors.count("\n") <= 1


def test_record_is_complete_after_every_figure_and_in_its_place_at_the_end(tmp_path, capsys):
    path = tmp_path / "results" / "some.json"
    path.parent.mkdir()
    path.write_text("the last one")
    record = harness.Record(path, tokens=4)
    beside = path.with_name("some.json.unfinished")
    assert str(beside) in capsys.readouterr().err
    assert read(beside)["status"] == "running" and read(beside)["parameters"] == {"tokens": 4}
    assert read(beside)["environment"].keys() >= ENVIRONMENT
    record.add("rows", {"error": math.nan})
    assert read(beside)["rows"] == [{"error": "nan"}] and path.read_text() == "the last one"
    assert record.finish(passed=False) == 1
    assert read(path)["passed"] is False and read(path)["status"] == "finished"
    assert list(path.parent.iterdir()) == [path]


def test_command_names_no_folder(monkeypatch):
    from sagebwd.benchmark.environment import command

    given = ["--out=/c/d/e.json", "x/y", "row:a=1,b", "/a/my file"]
    monkeypatch.setattr(sys, "argv", ["/a/b/speed.py", *given])
    said = ["--out=e.json", "y", "row:a=1,b", "my file"]
    for typed, program in ((["-X", "dev", "/a/b/speed.py"], ["speed.py"]),
                           (["-m", "sagebwd.x.speed"], ["-m", "sagebwd.x.speed"])):  # fmt: skip
        monkeypatch.setattr(sys, "orig_argv", ["python", *typed, *given])
        assert shlex.split(command())[1:] == [*program, *said]


def test_a_named_commit_is_the_records(monkeypatch):
    from sagebwd.benchmark.environment import tree

    digest = tree()["sources_sha256"]
    monkeypatch.setenv("SAGEBWD_COMMIT", "1234abcd")
    assert tree() == {"commit": "1234abcd", "tree": None, "dirty": None, "sources_sha256": digest}


def test_sources_digest_sees_sources_and_not_results(tmp_path):
    from sagebwd.benchmark.environment import sources_digest

    (tmp_path / "bench" / "results").mkdir(parents=True)
    source = tmp_path / "bench" / "speed.py"
    source.write_text("a")
    before = sources_digest(tmp_path)
    (tmp_path / "bench" / "results" / "x.py").write_text("b")
    assert sources_digest(tmp_path) == before
    source.write_text("c")
    assert sources_digest(tmp_path) != before


# ---- programs, and all of them ----------------------------------------------------------------


def test_programs_are_run_with_a_limit_and_tell_why_they_fail(tmp_path):
    done = harness.run([sys.executable, "-c", "import os; print(os.environ['A'])"], A="b")
    assert (done.status, done.output, done.errors) == (0, "b\n", "") and done.seconds > 0
    late = harness.run([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"],
                       timeout=2)
    assert late.status is None and late.output in ("1\n", "") and late.seconds < 300
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = []

    def main_of(name, outcome):
        def main(words):
            seen.append((name, words, sys.argv[0]))
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        return main

    outcomes = {"gpu_tests": 0, "sanitize": SystemExit(2), "compile_time": 0,
                "tuning": RuntimeError("boom"), "host_time": 0, "speed": 1, "grid": 0,
                "sparse": 0, "layer": 0, "balance": 0, "balance_lists": 0, "balance_masks": 0,
                "masks": 0, "intervals": 0, "scores": 0, "very_wide": 0, "generation": 0,
                "inference": 0, "errors": 0, "cases": 0,
                "cases_of_lists": 0, "cases_of_intervals": 0,
                "sla_cases": 0, "front_cases": 0}  # fmt: skip
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


def test_all_refuses_at_once_without_a_gpu(tmp_path, monkeypatch, capsys):
    every = importlib.import_module("all")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        every.main(["--out", str(tmp_path)])
    assert left.value.code == 2 and "no CUDA GPU here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_all_names_the_records_that_there_are():
    every = importlib.import_module("all")
    for name, record in every.BENCHMARKS.items():
        source = Path(importlib.import_module(name).__file__).read_text()
        assert f'"{record}"' in source


# ---- tests on a GPU -----------------------------------------------------------------------------


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
    found = gpu_tests.googletest(binary, 20, tmp_path, shards=1)
    assert (found["passed"], found["failed"], found["skipped"]) == counts
    assert found["complete"] == (counts == (2, 0, 0))
    assert found["failures"] + found["skips"] == ([] if found["complete"] else ["Gpu.b"])


@pytest.mark.parametrize("dies", [False, True])
def test_gpu_test_run_adds_shards_up(tmp_path, dies):
    binary = tmp_path / "gpu_tests"
    binary.write_text(GOOGLETEST.format(python=sys.executable, second='"result": "COMPLETED"')
                      .replace('"name": "Gpu"', '"name": os.environ["GTEST_SHARD_INDEX"]')
                      .replace("import json", "import json, os")
                      + f"sys.exit({dies} and os.environ['GTEST_SHARD_INDEX'] == '1')\n")
    binary.chmod(0o755)
    found = gpu_tests.googletest(binary, 20, tmp_path, shards=3)
    assert found["passed"] == 6 and found["complete"] == (not dies)


def test_gpu_test_run_takes_nothing_for_success(tmp_path):
    assert not gpu_tests.googletest(tmp_path / "absent", 5, tmp_path, shards=1)["complete"]
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no GPU')\n")
    found = gpu_tests.pytest(tmp_path / "test_some.py", 60, tmp_path, 1, bool)
    assert (found["passed"], found["skipped"], found["complete"]) == (1, 1, False)
    assert found["skips"] == ["test_some.test_b"] or found["skips"][0].endswith("test_b")


def test_gpu_test_run_has_each_file_in_a_process(tmp_path):
    (tmp_path / "test_a.py").write_text("def test_one(): pass\n")
    (tmp_path / "test_b.py").write_text("def test_two(): pass\n")
    assert gpu_tests.pytest(tmp_path, 60, tmp_path, 2, bool)["passed"] == 2
    (tmp_path / "test_b.py").write_text("import os\nos._exit(1)\n")
    found = gpu_tests.pytest(tmp_path, 60, tmp_path, 2, bool)
    assert (found["exit_status"], found["complete"]) == (1, False)


@pytest.mark.parametrize("passes_at", [2, 3])
def test_gpu_tests_of_times_have_a_second_try_that_the_record_tells(tmp_path, passes_at):
    tries = tmp_path / "tries"
    failing = (f"import pathlib\ndef test_b():\n    tries = pathlib.Path({str(tries)!r})\n"
               "    tries.open('a').write('x')\n"
               f"    assert len(tries.read_text()) >= {passes_at}\n")  # fmt: skip
    (tmp_path / gpu_tests.ALONE[0]).write_text(failing + "def test_a(): pass\n")
    found = gpu_tests.pytest(tmp_path, 60, tmp_path, 1, bool)
    assert tries.read_text() == "xx" and found["complete"] == (passes_at == 2)
    assert (found["passed"], found["failed"]) == ((2, 0) if passes_at == 2 else (1, 1))
    [told] = found["failed_at_first"]
    assert told.endswith("test_b")
    tries.unlink()
    (tmp_path / gpu_tests.ALONE[0]).rename(tmp_path / "test_other.py")
    found = gpu_tests.pytest(tmp_path, 60, tmp_path, 1, bool)
    assert tries.read_text() == "x" and found["failed"] == 1 and not found["failed_at_first"]


def test_gpu_tests_of_times_wait_for_all_others(tmp_path):
    at_the_end = f"import pathlib\ndef test(): assert pathlib.Path({str(tmp_path / 'x')!r})"
    (tmp_path / "test_a.py").write_text(f"{at_the_end}.mkdir() is None\n")
    (tmp_path / gpu_tests.ALONE[0]).write_text(f"{at_the_end}.with_name('y').exists()\n")
    found = gpu_tests.pytest(tmp_path, 60, tmp_path, 2,
                             lambda: (tmp_path / "x").rename(tmp_path / "y"))
    assert found["passed"] == 2 and found["complete"]
