"""Calls of a known form still have what PyTorch's dispatcher does for tensors and threads.

One test for each feature, on the third call of a form, forward and backward: results are those of
the operators on plain tensors.
"""

import contextlib

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from test_direct import check, explicit, make, results, shortcuts  # noqa: E402, F401
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from sagebwd.core import direct  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors"),
    pytest.mark.filterwarnings("ignore:Named tensors", "ignore:.*torch.jit"),
]  # fmt: skip

NAMES = ("q", "k", "v", "dout")


@pytest.fixture
def known(shortcuts):  # noqa: F811
    """Inputs of a form that has been called twice, dout, and the operators' results."""
    inputs, dout = make()
    for _ in range(2):
        results(inputs, dout, with_lse=True)
    assert shortcuts == {"taken": 1, "refused": 1}
    return inputs, dout, explicit(inputs, dout)


def with_one(known, name, change):
    """The inputs and dout, one of which is changed to another tensor of the same values."""
    inputs, dout, _ = known
    tensors = [*(t.detach() for t in inputs), dout]
    at = NAMES.index(name)
    tensors[at] = change(tensors[at])
    return [t.requires_grad_() for t in tensors[:3]], tensors[3]


def lazily_negated(t):
    negated = torch._neg_view(-t)
    assert negated.is_neg() and torch.equal(negated, t)
    return negated


@pytest.mark.parametrize("name", NAMES)
def test_a_lazy_sign(known, shortcuts, name):  # noqa: F811
    inputs, dout = with_one(known, name, lazily_negated)
    check(results(inputs, dout), known[2])
    assert shortcuts["taken"] == (2 if name == "dout" else 1)


def test_a_lazy_sign_of_the_gradient_of_lse(known):
    inputs, dout, expected = known
    ones = torch.ones(2, 4, 24)
    gradients = []
    for dlse in (ones, lazily_negated(ones)):
        outputs = sagebwd.attention(*inputs, return_lse=True)
        gradients.append(torch.autograd.grad(outputs, inputs, (dout, dlse)))
    assert not torch.equal(gradients[0][0], expected[2])  # that of lse counts
    check(("", "", *gradients[0])[2:], gradients[1])


def test_a_lazy_sign_that_hooks_bring_back(known):
    """As of tensors that were offloaded with it."""
    inputs, dout, expected = known
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lazily_negated):
        found = results(inputs, dout)
    check(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_without_memory(known, name):
    """The dispatcher makes them zeros of one element, which a gradient may be, and q may not."""
    inputs, dout = with_one(known, name, torch.zeros_like)
    expected = explicit(inputs, dout)
    inputs, dout = with_one(
        known, name, lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype))  # fmt: skip
    if name == "dout":
        check(results(inputs, dout), expected)
    else:
        with pytest.raises(sagebwd.SpecError, match=rf"{name} has strides \(0, 0, 0, 0\)"):
            results(inputs, dout)


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.skipif(not hasattr(torch.Tensor, "rename"), reason="PyTorch has no Tensor.rename")
def test_names_are_refused_as_operators_refuse_them(known, name):
    inputs, dout = with_one(known, name, lambda t: t.rename("a", "b", "c", "d"))
    with pytest.raises(RuntimeError, match="[Nn]amed tensors"):
        results(inputs, dout)


@pytest.mark.parametrize("layout", ["to_sparse", "to_mkldnn"])
@pytest.mark.parametrize("name", NAMES[:3])
def test_other_layouts_are_refused_in_our_words(known, name, layout):
    inputs, _ = with_one(known, name, lambda t: getattr(t, layout)())
    with pytest.raises(sagebwd.SpecError if layout == "to_sparse" else Exception):
        sagebwd.attention(*inputs)


@pytest.mark.parametrize("name", NAMES[:3])
def test_functional_wrappers(known, name):
    """torch.Tensor by type, and without memory that could be read."""
    inputs, dout, expected = known
    wrapped = [torch._to_functional_tensor(t.detach()) for t in (*inputs, dout)]
    torch._enable_functionalization(reapply_views=True)
    try:
        out = sagebwd.attention(*wrapped[:3])
    finally:
        torch._disable_functionalization()
    torch._sync(out)
    assert torch.equal(torch._from_functional_tensor(out), expected[0])


@pytest.mark.parametrize("passes", ["forward", "backward", "both"])
@pytest.mark.parametrize("kind", [TorchDispatchMode, TorchFunctionMode])
def test_modes(known, kind, passes):
    """They see the operator where they are on."""
    inputs, dout, expected = known
    seen = []

    class Mode(kind):
        def note(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

        __torch_dispatch__ = __torch_function__ = note

    within = {name: Mode() if name in (passes, "both") or passes == "both"
              else contextlib.nullcontext() for name in ("forward", "backward")}  # fmt: skip
    with within["forward"]:
        out = sagebwd.attention(*inputs)
    with within["backward"]:
        gradients = torch.autograd.grad(out, inputs, dout)
    check((out, None, *gradients), expected)
    if kind is TorchDispatchMode or passes != "backward":  # a function mode sees autograd.grad
        assert any("sagebwd" in name for name in seen)


def test_subclasses(known, shortcuts):  # noqa: F811
    inputs, dout, expected = known
    seen = []

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs)

    for at in range(3):
        mixed = [t.detach().as_subclass(Own) if i == at else t.detach()
                 for i, t in enumerate(inputs)]  # fmt: skip
        found = results([t.requires_grad_() for t in mixed], dout)
        check([None if t is None else t.as_subclass(torch.Tensor) for t in found], expected)
    assert sum("sagebwd.forward" in name for name in seen) == 3 and shortcuts["taken"] == 1


