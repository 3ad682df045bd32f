"""sagebwd.doctor: it never fails, and says what is missing for what."""

import json
import subprocess
import sys

import sagebwd


def run(*arguments):
    command = [sys.executable, "-m", "sagebwd.doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_report():
    report = sagebwd.doctor()
    assert report["sagebwd"] == sagebwd.__version__
    assert report["archs"] == sagebwd.archs()
    assert report["driver"]["missing"] or report["driver"]["version"] >= 12000
    assert report["nvrtc"]["missing"] or report["nvrtc"]["path"]
    json.dumps(report)
    can = report["can"]
    assert can["build kernels"] == report["nvrtc"]["missing"]
    if report["driver"]["missing"]:
        assert can["sagebwd.attention"] and can["run cached kernels"]


def test_command():
    result = run()
    assert result.returncode == 0 and "Warning" not in result.stderr, result.stderr
    for word in ("sagebwd", "torch", "driver", "NVRTC", "cache", "sagebwd.attention"):
        assert word in result.stdout


def test_command_with_json():
    result = run("--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["archs"] == sagebwd.archs()


def test_wrong_use():
    assert run("--jsn").returncode == 2
