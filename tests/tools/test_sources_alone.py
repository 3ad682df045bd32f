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
PRECOMPILED = BUILD.parent / "cmake/precompiled.h"
TARGETS = ("sagebwd_generator", "sagebwd_cache", "sagebwd_runtime", "sagebwd_c", "sagebwd", "_core")


#: Headers of others that take longer to read than what includes them. A source that does not include
#: its kind's may see no more than the standard library.
STANDARD = "".join(re.findall(r"^#include <.+>\n", PRECOMPILED.read_text(), re.MULTILINE))
BINDINGS = "#include <pybind11/numpy.h>\n#include <pybind11/stl.h>\n"


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
        # The build has shown the warnings; to look for them again is a tenth of the time.
        words = [words[0], "-w", *(word for word in words[1:] if not word.startswith("-W"))]
        for source in re.findall(r'^#include "(.+)"$', unity.read_text(), re.MULTILINE):
            yield [*words, "-fsyntax-only", source], Path(source)


def with_precompiled(folder, command, source):
    """The command with headers of others alone in place of all that the build has precompiled:
    pybind11 for its module, LLVM as it is, and else the standard library. Compilers that do not look
    for a .gch read the header itself."""
    text = source.read_text()
    if '#include "python/module.h"' in text:
        name, headers = "bindings.h", BINDINGS
    elif "-include" not in command or '#include "llvm/' in text:
        return command
    else:
        name, headers = "standard.h", STANDARD
        at = command.index("-include")
        command = [*command[:at], *command[at + 2 :]]
    header = folder / name
    if not header.exists():
        header.write_text(headers)
        options = [word for word in command[:-2] if word != "-c"]
        problem = problem_of([*options, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
        assert not problem, problem
    return [*command, "-include", str(header)]


def problem_of(command):
    ran = subprocess.run(command, capture_output=True, text=True, cwd=BUILD, check=False)
    return "" if ran.returncode == 0 else ran.stderr[:2000]


@pytest.mark.skipif("SAGEBWD_TEST_QUICK" in os.environ, reason="takes a minute of two cores")
def test_each_source_compiles_alone(tmp_path):
    if not (BUILD / "compile_commands.json").exists():
        pytest.skip("the build has no compile_commands.json")
    found = list(compiles_alone())
    if not found:
        pytest.skip("this build compiles each source alone")
    assert len(found) > 50
    commands = [with_precompiled(tmp_path, *each) for each in found]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = list(pool.map(problem_of, commands))
    assert not [f"{source}: {why}" for (_, source), why in zip(found, problems) if why]
