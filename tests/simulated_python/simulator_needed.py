"""Importing this skips a file of tests where no simulator takes the place of the CUDA driver."""

import os
from pathlib import Path

import pytest

#: The folder of the library that does.
FOLDER = next((Path(path) for path in os.environ.get("LD_LIBRARY_PATH", "").split(":")
               if Path(path).name == "simulator"), None)  # fmt: skip
if FOLDER is None:
    pytest.skip("needs the simulator, which ctest -L simulated starts", allow_module_level=True)
