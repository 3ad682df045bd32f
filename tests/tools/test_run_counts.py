"""Tests what .ci/run and ./run test count, and what they call failed."""

import subprocess
import sys

import pytest
from places import ROOT
from test_run import checkout  # noqa: F401

INSIDE = "echo '  5 passed, 0 failed, 1 skipped';"  # what a command in a fresh root says


@pytest.mark.parametrize(
    ("debian", "ubuntu", "demo", "test", "last", "code"),
    [
        (f"{INSIDE} echo 2 passed, 0 failed, 0 skipped",
         "echo 1 passed, 0 failed, 0 skipped", "", "",
         "8 passed, 0 failed, 1 skipped", 0),
        # No fresh roots: the same here.
        ("echo no mmdebstrap; exit 3", "exit 3", "true", "echo 5 passed, 0 failed, 1 skipped",
         "6 passed, 0 failed, 2 skipped", 0),
        ("exit 3", "exit 3", "false", "echo 5 passed, 0 failed, 1 skipped",
         "5 passed, 1 failed, 2 skipped", 1),
        ("exit 3", "exit 3", "true", "echo 4 passed, 1 failed, 1 skipped; exit 1",
         "5 passed, 1 failed, 2 skipped", 1),
        ("exit 3", "exit 3", "true", "echo 4 passed, 0 failed, 0 skipped; exit 1",
         "5 passed, 1 failed, 1 skipped", 1),
        ("exit 3", "exit 3", "true", "exit 3", "1 passed, 1 failed, 1 skipped", 1),
        ("exit 3", "exit 3", "true", "echo done", "1 passed, 1 failed, 1 skipped", 1),
        (f"{INSIDE} echo 1 passed, 1 failed, 0 skipped; exit 1",
         "echo 1 passed, 0 failed, 0 skipped", "", "", "7 passed, 1 failed, 1 skipped", 1),
        ("echo broke off; exit 1", "echo broke off; exit 1", "", "",
         "0 passed, 2 failed, 0 skipped", 1),
    ],
)  # fmt: skip
def test_what_ci_counts(checkout, debian, ubuntu, demo, test, last, code):  # noqa: F811
    (checkout.folder / "run").write_text(
        f'#!/bin/bash\ncase "$1 $2" in "fresh debian"*) {debian} ;; "fresh ubuntu"*) {ubuntu} ;;\n'
        f"demo*) {demo or 'exit 9'} ;; test*) {test or 'exit 9'} ;; esac\n"
    )
    result = subprocess.run(
        [".ci/run"], cwd=checkout.folder, capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines()[-1] == last
    assert result.returncode == code


def test_ci_leaves_nothing_out_however_long_it_takes(checkout):  # noqa: F811
    (checkout.folder / "run").write_text(
        '#!/bin/bash\necho "$*" >>asked\necho 1 passed, 0 failed, 0 skipped\n'
    )
    script = (checkout.folder / ".ci/run").read_text()
    # As if it had begun five hours ago.
    begun = script.replace("\npassed=0", "\nSECONDS=18000 passed=0")
    assert begun != script
    (checkout.folder / ".ci/run").write_text(begun)
    result = subprocess.run(
        [".ci/run"], cwd=checkout.folder, capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines()[-1] == "2 passed, 0 failed, 0 skipped"
    assert sorted((checkout.folder / "asked").read_text().splitlines()) == [
        "fresh debian:bookworm ./run demo ./run test --with-torch",
        "fresh ubuntu:jammy ./run demo"]  # fmt: skip


CTEST = """<testsuite name="all" tests="5">
<testcase name="Cache.One" status="run"/>
<testcase name="Cache.Two" status="fail"><failure/></testcase>
<testcase name="Gpu.One" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
<system-out>[ RUN ]
tests/gpu/device.h:15: Skipped
needs a GPU: no CUDA driver
</system-out></testcase>
<testcase name="Python.good" status="run"/>
<testcase name="Python.bad" status="fail"><failure/></testcase>
</testsuite>"""
PYTEST = {
    "good": '<testsuites><testsuite><testcase classname="a" name="x"/><testcase classname="a" '
    'name="y"><skipped message="not run: docs/a.md:3: needs a GPU"/></testcase><testcase '
    'classname="a" name="z"><skipped/></testcase><testcase name="w"><skipped message="collection '
    "skipped\">('a.py', 9, \"Skipped: needs b's c\")</skipped></testcase></testsuite></testsuites>",
    "bad": '<testsuites><testsuite><testcase classname="b" name="x"><failure/></testcase><testcase '
    'classname="b" name="y"/></testsuite></testsuites>',
}


@pytest.mark.parametrize(
    ("ctest", "reports", "told", "last"),
    [
        (CTEST, PYTEST, {"failed Cache.Two", "failed b::x", "skipped     2: needs a GPU",
                         "skipped     1: no reason given", "skipped     1: needs b's c"},
         "4 passed, 2 failed, 4 skipped"),
        # One that broke off after tests that passed, and one without a report.
        (CTEST, {"good": PYTEST["good"], "bad": PYTEST["good"]},
         {"failed Python.bad (its run broke off)"}, "4 passed, 2 failed, 7 skipped"),
        (CTEST, {"good": PYTEST["good"]}, {"failed Python.bad (its run broke off)"},
         "3 passed, 2 failed, 4 skipped"),
        ('<testsuite><testcase name="Cache.One" status="run"/></testsuite>', {},
         {"failed the tests in Python: ctest knows none (is pytest there?)"},
         "2 passed, 1 failed, 0 skipped"),
        ("<testsuite>", {}, {"failed ctest.xml (its run broke off)"},
         "1 passed, 1 failed, 0 skipped"),
    ],
)  # fmt: skip
def test_what_a_test_run_counts(tmp_path, ctest, reports, told, last):
    (tmp_path / "ctest.xml").write_text(ctest)
    (tmp_path / "reports").mkdir()
    for name, text in reports.items():
        (tmp_path / f"reports/{name}.xml").write_text(text)
    done = subprocess.run(
        [sys.executable, ROOT / "tools/run/counts.py", tmp_path / "ctest.xml",
         tmp_path / "reports", "1", "0", "0"], capture_output=True, text=True,
        check=False)  # fmt: skip
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[-1] == last
    assert told <= set(lines)
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("reason", "counted"),
    [
        ("needs a CUDA GPU", "0 passed, 0 failed, 1 skipped"),
        ("needs PyTorch", "0 passed, 1 failed, 0 skipped"),
    ],
)
def test_with_pytorch_nothing_is_skipped_without_being_expected(tmp_path, reason, counted):
    (tmp_path / "ctest.xml").write_text(
        '<testsuite><testcase name="Python.torch_0" status="run"/></testsuite>'
    )
    (tmp_path / "torch_0.xml").write_text(
        '<testsuite><testcase classname="a" name="x">'
        f'<skipped message="{reason}"/></testcase></testsuite>'
    )
    done = subprocess.run([sys.executable, ROOT / "tools/run/counts.py", tmp_path / "ctest.xml",
                           tmp_path, "0", "0", "0"], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.stdout.splitlines()[-1] == counted, done.stdout
    assert (
        f"failed a::x (with PyTorch it was skipped, unexpectedly: {reason})" in done.stdout
    ) == ("1 failed" in counted)


def test_a_run_with_pytorch_that_reports_nothing_has_failed(tmp_path):
    (tmp_path / "ctest.xml").write_text(
        '<testsuite><testcase name="Python.torch_on_gpu" status="notrun"/></testsuite>'
    )
    done = subprocess.run([sys.executable, ROOT / "tools/run/counts.py", tmp_path / "ctest.xml",
                           tmp_path, "0", "0", "0"], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped", done.stdout
