"""Calls with masks and score functions past the dispatcher, on a simulated GPU: when they are
taken, that the results are those of the operators, and that nothing of an earlier call stays."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402
from sagebwd.core import direct_masks  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_intervals import made  # noqa: E402
from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mixed import on_the_simulator  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("on_the_simulator", "taken")

TOKENS = 60
DOCUMENTS = torch.arange(2 * TOKENS, dtype=torch.int32).view(2, TOKENS) // 25
SLOPES = torch.tensor([0.05, 0.01])


def documents(of=DOCUMENTS):
    return masks.trace_mask("doc[b, q] == doc[b, k] & q >= k", {"doc": of})


def alibi(slopes=SLOPES):
    return masks.trace_score("s + slope[h] * float(k - q)", {"slope": slopes})


def intervals(numbers=(40, 20)):
    """Each sequence's queries from this number on do not see the first 20 keys."""
    found = torch.full((2, 1, TOKENS, 1), TOKENS, dtype=torch.int32)
    for of, number in zip(found, numbers):
        of[:, :20] = number
    return found


KINDS = {
    "intervals": lambda: dict(causal=True, startend_row_indices=intervals()),
    "intervals, score": lambda: dict(KINDS["intervals"](), score="s / 2.0"),
    "mask": lambda: dict(mask=documents()),
    "text": lambda: dict(mask="q >= k & q - k < 30"),
    "function": lambda: dict(mask=lambda b, h, q, k: q - k < 30, causal=True),
    "block mask": lambda: dict(mask=masks.block_mask(documents(), 2, 2, TOKENS, TOKENS)),
    "score": lambda: dict(score="20.0 * tanh(s / 20.0)"),
    "score of a tensor": lambda: dict(score=alibi(), causal=True),
    "mask, score": lambda: dict(mask=documents(), score=alibi()),
    "block mask, score": lambda: dict(
        mask=masks.block_mask("q >= k", 1, 1, TOKENS, TOKENS, device="cpu"), score=alibi()),
}  # fmt: skip


@pytest.fixture
def taken(monkeypatch):
    """Whether each call has passed the dispatcher."""
    calls = []

    def attention(*arguments, **keywords):
        found = shortcut(*arguments, **keywords)
        calls.append(found is not None)
        return found

    closure = dict(zip(sagebwd.attention.__code__.co_freevars, sagebwd.attention.__closure__))
    shortcut = closure["shortcut"].cell_contents
    monkeypatch.setattr(closure["shortcut"], "cell_contents", attention)
    monkeypatch.setattr(direct_masks, "_known", {})
    return calls


def by_operators(q, k, v, dout, **given):
    q, k, v = (t.detach() for t in (q, k, v))
    out, lse = sagebwd.attention_forward(q, k, v, **given)
    return out, lse, *sagebwd.attention_backward(dout, q, k, v, out, lse, **given)


def results(q, k, v, dout, **given):
    out, lse = sagebwd.attention(q, k, v, return_lse=True, **given)
    return out, lse, *torch.autograd.grad(out, (q, k, v), dout)


def inputs(layout="bhsd", **more):
    leaves = made(TOKENS, **more)
    dout = drawn(*leaves[0].shape, seed=9, dtype=leaves[0].dtype)
    if layout == "bshd":
        leaves = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in leaves]
        dout = dout.transpose(1, 2).contiguous()
    return *leaves, dout


def same(found, expected):
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind, layout", [*((kind, "bhsd") for kind in KINDS),
                                          ("intervals", "bshd"), ("mask, score", "bshd")])
def test_the_second_call_is_direct_and_has_the_same_bits(kind, layout, taken):
    given = {**KINDS[kind](), "layout": layout, "precision": "gradients16"}
    tensors = inputs(layout)
    expected = by_operators(*tensors, **given)
    taken.clear()
    for _ in range(2):
        assert same(results(*tensors, **given), expected)
    assert taken[-1]
    with torch.no_grad():
        assert torch.equal(sagebwd.attention(*tensors[:3], **given), expected[0])
    assert taken[-1]


