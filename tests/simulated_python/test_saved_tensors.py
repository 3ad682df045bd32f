"""SLA2's kernels, which are told addresses, would not see these: saved tensors that hooks have
changed, tangents, second derivatives, and replays of a captured backward."""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.autograd import forward_ad  # noqa: E402

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd.sla import parts  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_linear_branch import inputs, kernels_for_lists, listed  # noqa: E402, F401
from test_linear_branch import on_the_simulator as the_branch_on_the_simulator  # noqa: E402, F401
from test_mixed import on_the_simulator  # noqa: E402, F401


def called(function, leaves, mask):
    """The output of SLA2's functions, or of parts of them."""
    if function == "the branch alone":
        return sagebwd.block_linear_attention(*leaves, block_mask=mask)
    alpha = 0.4 if function == "both branches" else "estimated"
    apart = dict(return_branches=True, precision="exact") if function == "apart" else {}
    found = sagebwd.sparse_linear_attention(*leaves, block_mask=mask, alpha=alpha, **apart)
    return found[0] if apart else found


#: Changes a saved tensor so that at its address there is something else.
CHANGES = {
    "another type": lambda t: t.half() if t.dtype == torch.bfloat16 else t,
    "a type of fewer bytes": lambda t: t.bfloat16() if t.dtype == torch.float32 else t,
    "another shape": lambda t: t[..., :1].clone() if t.is_floating_point() else t,
    "a mask of another shape": lambda t: t[..., :1].clone() if t.dtype == torch.bool else t,
    "lists of another shape": lambda t: t[..., :1, :].clone() if t.dtype == torch.int32 else t,
}  # fmt: skip
FUNCTIONS = "both branches", "an estimate", "apart", "the branch alone"
#: The branch alone keeps nothing in FP32; in the mixture PyTorch finds another shape first; and
#: lists are kept as a mask, as bits, or for an estimate as both.
OTHERS = (("the branch alone", "a type of fewer bytes"), ("apart", "another shape"),
          ("both branches", "a mask of another shape"), ("apart", "lists of another shape"),
          ("the branch alone", "lists of another shape"))


@pytest.mark.parametrize(("function", "change"), [
    pair for pair in itertools.product(FUNCTIONS, CHANGES) if pair not in OTHERS])  # fmt: skip
def test_hooks_for_saved_tensors_may_not_give_other_types_and_shapes(function, change):
    leaves, dout = inputs(torch.bfloat16, 64, keys=130, batch=1)
    mask = listed(1, 1, 3, 3)
    with torch.autograd.graph.saved_tensors_hooks(CHANGES[change], lambda t: t):
        out = called(function, leaves, mask)
    with pytest.raises(sagebwd.SpecError, match="a hook for saved tensors gave"):
        out.backward(dout)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_tangents_of_gradients_are_refused(function):
    """Kernels would lose them."""
    leaves, _ = inputs(torch.bfloat16, 64, keys=130, batch=1)
    with forward_ad.dual_level():
        out = called(function, leaves, listed(1, 1, 3, 3)).float()
        factor = forward_ad.make_dual(torch.ones(()), torch.ones(()))
        with pytest.raises(sagebwd.SpecError, match="carries a tangent"):
            (out * factor).sum().backward()


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_input_alone_is_differentiated_once(function, square):
    """In another order than by PyTorch's products, which need no kernels."""
    for x in range(3):
        leaves, _ = inputs(torch.bfloat16, 64, queries=256, keys=128, batch=1)
        leaves = [t.requires_grad_(i == x) for i, t in enumerate(t.detach() for t in leaves)]
        out = called(function, leaves, listed(1, 1, 2, 2)).float()
        loss = out.square().sum() if square else out.sum()
        (first,) = torch.autograd.grad(loss, leaves[x], create_graph=True)
        with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
            first.sum().backward()


def stays(function, given, dout):
    """Tells which of the tensors that the backward found saved are there after it, and which after
    the node of autograd."""
    found = []

    def note(t):
        found.append(StorageWeakRef(t.untyped_storage()))
        return t

    leaves, mask = given
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = called(function, leaves, mask)
    torch.autograd.grad(out, leaves, dout)
    after = [not t.expired() for t in found]
    kept = {t.untyped_storage()._cdata for t in (*leaves, mask, out)}
    del out
    return after, [not t.expired() for t in found if t.cdata not in kept]


@pytest.mark.parametrize("function", ["both branches", "an estimate", "the branch alone"])
def test_what_a_captured_backward_reads_is_not_written_to_by_it(monkeypatch, function):
    """A replay of the backward without one of the forward finds it as it was. Without a capture the
    memory is free early, and in both cases when the graph of autograd is gone. Functions that have
    nodes of PyTorch between ours are left out: what these saved is free early in any capture."""
    leaves, dout = inputs(torch.bfloat16, 64, queries=256, keys=192, batch=1)
    given = leaves, listed(1, 1, 2, 3)
    after, late = stays(function, given, dout)
    assert function == "the branch alone" or not all(after)
    assert not any(late)
    monkeypatch.setattr(parts, "is_captured", lambda t: t is not None)
    after, late = stays(function, given, dout)
    assert after and all(after) and not any(late)
