"""Calls past the dispatcher: when they are taken, that nothing else changes, and who is refused."""

import threading

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from torch.autograd import forward_ad  # noqa: E402

from sagebwd.core import direct, forms, transforms  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")

NAMES = ("out", "lse", "dq", "dk", "dv")


def make(m=24, n=24, layout="bhsd", grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(heads, length):
        shape = (2, heads, length, 64) if layout == "bhsd" else (2, length, heads, 64)
        return torch.randn(shape, generator=generator).bfloat16().requires_grad_(grad)

    return (randn(4, m), randn(2, n), randn(2, n)), randn(4, m).detach()


@pytest.fixture
def shortcuts(monkeypatch):
    """How often a call took the shortcut, and how often none could."""
    counted = {"taken": 0, "refused": 0}

    def count(*arguments, **keywords):
        result = direct.attention(*arguments, **keywords)
        counted["refused" if result is None else "taken"] += 1
        return result

    closure = dict(zip(sagebwd.attention.__code__.co_freevars, sagebwd.attention.__closure__))
    monkeypatch.setattr(closure["shortcut"], "cell_contents", count)
    return counted


def results(inputs, dout, with_lse=False, **options):
    """By the shortcut where there is one: out, lse and the gradients."""
    outputs = sagebwd.attention(*inputs, return_lse=with_lse, **options)
    out, lse = outputs if with_lse else (outputs, None)
    gradients = torch.autograd.grad(out, inputs, dout)
    return out, lse, *gradients


def explicit(inputs, dout, **options):
    """By the operators."""
    q, k, v = (t.detach() for t in inputs)
    out, lse = sagebwd.attention_forward(q, k, v, **options)
    return out, lse, *sagebwd.attention_backward(dout, q, k, v, out, lse, **options)


def check(got, want):
    for name, a, b in zip(NAMES, got, want):
        assert a is None or torch.equal(a, b), name


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"layout": "bshd", "causal": "bottom-right"}, {"softmax_scale": 0.25}],
)
def test_the_second_call_of_a_form_is_direct_and_the_same(shortcuts, options, with_lse):
    for seed in range(3):
        inputs, dout = make(layout=options.get("layout", "bhsd"), seed=seed)
        check(results(inputs, dout, with_lse, **options), explicit(inputs, dout, **options))
    # The first has its form checked by the operator.
    assert shortcuts == {"taken": 2, "refused": 1}


def test_no_gradients_no_graph(shortcuts):
    (q, k, v), _ = make(grad=False)
    want = sagebwd.attention(q, k, v, return_lse=True)
    for with_lse in (False, True):
        got = sagebwd.attention(q, k, v, return_lse=with_lse)
        out, lse = got if with_lse else (got, None)
        check((out, lse), want)
        assert not out.requires_grad
    (q, k, v), _ = make()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert not sagebwd.attention(q, k, v).requires_grad
    assert shortcuts["taken"] == 4


@pytest.mark.parametrize("wanted", range(1, 8))
def test_any_subset_of_gradients(shortcuts, wanted):
    inputs, dout = make()
    expected = explicit(inputs, dout)[2:]
    for _ in range(2):
        chosen = [t.detach().requires_grad_(bool(wanted >> i & 1)) for i, t in enumerate(inputs)]
        sagebwd.attention(*chosen).backward(dout)
        for t, gradient in zip(chosen, expected):
            assert (t.grad is None) if not t.requires_grad else torch.equal(t.grad, gradient)
    assert shortcuts["taken"] == 2


def test_gradients_of_lse_and_of_any_strides(shortcuts):
    inputs, dout = make()
    sagebwd.attention(*inputs)
    out, lse = sagebwd.attention(*inputs, return_lse=True)
    q, k, v = (t.detach() for t in inputs)
    only = torch.autograd.grad(lse.sum(), inputs)
    zeros, ones = torch.zeros_like(out), torch.ones_like(lse)
    want = sagebwd.attention_backward(zeros, q, k, v, out.detach(), lse.detach(), dlse=ones)
    assert all(torch.equal(a, b) for a, b in zip(only, want))
    wide = torch.zeros(2, 4, 24, 72, dtype=dout.dtype)
    wide[..., :64] = dout
    odd = torch.zeros(2, 4, 24, 67, dtype=dout.dtype)
    odd[..., :64] = dout
    expected = explicit(inputs, dout)
    for view in (wide[..., :64], odd[..., :64], dout.mT.contiguous().mT):
        check(results(inputs, view), expected)
    summed = torch.autograd.grad(sagebwd.attention(*inputs).sum(), inputs)
    check((None, None, *summed), explicit(inputs, torch.ones_like(dout)))
    assert shortcuts["refused"] == 1


