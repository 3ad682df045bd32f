"""Who looks on sees operators of norm and RoPE, and what goes past them serves all of PyTorch's
modes. On a simulated GPU."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import simulator_needed  # noqa: E402, F401

from test_front_direct import assert_same, given_of, passes, ways  # noqa: E402, F401
from test_front_kernels import kernels  # noqa: E402, F401

import sagebwd  # noqa: E402
from sagebwd.core import forms, front, front_direct  # noqa: E402


@pytest.mark.parametrize("learned", ["q", "gain", "16-bit gain", "inv_rms"])
def test_it_is_differentiated_once(ways, learned):  # noqa: F811
    for _ in range(2):
        given, q, k = given_of("given")
        if learned == "16-bit gain":
            given["q_norm"] = given["q_norm"].bfloat16()
        t = {"q": q, "inv_rms": given["q_inv_rms"]}.get(learned, given["q_norm"]).requires_grad_()
        found = sagebwd.qk_norm_rope(q, k, **given)
        (gradient,) = torch.autograd.grad(found[0].float().sum(), t, create_graph=True)
        for once_more in (lambda g: torch.autograd.grad(g.sum(), t), lambda g: g.sum().backward()):
            with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
                once_more(gradient.clone())
            (gradient,) = torch.autograd.grad(sagebwd.qk_norm_rope(q, k, **given)[0].float().sum(),
                                              t, create_graph=True)  # fmt: skip


def test_a_graph_serves_twice(ways):  # noqa: F811
    given, q, k = given_of()
    sagebwd.qk_norm_rope(q, k, **given)
    q.requires_grad_()
    found = sagebwd.qk_norm_rope(q, k, **given)
    loss = found[0].float().square().sum()
    first = torch.autograd.grad(loss, q, retain_graph=True)
    assert_same(torch.autograd.grad(loss, q), first)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, q)
    assert ways.took() == (1, 3)


def test_autocast_changes_nothing(ways):  # noqa: F811
    given, q, k = given_of("given")
    given["q_norm"] = given["q_norm"].bfloat16()
    wanted = [passes(given, q, k) for _ in range(2)][1]
    ways.took()
    with torch.autocast("cpu", dtype=torch.float16):
        assert_same(passes(given, q, k), wanted)
    assert ways.took() == (0, 2)


def test_who_looks_on_sees_operators(ways):  # noqa: F811
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    given, q, k = given_of()
    wanted = [passes(given, q, k) for _ in range(2)][1]
    ways.took()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    for watcher in (Dispatch(), Function(), profile):
        with watcher:
            assert_same(passes(given, q, k), wanted)
        assert ways.took() == (2, 0)
    leaf = q.detach().requires_grad_()
    found = sagebwd.qk_norm_rope(leaf, k, **given)
    with Dispatch():  # comes later than the forward
        torch.autograd.grad(found[0].sum(), leaf)
    assert ways.took() == (1, 1)


def test_a_compiler_sees_operators(ways):  # noqa: F811
    given, q, k = given_of()
    for _ in range(2):
        passes(given, q, k)
    ways.took()
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front, "operators", lambda: torch.ops.sagebwd)
        compiled = torch.compile(sagebwd.qk_norm_rope, fullgraph=True, backend="aot_eager")
        found = passes(given, q, k, function=compiled)
    for x, y in zip(found, passes(given, q, k)):  # PyTorch's operations: CPU tensors have these
        torch.testing.assert_close(x, y, atol=2e-3, rtol=2.0**-6)
    assert ways.took() == (0, 2)


def test_tangents_and_transforms_are_refused(ways):  # noqa: F811
    given, q, k = given_of()
    for _ in range(2):
        sagebwd.qk_norm_rope(q, k, **given)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(sagebwd.SpecError, match="carries a tangent"):
            sagebwd.qk_norm_rope(dual, k, **given)
    with pytest.raises(sagebwd.SpecError, match=r"torch\.func"):
        torch.func.grad(lambda q: sagebwd.qk_norm_rope(q, k, **given)[0].float().sum())(q)
    leaf = q.detach().requires_grad_()
    found = sagebwd.qk_norm_rope(leaf, k, **given)[0].float().sum()
    with pytest.raises(sagebwd.SpecError, match="a gradient is a batch"):
        torch.autograd.grad(found, leaf, torch.ones(3), is_grads_batched=True)


def test_each_launch_asks_for_the_stream(monkeypatch):
    asked = []
    monkeypatch.setattr(forms, "stream_of", lambda device: asked.append(device) or 0)
    given, q, k = given_of()
    for _ in range(3):
        passes(given, q, k)
    assert len(asked) == 6


def test_forms_are_bounded_and_of_one_family(ways, monkeypatch):  # noqa: F811
    monkeypatch.setattr(forms, "MOST_FORMS", 3)
    _, q, k = given_of()
    for tokens in range(1, 9):
        for _ in range(2):
            sagebwd.qk_norm_rope(q[:, :, :tokens], k, q_norm=True)
        assert len(front_direct._known) <= 3 and ways.took() == (1, 1)
    with forms.kernels_of("mma"):
        sagebwd.qk_norm_rope(q[:, :, :8], k, q_norm=True)
    assert ways.took() == (1, 0)
