"""./run build library and ./run demo: what they ask for, and what is seen of them meanwhile."""

import os
import re
import shutil
import signal
import subprocess
import sys

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


# The demo calls this: rows of sm_86 come once a file is there.
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
    for line in process.stdout:  # up to the row of sm_80; the next is not there yet
        if line.startswith("sagebwd_"):
            break
    assert line.split()[:2] == ["sagebwd_forward_d64", "sm_80"]
    (tmp_path / "go").touch()
    rest = process.communicate(timeout=60)[0].split("\n2. ", 1)[0].splitlines()
    assert process.returncode == 0
    assert "30 kernels, 5 from the cache, 60 ms in all" in rest
    assert sum("sagebwd_forward_d64" in line for line in rest) == 4


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
    logs = {
        path.name: path.read_text()
        for path in (tmp_path / "build/logs/bookworm").glob("fresh-*.log")
    }
    assert set(logs) > {"fresh-clone.log", "fresh-runnone.log"} and len(logs) == 4
    said = [text.split()[-1] for text in logs.values() if "seven letters" in text]
    assert sorted(said) == ["1", "2"]


PROGRESS = [sys.executable, ROOT / "tools/run/progress.py", "Tests"]


def test_a_failure_is_seen_when_it_comes(tmp_path):
    log = tmp_path / "log"
    process = subprocess.Popen(
        [*PROGRESS, log], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    said = ("   1/3 Test   #7: Cache.One ...........   Passed    0.02 sec\n"
            "   2/3 Test   #8: Gpu/One.Two/D64 ............***Skipped   0.01 sec\n"
            "   3/3 Test #1009: Python.tools_0 ....***Failed   31.60 sec\n")  # fmt: skip
    process.stdin.write(said)
    process.stdin.flush()
    assert process.stdout.readline() == "  failed after 32 s: Python.tools_0\n"  # it still runs
    rest, _ = process.communicate("more\n", timeout=60)
    assert process.returncode == 0 and rest == "" and log.read_text() == said + "more\n"


def test_how_far_a_build_and_a_test_run_are(tmp_path):
    script = "import progress, sys; progress.EVERY = 0; progress.main(*sys.argv[1:])"
    lines = ("[1/40] Building CXX object a.o\n[40/40] Linking\n"
             " 3/2016 Test  #3: A.B ....Subprocess aborted***Exception:   0.50 sec\n"
             "10/2016 Test #12: C.D .....   Passed    0.02 sec\n")  # fmt: skip
    done = subprocess.run([sys.executable, "-B", "-c", script, "All", tmp_path / "log"],
                          input=lines, text=True, capture_output=True, cwd=ROOT / "tools/run",
                          check=True)  # fmt: skip
    shown = [re.sub(r" after \d+ s$", "", line) for line in done.stdout.splitlines()]
    assert shown == ["  1 of 40", "  40 of 40", "  failed after 0 s: A.B", "  3 of 2016, 1 failed",
                     "  10 of 2016, 1 failed"]  # fmt: skip


def test_pytorch_is_installed_once_and_tests_run_with_it(checkout):  # noqa: F811
    for name in ("bin/ctest", "build/bin/sagebwd", "build/bin/gpu_tests"):
        path = checkout.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho {path.name} "$*" >>{checkout.folder}/calls\n')
        path.chmod(0o755)
    for installs in (True, False):
        checkout("test", "quick", "--with-torch")
        calls = (checkout.folder / "calls").read_text()
        assert ("-r tests/python/requirements.txt" in calls) == installs
        assert ("-DSAGEBWD_TORCH_PYTHON=" in calls) == installs  # configured once, too
        (tests,) = re.findall("^ctest .*", calls, re.M)
        assert "-LE heavy|^gpu$|gpu_python " in tests
    checkout("test")
    (tests,) = re.findall("^ctest .*", (checkout.folder / "calls").read_text(), re.M)
    assert "-LE torch|^gpu$|gpu_python " in tests
    (checkout.folder / "tests/python/requirements.txt").write_text("torch==2.16.0\n")
    other = checkout("test", "--with-torch", SAGEBWD_PYTHON_EXE="python3")
    assert other.returncode == 1 and "Unset it; or leave --with-torch out" in other.stderr
    old = checkout("test", "--with-torch", OLD_PYTHON="1")
    assert old.returncode == 1 and "--with-torch needs Python 3.11 or newer" in old.stderr


def test_an_interrupt_ends_what_is_watched_and_the_script(tmp_path):
    shutil.copytree(ROOT / "tools/run", tmp_path / "tools/run")
    shutil.copy(ROOT / "run", tmp_path / "run")
    (tmp_path / "build/logs").mkdir(parents=True)
    script = f"""sed '/^jobs=/,$d' run >functions
source ./functions
root=$PWD logs=$PWD/build/logs python={sys.executable}
watch slow "What is slow" bash -c 'echo "[1/2] first"; : >begun; exec sleep 60' || echo it failed
echo and it goes on"""
    # pytest may have been started where SIGINT is ignored, which bash could not change.
    process = subprocess.Popen(
        ["bash", "-c", script, "./run"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "interrupted" in said and "goes on" not in said and "failed" not in said
