"""Backwards that compiled autograd traces: eager's gradients, in one graph for all lengths."""

import contextlib

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import compiled_doors as doors  # noqa: E402
import torch._dynamo.compiled_autograd as compiled_autograd  # noqa: E402
from packed_inputs import packed  # noqa: E402
from stand_in import kernels_on_the_cpu, listed_kernels_on_the_cpu  # noqa: E402, F401
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import distributed  # noqa: E402
from sagebwd.numerics import emulation  # noqa: E402

enable = getattr(compiled_autograd, "_enable", None) or getattr(compiled_autograd, "enable", None)
pytestmark = [pytest.mark.usefixtures("kernels_on_the_cpu", "listed_kernels_on_the_cpu",
                                      "tiny_tensors"),
              pytest.mark.skipif(enable is None, reason="needs compiled autograd")]  # fmt: skip


@contextlib.contextmanager
def compiling(backend="eager"):
    """Backwards are compiled; gives what counts their graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    with enable(torch.compile(backend=counter)):
        yield counter


def raw(q, k, v, hidden, told):
    given = (None, "bhsd", f"causal={'top-left' if hidden else 'none'}")
    out, lse = torch.ops.sagebwd.forward(q, k, v, *given)
    return out * lse[..., None]


def emulated(q, k, v, hidden, told):
    return emulation.emulated_attention(q, k, v, causal=hidden)


def exact(q, k, v, hidden, told):
    mask = told.blocks if hidden else told.everything
    return sagebwd.sparse_linear_attention(q, k, v, alpha=0.7, block_mask=mask,
                                           precision="exact")  # fmt: skip


@pytest.mark.parametrize(
    "door", [raw, doors.padded, doors.packed, doors.pytorchs, doors.in_a_context, doors.listed,
             doors.sparse_linear, exact, emulated], ids=lambda door: door.__name__)  # fmt: skip
def test_each_door(door):
    given, told = doors.inputs("cpu"), doors.Hidden("cpu")
    expected = doors.loss_and_gradients(door, given, True, told)
    with compiling() as counter:
        for _ in range(2):
            found = doors.loss_and_gradients(door, given, True, told)
            assert all(map(torch.equal, found, expected))
    # The emulation is left out, between two parts of a graph.
    assert counter.frame_count == 1 if door is not emulated else counter.frame_count <= 3


def test_a_graph_break_before_the_backward():
    given, told = doors.inputs("cpu"), doors.Hidden("cpu")
    expected = doors.loss_and_gradients(doors.packed, given, True, told)[1:]
    given = [t.detach().requires_grad_() for t in given]

    def step(q, k, v):
        loss = doors.packed(q, k, v, True, told).float().square().mean()
        torch._dynamo.graph_break()
        loss.backward()

    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(*given)
    assert all(map(torch.equal, (t.grad for t in given), expected))


def test_other_lengths_make_no_further_graph():
    lengths = [((20, 7, 5, 1, 2),) * 2, ((20, 7, 9),) * 2, ((20, 7),) * 2, ((9, 8, 7, 6, 5, 1),) * 2,
               ((5, 6, 7, 3),) * 2]  # fmt: skip
    with compiling() as counter:
        for each in lengths:
            inputs, dout, where = packed(*each)
            out = sagebwd.attention(*inputs, causal="top-left", **where)
            torch.autograd.grad(out, inputs, dout)
    assert counter.frame_count <= 2  # one of the first lengths alone


def test_ranks_exchange_outside_of_graphs():
    import distributed_ranks as ranks_of

    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for method in ("ring", "ulysses"):
            mesh = ranks_of.mesh_of(method, 1)

            def run(tokens):
                *leaves, dout = ranks_of.draw(tokens=tokens)[0]
                leaves = [t.requires_grad_() for t in leaves]
                out = distributed.attention(*leaves, mesh=mesh, method=method, causal=True)
                return torch.autograd.grad(out, leaves, dout)

            expected = [run(tokens) for tokens in (60, 40, 50, 70)]
            with compiling() as counter:
                found = [run(tokens) for tokens in (60, 40, 50, 70)]
            for ours, theirs in zip(found, expected):
                assert all(map(torch.equal, ours, theirs))
            assert counter.frame_count <= 4
    finally:
        dist.destroy_process_group()
