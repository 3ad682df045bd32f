"""Hooks for saved tensors that change what kernels are then told the addresses of."""

import os

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402

if "simulator" not in os.environ.get("LD_LIBRARY_PATH", ""):
    pytest.skip("needs the simulator", allow_module_level=True)

from test_linear_branch import inputs, listed, on_the_simulator  # noqa: E402, F401

#: Changes a saved tensor so that at its address there is something else.
CHANGES = {
    "another type": lambda t: t.half() if t.dtype == torch.bfloat16 else t,
    "a type of fewer bytes": lambda t: t.bfloat16() if t.dtype == torch.float32 else t,
    "another shape": lambda t: t[..., :1].clone() if t.is_floating_point() else t,
    "a mask of another shape": lambda t: t[..., :1].clone() if t.dtype == torch.bool else t,
}  # fmt: skip


WITHOUT = {
    ("the branch alone", "a type of fewer bytes"): "it keeps nothing in FP32",
    ("apart", "another shape"): "PyTorch finds that first, in the mixture",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("function", ["both branches", "an estimate", "apart", "the branch alone"])
def test_hooks_for_saved_tensors_may_not_give_other_types_and_shapes(change, function):
    leaves, dout = inputs(torch.bfloat16, 64)
    mask = listed(1, 1, 3, 6)
    alpha = 0.4 if function == "both branches" else "estimated"
    told = dict(block_mask=mask, precision="exact", alpha=alpha)
    with torch.autograd.graph.saved_tensors_hooks(CHANGES[change], lambda t: t):
        if function == "the branch alone":
            out = sagebwd.block_linear_attention(*leaves, block_mask=mask)
        elif function == "apart":
            out = sagebwd.sparse_linear_attention(*leaves, **told, return_branches=True)[0]
        else:
            out = sagebwd.sparse_linear_attention(*leaves, **told)
    if (function, change) in WITHOUT:
        pytest.skip(WITHOUT[function, change])
    with pytest.raises(sagebwd.SpecError, match="a hook for saved tensors gave"):
        out.backward(dout)
