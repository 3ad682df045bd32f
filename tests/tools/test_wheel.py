"""./run wheel: which Pythons it takes, what it does with them; and what a wheel says of itself."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from places import BINARY, ROOT
from test_run import checkout  # noqa: F401

BUILD = BINARY.parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
CMAKE = (ROOT / "CMakeLists.txt").read_text()
VERSIONS = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
# A Python of that version, with headers or without, that notes what it is asked to do.
PYTHON = """#!/bin/bash
case "$*" in
  *version_info*) echo {version} ;;
  *Python.h*) {headers} ;;
  *) echo "{version} $*" >>{calls} ;;
esac
"""


@pytest.fixture
def wheel(checkout):  # noqa: F811
    """`wheel(WORD...)` is ./run wheel where sdist, builds and trials are stubs, and there are only
    the Pythons that `wheel.add` made."""
    folder = checkout.folder
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "tools/run/wheel.sh").write_text(
        (ROOT / "tools/run/wheel.sh").read_text()
        + """
prepare_wheel_tools() { tools=/tools/python; }
make_sdist() { mkdir -p dist; }
prepare_jax_header() { :; }
build_wheel() {
  echo "$1" >>dist/built_by
  [[ ${BROKEN:-} != build ]] && touch "dist/s-cp$(version_of "$1" | tr -d .)-m.whl"
}
audit_wheel() { [[ ${BROKEN:-} != audit ]]; }
newest_glibc() { echo GLIBC_2.34; }
make_root() { [[ $1 != ubuntu:* ]] || no_root_here none; }
try_in_root() { echo "in a root: $1" && [[ ${BROKEN:-} != trial ]]; }
try_here() { echo "here: $2" && [[ ${BROKEN:-} != trial ]]; }
"""
    )
    for tool in ("cmake", "ninja"):
        (folder / "bin" / tool).chmod(0o755)

    def add(path, version, headers="true"):
        path = folder / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PYTHON.format(version=version, headers=headers, calls=folder / "asked"))
        path.chmod(0o755)
        return path

    def in_wheel(*words, **environment):
        environment = {"HOME": str(folder), "PYENV_ROOT": str(folder / "pyenv"), **environment}
        environment["UV_PYTHON_INSTALL_DIR"] = str(folder / "uv")
        for version in VERSIONS:  # hides this machine's
            if not (folder / f"bin/python{version}").exists():
                add(f"bin/python{version}", "shim")
        return checkout("wheel", *words, **environment)

    in_wheel.add = add
    return in_wheel


def test_who_builds_without_isolation_is_told_what_builds_it():
    requires = re.search(r"^requires = \[(.*)\]$", PYPROJECT, re.M)[1]
    builds = re.findall(r'"([\w-]+)', requires)
    assert len(builds) == 2
    advice = "pip install " + " ".join(builds)
    code = re.sub(r'"\s+"', "", (ROOT / "python/sagebwd/integrations/_jax_calls.py").read_text())
    assert advice in code
    assert advice.replace("install", "install jax") in (ROOT / "docs/use/jax.md").read_text()


def test_it_finds_pythons_on_path_of_pyenv_and_of_uv(wheel):
    wheel.add("bin/python3.10", "3.10")
    wheel.add("pyenv/versions/3.11.9/bin/python", "3.11")
    wheel.add("uv/cpython-3.12.4-linux/bin/python", "3.12")
    result = wheel()
    assert result.returncode == 0, result.stdout + result.stderr
    for version in ("3.10", "3.11", "3.12"):
        assert f"A wheel for Python {version} " in result.stdout
    assert "No Python 3.13 with headers here: apt-get install python3.13-dev" in result.stdout
    assert "dist/s-cp310-m.whl: " in result.stdout and "needs GLIBC_2.34" in result.stdout
    assert "in a root: dist/s-cp311-m.whl" in result.stdout
    assert "here: dist/s-cp310-m.whl" in result.stdout  # no root of that system can be had
    assert result.stdout.splitlines()[-1] == "3 passed, 0 failed, 0 skipped"


def test_none_is_an_error(wheel):
    wheel.add("bin/python3.12", "3.12", headers="false")
    result = wheel()
    assert result.returncode == 1
    assert "None of Python 3.10, 3.11, 3.12, 3.13 is here with headers." in result.stderr
    assert result.stdout.count("pyenv install") == len(VERSIONS)


def test_only_those_that_are_asked_for(wheel):
    wheel.add("bin/python3.10", "3.10")
    mine = wheel.add("mine/python", "3.13")
    result = wheel("--python", str(mine), "--python", "3.10")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.findall(r"A wheel for Python (\S+)", result.stdout) == ["3.13", "3.10"]
    missing = wheel("--python", "3.11")
    assert missing.returncode == 1 and "No Python 3.11 with headers here" in missing.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["3.11"], "wheel takes --python X, a version or a command, any number of times: '3.11'"),
        (["--python"], "any number of times: '--python'"),
        (["--pyton", "3.11"], "any number of times: '--pyton'"),
        (["--python", "3.9"], "--python 3.9: sagebwd is built for Python 3.10, 3.11, 3.12, 3.13"),
        (["--python", "no-such"], "--python no-such is no Python here"),
    ],
)
def test_wrong_use_of_run_wheel(wheel, words, message):
    result = wheel(*words)
    assert result.returncode == 2 and message in result.stderr


def test_a_python_without_headers_is_named(wheel):
    mine = wheel.add("mine/python", "3.13", headers="false")
    result = wheel("--python", str(mine))
    assert result.returncode == 1 and "mine/python has no headers (Python.h)" in result.stderr


def test_a_command_is_handed_on_as_a_path(wheel):
    """pip's --python takes no command."""
    there = wheel.add("bin/python3.10", "3.10")
    result = wheel("--python", "python3.10")
    assert result.returncode == 0, result.stdout + result.stderr
    [built_by] = [path.read_text() for path in there.parents[1].rglob("built_by")]
    assert built_by == f"{there}\n"