def test_another_form_is_checked(shortcuts):
    (q, k, v), _ = make(grad=False)
    sagebwd.attention(q, k, v)
    sagebwd.attention(q, k, v)
    assert shortcuts == {"taken": 1, "refused": 1}
    for change, message in (
        (dict(k=k.half()), "one dtype"),
        (dict(v=v[:, :, 1:]), "k has shape"),
        (dict(q=q[0]), "rank 3"),
        (dict(q=q.to_sparse()), "to_dense"),
        (dict(k=k.mT.contiguous().mT), r"k has strides.*contiguous\(\)"),
        (dict(layout="sbhd"), "sbhd"),
        (dict(softmax_scale=True), "softmax_scale=True"),
        (dict(causal=1), "causal=1"),
        (dict(causal=["none"]), "causal="),
        (dict(return_lse=1), "return_lse=1"),
    ):
        with pytest.raises(sagebwd.SpecError, match=message):
            sagebwd.attention(**(dict(q=q, k=k, v=v) | change))
    with pytest.raises(TypeError, match="did you mean"):
        sagebwd.attention(q, k, v, smoothk=True)
    with pytest.raises(TypeError, match="ndarray"):
        sagebwd.attention(q.float().numpy(), k, v)
    assert shortcuts["taken"] == 1


def test_true_stays_true_and_one_stays_one():
    (q, k, v), _ = make(grad=False)
    for _ in range(2):
        sagebwd.attention(q, k, v, causal=True, smooth_k=True)
        for wrong in (dict(causal=1), dict(causal=True, smooth_k=1)):
            with pytest.raises(sagebwd.SpecError, match="=1"):
                sagebwd.attention(q, k, v, **wrong)
    _, shorter, _ = make(24, 16, grad=False)[0]
    sagebwd.attention(q, shorter, shorter, causal="top-left")
    for _ in range(2):
        with pytest.raises(sagebwd.SpecError, match="24 queries and 16 keys"):
            sagebwd.attention(q, shorter, shorter, causal=True)


def test_an_address_that_kernels_cannot_read():
    (q, k, v), _ = make(grad=False)
    sagebwd.attention(q, k, v)
    shifted = torch.zeros(v.numel() + 4, dtype=v.dtype)[4:].view(v.shape)
    with pytest.raises(sagebwd.SpecError, match=r"address .*pass v\.clone\(\)"):
        sagebwd.attention(q, k, shifted)


def test_who_looks_on_sees_the_operator(shortcuts):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    inputs, dout = make()
    want = results(inputs, dout)
    results(inputs, dout)
    assert shortcuts["taken"] == 1
    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    forward, backward = torch.ops.sagebwd.forward.default, torch.ops.sagebwd.backward.default
    with Dispatch():
        check(results(inputs, dout), want)
    assert seen.count(forward) == seen.count(backward) == 1
    out = sagebwd.attention(*inputs)  # a direct forward; the mode comes later
    seen.clear()
    with Dispatch():
        gradients = torch.autograd.grad(out, inputs, dout)
    assert seen.count(backward) == 1
    check((out, None, *gradients), want)
    seen.clear()
    with Function():
        sagebwd.attention(*inputs)
    assert any("sagebwd" in str(function) for function in seen)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results(inputs, dout)
    names = {event.key for event in profile.key_averages()}
    assert {"sagebwd::forward", "sagebwd::backward"} <= names


def test_subclasses_and_transforms_go_by_the_operator(shortcuts):
    class Sub(torch.Tensor):
        pass

    (q, k, v), _ = make(grad=False)
    want = sagebwd.attention(q, k, v)
    assert torch.equal(sagebwd.attention(q.as_subclass(Sub), k, v), want)
    got = torch.func.vmap(lambda q: sagebwd.attention(q, k, v))(q[None])
    assert torch.equal(got[0], want)
    assert shortcuts["taken"] == 0
    assert torch.equal(sagebwd.attention(torch.nn.Parameter(q), k, v), want)
    assert shortcuts["taken"] == 1


