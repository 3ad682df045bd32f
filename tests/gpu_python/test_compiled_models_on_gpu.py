"""Models of transformers on a GPU in compiled code, with masks and without: eager's loss and
gradients. PyTorch's kernel for what the device checks takes a short text only."""

import pytest
from inputs import torch  # noqa: F401: skips where it is missing


@pytest.mark.parametrize("kind", ["plain", "whole", "padded", "packed", "packed beside"])
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_models_of_transformers(kind, fullgraph, backend):
    pytest.importorskip("transformers", reason="needs transformers")
    import compiled_models as models

    models.assert_as_eager(kind, "cuda", backend, fullgraph)
