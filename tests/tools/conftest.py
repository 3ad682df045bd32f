"""The command line under test: build/bin/sagebwd, or SAGEBWD_BIN."""

import json
import os
import shutil
import subprocess

import pytest
from cache_helpers import OPERATION
from places import BINARY


class Result:
    def __init__(self, process):
        self.code = process.returncode
        self.out = process.stdout
        self.err = process.stderr

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture(scope="session")
def sagebwd(cache_dir):
    """Runs the command line with a cache directory of this session."""
    assert BINARY.exists(), f"{BINARY} is not built: ./run build"

    def run(*arguments, timeout=1200, cwd=None, **environment):
        return Result(
            subprocess.run(
                [BINARY, *map(str, arguments)],
                capture_output=True,
                text=True,
                timeout=timeout,
                cwd=cwd,
                env={**os.environ, "SAGEBWD_CACHE_DIR": str(cache_dir), **environment},
                check=False,
            )
        )

    return run


@pytest.fixture(scope="session")
def doctor(sagebwd):
    return sagebwd("doctor", "--json").json


@pytest.fixture
def needs_nvrtc(doctor):
    if not doctor["can_compile"]:
        pytest.skip("no NVRTC: " + doctor["nvrtc"]["error"].splitlines()[0])


@pytest.fixture(scope="session")
def built(stocked, tmp_path_factory):
    """A cache with every kernel of one operation, OPERATION; not to be changed."""
    directory = tmp_path_factory.mktemp("built") / "cache"
    stocked(directory, *OPERATION)
    return directory


@pytest.fixture
def cache(built, tmp_path, sagebwd):
    """Runs `sagebwd cache` on a copy of it, with `.directory`."""
    directory = tmp_path / "cache"
    shutil.copytree(built, directory)

    def run(*arguments, **environment):
        return sagebwd("cache", *arguments, **{"SAGEBWD_CACHE_DIR": str(directory), **environment})

    run.directory = directory
    run.kernels = lambda: sorted(directory.glob("*.kernel"))
    return run
