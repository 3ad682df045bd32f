"""What SLA2's kernels, which are told addresses, would not see: saved tensors that hooks have
changed, and tangents."""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.autograd import forward_ad  # noqa: E402

import sagebwd  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_linear_branch import inputs, listed, on_the_simulator  # noqa: E402, F401


def called(function, leaves, mask):
    """The output of SLA2's functions, or of parts of them."""
    if function == "the branch alone":
        return sagebwd.block_linear_attention(*leaves, block_mask=mask)
    alpha = 0.4 if function == "both branches" else "estimated"
    apart = dict(return_branches=True) if function == "apart" else {}
    found = sagebwd.sparse_linear_attention(*leaves, block_mask=mask, precision="exact",
                                            alpha=alpha, **apart)  # fmt: skip
    return found[0] if apart else found


#: Changes a saved tensor so that at its address there is something else.
CHANGES = {
    "another type": lambda t: t.half() if t.dtype == torch.bfloat16 else t,
    "a type of fewer bytes": lambda t: t.bfloat16() if t.dtype == torch.float32 else t,
    "another shape": lambda t: t[..., :1].clone() if t.is_floating_point() else t,
    "a mask of another shape": lambda t: t[..., :1].clone() if t.dtype == torch.bool else t,
}  # fmt: skip
FUNCTIONS = "both branches", "an estimate", "apart", "the branch alone"
#: The branch alone keeps nothing in FP32, and in the mixture PyTorch finds another shape first.
OTHERS = ("the branch alone", "a type of fewer bytes"), ("apart", "another shape")


@pytest.mark.parametrize(("function", "change"), [
    pair for pair in itertools.product(FUNCTIONS, CHANGES) if pair not in OTHERS])  # fmt: skip
def test_hooks_for_saved_tensors_may_not_give_other_types_and_shapes(function, change):
    leaves, dout = inputs(torch.bfloat16, 64)
    mask = listed(1, 1, 3, 6)
    with torch.autograd.graph.saved_tensors_hooks(CHANGES[change], lambda t: t):
        out = called(function, leaves, mask)
    with pytest.raises(sagebwd.SpecError, match="a hook for saved tensors gave"):
        out.backward(dout)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_tangents_of_gradients_are_refused(function):
    """Kernels would lose them."""
    leaves, _ = inputs(torch.bfloat16, 64)
    with forward_ad.dual_level():
        out = called(function, leaves, listed(1, 1, 3, 6)).float()
        factor = forward_ad.make_dual(torch.ones(()), torch.ones(()))
        with pytest.raises(sagebwd.SpecError, match="carries a tangent"):
            (out * factor).sum().backward()
