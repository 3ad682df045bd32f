"""The linear branch's kernels on a simulated GPU, whose memory is that of PyTorch's CPU tensors,
against the branch in FP64."""


import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd.lists import block_sparse, list_ops  # noqa: E402
from sagebwd.core import direct, forms, ops  # noqa: E402
from sagebwd.nn import SparseLinearAttention  # noqa: E402
from sagebwd.sla import by_kernels, estimated_kernels, linear_kernels  # noqa: E402

import simulator_needed  # noqa: E402, F401


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


@pytest.mark.parametrize("dtype, channels, sizes, of_mask", CASES)
@pytest.mark.parametrize("smooth_k", [True, False])
def test_the_branch_alone(on_the_simulator, dtype, channels, sizes, of_mask, smooth_k):
    leaves, dout = inputs(dtype, channels)
    mask = listed(*of_mask, -(-300 // sizes[0]), -(-333 // sizes[1]))

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
    leaves, dout = inputs(torch.bfloat16, 64)

    def function(q, k, v):
        return sagebwd.block_linear_attention(q, k, v, block_mask=listed(1, 1, 3, 6))

    out = checkpoint(function, *leaves, use_reentrant=False)
    found = torch.autograd.grad(out, leaves, dout)
    expected = torch.autograd.grad(function(*leaves), leaves, dout)
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


@pytest.mark.parametrize("alpha", ["number", "head", "block", "estimated"])
@pytest.mark.parametrize("linear", ["complement", "all"])
def test_both_branches(on_the_simulator, alpha, linear):
    leaves, dout = inputs(torch.bfloat16, 64)
    mask = listed(2, 2, 3, 6)
    shape = {"head": (4,), "block": (4, 3), "estimated": (4,)}.get(alpha)
    if shape:
        leaves.append(drawn(*shape, seed=9, dtype=torch.float32).sigmoid().requires_grad_())

    def function(q, k, v, learned=0.3):
        given = dict(alpha="estimated", beta=learned) if alpha == "estimated" else dict(
            alpha=learned)  # fmt: skip
        return sagebwd.sparse_linear_attention(q, k, v, block_mask=mask, linear=linear,
                                               precision="exact", **given)  # fmt: skip

    compared(function, leaves, dout, 0.01)
    assert any(on_the_simulator)


@pytest.mark.parametrize("smooth_k", [True, False])
def test_the_same_inputs_give_the_same_bits(monkeypatch, smooth_k):
    """Whatever the forward keeps."""
    leaves, dout = inputs(torch.float16, 64)
    mask = listed(1, 1, 3, 6)
    found = []
    for keeps in (False, True):
        monkeypatch.setattr(linear_kernels, "KEEPS_SUMS", keeps)
        out = sagebwd.sparse_linear_attention(*leaves, alpha=0.4, block_mask=mask,
                                              smooth_k=smooth_k, precision="exact")  # fmt: skip
        found.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert all(torch.equal(x, y) for x, y in zip(*found))


def places(parts):
    """The pairs of a sequence and a key head that parts hold, in order."""
    return [(b, h) for bs, hs in parts for b in range(bs.start, bs.stop)
            for h in range(hs.start, hs.stop)]  # fmt: skip


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("keeps_graph", [False, True])
@pytest.mark.parametrize("alpha", ["block", "estimated"])
@pytest.mark.parametrize("linear", ["complement", "all"])
def test_parts_of_the_heads_give_the_same_bits(monkeypatch, count, keeps_graph, alpha, linear):
    """By which memory the gradients come to lie does not matter, either."""
    leaves, dout = inputs(torch.bfloat16, 64, heads=6, heads_kv=3, queries=301)
    mask = listed(2, 3, 3, 6)
    learned = drawn(*((6, 3) if alpha == "block" else (6,)), seed=9, dtype=torch.float32)
    leaves.append(learned.sigmoid().requires_grad_())
    told = dict(alpha=leaves[3]) if alpha == "block" else dict(alpha=alpha, beta=leaves[3])
    reused, found = [], []
    has_alone = by_kernels._has_alone
    monkeypatch.setattr(by_kernels, "_has_alone",
                        lambda t: reused.append(has_alone(t)) or reused[-1])
    for least in (1 << 40, 1):
        monkeypatch.setattr(by_kernels, "LEAST_QUERIES", least)
        monkeypatch.setattr(by_kernels, "PARTS", count)
        parts = by_kernels.parts_of(2, 3, 600)
        assert places(parts) == [(b, h) for b in range(2) for h in range(3)]
        assert len(parts) == (1 if least > 1 else {2: 3, 5: 6}[count])
        out = sagebwd.sparse_linear_attention(*leaves[:3], block_mask=mask, linear=linear,
                                              precision="exact", **told)  # fmt: skip
        found.append((out, *torch.autograd.grad(out, leaves, dout, retain_graph=keeps_graph)))
        if keeps_graph:
            again = torch.autograd.grad(out, leaves, dout)
            assert all(torch.equal(x, y) for x, y in zip(found[-1][1:], again))
    assert reused == ([False, True] if keeps_graph else [True])
    assert all(torch.equal(x, y) for x, y in zip(*found))


@pytest.mark.parametrize("how", ["checkpoint", "kept by a hook", "twice by create_graph"])
def test_gradients_lie_in_no_memory_that_others_have(monkeypatch, how):
    """A hook for saved tensors may have them, or a graph; a checkpoint gives new ones, once."""
    leaves, dout = inputs(torch.bfloat16, 64)
    mask, kept = listed(1, 1, 3, 6), []
    monkeypatch.setattr(by_kernels, "LEAST_QUERIES", 1)

    def call(*tensors):
        return sagebwd.sparse_linear_attention(*tensors, alpha=0.4, block_mask=mask,
                                               precision="exact")  # fmt: skip

    def keep(t):
        kept.append((t, t.clone()))
        return t

    expected = torch.autograd.grad(call(*leaves), leaves, dout)
    if how == "checkpoint":
        out = checkpoint(call, *leaves, use_reentrant=False)
        found = torch.autograd.grad(out, leaves, dout)
    elif how == "kept by a hook":
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = call(*leaves)
        found = torch.autograd.grad(out, leaves, dout)
        assert kept and all(torch.equal(t, as_it_was) for t, as_it_was in kept)
    else:
        out = call(*leaves)
        found = torch.autograd.grad(out, leaves, dout, create_graph=True)
        # Gradients cannot be differentiated: that is refused, and leaves them as they were.
        with pytest.raises(NotImplementedError, match="differentiated twice"):
            torch.autograd.grad(found[0].sum(), leaves, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(found, expected))
        found = torch.autograd.grad(out, leaves, dout)
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


#: Packs and unpacks a saved tensor, so that others have its memory, or its strides are others.
HOOKS = {
    "storages": (lambda t: (t.detach().untyped_storage(), t.dtype, t.shape, t.stride()),
                 lambda x: torch.empty(0, dtype=x[1]).set_(x[0], 0, x[2], x[3])),
    "NumPy": (lambda t: (t.detach().contiguous().view(torch.uint8).numpy().copy(), t.dtype),
              lambda x: torch.from_numpy(x[0]).view(x[1])),
    "other strides": (lambda t: t.detach().transpose(1, 2).contiguous() if t.dim() == 4 else t,
                      lambda t: t.transpose(1, 2) if t.dim() == 4 else t),
}  # fmt: skip


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("least", [1, 1 << 40])
def test_hooks_for_saved_tensors_may_give_others(monkeypatch, hooks, least):
    leaves, dout = inputs(torch.bfloat16, 64)
    leaves.append(drawn(4, seed=9, dtype=torch.float32).sigmoid().requires_grad_())
    mask = listed(1, 1, 3, 6)
    monkeypatch.setattr(by_kernels, "LEAST_QUERIES", least)

    def call(*tensors):
        return sagebwd.sparse_linear_attention(*tensors[:3], alpha=leaves[3], block_mask=mask,
                                               precision="exact")  # fmt: skip

    expected = torch.autograd.grad(call(*leaves), leaves, dout)
    with torch.autograd.graph.saved_tensors_hooks(*HOOKS[hooks]):
        out = call(*leaves)
    for keeps in (True, True, False):
        found = torch.autograd.grad(out, leaves, dout, retain_graph=keeps)
        assert all(torch.equal(x, y) for x, y in zip(found, expected))


def shifted(t):
    """Copies a tensor to an address that kernels cannot read."""
    return torch.cat([t.flatten()[:3], t.flatten()])[3:].view(t.shape)


def spread(t):
    """Copies a tensor, with sequences at numbers that are not multiples of 8."""
    return torch.cat([t.flatten(1), t.flatten(1)[:, :3]], 1)[:, :-3].unflatten(1, t.shape[1:])


@pytest.mark.parametrize("least", [1, 1 << 40])
@pytest.mark.parametrize("given", ["shifted", "spread", "expanded"])
def test_gradients_of_the_output_lie_anywhere(monkeypatch, least, given):
    leaves, dout = inputs(torch.bfloat16, 64)
    mask = listed(1, 1, 3, 6)
    monkeypatch.setattr(by_kernels, "LEAST_QUERIES", least)
    wherever = {"shifted": shifted, "spread": spread, "expanded": lambda t: t[:1].expand(t.shape)}
    dout = wherever[given](dout)
    assert dout.data_ptr() % 16 or dout.stride(0) % 8 or not dout.is_contiguous()
    for function in (lambda *t: sagebwd.sparse_linear_attention(
                         *t, alpha=0.4, block_mask=mask, precision="exact"),
                     lambda *t: sagebwd.block_linear_attention(*t, block_mask=mask)):  # fmt: skip
        out = function(*leaves)
        expected = torch.autograd.grad(out, leaves, dout.clone(
            memory_format=torch.contiguous_format), retain_graph=True)  # fmt: skip
        found = torch.autograd.grad(out, leaves, dout)
        assert all(torch.equal(x, y) for x, y in zip(found, expected))


@pytest.fixture
def kernels_for_lists(monkeypatch):
    """CPU tensors take these, too, with a workspace where they want it."""
    new_empty = torch.Tensor.new_empty

    def aligned(t, size, dtype=None, **more):
        if dtype != torch.uint8:
            return new_empty(t, size, dtype=dtype, **more)
        count = size if isinstance(size, int) else size[0]
        found = new_empty(t, count + 256, dtype=dtype)
        begin = -found.data_ptr() % 256
        return found[begin : begin + count]

    monkeypatch.setattr(torch.Tensor, "new_empty", aligned)
    monkeypatch.setattr(ops, "DEVICES", ("cpu", "meta"))


@pytest.mark.parametrize("keeps_graph", [False, True])
@pytest.mark.parametrize("channels, heads_kv, sizes", [(64, 2, (128, 64)), (128, 4, (128, 128))])
def test_parts_of_both_branches_kernels_give_the_same_bits(
    kernels_for_lists, monkeypatch, channels, heads_kv, sizes, keeps_graph
):
    """One sequence, whose heads have copies in the gradients of later heads. Rows of a part begin
    at odd numbers of FP32."""
    leaves, dout = inputs(torch.bfloat16, channels, 4, heads_kv, 301, 320, 1)
    mask = listed(1, heads_kv, 3, -(-320 // sizes[1]))
    leaves.append(drawn(4, seed=9, dtype=torch.float32).sigmoid().requires_grad_())
    found = []
    for least in (1 << 40, 1):
        monkeypatch.setattr(by_kernels, "LEAST_QUERIES", least)
        out = sagebwd.sparse_linear_attention(*leaves[:3], block_mask=mask, block_size=sizes,
                                              alpha="estimated", beta=leaves[3])  # fmt: skip
        found.append((out, *torch.autograd.grad(out, leaves, dout, retain_graph=keeps_graph)))
    assert all(torch.equal(x, y) and x.isfinite().all() and x.any() for x, y in zip(*found))
