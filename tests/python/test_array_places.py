"""sagebwd.arrays without a GPU: what is said of arrays that are not on one."""

import numpy as np
import pytest

from sagebwd import SpecError, arrays

X = np.zeros((1, 1, 64, 64), np.float16)
ON_THE_CPU = "is an ndarray on the CPU; the kernels take arrays on a CUDA GPU, .*sagebwd.reference"


class OnGpu:
    """This array says that it is on a GPU."""

    __cuda_array_interface__ = None


def test_the_place_of_arrays_is_looked_at_first():
    """Not after a stream and an allocator have been asked for."""
    with pytest.raises(SpecError, match=f"q {ON_THE_CPU}"):
        arrays.attention_forward(X, X, X)
    with pytest.raises(SpecError, match=f"q {ON_THE_CPU}"):
        arrays.attention_backward(X, X, X, X, X, X)
    with pytest.raises(SpecError, match=f"v {ON_THE_CPU}"):
        arrays.attention_forward(OnGpu(), OnGpu(), X)
    with pytest.raises(SpecError, match="k is a list; pass an array on a CUDA GPU"):
        arrays.attention_forward(OnGpu(), [1], X)


@pytest.mark.parametrize("given", [{}, {"stream": 0}, {"empty": np.empty}])
def test_other_libraries_are_told_of_both_arguments_at_once(given):
    with pytest.raises(SpecError, match=r"q is an OnGpu: pass both stream=, .* and empty=, a "):
        arrays.attention_forward(OnGpu(), OnGpu(), OnGpu(), **given)


def test_torch_tensors_are_named():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    x = torch.zeros(1, 1, 64, 64, dtype=torch.float16)
    with pytest.raises(SpecError, match="q is a Tensor on the CPU"):
        arrays.attention_forward(x, x, x)
