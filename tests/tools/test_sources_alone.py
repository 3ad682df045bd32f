"""Each source compiles by itself. ./run compiles several as one, where a source sees what another
includes and defines; `pip install` and wheels compile each alone."""

import json
import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from places import BINARY

BUILD = BINARY.parents[1]
TARGETS = ("sagebwd_generator", "sagebwd_cache", "sagebwd_runtime", "sagebwd_c", "sagebwd", "_core")


def compiles_alone():
    """(command, source) of each source that the build compiles as a part of another file."""
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        unity = Path(entry["file"])
        target = re.search(r"CMakeFiles/([^/]+)\.dir/Unity/", str(unity))
        if not target or target[1] not in TARGETS:
            continue
        words = shlex.split(entry["command"])
        del words[words.index("-o") : words.index("-o") + 2]
        words.remove(str(unity))
        for source in re.findall(r'^#include "(.+)"$', unity.read_text(), re.MULTILINE):
            yield [*words, "-fsyntax-only", source], Path(source)


def problem_of(command):
    ran = subprocess.run(command, capture_output=True, text=True, cwd=BUILD, check=False)
    return "" if ran.returncode == 0 else ran.stderr[:2000]


@pytest.mark.skipif("SAGEBWD_TEST_QUICK" in os.environ, reason="takes a minute of two cores")
def test_each_source_compiles_alone():
    if not (BUILD / "compile_commands.json").exists():
        pytest.skip("the build has no compile_commands.json")
    found = list(compiles_alone())
    if not found:
        pytest.skip("this build compiles each source alone")
    assert len(found) > 50
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = list(pool.map(problem_of, (command for command, _ in found)))
    assert not [f"{source}: {why}" for (_, source), why in zip(found, problems) if why]
