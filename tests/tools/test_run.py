"""./run and .ci/run: wrong use, what they install and when, and that pages say the same."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEERING = re.compile("SAGEBWD_|JOBS$|CUDA_HOME$|CUDA_PATH$|GTest_ROOT$")


def run(folder, *arguments, wrap=(), **environment):
    """./run in that folder, without the variables that steer it."""
    kept = {k: v for k, v in os.environ.items() if not STEERING.match(k)}
    return subprocess.run(
        [*wrap, "./run", *arguments],
        cwd=folder,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


# A command that does nothing but note that it was called, and fails where a variable says so.
STUB = """#!/bin/bash
name=${0##*/}
echo "$name $*" >>CALLS
[[ -z ${FAILING:-} || ${FAILING:-} != *$name* ]]
"""

# A Python for `venv`: variables say whether `pip` can and which NVRTC is among its packages; the
# rest, except slow imports, is this test's Python. pip brings NVRTC's library, and nothing else.
PYTHON = """#!/bin/bash
case "$*" in
  "-m pip "*)
    echo "pip $*" >>CALLS
    [[ -z ${OFFLINE:-} ]] || exit 1
    words=$*
    folder=${words#*--target }
    folder=${folder%% *}/nvidia/cu13/lib
    [[ $words != *nvidia-cuda-nvrtc* ]] || { mkdir -p "$folder" && touch "$folder/libnvrtc.so.13"; }
    ;;
  "-m venv "*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
  -) echo "${PYTHONS_NVRTC:-}"; [[ -n ${PYTHONS_NVRTC:-} ]] ;;
  "-m uv "*) exit 1 ;;
  *version_info*) [[ -z ${OLD_PYTHON:-} ]] ;;
  *"import pytest"*) exit 0 ;;
  *"import torch"*) exit 1 ;;
  *purelib*) echo "$PWD/build/venv" ;;
  *) exec SELF "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """The scripts alone, on a machine that has everything but NVRTC, where nothing is really built.

    `checkout(COMMAND...)` runs them, `checkout.calls()` are the commands that were called since.
    """
    folder = tmp_path / "sagebwd"
    shutil.copytree(ROOT / "tools/run", folder / "tools/run")
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    for name in ("run", "pyproject.toml", "tests/python/requirements.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    there = ["build/build.ninja", "lib/libLLVMSupport.a", "lib/libLLVMDemangle.a",
             "include/llvm/Support/JSON.h", "include/gtest/gtest.h"]  # fmt: skip
    for name in there:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    nvrtc = folder / "tools/run/nvrtc.sh"
    text = nvrtc.read_text()
    nvrtc.write_text(re.sub("/usr/(local/cuda|lib/)", r"/nowhere/\1", text))
    assert nvrtc.read_text().count("/nowhere/") > 1
    calls = folder / "calls"
    commands = dict.fromkeys(["c++", "cmake", "ninja", "apt-get", "sudo"], STUB)
    commands["python3"] = PYTHON.replace("SELF", sys.executable)
    for name, text in commands.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("CALLS", str(calls)))
        path.chmod(0o755)

    def in_checkout(*arguments, **environment):
        calls.write_text("")
        return run(
            folder,
            *arguments,
            PATH=f"{folder}/bin:{os.environ['PATH']}",
            SAGEBWD_LLVM_LIBDIR=str(folder / "lib"),
            SAGEBWD_LLVM_INCLUDEDIR=str(folder / "include"),
            GTest_ROOT=str(folder),
            **environment,
        )

    in_checkout.folder = folder
    in_checkout.calls = lambda: {line.split()[0] for line in calls.read_text().splitlines()}
    return in_checkout


@pytest.mark.parametrize("jobs", ["0", "-1", "two", "1.5", "07", "10000"])
def test_wrong_jobs(checkout, jobs):
    result = checkout("build", JOBS=jobs)
    assert result.returncode == 2
    assert f"JOBS is '{jobs}'; give a whole number from 1 to 9999" in result.stderr
    assert not checkout.calls()


def test_jobs_reach_the_build(checkout):
    assert checkout("build", JOBS="3").returncode == 0
    assert "cmake --build build -j 3" in (checkout.folder / "calls").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tset"], "unknown command 'tset'"),
        (["build", "extra"], "build takes library, not 'extra'"),
        (["demo", "extra"], "demo takes no more words: 'extra'"),
        (["test", "quikc"], "test takes quick and --with-torch, not 'quikc'"),
        (["nvrtc"], "nvrtc takes a version of NVRTC, such as 13.0.88"),
        (
            ["nvrtc", "new"],
            "nvrtc takes a version of NVRTC, such as 13.0.88, and --record, not 'new'",
        ),
        (["hub", "extra"], "hub takes no more words: 'extra'"),
        (["docs", "--sevre"], "docs takes --serve, not '--sevre'"),
        (["fresh", "arch:linux"], "there is no fresh 'arch:linux'; there is debian:bookworm"),
    ],
)
def test_wrong_use_of_run(checkout, arguments, message):
    result = checkout(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    (error,) = result.stderr.splitlines()  # and no page of usage to look for it in
    assert error.startswith(f"./run: {message}")
    assert error.endswith("; './run help' shows what there is")
    assert not checkout.calls()


@pytest.mark.parametrize("arguments", [[], ["help"], ["--help"], ["wheel", "--help"],
                                       ["docs", "--serve", "-h"]])  # fmt: skip
def test_help(checkout, arguments):
    result = checkout(*arguments)
    assert result.returncode == 0
    for command in ("demo", "test", "build", "docs", "fresh", "nvrtc", "wheel", "hub", "image"):
        assert f"\n  {command} " in result.stdout
    assert "'fresh SYSTEM COMMAND...'" in result.stdout
    assert not checkout.calls()


def test_nothing_is_installed_twice(checkout):
    first = checkout("build")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "pip" in checkout.calls()
    assert "apt-get" not in checkout.calls()
    again = checkout("build", OFFLINE="1", FAILING="apt-get")
    assert again.returncode == 0, again.stdout + again.stderr
    assert checkout.calls() == {"cmake"}


def test_an_environment_of_the_trees_owner_stays(checkout):
    own = checkout.folder / ".venv/bin/python"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    link = checkout.folder / "build/venv"
    link.symlink_to("../.venv")  # as ./run once made it
    assert checkout("build").returncode == 0
    assert [path.name for path in own.parent.parent.rglob("*")] == ["bin", "python"]
    assert own.read_text() == "mine"
    assert not link.is_symlink() and (link / "bin/python").exists()


def test_a_build_needs_no_nvrtc_but_a_demo_does(checkout):
    built = checkout("build", OFFLINE="1", FAILING="apt-get")
    assert built.returncode == 0, built.stdout + built.stderr
    assert "pip cannot install NVRTC" in built.stdout
    pytorchs = checkout("build", OFFLINE="1", FAILING="apt-get", PYTHONS_NVRTC="/libnvrtc.so.12")
    assert pytorchs.returncode == 0, pytorchs.stdout + pytorchs.stderr
    assert "pip cannot" not in pytorchs.stdout
    demo = checkout("demo", OFFLINE="1", FAILING="apt-get")
    assert demo.returncode == 1
    assert "set SAGEBWD_NVRTC to its libnvrtc.so" in demo.stderr


def test_the_nvrtc_that_is_installed_is_the_one_that_the_extras_name(checkout):
    pyproject = (ROOT / "pyproject.toml").read_text()
    extras = dict(re.findall(r'^(cu1[23]) = \["(nvidia-cuda-nvrtc\S*)"\]$', pyproject, re.M))
    assert extras.keys() == {"cu12", "cu13"} and all("==" in pin for pin in extras.values())
    smi = checkout.folder / "bin/nvidia-smi"
    for cuda, extra in (("13.0", "cu13"), ("12.8", "cu12")):
        smi.write_text(f"#!/bin/sh\necho 'CUDA Version: {cuda}'\n")
        smi.chmod(0o755)
        assert checkout("build").returncode == 0
        calls = (checkout.folder / "calls").read_text()
        assert re.findall(r"(nvidia-cuda-nvrtc\S*)", calls) == [extras[extra]]
    # Programs in build/bin look for it here.
    linked = checkout.folder / "build/venv/lib/python3.9/site-packages"
    linked.mkdir(parents=True)
    smi.unlink()
    assert checkout("build").returncode == 0
    assert (linked / "nvidia/cu13/lib/libnvrtc.so.13").exists()


# ctest, one of whose tests fails and says more than a pipe holds.
CTEST_THAT_FAILS = """#!/bin/bash
echo "ctest $*" >>CALLS
failed='<testcase name="Python.a" status="fail"><failure/></testcase>'
echo "<testsuite>$failed</testsuite>" >build/ctest.xml
echo "      Start  1: Python.a"
echo "1/2 Test  #1: Python.a .......***Failed    0.02 sec"
for ((i = 0; i < 20000; ++i)); do echo "line $i of a traceback"; done
echo "      Start  2: Cache.Two"
echo "2/2 Test  #2: Cache.Two ......   Passed    0.02 sec"
echo "The following tests FAILED:"
echo "	  1 - Python.a (Failed)"
exit 8
"""


def test_a_long_failure_has_a_summary(checkout):
    """The command once died of the pipe that nobody read to its end."""
    programs = {"bin/ctest": CTEST_THAT_FAILS, "build/bin/sagebwd": "#!/bin/sh\n",
                "build/bin/gpu_tests": "#!/bin/sh\n"}  # fmt: skip
    for name, text in programs.items():
        path = checkout.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("CALLS", str(checkout.folder / "calls")))
        path.chmod(0o755)
    ended = checkout("test")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "  failed after 0 s: Python.a\n" in ended.stdout
    assert "line 150 of a traceback" in ended.stdout and "line 250 " not in ended.stdout
    assert "The following tests FAILED:\n\t  1 - Python.a (Failed)" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "0 passed, 1 failed, 1 skipped"
    assert "-LE torch|^gpu$|gpu_python " in (checkout.folder / "calls").read_text()


def test_a_missing_package_is_installed_by_its_name(checkout):
    (checkout.folder / "include/gtest/gtest.h").unlink()
    built = checkout("build")
    assert built.returncode == 0
    assert "Installing system packages (1)" in built.stdout
    calls = (checkout.folder / "calls").read_text()
    assert re.search("^apt-get install .*--no-install-recommends libgtest-dev$", calls, re.M)
    failed = checkout("build", FAILING="apt-get")
    assert failed.returncode == 1
    assert "Reading the package lists failed" in failed.stderr


def test_what_is_built_here_is_built_again_without_network(tmp_path):
    """The real thing, in the tree that ./run built."""
    configured = ROOT / "build/.configured"
    if not configured.exists():
        pytest.skip("this build is not ./run's")
    if os.environ.get("SAGEBWD_TEST_QUICK"):
        pytest.skip("./run test quick has not built everything")
    steering = {k: v for k, v in os.environ.items() if STEERING.match(k)}
    python = Path(re.search("-DPython_EXECUTABLE=(.*?) -D", configured.read_text())[1])
    if not python.exists():  # the user's own, since removed: ./run has nothing to build with
        pytest.skip(f"SAGEBWD_PYTHON_EXE of this build was removed: {python}")
    if python != ROOT / "build/venv/bin/python":  # its variable need not be in this environment
        steering["SAGEBWD_PYTHON_EXE"] = str(python)
    apt = tmp_path / "apt-get"
    apt.write_text(f"#!/bin/sh\ntouch {tmp_path}/apt-was-called\nexit 1\n")
    apt.chmod(0o755)
    alone = ["unshare", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        alone = []
    result = run(
        ROOT,
        "build",
        wrap=alone,
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        PIP_LOG=str(tmp_path / "pip-was-called"),
        **steering,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["apt-get"]


def test_no_fresh_root_is_no_failure_and_no_success(checkout):
    (checkout.folder / "bin/setpriv").symlink_to(shutil.which("false"))
    result = checkout("fresh")
    assert result.returncode == 3
    assert result.stderr.startswith("No fresh debian:bookworm here: ")


@pytest.mark.skipif(not (ROOT / "build/CTestTestfile.cmake").exists(), reason="nothing is built")
def test_a_quick_run_leaves_out_what_takes_most_and_nothing_else():
    def names(*choice):
        command = ["ctest", "--test-dir", ROOT / "build", "--show-only=json-v1", *choice]
        return {test["name"] for test in json.loads(subprocess.check_output(command))["tests"]}

    everything, quick = names(), names("-LE", "heavy")
    left_out = everything - quick
    kinds = {re.split("[./]", name.removeprefix("On/"))[0] for name in left_out}
    assert kinds == {"CompileTest", "Simulated", "Sanitized", "Fuzz"}
    assert not any("CompileTest" in name for name in quick)
    assert {"Python.tools_0", "Simulated.Arguments"} <= quick


# --- pages ----------------------------------------------------------------------------------------


def block(page, heading):
    """The shell commands of a section."""
    section = (ROOT / page).read_text().split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.M | re.S)
    return "\n".join(text for language, text in blocks if language == "sh")


def test_pages_name_the_packages_that_run_installs():
    script = f"source {ROOT}/tools/run/packages.sh; echo $packages_to_build; echo $packages_to_test"
    to_build, to_test = subprocess.check_output(["bash", "-c", script], text=True).splitlines()
    for page, heading, packages in (
        ("README.md", "## Install", to_build), ("docs/install.md", "## From source", to_build),
        ("CONTRIBUTING.md", "## Build and test", to_test)):  # fmt: skip
        named = " ".join(re.findall(r"apt-get install ([^#\n]*)", block(page, heading)))
        assert sorted(named.split()) == sorted(packages.split()), page


def test_a_page_names_presets_and_folders_that_there_are():
    commands = block("CONTRIBUTING.md", "## Build and test")
    presets = json.loads((ROOT / "CMakePresets.json").read_text())["testPresets"]
    named = set(re.findall(r"--preset (\S+)", commands))
    assert named and named <= {preset["name"] for preset in presets}
    assert set(re.findall(r"--test-dir (\S+)", commands)) == {"build"}, "where ./run build builds"


def test_tables_of_pages_are_those_of_the_records(tmp_path):
    def check():
        return subprocess.run([sys.executable, tmp_path / "bench/tables.py", "--check"],
                              capture_output=True, text=True, check=False)  # fmt: skip

    shutil.copytree(ROOT / "bench", tmp_path / "bench")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    assert check().returncode == 0
    page = tmp_path / "docs/benchmarks.md"
    right = page.read_text()
    page.write_text(right.replace("<!-- end -->", "| one more | row |\n<!-- end -->", 1))
    assert check().returncode == 1 and "python bench/tables.py" in check().stdout
    page.write_text(right.replace("<!-- speed.json -->", ""))
    assert "benchmarks.md has 0 tables between '<!-- speed.json -->'" in check().stderr


def test_sources_include_what_the_packages_bring():
    """gmock/gmock.h was on the machine of whoever included it, and nowhere else."""
    brought = {"gtest", "llvm", "pybind11"}
    where_there_is_jaxlib = {("python", "xla")}  # cmake/JaxHeaders.cmake
    of_the_system = {"sys", "linux"}
    foreign = {
        (folder, top)
        for folder in ("cache", "examples", "generator", "python", "runtime", "tests", "tools")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".h", ".cpp", ".c"}
        for top in re.findall(r"^\s*#\s*include\s*<(\w+)/", path.read_text(), re.M)
    }
    assert {top for _, top in foreign} >= {"gtest", "pybind11"}
    others = {(f, top) for f, top in foreign if top not in brought | of_the_system}
    assert others == where_there_is_jaxlib
