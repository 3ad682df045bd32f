"""The kernel for the Hub on a GPU, loaded by the Hub's own library in a process of its own."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build/hub-library/libsagebwd.so"


def test_all_of_its_cases(tmp_path):
    if importlib.util.find_spec("kernels") is None:
        pytest.skip("needs the package kernels of the Hub")
    if not LIBRARY.exists():
        pytest.skip("needs the target sagebwd_hub")
    for words in (["hub/write.py", LIBRARY, tmp_path], ["tests/python/hub_kernel.py", tmp_path]):
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True,
                              check=False)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all are right"
