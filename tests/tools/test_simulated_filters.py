"""Each name in the filters of simulated tests is a test's. GoogleTest runs what a filter finds, and
says nothing of names that it does not find."""

import fnmatch
import json
import re
import shutil
import subprocess

import pytest
from places import BINARY

BUILD = BINARY.parents[1]


def names_of(program):
    """All tests of a program, as filters name them."""
    listed = subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True,
                            check=True).stdout  # fmt: skip
    suite, found = "", []
    for line in listed.splitlines():
        name = line.split("#")[0].strip()
        if line.startswith("  "):
            found.append(suite + name)
        else:
            suite = name
    return found


def filters():
    """(test, program, name in its filter)."""
    asked = ["ctest", "--test-dir", str(BUILD), "-R", r"^Simulated\.", "--show-only=json-v1"]
    tests = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    for test in tests["tests"]:
        words = test.get("command", [])
        for program, word in zip(words, words[1:]):
            if found := re.fullmatch("--gtest_filter=(.*)", word):
                yield from ((test["name"], program, part) for part in found[1].split(":"))


def test_each_name_is_a_tests():
    if shutil.which("ctest") is None or not (BUILD / "CTestTestfile.cmake").exists():
        pytest.skip("the build has no tests")
    found = list(filters())
    if not found:
        pytest.skip("this build simulates no GPU")
    known = {program: names_of(program) for program in {program for _, program, _ in found}}
    assert all(len(names) > 100 for names in known.values())
    lost = [f"{test}: {part}" for test, program, part in found
            if not fnmatch.filter(known[program], part)]  # fmt: skip
    assert not lost