def test_each_call_reads_its_tensors_anew(taken):
    q, k, v, _ = inputs()
    of_documents, slopes, hidden = DOCUMENTS.clone(), SLOPES.clone(), intervals()
    calls = [
        (lambda: dict(mask=documents(of_documents)), of_documents),
        (lambda: dict(score=alibi(slopes)), slopes),
        (lambda: dict(startend_row_indices=hidden, causal=True), hidden),
    ]
    for make, tensor in calls:
        given = make()
        found = [sagebwd.attention(q, k, v, **given) for _ in range(2)]
        assert taken[-1] and torch.equal(*found)
        with torch.no_grad():
            tensor.copy_(tensor.flip(0))
        changed = sagebwd.attention(q, k, v, **given)
        assert taken[-1] and not torch.equal(changed, found[0])
        assert torch.equal(changed, sagebwd.attention_forward(q, k, v, **make())[0])


def test_other_tensors_of_the_same_form_are_their_own(taken):
    tensors = inputs()
    for numbers in ((40, 20), (30, 60), (0, 0)):
        given = dict(causal=True, startend_row_indices=intervals(numbers))
        assert same(results(*tensors, **given), by_operators(*tensors, **given))
    assert taken[1:] == [True, True]
    for begin in (15, 25, 40):
        given = dict(mask=documents((torch.arange(TOKENS).expand(2, -1) // begin).int()))
        assert same(results(*tensors, **given), by_operators(*tensors, **given))


def test_what_a_function_reads_elsewhere_may_change(taken):
    q, k, v, _ = inputs()
    width = 5

    def sees(b, h, q, k):
        return (q >= k) & (q - k < width)

    for width in (5, 5, 30, 5, 30):
        found = sagebwd.attention(q, k, v, mask=sees)
        expected = sagebwd.attention_forward(q, k, v, mask=f"q >= k & q - k < {width}")[0]
        assert torch.equal(found, expected)
    assert taken[1] and taken[-1]


@pytest.mark.parametrize("numbers, made_of", [
    (intervals, lambda t: dict(startend_row_indices=t, causal=True)),
    (DOCUMENTS.clone, lambda t: dict(mask=documents(t))),
    (SLOPES.clone, lambda t: dict(score=alibi(t))),
])  # fmt: skip
def test_a_change_between_the_passes_is_refused(numbers, made_of, taken):
    q, k, v, dout = inputs()
    changed = numbers()
    given = made_of(changed)
    for _ in range(2):
        out = sagebwd.attention(q, k, v, **given)
    assert taken[-1]
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


@pytest.mark.parametrize("kind", ["intervals", "mask", "mask, score", "block mask", "score"])
def test_a_checkpoint_may_compute_again_what_the_operators_have(kind, taken):
    """It compares which tensors are saved, the first time by the operators."""
    *leaves, dout = inputs()
    given = KINDS[kind]()
    expected = by_operators(*leaves, dout, **given)[2:]

    def attend(*qkv):
        return sagebwd.attention(*qkv, **given)

    for _ in range(2):
        out = checkpoint(attend, *leaves, use_reentrant=False)
        assert same(torch.autograd.grad(out, leaves, dout), expected)


@pytest.mark.parametrize("kind", ["intervals", "mask", "mask, score", "block mask"])
@pytest.mark.parametrize("unpack", [
    torch.clone, lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    lambda t: t.mT.contiguous().mT if t.dim() > 1 else t], ids=["copies", "shifted", "turned"])
def test_hooks_may_bring_back_others(kind, unpack, taken):
    q, k, v, dout = inputs()
    given = KINDS[kind]()
    expected = results(q, k, v, dout, **given)

    def unpacked(t):
        return unpack(t) if t.dtype == torch.int32 else t

    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpacked):
            found = results(q, k, v, dout, **given)
        assert same(found, expected)
    assert taken[-1]


def test_intervals_anywhere_in_memory(taken):
    tensors = inputs()
    numbers = intervals()
    wide = torch.zeros(2, 1, TOKENS, 3, dtype=torch.int32)
    wide[..., 1:2] = numbers
    last = torch.full((2, 1, TOKENS), TOKENS - 1, dtype=torch.int32)
    four = torch.stack([*numbers.unbind(3), last], 3)
    shifted = torch.cat([torch.zeros(1, dtype=torch.int32), four.flatten()])[1:].view(four.shape)
    for given in (numbers, wide[..., 1:2], numbers[:1].expand(2, -1, -1, -1), four, shifted):
        call = dict(causal=True, startend_row_indices=given)
        expected = by_operators(*tensors, **call)
        for _ in range(2):
            assert same(results(*tensors, **call), expected)
        assert taken[-1]


def test_what_is_refused_stays_so(taken):
    q, k, v, _ = inputs()
    kept = masks.block_mask(documents(), 2, 2, TOKENS, TOKENS)
    for _ in range(2):
        sagebwd.attention(q, k, v, causal=True, startend_row_indices=intervals())
        sagebwd.attention(q, k, v, mask=kept)
        sagebwd.attention(q, k, v, mask=documents())
    assert all(taken[-3:])
    short, hidden = q[:, :, 1:], intervals()
    for given, error, message in (
        (dict(causal=True, startend_row_indices=hidden.long()), ValueError, "pass torch.int32"),
        (dict(causal=True, startend_row_indices=hidden.tolist()), TypeError, "is a list; pass"),
        (dict(causal=True, startend_row_indices=hidden[:, :, 1:]), ValueError, "these q and k"),
        (dict(causal=True, startend_row_indices=hidden, mask="q >= k"), ValueError, "together"),
        (dict(causal=True, startend_row_indices=hidden, score=alibi()), ValueError, "together"),
        (dict(startend_row_indices=intervals()), ValueError, "columns is not supported"),
        (dict(causal=1, startend_row_indices=intervals()), ValueError, "causal=1"),
        (dict(mask=documents(), window_left=3), ValueError, "window"),
        (dict(mask=documents(), k_mean=torch.zeros(2, 1, 64)), ValueError, "k_mean and mask"),
        (dict(mask=documents(), return_lse=1), ValueError, "return_lse=1"),
        (dict(mask="doc[b, q] == 1"), ValueError, "no tensor of that name is given"),
        (dict(mask="q + k"), ValueError, "a mask is a bool"),
        (dict(mask=documents(DOCUMENTS[:1, :9])), None, ""),
        (dict(mask=alibi()), TypeError, "mask is"),
        (dict(mask=7), TypeError, "mask is an int"),
        (dict(mask=lambda q, k: q >= k), TypeError, "this one has others"),
        (dict(score=masks.trace_score("s + doc[k]")), ValueError, "no tensor of that name"),
        (dict(mask=kept, causal=True, q=short), ValueError, "ambiguous"),
        (dict(mask=kept, q=short), ValueError, "a BlockMask for"),
        (dict(mask=kept, q=q[:1], k=k[:1], v=v[:1]), ValueError, "a BlockMask for"),
        (dict(mask=masks.block_mask(documents(), 2, 2, 139, 139)), ValueError, "a BlockMask for"),
    ):  # fmt: skip
        tensors = {name: given.pop(name, t) for name, t in (("q", q), ("k", k), ("v", v))}
        if error is None:
            sagebwd.attention(**tensors, **given)
            continue
        with pytest.raises(error, match=message):
            sagebwd.attention(**tensors, **given)


def test_tables_that_require_grad_get_one_after_calls_without(taken):
    q, k, v, dout = inputs()
    for _ in range(2):
        sagebwd.attention(q, k, v, score=alibi())
    assert taken[-1]
    slopes = SLOPES.clone().requires_grad_()
    out = sagebwd.attention(q, k, v, score=alibi(slopes))
    out.backward(dout)
    assert not taken[-1] and slopes.grad.abs().min() > 0
    with torch.no_grad():
        assert torch.equal(sagebwd.attention(q, k, v, score=alibi(slopes)), out)
    assert taken[-1]


@pytest.mark.parametrize("kind", ["intervals", "mask", "block mask", "score"])
def test_who_looks_on_sees_the_operators(kind, taken):
    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    q, k, v, dout = inputs()
    given, seen = KINDS[kind](), []
    for _ in range(2):
        expected = results(q, k, v, dout, **given)
    with Dispatch():
        assert same(results(q, k, v, dout, **given), expected)
    passes = [name.partition(".")[0].rpartition("_")[2] for name in seen]
    assert [name for name in passes if name in ("forward", "backward")] == ["forward", "backward"]
    out = sagebwd.attention(q, k, v, **given)
    assert taken[-1]
    seen.clear()
    with Dispatch():  # it comes later
        assert same(torch.autograd.grad(out, (q, k, v), dout), expected[2:])
    assert sum("backward" in name for name in seen) == 1


@pytest.mark.parametrize("kind", ["intervals", "mask", "block mask", "score of a tensor"])
def test_double_backward_is_refused(kind):
    q, k, v, _ = inputs()
    for _ in range(2):
        out = sagebwd.attention(q, k, v, **KINDS[kind]())
        gradient, = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="differentiated twice"):
            gradient.sum().backward()


@pytest.mark.parametrize("kind", ["mask", "score"])
def test_each_call_calls_a_function_once(kind, taken):
    """The first goes by the operators, and the second past them."""
    called = []

    def function(*at):
        called.append(kind)
        return at[2] >= at[3] if kind == "mask" else 0.5 * at[0]

    for _ in range(2):
        sagebwd.attention(*inputs()[:3], **{kind: function})
    assert taken == [False, True] and len(called) == 2


def test_forms_are_bounded(monkeypatch):
    monkeypatch.setattr(direct_masks.forms, "MOST_FORMS", 3)
    *tensors, _ = inputs()
    kept = []
    for first in range(8):  # forms of which one kernel computes all
        for _ in range(2):
            sagebwd.attention(*(t[:, :, first:] for t in tensors), mask="q >= k & q - k <= 7")
        kept.append(len(direct_masks._known))
    assert max(kept) == 3 and kept[-1] > 0


def test_a_first_call_in_inference_mode_leaves_nothing_that_autograd_refuses(taken):
    tensors = inputs()
    given = dict(mask="q >= k & q - k < 37")
    with torch.inference_mode():
        for _ in range(2):
            sagebwd.attention(*tensors[:3], **given)
    assert taken[-1] and same(results(*tensors, **given), by_operators(*tensors, **given))


#: In inference mode all of these make tensors that autograd does not save.
MADE = {
    "int32": lambda: dict(mask=documents(DOCUMENTS.clone())),
    "int64": lambda: dict(mask=documents(DOCUMENTS.long())),
    "floats": lambda: dict(score=alibi(SLOPES.clone()), causal=True),
    "intervals": KINDS["intervals"],
    "a view": lambda: dict(startend_row_indices=intervals().repeat(1, 1, 1, 3)[..., :1],
                           causal=True),
    "block mask": KINDS["block mask"],
}  # fmt: skip


@pytest.mark.parametrize("kind", MADE)
def test_what_inference_mode_has_made_trains(kind, taken):
    tensors = inputs()
    expected = by_operators(*tensors, **MADE[kind]())
    with torch.inference_mode():
        given = MADE[kind]()
    for _ in range(2):
        assert same(results(*tensors, **given), expected)
    with torch.inference_mode():
        assert torch.equal(sagebwd.attention(*tensors[:3], **given), expected[0])
    assert taken[-1]


@pytest.mark.parametrize("kind", ["intervals", "mask", "mask, score", "block mask", "text"])
def test_compiled_autograd_takes_the_operators(kind, taken):
    from torch._dynamo import compiled_autograd

    enable = getattr(compiled_autograd, "_enable", getattr(compiled_autograd, "enable", None))
    if enable is None:
        pytest.skip("needs compiled autograd")
    *leaves, dout = inputs()
    given = KINDS[kind]()
    for _ in range(2):
        expected = results(*leaves, dout, **given)[2:]
    out = sagebwd.attention(*leaves, **given)
    assert taken[-1]
    torch._dynamo.reset()
    with enable(torch.compile(backend="eager")):
        out.backward(dout)
    assert same([t.grad for t in leaves], expected)