def test_double_backward_is_refused(shortcuts):
    inputs, _ = make()
    for with_lse in (False, True, False, True):
        out = sagebwd.attention(*inputs, return_lse=with_lse)
        out = out[0] if with_lse else out
        (gradient,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
        with pytest.raises(NotImplementedError, match="differentiated twice"):
            (out.sum() + gradient.square().sum()).backward()
    assert shortcuts["taken"] == 3


def test_saved_tensors(shortcuts):
    inputs, dout = make()
    want = results(inputs, dout)
    out = sagebwd.attention(*inputs)
    with torch.no_grad():
        inputs[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)

    # Hooks may bring other strides back.
    (q, k, v), dout = make()
    wide = torch.zeros(2, 4, 24, 72, dtype=q.dtype)
    wide[..., :64] = q.detach()
    inputs = (wide[..., :64].requires_grad_(), k, v)
    hooks = torch.autograd.graph.saved_tensors_hooks
    for _ in range(2):
        with hooks(lambda t: t.clone(), lambda t: t.contiguous()):
            out = sagebwd.attention(*inputs)
        check((out, None, *torch.autograd.grad(out, inputs, dout)), want)
    assert shortcuts["taken"] == 2


def test_forms_are_bounded(shortcuts, monkeypatch):
    monkeypatch.setattr(forms, "MOST_FORMS", 4)
    monkeypatch.setattr(forms, "MOST_STRIDES", 2)
    for m in range(1, 12):
        inputs, dout = make(m, m)
        for _ in range(2):
            check(results(inputs, dout), explicit(inputs, dout))
        assert len(forms._forms) <= 4
    assert shortcuts["taken"] == 11
    for extra in (8, 16, 24, 32):
        wide = torch.zeros(2, 4, 11, 64 + extra, dtype=dout.dtype)
        wide[..., :64] = dout
        check(results(inputs, wide[..., :64]), explicit(inputs, dout))
    assert all(len(form._backward_passes) <= 2 for form in forms._forms.values())


def test_empty_tensors(shortcuts):
    for m, n in ((0, 24), (24, 0)):
        inputs, dout = make(m, n)
        for _ in range(2):
            out, lse = sagebwd.attention(*inputs, return_lse=True)
            assert not out.any() and bool((lse == -torch.inf).all())
            assert not any(g.any() for g in torch.autograd.grad(out, inputs, dout))
    assert shortcuts["taken"] == 2


def test_threads_share_forms():
    inputs, dout = make()
    expected = explicit(inputs, dout)
    failures = []

    def work():
        try:
            for _ in range(5):
                check(results([t.detach().requires_grad_() for t in inputs], dout), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_autocast(shortcuts, monkeypatch):
    (q, k, v), _ = make(grad=False)
    sagebwd.attention(q, k, v)
    monkeypatch.setattr(direct, "_is_any_autocast_enabled", lambda: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    for dtype, taken in ((torch.bfloat16, 1), (torch.float16, 0)):
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda device, dtype=dtype: dtype)
        before = shortcuts["taken"]
        sagebwd.attention(q, k, v)
        assert shortcuts["taken"] - before == taken


# ---- forward mode --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attend", "device"),
    [
        (sagebwd.attention, "cpu"),
        (sagebwd.attention, "meta"),
        (sagebwd.attention_forward, "meta"),
        (sagebwd.emulation.emulated_attention, "cpu"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("which", range(3))
def test_tangents_are_refused(attend, device, grad, which):
    message = r"carries a tangent.*only reverse mode is supported.*\.backward\(\)"
    inputs = [t.detach().to(device).requires_grad_(grad) for t in make()[0]]
    attend(*inputs)

    def of(t):
        return attend(*inputs[:which], t, *inputs[which + 1 :])

    tangent = torch.ones_like(inputs[which])
    with forward_ad.dual_level(), pytest.raises(sagebwd.SpecError, match=message):
        of(forward_ad.make_dual(inputs[which], tangent))
    with pytest.raises(sagebwd.SpecError, match=message):
        torch.func.jvp(of, (inputs[which],), (tangent,))
    with forward_ad.dual_level():  # without a tangent there is nothing to lose
        of(inputs[which])


@pytest.mark.parametrize("which", ["dout", "q", "lse", "dlse"])
def test_tangents_of_the_backward_are_refused(which):
    (q, k, v), dout = make(grad=False)
    out, lse = sagebwd.attention_forward(q, k, v)
    given = dict(dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=torch.zeros_like(lse))
    with forward_ad.dual_level(), pytest.raises(sagebwd.SpecError, match="carries a tangent"):
        given[which] = forward_ad.make_dual(given[which], torch.ones_like(given[which]))
        sagebwd.attention_backward(**given)


@pytest.mark.parametrize("attend", [sagebwd.attention, sagebwd.emulation.emulated_attention])
def test_a_tangent_between_forward_and_backward_is_refused(attend):
    """Forward over reverse: a Hessian's product with a vector."""
    inputs, dout = make()
    for _ in range(2):
        out = attend(*inputs)
        with forward_ad.dual_level(), pytest.raises(sagebwd.SpecError, match="carries a tangent"):
            torch.autograd.grad(out, inputs, forward_ad.make_dual(dout, dout))


def test_operators_refuse_tangents_themselves():
    (q, k, v), _ = make(grad=False)
    with forward_ad.dual_level(), pytest.raises(sagebwd.SpecError, match="carries a tangent"):
        torch.ops.sagebwd.forward(forward_ad.make_dual(q, q), k, v, None, "bhsd", "causal=none")
    assert transforms.refuse_tangents(q, k, v) is None


def test_a_family_has_forms_of_its_own(shortcuts):
    inputs, dout = make()
    want = results(inputs, dout)
    with forms.kernels_of("mma"):
        check(results(inputs, dout), want)  # by the operators: that family has not had this form
        check(results(inputs, dout), want)
    check(results(inputs, dout), want)
    assert shortcuts == {"taken": 2, "refused": 2}
