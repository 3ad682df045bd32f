"""`sagebwd bench` and `tune --lengths` of the command line start Python with what was typed."""

import os
import shutil
import subprocess
import sys

import pytest
from places import BINARY

#: Says what it was given, and leaves with 7.
FAKE = """#!/bin/sh
echo "$(basename "$0")" in "$(dirname "$0")" >&2
shift 2 # -c and the text
echo "[$1]"
shift 2 # the command and the folder of the package
for word in "$@"; do echo "[$word]"; done
exit 7
"""


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(*words, path, binary=BINARY, command="bench", **variables):
    environment = {**os.environ, "PATH": f"{path}:/usr/bin:/bin", **variables}
    return subprocess.run([binary, command, *words], capture_output=True, text=True, check=False,
                          env=environment)  # fmt: skip


def test_what_was_typed_reaches_the_python_on_the_path(tmp_path):
    program(tmp_path / "python3", FAKE)
    done = run("--models", "flux-1", "--plot=a b.png", "--json", path=tmp_path)
    assert done.returncode == 7 and f"python3 in {tmp_path}" in done.stderr
    assert done.stdout == "[bench]\n[--models]\n[flux-1]\n[--plot=a b.png]\n[--json]\n"


def test_lengths_to_tune_reach_python_too(tmp_path):
    program(tmp_path / "python3", FAKE)
    words = "--lengths=512,1024", "--causal", "top-left", "--json"
    done = run(*words, path=tmp_path, command="tune")
    assert done.returncode == 7
    assert done.stdout == "[tune]\n" + "".join(f"[{word}]\n" for word in words)


def test_the_python_beside_the_program_comes_first(tmp_path):
    program(tmp_path / "on-path/python3", FAKE)
    program(tmp_path / "beside/python3", FAKE)
    binary = shutil.copy(BINARY, tmp_path / "beside/sagebwd")
    done = run(path=tmp_path / "on-path", binary=binary)
    assert done.returncode == 7 and f"python3 in {tmp_path}/beside" in done.stderr


def test_the_package_of_a_build_is_found_beside_the_program(tmp_path):
    """As in a checkout, where build/bin has the program and build/python the package."""
    program(tmp_path / "on-path/python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    package = tmp_path / "build/python/sagebwd"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("def main(words):\n    print(words, __file__)\n")
    (tmp_path / "build/bin").mkdir()
    binary = shutil.copy(BINARY, tmp_path / "build/bin/sagebwd")
    done = run("--sinks", path=tmp_path / "on-path", binary=binary, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"['bench', '--sinks'] {package}/__main__.py\n"


def test_a_python_without_sagebwd_is_named(tmp_path):
    program(tmp_path / "python3", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "bin").mkdir()
    done = run(path=tmp_path, PYTHONPATH="", binary=shutil.copy(BINARY, tmp_path / "bin/sagebwd"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"{sys.executable} cannot import sagebwd (No module named" in done.stderr
    assert "run 'python -m sagebwd bench' with the Python that has it" in done.stderr


def test_without_python_it_says_what_to_do(tmp_path):
    done = subprocess.run([BINARY, "bench"], capture_output=True, text=True, check=False,
                          env={"PATH": str(tmp_path)})  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    assert "needs Python with sagebwd and PyTorch" in done.stderr
    assert "run 'python -m sagebwd bench'" in done.stderr


@pytest.mark.parametrize(("words", "message"), [
    (["--model", "x"], "unknown option '--model'; did you mean '--models'?"),
    (["--layout", "bshf"], "--layout is 'bshf'; it takes bhsd, bshd; did you mean 'bshd'?"),
    (["--deterministic", "maybe"], "it takes both, yes, no"),
    (["--seq-len", "0"], "--seq-len is '0'; it takes a whole number from 1"),
    (["--causal", "yes"], "yes"),
    (["--rounds", "1001"], "from 1 to 1000"),
    (["--models"], "--models needs a value"),
])  # fmt: skip
def test_wrong_use_starts_no_python(tmp_path, words, message):
    program(tmp_path / "python3", FAKE)
    done = run(*words, path=tmp_path)
    assert done.returncode == 2 and message in done.stderr and "python3 in" not in done.stderr
