"""Every door on a GPU in compiled code, with masks and without: eager's loss and gradients.

PyTorch's kernel for what the device checks takes a short text only, which a CPU does not show.
"""

import pytest
from inputs import torch  # noqa: F401: skips where it is missing

import compiled_doors as doors


@doors.each
@pytest.mark.parametrize("hidden", [False, True], ids=["all", "hidden"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_doors(door, hidden, backend):
    doors.need(door)
    doors.assert_as_eager(door, "cuda", hidden, backend)
