"""Norm and RoPE past the operators, on a simulated GPU: when that is taken, and that bits and errors
are the operators'."""

import contextlib
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import simulator_needed  # noqa: E402, F401

from test_front_kernels import kernels  # noqa: E402, F401

import sagebwd  # noqa: E402
from sagebwd.core import front_direct, front_kernels  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import front_inputs  # noqa: E402

BF16 = torch.bfloat16


class Ways:
    """Counts the passes that went by operators, and past them."""

    def __init__(self, by_operators):
        self._by_operators, self._direct = by_operators, []

    def took(self):
        """The numbers of both since this was asked last."""
        counts = len(self._by_operators), len(self._direct)
        self._by_operators.clear(), self._direct.clear()
        return counts


@pytest.fixture(autouse=True)
def ways(kernels, monkeypatch):  # noqa: F811
    made = Ways(kernels)
    monkeypatch.setattr(front_kernels, "may_run", lambda t: True)
    launch = front_direct.Form._launch
    monkeypatch.setattr(front_direct.Form, "_launch", lambda *given: (
        made._direct.append(1), launch(*given)))  # fmt: skip
    front_direct._known.clear()
    yield made
    front_direct._known.clear()


@contextlib.contextmanager
def by_operators():
    """Within it every call is checked, and goes by the operators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front_direct, "key_of", lambda *given: None)
        yield


def given_of(name="shared gains", dtype=BF16, **of):
    return front_inputs.calls(dtype=dtype)[name], *front_inputs.inputs(dtype, **of)


def passes(given, q, k, layout="bhsd", function=sagebwd.qk_norm_rope):
    """Results and all gradients."""
    weights = front_inputs.weights_like(q, k, q.dtype)
    found, gradients = front_inputs.with_gradients(
        lambda q, k, **of: function(q, k, layout=layout, **of), q, k, given, weights)  # fmt: skip
    return *found, *gradients


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted):
        assert x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x, y)


@pytest.mark.parametrize("name", front_inputs.NAMES)
@pytest.mark.parametrize("of", [{}, dict(layout="bshd"), dict(slices=True)], ids=str)
def test_the_second_call_is_direct_and_has_the_same_bits(ways, name, of):
    layout = of.get("layout", "bhsd")
    given, q, k = given_of(name, **of)
    first = passes(given, q, k, layout)
    assert ways.took() == (2, 0)
    for _ in range(2):
        assert_same(passes(given, q, k, layout), first)
        assert ways.took() == (0, 2)
    with torch.no_grad():
        assert_same(sagebwd.qk_norm_rope(q, k, layout=layout, **given), first[:2])
    with torch.inference_mode():
        assert_same(sagebwd.qk_norm_rope(q, k, layout=layout, **given), first[:2])
    assert ways.took() == (0, 2)


@pytest.mark.parametrize("shape", [(64,), (4, 64)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
def test_gains_of_each_type(ways, dtype, shape):
    given, q, k = given_of()
    given |= dict(q_norm=(1 + 0.3 * front_inputs.drawn(*shape)).to(dtype), k_norm=True)
    first = passes(given, q, k)
    assert_same(passes(given, q, k), first)
    assert ways.took() == (2, 2) and first[-1].dtype == dtype


@pytest.mark.parametrize("of_both", [False, True])
@pytest.mark.parametrize("change", [
    lambda t: t[:, :32].bfloat16(),
    lambda t: t[:, :32].double(),
    lambda t: t.bfloat16()[:, :32],
    lambda t: t[:, ::2],
    lambda t: t[None, :, :12],
    lambda t: t[:, :6],
    lambda t: t[0, :32].expand(t.shape[0], 32),
    lambda t: torch.stack([t, -t])[..., 1:31].half(),
], ids=["bf16", "fp64", "a bf16 part", "every second", "a row of 12", "6 pairs", "one row",
        "of each sequence"])  # fmt: skip
def test_tables_are_made_fit(ways, change, of_both):
    """They are cast, or copied where kernels cannot read their rows. One may serve both."""
    q, k = front_inputs.inputs(BF16)
    k = k[:, :, :37] if of_both else k
    rope = [tuple(map(change, front_inputs.table(tokens, 64))) for tokens in (37, 50)]
    given = dict(k_norm=True, rope=rope[0], rope_style="interleaved")
    given |= {} if of_both else dict(rope_k=rope[1])
    first = passes(given, q, k)
    assert ways.took() == (2, 0)
    for _ in range(2):
        assert_same(passes(given, q, k), first)
    assert ways.took() == (0, 4)


@pytest.mark.parametrize("shared", ["q and k", "gain", "16-bit gain", "inv_rms"])
def test_one_tensor_in_two_places(ways, shared):
    def call():
        x = front_inputs.inputs(BF16)[0].detach().requires_grad_()
        gain = torch.linspace(0.5, 1.5, 64, dtype=BF16 if "16" in shared else None)
        inv_rms = 1 + 0.1 * front_inputs.drawn(2, 37)
        leaves = [t.requires_grad_() for t in (x, gain, inv_rms)]
        key = x if shared == "q and k" else x.detach()
        more = dict(q_inv_rms=inv_rms, k_inv_rms=inv_rms) if shared == "inv_rms" else {}
        found = sagebwd.qk_norm_rope(x, key, q_norm=gain, k_norm=gain, **more,
                                     rope=front_inputs.table(37, 32))  # fmt: skip
        loss = sum((y.float() * w).sum() for y, w in zip(found, (1.0, 2.0)))
        return *found, *(g for g in torch.autograd.grad(loss, leaves, allow_unused=True)
                         if g is not None)  # fmt: skip

    first = call()
    assert_same(call(), first)
    assert ways.took() == (2, 2)


@pytest.mark.parametrize("wanted", range(1, 64))
def test_any_subset_of_gradients(ways, wanted):
    given, q, k = given_of("given")
    given["k_norm"] = torch.linspace(0.5, 1.5, 64)
    names = "q_norm", "k_norm", "q_inv_rms", "k_inv_rms"

    def call():
        leaves = [t.detach().requires_grad_(bool(wanted >> i & 1))
                  for i, t in enumerate((q, k, *(given[name] for name in names)))]  # fmt: skip
        found = sagebwd.qk_norm_rope(*leaves[:2], **given | dict(zip(names, leaves[2:])))
        loss = sum((y.float() * y.float()).sum() for y in found)
        learned = [t for t in leaves if t.requires_grad]
        gradients = torch.autograd.grad(loss, learned, allow_unused=True)
        return [y.requires_grad for y in found], gradients

    require, first = call()
    for again, found in (call(), call()):
        assert again == require
        assert_same(found, first)
    assert ways.took() == (2, 4)


def test_gradients_of_any_strides_and_of_one_result(ways):
    given, q, k = given_of()
    for weigh in (
        lambda y: y.sum(),
        lambda y: y.mT.contiguous().mT.square().sum(),
        lambda y: torch.nn.functional.pad(y, (4, 3)).square().sum(),
        lambda y: torch.nn.functional.pad(y, (1, 0))[..., :-1].float().sin().sum(),
    ):
        for which in (0, 1):
            leaves = [t.detach().requires_grad_() for t in (q, k)]

            def gradients(leaves=leaves, which=which, weigh=weigh):
                found = sagebwd.qk_norm_rope(*leaves, **given)
                return torch.autograd.grad(weigh(found[which]), leaves)

            with by_operators():
                wanted = gradients()
            gradients()
            ways.took()
            assert_same(gradients(), wanted)
            assert ways.took() == (0, 2)


# ---- errors --------------------------------------------------------------------------------------

QUERIES = front_inputs.table(37, 32)
WRONG = [
    dict(q_norm=torch.ones(63)), dict(k_norm=torch.ones(4, 64)), dict(q_norm=False),
    dict(q_norm=1), dict(q_norm=torch.ones(64, dtype=torch.int32)), dict(q_norm=[1.0]),
    dict(q_inv_rms=torch.ones(2, 38)), dict(q_inv_rms=2.0), dict(norm_eps=-1),
    dict(norm_eps=True), dict(norm_eps="1"), dict(norm_eps=[1]), dict(rope_style="neox"),
    dict(rope_style=["halves"]), dict(rope_begin=-1), dict(rope_begin="1"), dict(rope_begin=True),
    dict(rope_begin=2.0), dict(rope_begin=False), dict(rope=None), dict(rope=QUERIES[0]), dict(rope=(QUERIES[0],)),
    dict(rope=QUERIES, rope_k=None), dict(rope=(QUERIES[0], QUERIES[1][:, :16])),
    dict(rope=(QUERIES[0].clone().requires_grad_(), QUERIES[1])),
    dict(rope=tuple(t[:, :16] for t in QUERIES)), dict(rope_k=QUERIES), dict(layout="sbhd"),
    dict(layout="bshd"), dict(q=torch.ones(2, 3, 37, 64).bfloat16()),
    dict(k=torch.ones(2, 2, 50, 64)), dict(k=torch.ones(2, 2, 50, 32).bfloat16()),
    dict(k=torch.ones(2, 50, 64).bfloat16()), dict(q=3), dict(eps=1e-6),
    dict(q=torch.ones(2, 4, 37, 64).bfloat16().to_sparse()),
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG, ids=lambda change: ", ".join(change))
def test_errors_are_the_same(ways, change):
    given, q, k = given_of()

    def error():
        with pytest.raises(Exception) as raised:
            sagebwd.qk_norm_rope(**{**given, "q": q, "k": k, **change})
        return type(raised.value), str(raised.value)

    first = error()
    assert issubclass(first[0], (TypeError, ValueError, RuntimeError))
    ways.took()
    for _ in range(2):
        sagebwd.qk_norm_rope(q, k, **given)
    assert ways.took() == (1, 1)
    assert error() == first == error()


def test_what_changes_between_calls_is_seen(ways):
    given, q, k = given_of()
    for _ in range(2):
        passes(given, q, k)
    assert ways.took() == (2, 2)
    cos, sin = given["rope"]
    with pytest.raises(sagebwd.SpecError, match="tables get no gradient"):
        sagebwd.qk_norm_rope(q, k, **given | dict(rope=(cos.clone().requires_grad_(), sin)))
    with torch.no_grad():
        learned = dict(rope=(cos.clone().requires_grad_(), sin))
        found = sagebwd.qk_norm_rope(q, k, **given | learned)
    assert not any(y.requires_grad for y in found) and ways.took() == (0, 1)
    for change in (
        dict(q_norm=given["q_norm"].bfloat16()), dict(q_norm=given["q_norm"].double()),
        dict(norm_eps=1e-3), dict(q_norm=torch.ones(128)[::2]), dict(rope_style="interleaved"),
        dict(rope=tuple(torch.nn.functional.pad(t, (4, 4))[:, 4:-4] for t in (cos, sin))),
        dict(rope=tuple(t.bfloat16() for t in (cos, sin))),
        dict(rope=(cos, torch.nn.functional.pad(sin, (0, 4))[:, :-4])),
        dict(rope=tuple(t.expand(2, 37, 32).contiguous() for t in (cos, sin))),
        dict(rope=(torch.stack([cos, -cos]), sin[None])), dict(rope=(cos, torch.stack([sin, -sin]))),
    ):  # fmt: skip
        with by_operators():
            wanted = passes(given | change, q, k)
        for _ in range(2):
            assert_same(passes(given | change, q, k), wanted)
    ways.took()
    wide = torch.nn.functional.pad(q, (8, 8))[..., 8:-8]
    with by_operators():
        wanted = passes(given, q, k)
    ways.took()
    for _ in range(2):
        assert_same(sagebwd.qk_norm_rope(wide, k, **given), wanted[:2])
    assert ways.took() == (1, 1)


@pytest.mark.parametrize("which", range(6))
def test_an_address_that_no_kernel_reads_is_copied(ways, which):
    given, q, k = given_of("given")
    names = "q_norm", "q_inv_rms"
    tensors = [q, k, *(given[name] for name in names), *given["rope"]]
    made = []
    for t in (tensors, [t if i != which else torch.cat([t.flatten()[:1], t.flatten()])[1:].view(
            t.shape) for i, t in enumerate(tensors)]):  # fmt: skip
        assert t[which].data_ptr() % 16 == 0 or len(made) == 2
        for _ in range(2):
            more = dict(zip(names, t[2:4])) | dict(rope=tuple(t[4:]))
            made.append(sagebwd.qk_norm_rope(*t[:2], **given | more))
    assert ways.took() == (3, 1)
    for found in made[1:]:
        assert_same(found, made[0])


# ---- saved tensors -------------------------------------------------------------------------------


@pytest.mark.parametrize("back, direct", [
    (lambda t: t.clone(), True),
    (lambda t: t.mT.contiguous().mT if t.dim() == 4 else t, False),
    (lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape), False),
], ids=["a copy", "other strides", "another place"])  # fmt: skip
def test_hooks_may_bring_back_copies(ways, back, direct):
    given, q, k = given_of("interleaved")
    wanted = [passes(given, q, k) for _ in range(2)][1]
    ways.took()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), back):
        assert_same(passes(given, q, k), wanted)
    assert ways.took() == ((0, 2) if direct else (1, 1))


@pytest.mark.parametrize("back", [
    lambda t: t.half() if t.shape[:2] == (2, 2) else t,
    lambda t: t[:40] if t.dim() == 1 else t,
    lambda t: t[:8] if t.shape == (37, 32) else t,
    lambda t: t[:, :, :9] if t.dim() == 4 else t,
], ids=["k", "gain", "table", "fewer tokens"])  # fmt: skip
def test_hooks_that_bring_back_other_tensors_are_refused(ways, back):
    q, k = (t.requires_grad_() for t in front_inputs.inputs(BF16))
    gain = torch.ones(64, dtype=BF16, requires_grad=True)
    given = dict(q_norm=gain, rope=QUERIES, rope_k=front_inputs.table(50, 32))
    sagebwd.qk_norm_rope(q, k, **given)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), back):
        found = sagebwd.qk_norm_rope(q, k, **given)
    assert ways.took() == (1, 1)
    with pytest.raises(sagebwd.SpecError, match="bring back what it was given"):
        torch.autograd.grad(found[0].sum(), (q, gain))


def test_a_change_in_place_is_seen_where_the_operators_see_it(ways):
    for dtype, fails in ((torch.float32, True), (BF16, False)):
        for _ in range(2):
            gain = torch.ones(64, dtype=dtype, requires_grad=True)
            found = sagebwd.qk_norm_rope(*front_inputs.inputs(BF16), q_norm=gain)
            with torch.no_grad():
                gain.add_(1)
            raises = pytest.raises(RuntimeError, match="modified by an inplace operation")
            with raises if fails else contextlib.nullcontext():
                found[0].sum().backward()


def test_a_checkpoint_gives_the_same_bits(ways):
    given, q, k = given_of()
    wanted = [passes(given, q, k) for _ in range(2)][1]
    ways.took()

    def checkpointed(q, k, **more):
        return torch.utils.checkpoint.checkpoint(sagebwd.qk_norm_rope, q, k, use_reentrant=False,
                                                 **more)  # fmt: skip

    assert_same(passes(given, q, k, function=checkpointed), wanted)
    assert ways.took() == (0, 3)
