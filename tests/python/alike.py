"""Calls that have to come to the same, and how far results are apart, for tests here and on a
GPU."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402


def relative(x, expected):
    """||x - expected|| / ||expected|| of tensors or arrays, in FP64."""
    x, expected = (torch.asarray(t, dtype=torch.float64, copy=True, requires_grad=False)
                   for t in (x, expected))  # fmt: skip
    return float((x - expected).norm() / expected.norm())


def results(attend, leaves, dout):
    """The output of attend(*leaves), and the gradients of the leaves."""
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def equal(first, second):
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def bytes_kept(run, but=()):
    """How much memory run() keeps for the backward, beside that of the tensors `but`."""
    kept, known = {}, {t.untyped_storage().data_ptr() for t in but}

    def note(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        run()
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in known)


def assert_alike(first, second, inputs, dout, *more):
    """Both functions of `inputs` and `more` give the same bits, and so do their gradients."""
    got, expected = first(*inputs, *more), second(*inputs, *more)
    assert torch.equal(got, expected)
    for a, b in zip(torch.autograd.grad(got, inputs, dout),
                    torch.autograd.grad(expected, inputs, dout)):  # fmt: skip
        assert torch.equal(a, b)


def compiled(layer, **options):
    torch._dynamo.reset()
    return torch.compile(layer, fullgraph=True, **{"backend": "aot_eager", **options})


def forwards_of_selective_checkpoints(inputs, dout, save):
    """Leaves gradients of a checkpointed call in `inputs`; how often the forward operator ran if
    the checkpoint does, or does not, save its results."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    forward = torch.ops.sagebwd.forward.default
    calls = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **(kwargs or {}))

    def policy(context, function, *args, **kwargs):
        keep = save and function is forward
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    with Count():
        out = checkpoint(
            sagebwd.attention,
            *inputs,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        out.backward(dout)
    return calls.count(forward)