def test_subclasses_that_wrap(known):
    from torch.testing._internal.two_tensor import TwoTensor

    inputs, dout, expected = known
    wrapped = [TwoTensor(t.detach(), t.detach() * 1).requires_grad_() for t in inputs]
    out = sagebwd.attention(*wrapped)
    gradients = torch.autograd.grad(out, wrapped, TwoTensor(dout, dout))
    for part in ("a", "b"):
        check((getattr(out, part), None, *(getattr(g, part) for g in gradients)), expected)


def test_fakes(known):
    inputs, dout, expected = known
    tensors = [t.detach() for t in inputs]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t).requires_grad_() for t in tensors]
        for found, real in zip(results(fakes, mode.from_tensor(dout)), expected):
            assert found is None or (found.shape, found.stride()) == (real.shape, real.stride())


def test_tracers(known):
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs, _, expected = known
    tensors = [t.detach() for t in inputs]
    traced = torch.jit.trace(lambda q, k, v: sagebwd.attention(q, k, v), tensors)
    assert "sagebwd::forward" in str(traced.graph)
    assert torch.equal(traced(*(t * 1 for t in tensors)), expected[0])
    graph = make_fx(lambda q, k, v: sagebwd.attention(q, k, v))(*tensors)
    assert "sagebwd.forward" in graph.code and torch.equal(graph(*tensors), expected[0])
    program = torch.export.export(_Module(), tuple(tensors))
    assert "sagebwd.forward" in program.graph_module.code
    assert torch.equal(program.module()(*tensors), expected[0])


class _Module(torch.nn.Module):
    def forward(self, q, k, v):
        return sagebwd.attention(q, k, v)


@pytest.mark.parametrize("profiler", [
    lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    torch.autograd.profiler.profile,
], ids=["kineto", "autograd"])  # fmt: skip
def test_profilers(known, profiler):
    inputs, dout, expected = known
    with profiler() as profile:
        check(results(inputs, dout), expected)
    names = {event.key for event in profile.key_averages()}
    assert {"sagebwd::forward", "sagebwd::backward"} <= names


def test_hooks_of_tensors_and_of_the_graph(known, shortcuts):  # noqa: F811
    """Autograd runs them whatever the way; the shortcut is taken."""
    inputs, dout, expected = known
    leaves = [t.detach().requires_grad_() for t in inputs]
    leaves[0].register_hook(lambda g: g * 2)
    after = []
    leaves[1].register_post_accumulate_grad_hook(lambda t: after.append(t.grad.clone()))
    out = sagebwd.attention(*leaves)
    out.register_hook(lambda g: g * 1)
    out.grad_fn.register_hook(lambda into, of: (into[0], into[1], into[2] * 3, None)[: len(into)])
    out.backward(dout)
    assert shortcuts["taken"] == 2
    assert torch.equal(leaves[0].grad, expected[2] * 2) and torch.equal(after[0], expected[3])


def test_anomaly_mode_names_the_call(known):
    inputs, dout, expected = known
    with torch.autograd.set_detect_anomaly(True):
        check(results(inputs, dout), expected)
        with pytest.raises(RuntimeError, match=r"Function '_Attention.*Backward' returned nan"):
            results(inputs, dout * torch.nan)


def test_inside_of_an_operator_of_somebody_elses(known):
    """Below autograd, whose gradients are that operator's own."""
    inputs, _, expected = known

    def compute(q, k, v):
        with torch.enable_grad():
            out = sagebwd.attention(q, k, v)
        assert out.grad_fn is None
        return out

    with torch._C._AutoDispatchBelowAutograd():
        assert torch.equal(compute(*inputs), expected[0])


def test_a_default_device_and_inference(known, shortcuts):  # noqa: F811
    inputs, _, expected = known
    with torch.device("meta"):  # a torch function mode
        assert torch.equal(sagebwd.attention(*inputs), expected[0])
    with torch.inference_mode():
        tensors = [t.detach() * 1 for t in inputs]
        assert tensors[0].is_inference()
        assert torch.equal(sagebwd.attention(*tensors), expected[0])
    assert torch.equal(sagebwd.attention(*tensors), expected[0])
    assert shortcuts["taken"] == 3


def test_a_key_that_nobody_has_heard_of_counts(known, shortcuts):  # noqa: F811
    inputs = known[0]
    for name in ("PrivateUse1", "TESTING_ONLY_GenericMode", "PreDispatch"):
        key = getattr(torch._C.DispatchKey, name, None)
        if key is not None:
            assert not direct._are_ordinary([torch._C.DispatchKeySet(key)]), name
    assert direct._are_ordinary([torch._C._dispatch_keys(inputs[0])])


@pytest.mark.parametrize("pack", [
    lambda t: t.float(), lambda t: t.half(), lambda t: t.to(torch.float8_e5m2),
    lambda t: t.float() if t.shape[1] == 2 else t, lambda t: t.bfloat16() if t.dim() == 3 else t,
    lambda t: t[:, :, :8].clone() if t.dim() == 3 else t, lambda t: t.to("meta"),
], ids=["float32", "float16", "float8", "keys alone", "lse alone", "a part of lse", "elsewhere"],
)  # fmt: skip
def test_hooks_may_not_bring_other_types_and_shapes_back(known, shortcuts, pack):  # noqa: F811
    """Kernels are told addresses, and would read beyond these tensors."""
    inputs, dout, _ = known
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = sagebwd.attention(*inputs)
    with pytest.raises(sagebwd.SpecError, match="must be|the kernels take"):
        out.backward(dout)
    assert shortcuts["taken"] == 2
