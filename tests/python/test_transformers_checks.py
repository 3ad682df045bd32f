"""Models of transformers give what they have to, by the emulation in the kernels' place."""

import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs transformers")

import transformers_checks  # noqa: E402
from stand_in import kernels_on_the_cpu, mask_kernels_on_the_cpu  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("mask_kernels_on_the_cpu", "tiny_tensors")


@transformers_checks.each
def test_models(check):
    check("cpu", 1)
