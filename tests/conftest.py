"""What tests of the command line and of the package share."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


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
