"""The linear branch's kernels on a simulated GPU, whose memory is that of PyTorch's CPU tensors,
against the branch in FP64."""

import functools
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd.core import forms, ops  # noqa: E402
from sagebwd.sla import estimated_kernels, linear_kernels  # noqa: E402

import simulator_needed  # noqa: E402, F401

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

import workspaces  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_simulator(monkeypatch):
    """CPU tensors of 16 bits take the kernels that they would take on a GPU."""
    taken = []

    def take(q, k, v, mask, sizes):
        found = q.dtype in (torch.bfloat16, torch.float16) and mask.dtype == torch.bool
        taken.append(found)
        return found

    monkeypatch.setattr(linear_kernels, "take", take)
    for kernels in (linear_kernels, estimated_kernels):
        monkeypatch.setattr(kernels, "forward", kernels._forward)
        monkeypatch.setattr(kernels, "backward", kernels._backward)
    operation = forms.operation
    monkeypatch.setattr(forms, "operation", lambda device, *told, **of: operation(0, *told, **of))
    monkeypatch.setattr(forms, "stream_of", lambda device: 0)
    return taken


def drawn(*shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def inputs(dtype, channels, heads=4, heads_kv=2, queries=300, keys=333, batch=2):
    shapes = (heads, queries), (heads_kv, keys), (heads_kv, keys), (heads, queries)
    q, k, v, dout = (drawn(batch, h, n, channels, seed=s, dtype=dtype)
                     for s, (h, n) in enumerate(shapes))  # fmt: skip
    return [t.requires_grad_() for t in (q, k + 0.5, v)], dout


def listed(*shape):
    mask = drawn(*shape, seed=7, dtype=torch.float32) > 0.3
    mask[..., 0, :], mask[..., 1, :] = False, True
    return mask


def compared(function, leaves, dout, at_most):
    """The relative errors of the output and all gradients to the same in FP64."""
    out = function(*leaves)
    found = (out, *torch.autograd.grad(out, leaves, dout))
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = function(*exact)
    wanted = (expected, *torch.autograd.grad(expected, exact, dout.double()))
    for x, y in zip(found, wanted):
        assert x.shape == y.shape and torch.isfinite(x).all()
        error = float((x - y).detach().double().norm() / y.detach().norm())
        assert error < at_most, [
            float((x.detach().double() - y).norm() / y.norm()) for x, y in zip(found, wanted)
        ]
    return found


CASES = [
    (torch.bfloat16, 64, (128, 64), (2, 4)),
    (torch.float16, 128, (64, 128), (1, 2)),
    (torch.bfloat16, 128, (128, 128), (1, 1)),
]


@pytest.mark.parametrize("dtype, channels, sizes, of_mask, smooth_k", [
    *((*case, True) for case in CASES), (*CASES[1], False)])  # fmt: skip
def test_the_branch_alone(on_the_simulator, dtype, channels, sizes, of_mask, smooth_k):
    leaves, dout = inputs(dtype, channels, keys=200)
    mask = listed(*of_mask, -(-300 // sizes[0]), -(-200 // sizes[1]))

    def function(q, k, v):
        return sagebwd.block_linear_attention(q, k, v, block_mask=mask, block_size=sizes,
                                              smooth_k=smooth_k)  # fmt: skip

    compared(function, leaves, dout, 0.006)
    assert on_the_simulator == [True, False]


def test_views_and_the_other_layout(on_the_simulator):
    leaves, dout = inputs(torch.bfloat16, 64)
    mask = listed(1, 4, 3, 6)
    bshd = [torch.cat([t.detach().transpose(1, 2)] * 2, -1)[..., :64].requires_grad_()
            for t in leaves]  # fmt: skip

    def function(q, k, v):
        return sagebwd.block_linear_attention(q, k, v, block_mask=mask, layout="bshd")

    out, *grads = compared(function, bshd, dout.transpose(1, 2), 0.006)
    plain = sagebwd.block_linear_attention(*leaves, block_mask=mask)
    for x, y in zip((out, *grads), (plain, *torch.autograd.grad(plain, leaves, dout))):
        assert torch.equal(x, y.transpose(1, 2))
    assert all(on_the_simulator[::2])


def test_a_checkpoint_of_the_branch_alone():
    leaves, dout = inputs(torch.bfloat16, 64, keys=130, batch=1)

    def function(q, k, v):
        return sagebwd.block_linear_attention(q, k, v, block_mask=listed(1, 1, 3, 3))

    out = checkpoint(function, *leaves, use_reentrant=False)
    found = torch.autograd.grad(out, leaves, dout)
    expected = torch.autograd.grad(function(*leaves), leaves, dout)
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


@pytest.mark.parametrize("smooth_k", [True, False])
def test_the_same_inputs_give_the_same_bits(smooth_k):
    leaves, dout = inputs(torch.float16, 64, keys=200, batch=1)
    found = []
    for _ in range(2):
        out = sagebwd.block_linear_attention(*leaves, block_mask=listed(1, 1, 3, 4),
                                             smooth_k=smooth_k)  # fmt: skip
        found.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert all(torch.equal(x, y) for x, y in zip(*found))


#: Packs and unpacks a saved tensor, so that others have its memory, or its strides are others.
HOOKS = {
    "storages": (lambda t: (t.dtype, t.detach().untyped_storage(), t.storage_offset(), t.shape,
                            t.stride()),
                 lambda x: torch.empty(0, dtype=x[0]).set_(*x[1:])),
    "NumPy": (lambda t: (t.detach().contiguous().view(torch.uint8).numpy().copy(), t.dtype),
              lambda x: torch.from_numpy(x[0]).view(x[1])),
    "other strides": (lambda t: t.detach().transpose(1, 2).contiguous() if t.dim() == 4 else t,
                      lambda t: t.transpose(1, 2) if t.dim() == 4 else t),
}  # fmt: skip


def under_hooks(call, leaves, dout, hooks):
    """Whether gradients have the same bits, also of a graph that is kept."""
    expected = torch.autograd.grad(call(*leaves), leaves, dout)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        out = call(*leaves)
    return all(torch.equal(x, y) for keeps in (True, False) for x, y in zip(
        torch.autograd.grad(out, leaves, dout, retain_graph=keeps), expected))  # fmt: skip


@pytest.mark.parametrize("hooks", HOOKS)
def test_hooks_for_saved_tensors_may_give_others(hooks):
    leaves, dout = inputs(torch.bfloat16, 64, keys=130, batch=1)
    call = functools.partial(sagebwd.block_linear_attention, block_mask=listed(1, 1, 3, 3))
    assert under_hooks(call, leaves, dout, HOOKS[hooks])


def shifted(t):
    """Copies a tensor to an address that kernels cannot read."""
    return torch.cat([t.flatten()[:3], t.flatten()])[3:].view(t.shape)


def spread(t):
    """Copies a tensor, with sequences at numbers that are not multiples of 8."""
    return torch.cat([t.flatten(1), t.flatten(1)[:, :3]], 1)[:, :-3].unflatten(1, t.shape[1:])


ANYWHERE = {"shifted": shifted, "spread": spread, "expanded": lambda t: t[:1].expand(t.shape)}


def with_gradients_anywhere(call, leaves, dout):
    """Whether a gradient of the output gives the same bits wherever it lies."""
    assert dout.data_ptr() % 16 or dout.stride(0) % 8 or not dout.is_contiguous()
    out = call(*leaves)
    plain = dout.clone(memory_format=torch.contiguous_format)
    expected = torch.autograd.grad(out, leaves, plain, retain_graph=True)
    return all(torch.equal(x, y)
               for x, y in zip(torch.autograd.grad(out, leaves, dout), expected))  # fmt: skip


@pytest.mark.parametrize("given", ANYWHERE)
def test_gradients_of_the_output_lie_anywhere(given):
    leaves, dout = inputs(torch.bfloat16, 64, 2, 1, keys=130)
    call = functools.partial(sagebwd.block_linear_attention, block_mask=listed(1, 1, 3, 3))
    assert with_gradients_anywhere(call, leaves, ANYWHERE[given](dout))


@pytest.fixture
def kernels_for_lists(monkeypatch):
    """CPU tensors take these, too, with a workspace where they want it."""
    monkeypatch.setattr(torch.Tensor, "new_empty", workspaces.aligned(torch.Tensor.new_empty))
    monkeypatch.setattr(ops, "DEVICES", ("cpu", "meta"))
