"""Tests of the command line and of the package share these."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BINARY = Path(os.environ.get("SAGEBWD_BIN", ROOT / "build/bin/sagebwd"))


@pytest.fixture(scope="session")
def stocked():
    """Fills a folder with the kernels of an operation, for tests that are about something else than
    compiling: stocked(folder, *words of `sagebwd build`). The stock is a cache directory in build/,
    one for each build of NVRTC, so that of all tests one compiles them."""

    def run(*words, **environment):
        done = subprocess.run([BINARY, *map(str, words)], capture_output=True, text=True,
                              env={**os.environ, **environment})  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    nvrtc = run("doctor", "--json")["nvrtc"]
    if not nvrtc["found"]:
        pytest.skip("no NVRTC: " + nvrtc["error"].splitlines()[0])
    name = hashlib.sha256(nvrtc["identity"].encode()).hexdigest()[:16]
    stock = ROOT / "build/stock" / name
    stock.parent.mkdir(parents=True, exist_ok=True)
    plain = {"SAGEBWD_CACHE_DIR": str(stock), "SAGEBWD_CACHE_PACKS": "", "SAGEBWD_OFFLINE": "",
             "SAGEBWD_TUNE": "off"}  # fmt: skip

    def fill(folder, *words):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        run("build", *words, "--json", **plain)
        kernels = run("cache", "explain", *words, "--json", **plain)["kernels"]
        for kernel in kernels:
            shutil.copy(stock / f"{kernel['digest']}.kernel", folder)
        return kernels

    return fill


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory):
    """The folder of a libcuda.so.1 whose kernels take what FAKE_KERNELS says."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run(
        ["cc", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o",
         folder / "libcuda.so.1", ROOT / "tests/runtime/fake_libcuda.c"],
        check=True,
    )  # fmt: skip
    return folder
