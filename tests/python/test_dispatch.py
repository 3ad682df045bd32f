"""What PyTorch's dispatcher does for tensors and threads: calls of a known form still have it.

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

from sagebwd import direct  # noqa: E402

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


#: Before PyTorch 2.5 operators have no rules for vmap, which warns and calls them by turns.
HAS_RULES = hasattr(torch.library, "register_vmap")
OF_VMAP = pytest.mark.filterwarnings(
    f"{'error' if HAS_RULES else 'ignore'}:There is a performance drop"
)


@OF_VMAP
def test_vmap_and_grad_of_torch_func(known):
    inputs, dout, expected = known
    inputs = [t.detach() for t in inputs]

    def loss(q, k, v, dout):
        return (sagebwd.attention(q, k, v).float() * dout.float()).sum()

    found = torch.func.grad(loss, (0, 1, 2))(*inputs, dout)
    check((expected[0], None, *found), expected)
    both = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), (0, None, None, 0))
    q = torch.stack([inputs[0], inputs[0] * 2])
    found = both(q, *inputs[1:], torch.stack([dout, dout]))
    check((None, None, *(t[0] for t in found)), expected)
    check((None, None, *(t[1] for t in found)), explicit((q[1], *inputs[1:]), dout))
    out, pullback = torch.func.vjp(lambda *qkv: sagebwd.attention(*qkv), *inputs)
    check((out, None, *pullback(dout)), expected)
    (rows,) = torch.func.vmap(torch.func.vjp(lambda q: sagebwd.attention(q, *inputs[1:]),
                                             inputs[0])[1])(torch.stack([dout, 0 * dout]))
    assert torch.equal(rows[0], expected[2]) and not rows[1].any()


def test_torch_func_is_differentiated_further_out_and_once(known):
    inputs, dout, expected = known

    def loss(q):
        return (sagebwd.attention(q, *inputs[1:]).float() * dout.float()).sum()

    gradient, value = torch.func.grad_and_value(loss)(inputs[0])
    # Plain autograd outside of torch.func: of the value it is known, of the gradient refused.
    check((None, None, *torch.autograd.grad(value, inputs, retain_graph=True)), expected)
    for twice in (
        lambda: torch.autograd.grad(gradient.sum(), inputs[0]),
        lambda: torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(inputs[0].detach()),
    ):
        with pytest.raises(NotImplementedError, match="differentiated twice"):
            twice()


def test_the_emulation_refuses_torch_func(known):
    inputs = [t.detach() for t in known[0]]

    def loss(q):
        return sagebwd.emulation.emulated_attention(q, *inputs[1:]).sum()

    for transformed in (torch.func.grad(loss), torch.func.vjp):
        arguments = (loss, inputs[0]) if transformed is torch.func.vjp else inputs[:1]
        with pytest.raises(sagebwd.SpecError, match="no rules for torch.func's transforms"):
            transformed(*arguments)


@OF_VMAP
@pytest.mark.skipif(not HAS_RULES, reason="torch.library.register_vmap needs PyTorch 2.5")
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("places", [(0, 0, 0), (1, 2, 4), (0, None, None)], ids=str)
def test_vmap_of_the_operators(kernels_on_the_cpu, layout, places):  # noqa: F811
    """One call if all tensors have the mapped dimension, and else one for each element; every
    result is that of the element's own call."""
    generator = torch.Generator().manual_seed(3)
    shape = (2, 4, 24, 64) if layout == "bhsd" else (2, 24, 4, 64)
    each = [[torch.randn(shape, generator=generator).bfloat16() for _ in range(3)] for _ in "abc"]
    given = [each[0][i] if place is None else torch.stack([one[i] for one in each], place)
             for i, place in enumerate(places)]  # fmt: skip
    used = torch.tensor([[24, 9], [24, 24], [1, 7]]).int()
    mean = torch.randn(3, 2, 4, 64, generator=generator)

    def attend(q, k, v, used, mean):
        more = dict(causal="top-left", seqused_q=used, seqused_k=used, k_mean=mean)
        return sagebwd.attention(q, k, v, layout=layout, return_lse=True, **more)

    def launches():
        return sum(kernels.launches for kernels in kernels_on_the_cpu.values())

    before = launches()
    found = torch.func.vmap(attend, (*places, 0, 0))(*given, used, mean)
    assert launches() - before == (3 if None in places else 1)
    for i in range(3):
        own = [one if place is None else one.select(place, i).contiguous()
               for one, place in zip(given, places)]  # fmt: skip
        for x, y in zip(found, attend(*own, used[i], mean[i])):
            assert torch.equal(x[i], y)


@OF_VMAP
@pytest.mark.skipif(not HAS_RULES, reason="torch.library.register_vmap needs PyTorch 2.5")
def test_vmap_of_packed_sequences_of_vmap_and_of_nothing(known):
    inputs = [t.detach() for t in known[0]]
    firsts = torch.tensor([0, 10, 24]).int()

    def packed(q, k, v):
        return sagebwd.attention(q, k, v, cu_seqlens_q=firsts, cu_seqlens_k=firsts)

    q, k, v = (t.transpose(1, 2) for t in inputs)
    found = torch.func.vmap(packed)(q, k, v)
    for i in range(2):
        assert torch.equal(found[i], packed(q[i], k[i], v[i]))
    many = [torch.stack([torch.stack([t, 2 * t]), torch.stack([3 * t, 4 * t])]) for t in inputs]
    found = torch.func.vmap(torch.func.vmap(sagebwd.attention))(*many)
    for i in range(2):
        for j in range(2):
            assert torch.equal(found[i, j], sagebwd.attention(*(t[i, j] for t in many)))
    with pytest.raises(sagebwd.SpecError, match=r"q has rank 3 \(shape \(4, 24, 64\)\)"):
        torch.func.vmap(sagebwd.attention)(*inputs)


@OF_VMAP
def test_the_older_vmap(known):
    """is_grads_batched, and jacobian(vectorize=True), which use it."""
    inputs, dout, expected = known
    out = sagebwd.attention(*inputs)
    batched = torch.autograd.grad(out, inputs, torch.stack([dout, 0 * dout]), is_grads_batched=True)
    check((out, None, *(g[0] for g in batched)), expected)
    assert not any(g[1].any() for g in batched)

    def corner(q):
        return sagebwd.attention(q, *inputs[1:])[0, 0, :1, :2]

    found, wanted = (torch.autograd.functional.jacobian(corner, inputs[0], vectorize=vectorize)
                     for vectorize in (True, False))  # fmt: skip
    assert torch.equal(found, wanted)


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