@pytest.mark.parametrize(
    ("broken", "message"),
    [("build", "A wheel for Python 3.11 failed"), ("audit", "Checking what it needs failed"),
     ("trial", "0 passed, 1 failed, 0 skipped")],
)  # fmt: skip
def test_what_fails_is_said(wheel, broken, message):
    wheel.add("bin/python3.11", "3.11")
    result = wheel("--python", "3.11", BROKEN=broken)
    assert result.returncode == 1
    assert message in result.stdout + result.stderr


# --- a wheel's trial ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [[], ["one"], ["one", "two", "three"]])
def test_a_trial_takes_a_wheel_and_a_folder(wrong):
    result = subprocess.run([sys.executable, ROOT / "tools/run/try_wheel.py", *wrong],
                            capture_output=True, text=True, check=False)  # fmt: skip
    assert result.returncode == 1 and "WHEEL FOLDER" in result.stderr


def test_a_trial_ends_where_a_step_fails(tmp_path):
    """That of a wheel which is none."""
    no_wheel = tmp_path / "sagebwd-0-py3-none-any.whl"
    no_wheel.write_text("no archive")
    result = subprocess.run(
        [sys.executable, ROOT / "tools/run/try_wheel.py", no_wheel, tmp_path / "place"],
        capture_output=True, text=True, check=False, env={**os.environ, "PIP_NO_INDEX": "1"},
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith("ended with 1, not 0")
    assert "installed in" not in result.stdout


# --- what a wheel says of itself ------------------------------------------------------------------


def test_the_version_is_said_once(sagebwd):
    (version,) = re.findall(r"^project\(sagebwd VERSION (\d+\.\d+\.\d+) ", CMAKE, re.M)
    assert 'dynamic = ["version"]' in PYPROJECT
    assert not re.search(r"^version *=", PYPROJECT.split("[project]")[1].split("\n[")[0], re.M)
    regex = re.search(r"^regex = '(.*)'$", PYPROJECT, re.M)[1]
    assert re.search(regex, CMAKE)["value"] == version
    assert sagebwd("--version").out == f"sagebwd {version}\n"
    import sagebwd as package

    assert package.__version__ == version
    for folder in ("python", "tools", "runtime", "c", "cmake"):
        for path in (ROOT / folder).rglob("*.*"):
            # C's header has it for the preprocessor; a test of the command line compares it.
            if path.suffix in {".py", ".cpp", ".h", ".sh", ".cmake"} and path.name != "sagebwd.h":
                assert version not in path.read_text(), path


def test_pythons_are_said_alike():
    """The versions that are tried are those that are promised."""
    oldest = VERSIONS[0]
    assert f'requires-python = ">={oldest}"' in PYPROJECT
    assert f'target-version = "py{oldest.replace(".", "")}"' in PYPROJECT
    assert f"find_package(Python {oldest} " in CMAKE


# --- what a wheel has for C -----------------------------------------------------------------------


def test_a_wheel_has_the_library_and_the_header_for_c(tmp_path):
    """What pip installs of a build whose files are stand-ins: the build for C++ has tested them."""
    for tool in ("cmake", "ninja", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, and this test configures with it")
    known = dict(re.findall(r"^(\w+):\w+=(.+)$", (BUILD / "CMakeCache.txt").read_text(), re.M))
    if "pybind11_DIR" not in known:
        pytest.skip("the build has no package of Python")
    build, place = tmp_path / "build", tmp_path / "place"
    kept = ("SAGEBWD_LLVM_LIBDIR", "SAGEBWD_LLVM_INCLUDEDIR", "Python_EXECUTABLE", "pybind11_DIR")
    subprocess.run(["cmake", "-G", "Ninja", "-S", ROOT, "-B", build, "-DSKBUILD=2",
                    f"-DSKBUILD_SCRIPTS_DIR={tmp_path / 'scripts'}", "-DSAGEBWD_PYTHON=ON",
                    "-DSAGEBWD_TESTS=OFF", *(f"-D{name}={known[name]}" for name in kept)],
                   check=True, capture_output=True)  # fmt: skip
    rules = (build / "build.ninja").read_text()
    assert "SONAME = libsagebwd.so\n" in rules, "a name that has no link beside it"
    built = set(re.search(r"^build.targets = \[(.*)\]$", PYPROJECT, re.M)[1].split(", "))
    files = ["bin/sagebwd", "libsagebwd.so",
             *re.findall(r"^build (python/sagebwd/_core\.\S+\.so):", rules, re.M)]  # fmt: skip
    assert built == {'"_core"', '"sagebwd"', '"sagebwd_shared"'} and len(files) == 3
    for name in files:
        (build / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(sys.executable, build / name)
    subprocess.run(["cmake", "--install", build, "--component", "python", "--prefix", place],
                   check=True, capture_output=True)  # fmt: skip
    folder = place / "sagebwd"
    assert (folder / "sagebwd.h").read_text() == (ROOT / "c/sagebwd.h").read_text()
    assert [path.name for path in folder.glob("lib*")] == ["libsagebwd.so"]
    assert not (folder / "libsagebwd.so").is_symlink()
