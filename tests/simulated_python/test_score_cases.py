"""The checks of tests/gpu_python/test_scores_on_gpu.py, some of them on a simulated GPU."""

import sys
from itertools import cycle
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")


import simulator_needed  # noqa: E402, F401

from test_linear_branch import kernels_for_lists  # noqa: E402, F401
from test_mixed import on_the_simulator  # noqa: E402, F401

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import score_cases as cases  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_simulator")


#: Each needs kernels of its own, which a GPU compiles for all functions.
SOME = pytest.mark.parametrize("name", ["softcap", "bias by distance"])


@pytest.mark.parametrize("name, beside", [*zip(cases.CASES, cycle(cases.BESIDE))])
def test_beside_masks(name, beside):
    cases.check(name, "cpu", queries=150, keys=190, beside=beside)


@pytest.mark.parametrize("name, channels, dtype, precision", [
    ("softcap", 128, torch.float16, "dv16"), ("alibi", 72, torch.bfloat16, "qk16")])  # fmt: skip
def test_sizes_and_precisions(name, channels, dtype, precision):
    cases.check(name, "cpu", queries=65, keys=129, channels=channels, dtype=dtype,
                precision=precision)  # fmt: skip


def test_packed_sequences():
    cases.check_packed("cpu")


@SOME
def test_compiled(name):
    cases.check_compiled(name, "cpu", "aot_eager")


@SOME
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(name, reentrant):
    cases.check_checkpointed(name, "cpu", reentrant)


@SOME
def test_repeated(name):
    cases.check_repeated(name, "cpu")
