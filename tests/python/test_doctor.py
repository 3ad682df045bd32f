"""sagebwd.doctor: it never fails, and says what is missing for what."""

import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm

import sagebwd


def run(*arguments, **variables):
    return run_as(["sagebwd.doctor"], *arguments, **variables)


def run_as(module, *arguments, **variables):
    return warm.run(["-m", *module, *arguments], env=os.environ | variables)


def test_report():
    report = sagebwd.doctor()
    assert report["version"] == sagebwd.__version__
    assert [arch["name"] for arch in report["architectures"]] == sagebwd.archs()
    assert report["driver"].get("error") or report["driver"]["cuda_version"] >= 12000
    assert report["nvrtc"].get("error") or report["nvrtc"]["path"]
    assert sys.executable in report["python"] and report["torch"]
    assert re.search(r", glibc 2\.\d+, kernel \d", report["system"]), report["system"]
    assert f"numpy {importlib.metadata.version('numpy')}" in report["beside"].split(", ")
    for item in report["missing"]:
        assert item["what"] and item["needed_for"] and item["remedy"]


def test_command():
    result = run()
    assert result.returncode == 0 and "Warning" not in result.stderr, result.stderr
    for word in ("sagebwd", "system", "python", "torch", "beside", "driver", "nvrtc", "cache",
                 "tuning"):  # fmt: skip
        assert f"\n{word:8}" in "\n" + result.stdout


def test_a_cache_that_cannot_be_used_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("--json", SAGEBWD_CACHE_DIR=str(tmp_path / "file"))
    assert result.returncode == 1
    assert not json.loads(result.stdout)["cache"]["usable"]


def test_both_doctors_say_the_same():
    binary = Path(os.environ.get("SAGEBWD_BIN", "build/bin/sagebwd"))
    if not binary.exists():
        pytest.skip("the command line is not built")
    nvrtc = sagebwd.doctor()["nvrtc"].get("path", "")  # Python looks in more places
    other = subprocess.run([binary, "doctor", "--json"], capture_output=True, text=True,
                           env=os.environ | {"SAGEBWD_NVRTC": nvrtc})  # fmt: skip
    theirs = json.loads(other.stdout)
    ours = json.loads(run("--json", SAGEBWD_NVRTC=nvrtc).stdout)
    assert ours.keys() - theirs.keys() == {"system", "python", "torch", "beside"}
    missing = [m for m in ours.pop("missing") if "PyTorch" not in m["what"]]
    assert missing == theirs.pop("missing")
    assert {key: ours[key] for key in theirs} == theirs


@pytest.mark.anywhere
def test_the_package_itself_is_no_command_and_says_which_there_are():
    @functools.cache
    def said(*words):
        return warm.run(["-m", "sagebwd", *words])

    assert said("--version").stdout == f"sagebwd {sagebwd.__version__}\n"
    assert said("--help").returncode == 0 and said("build").returncode == 2
    named = re.findall(r"python -m (sagebwd \w+|\w+)", said("--help").stdout)
    assert named == ["sagebwd bench", "sagebwd tune", "sagebwd doctor", "experiments"]
    assert said("trace").stderr.startswith("sagebwd: 'trace' is no command of this module\n")
    assert "is no command" not in said("--help").stdout + said("--help").stderr + said().stderr


@pytest.mark.anywhere
@pytest.mark.parametrize("module", [["sagebwd.doctor"], ["sagebwd", "doctor"]], ids=str)
def test_both_ways_to_start_it(module, tmp_path):
    result = run_as(module, "--json")
    assert result.returncode == 0 and json.loads(result.stdout) == sagebwd.doctor()
    (tmp_path / "file").write_text("")
    assert run_as(module, SAGEBWD_CACHE_DIR=str(tmp_path / "file")).returncode == 1
    wrong = run_as(module, "--jsn")
    assert wrong.returncode == 2 and f"usage: python -m {' '.join(module)} [" in wrong.stderr
