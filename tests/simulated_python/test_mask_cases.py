"""The masks of tests/gpu_python/test_masks_on_gpu.py on a simulated GPU, at small sizes."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402

import simulator_needed  # noqa: E402, F401

from mask_cases import BATCH, CASES, HEADS, assert_near, exact, inputs, results  # noqa: E402
from test_linear_branch import kernels_for_lists  # noqa: E402, F401
from test_mixed import on_the_simulator  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("on_the_simulator")


def expression_of(mask):
    return mask if isinstance(mask, masks.Expression) else masks.trace_mask(mask)


@pytest.mark.parametrize("tokens", [149, 575])
@pytest.mark.parametrize("name", CASES)
def test_expressions_say_the_masks(name, tokens):
    mask, seen = CASES[name](tokens, "cpu")
    found = expression_of(mask).dense(BATCH, HEADS, *seen.shape[2:])
    assert torch.equal(found, seen.expand_as(found))


#: A GPU has the kernels of all.
@pytest.mark.parametrize("name", list(CASES)[::3])
def test_masks_against_fp64(name):
    mask, seen = CASES[name](149, "cpu")
    leaves, dout = inputs(seen, "cpu", channels=64)
    lse, right = exact(leaves, dout, seen)
    assert_near(results(lambda *x: sagebwd.attention(*x, mask=mask), leaves, dout), right)
    _, found = sagebwd.attention_forward(*leaves, mask=mask)
    sees = lse > -torch.inf
    assert torch.equal(found > -torch.inf, sees)
    assert (found[sees] - lse[sees]).abs().max() < 0.05
