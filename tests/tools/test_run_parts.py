"""./run build library and ./run demo: what they ask for, and what is seen of them meanwhile."""

import os
import shutil
import subprocess

from places import ROOT
from test_run import checkout  # noqa: F401


def test_the_library_is_built_without_python_and_tests(checkout):  # noqa: F811
    (checkout.folder / "include/gtest/gtest.h").unlink()
    for command in ("python3", "apt-get", "sudo"):
        (checkout.folder / "bin" / command).write_text("#!/bin/sh\nexit 1\n")
    built = checkout("build", "library", JOBS="3")
    assert built.returncode == 0, built.stdout + built.stderr
    assert checkout.calls() == {"cmake"} and not (checkout.folder / "build/venv").exists()
    configured, compiled = (checkout.folder / "calls").read_text().splitlines()
    assert " -B build/library " in configured and " -DSAGEBWD_TESTS=OFF " in configured
    assert compiled == ("cmake --build build/library -j 3 --target "
                        "sagebwd sagebwd_bundle sagebwd_shared")  # fmt: skip
    assert "cmake --install build/library --prefix PREFIX" in built.stdout


# What the demo calls: rows of sm_86 come once a file is there.
ROWS = """#!/bin/bash
arch=$3
case "$1" in
  build)
    while [[ $arch == sm_86 && ! -e go ]]; do sleep .01; done
    echo "kernel arch pass ms registers spills shared cached"
    echo "sagebwd_quantize_forward_d64 $arch forward 5 80 0 9476 no"
    echo "sagebwd_forward_d64 $arch forward 7 155 0 21504 no"
    echo "6 kernels, 1 from the cache, 12 ms in all"
    ;;
esac
"""


def test_the_demo_shows_kernels_as_they_are_compiled(tmp_path):
    shutil.copytree(ROOT / "tools/run", tmp_path / "tools/run")
    sagebwd = tmp_path / "build/bin/sagebwd"
    sagebwd.parent.mkdir(parents=True)
    sagebwd.write_text(ROWS)
    sagebwd.chmod(0o755)
    (tmp_path / "build/logs").mkdir()
    script = "set -euo pipefail; root=$PWD python=false; source tools/run/demo.sh"
    process = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, stdout=subprocess.PIPE,
                               text=True, env={**os.environ, "SAGEBWD_CACHE_DIR": "x"})  # fmt: skip
    seen = []
    while len(seen) < 2:  # those of sm_80; the next are not there yet
        line = process.stdout.readline()
        assert line, "the demo ended"
        seen += [line] if line.startswith("sagebwd_") else []
    assert [line.split()[:2] for line in seen] == [["sagebwd_forward_d64", "sm_80"]] * 2
    (tmp_path / "go").touch()
    rest = process.communicate(timeout=60)[0].split("\n2. ", 1)[0].splitlines()
    assert process.returncode == 0
    assert "60 kernels, 10 from the cache, 120 ms in all" in rest
    assert sum("sagebwd_forward_d64" in line for line in rest) == 8


def test_a_long_command_in_a_fresh_root_has_a_log_of_its_own(tmp_path):
    shutil.copytree(ROOT / "tools/run", tmp_path / "tools/run")
    shutil.copy(ROOT / "run", tmp_path / "run")
    (tmp_path / "build/logs").mkdir(parents=True)
    (tmp_path / "sagebwd/build/logs").mkdir(parents=True)
    script = """sed '/^jobs=/,$d' run >functions
source ./functions
root=$PWD logs=$PWD/build/logs tree=$PWD
make_root() { :; }; clone() { :; }; own_git() { :; }; in_root() { eval "${3#*&& }"; }
run_fresh debian:bookworm "$@" """
    long = "echo " + 60 * "seven letters "
    commands = ["./run none", f"{long} 1", f"{long} 2; false"]
    ended = subprocess.run(["bash", "-c", script, "./run", *commands], cwd=tmp_path,
                           capture_output=True, text=True, check=False)  # fmt: skip
    assert "\n1 passed, 2 failed, 0 skipped" in ended.stdout, ended.stdout + ended.stderr
    logs = {path.name: path.read_text() for path in (tmp_path / "build/logs").glob("fresh-*.log")}
    assert set(logs) > {"fresh-clone.log", "fresh-runnone.log"} and len(logs) == 4
    said = [text.split()[-1] for text in logs.values() if "seven letters" in text]
    assert sorted(said) == ["1", "2"]
