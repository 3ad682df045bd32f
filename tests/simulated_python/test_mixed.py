"""SLA2's attention as one operation of the kernels, on a simulated GPU, against FP64."""

import functools
import traceback
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd.core import direct, forms, watching  # noqa: E402
from sagebwd.core.arguments.tensors import DTYPES  # noqa: E402
from sagebwd.lists import block_sparse, list_ops  # noqa: E402
from sagebwd.nn import SparseLinearAttention  # noqa: E402
from sagebwd.sla import estimated_kernels, mixed, mixing  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_linear_branch import (  # noqa: E402
    ANYWHERE,
    HOOKS,
    drawn,
    inputs,
    kernels_for_lists,  # noqa: F401
    listed,
    under_hooks,
    with_gradients_anywhere,
)


@pytest.fixture(autouse=True)
def on_the_simulator(kernels_for_lists, monkeypatch):  # noqa: F811
    operation = forms.operation
    monkeypatch.setattr(forms, "operation", lambda device, *told, **of: operation(0, *told, **of))
    monkeypatch.setattr(forms, "stream_of", lambda device: 0)
    monkeypatch.setattr(estimated_kernels, "take", lambda q, *rest: q.dtype in DTYPES)
    for name in ("forward", "backward"):
        monkeypatch.setattr(estimated_kernels, name, getattr(estimated_kernels, f"_{name}"))
    calls = []
    for name in ("_forward", "_backward"):
        of_kernels = getattr(mixed, name)
        monkeypatch.setattr(mixed, name, lambda *given, name=name, run=of_kernels: (
            calls.append(name), run(*given))[1])  # fmt: skip
    return calls


def attend(q, k, v, alpha, **told):
    """By kernels, or, for FP64, by PyTorch's own products."""
    precision = "exact" if q.dtype == torch.float64 else "six-of-seven"
    return sagebwd.sparse_linear_attention(q, k, v, alpha=alpha, precision=precision, **told)


def errors(found, expected):
    """Relative L2; infinity for NaN, which max() would pass over."""
    return [float(((x.detach().double() - y.detach()).norm() / y.detach().norm()).nan_to_num(
        torch.inf, posinf=torch.inf)) for x, y in zip(found, expected)]  # fmt: skip


def both(leaves, dout, **told):
    """The output and all gradients, of the kernels and in FP64."""
    results = []
    for x in (leaves, [t.detach().double().requires_grad_() for t in leaves]):
        out = attend(*x, **told)
        results.append((out, *torch.autograd.grad(out, x, dout.to(out.dtype))))
    return results


FORMS_OF_ALPHA = {"head": (4,), "block": (4, 3), "query": (1, 4, 300), "sequence": (2, 1, 1),
                  "one": (1, 1, 1)}  # fmt: skip


# A form is an expansion of alpha in Python, and `linear` is the kernels'.
@pytest.mark.parametrize("form, linear", [
    ("head", "complement"), ("block", "all"), ("query", "complement"), ("sequence", "all"),
    ("one", "complement")])  # fmt: skip
def test_forms_of_alpha(on_the_simulator, form, linear):
    leaves, dout = inputs(torch.bfloat16, 64, keys=200)
    alpha = drawn(*FORMS_OF_ALPHA[form], seed=9, dtype=torch.float32).sigmoid()
    leaves.append(alpha.requires_grad_())
    found, exact = both(leaves, dout, block_mask=listed(2, 2, 3, 4), linear=linear)
    assert on_the_simulator == ["_forward", "_backward"]
    assert max(errors(found[:4], exact)) < 0.04
    assert found[4].shape == alpha.shape
    # A sum over many queries is far smaller than its terms, and so less exact than they are.
    assert errors(found[4:], exact[4:])[0] < (0.03 if form in ("query", "block") else 0.1)


@pytest.mark.parametrize("dtype, smooth_k, linear", [
    (torch.bfloat16, True, "complement"), (torch.float16, False, "all")])  # fmt: skip
def test_an_estimated_alpha(on_the_simulator, dtype, smooth_k, linear):
    """Its gradient reaches q and k through the listed keys' weights and through the estimate."""
    leaves, dout = inputs(dtype, 64, keys=200)
    leaves.append(drawn(4, seed=9, dtype=torch.float32).requires_grad_())
    results = []
    for x in (leaves, [t.detach().double().requires_grad_() for t in leaves]):
        out = attend(*x[:3], "estimated", beta=x[3], block_mask=listed(2, 2, 3, 4), linear=linear,
                     smooth_k=smooth_k)  # fmt: skip
        results.append((out, *torch.autograd.grad(out, x, dout.to(out.dtype))))
    assert on_the_simulator == ["_forward", "_backward"]
    assert max(errors(*results)[:4]) < 0.04 and errors(*results)[4] < 0.1


@pytest.mark.parametrize("channels, sizes, dtype", [
    (128, (128, 64), torch.bfloat16), (64, (64, 128), torch.float16),
])  # fmt: skip
def test_the_other_layout_and_sizes(on_the_simulator, channels, sizes, dtype):
    leaves, dout = inputs(dtype, channels, keys=200, batch=1)
    mask = listed(1, 4, -(-300 // sizes[0]), -(-200 // sizes[1]))
    told = dict(block_mask=mask, block_size=sizes)
    found, exact = both([*leaves, torch.full((4,), 0.4, requires_grad=True)], dout, **told)
    assert max(errors(found[:4], exact)) < 0.04
    turned = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in leaves]
    out = attend(*turned, 0.4, layout="bshd", **told)
    given = torch.autograd.grad(out, turned, dout.transpose(1, 2))
    for x, y in zip((out, *given), found):
        assert torch.equal(x.transpose(1, 2), y)


def test_without_a_share_it_is_linear_attention(on_the_simulator):
    leaves, dout = inputs(torch.bfloat16, 64)
    mask = listed(1, 1, 3, 6)
    mask[..., 1, 2:] = False  # no list has all blocks
    found, expected = both(leaves, dout, alpha=0.0, block_mask=mask)
    assert max(errors(found, expected)) < 0.01


def test_rows_of_lists_that_name_no_block_are_nan(on_the_simulator):
    leaves, _ = inputs(torch.bfloat16, 64)
    indices = torch.tensor([0, 3, 5]).expand(1, 1, 3, 3).clone()
    expected = attend(*leaves, 0.4, block_indices=indices)
    indices[..., 0, 1] = 6  # there are six
    out = attend(*leaves, 0.4, block_indices=indices)
    assert out[:, :, :128].isnan().all() and torch.equal(out[:, :, 128:], expected[:, :, 128:])

def told_alpha(alpha, q):
    """`attend` of q, k, v and what alpha learns, and that."""
    shape = (q.shape[1], 3) if alpha == "block" else (q.shape[1],)
    learned = drawn(*shape, seed=9, dtype=torch.float32)
    given = learned.sigmoid().requires_grad_()

    def call(q, k, v, learned, **told):
        if alpha == "estimated":
            return attend(q, k, v, alpha, beta=learned, **told)
        return attend(q, k, v, learned, **told)

    return call, given


EITHER = pytest.mark.parametrize("alpha", ["block", "estimated"])


@pytest.mark.parametrize("alpha, batch, heads_kv", [
    ("block", 1, 2), ("block", 2, 4), ("estimated", 2, 1), ("estimated", 1, 4)])  # fmt: skip
def test_parts_of_the_heads_give_the_same_bits(on_the_simulator, monkeypatch, alpha, batch,
                                               heads_kv):  # fmt: skip
    leaves, dout = inputs(torch.bfloat16, 64, 4, heads_kv, 301, 130, batch)
    call, learned = told_alpha(alpha, leaves[0])
    leaves.append(learned)
    mask, found = listed(1, heads_kv, 3, 3), []
    for least in (1 << 40, 1):
        monkeypatch.setattr(mixed, "LEAST_QUERIES", least)
        out = call(*leaves, block_mask=mask)
        found.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert all(torch.equal(x, y) and x.isfinite().all() and x.any() for x, y in zip(*found))


@pytest.mark.parametrize("alpha, least, hooks", [
    ("block", 1, "storages"), ("block", 1 << 40, "NumPy"), ("block", 1 << 40, "other strides"),
    ("estimated", 1 << 40, "storages"), ("estimated", 1, "other strides"),
    ("estimated", 1 << 40, "NumPy")])  # fmt: skip
def test_hooks_may_give_others(on_the_simulator, monkeypatch, alpha, least, hooks):
    monkeypatch.setattr(mixed, "LEAST_QUERIES", least)
    leaves, dout = inputs(torch.bfloat16, 64, queries=256, keys=130, batch=1)
    call, learned = told_alpha(alpha, leaves[0])
    function = functools.partial(call, block_mask=listed(1, 1, 2, 3), block_size=(128, 64))
    if alpha == "block":
        learned = learned.detach()[:, :2].requires_grad_()
    assert under_hooks(function, [*leaves, learned], dout, HOOKS[hooks])


@pytest.mark.parametrize("given", ANYWHERE)
def test_gradients_of_the_output_lie_anywhere(on_the_simulator, given):
    leaves, dout = inputs(torch.bfloat16, 64, 2, 1, keys=130)
    call, learned = told_alpha("estimated", leaves[0])
    function = functools.partial(call, block_mask=listed(1, 1, 3, 3))
    assert with_gradients_anywhere(function, [*leaves, learned], ANYWHERE[given](dout))


@EITHER
def test_a_checkpoint_and_kept_graphs_give_the_same_bits(on_the_simulator, alpha):
    leaves, dout = inputs(torch.bfloat16, 64, keys=130, batch=1)
    call, learned = told_alpha(alpha, leaves[0])
    leaves.append(learned)
    function = functools.partial(call, block_mask=listed(1, 1, 3, 3))
    out = function(*leaves)
    expected = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    again = torch.autograd.grad(out, leaves, dout)
    saved = torch.autograd.grad(checkpoint(function, *leaves, use_reentrant=False), leaves, dout)
    for x, y, z in zip(expected, again, saved):
        assert torch.equal(x, y) and torch.equal(x, z)


def test_the_gradient_of_beta_has_its_bits_where_alpha_is_nearly_one(on_the_simulator):
    """Scores have a standard deviation of 16, so the listed keys have nearly all the weight, and
    1 - alpha is nothing in FP32. The model is FP64 with the kernels' lse, sparse output and
    estimate, whose errors are not of interest here. Three queries make most of the sum, of which
    the output's rounding to bf16 is some hundredths."""
    q, k, v, dout = (drawn(1, 2, 512, 64, seed=s, dtype=torch.float32) for s in range(4))
    q, k, v, dout = (t.bfloat16() for t in (4 * q, 4 * k, v, dout))
    mask = sagebwd.top_blocks(sagebwd.pooled_block_scores(q, k), 0.34)
    beta = torch.zeros(2, requires_grad=True)
    out = attend(q, k, v, "estimated", beta=beta, block_mask=mask)
    (found,) = torch.autograd.grad(out, beta, dout)
    with torch.no_grad():
        rest = mixing.estimated_rest(q, k, mask, (128, 64), 0.125).double()
        bits = sagebwd.pack_blocks(mask)
        told = 1, True, False, 0.125, "bhsd", "sparse_q=128 sparse_kv=64 linear=complement"
        _, sparse, lse, _ = mixed._forward(q, k, v, bits, rest.float(), *told)
        linear = sagebwd.block_linear_attention(*(t.double() for t in (q, k, v)), block_mask=mask)
        d_alpha = (dout.double() * (sparse.double() - linear)).sum(-1)
        lse = lse.double()
        model = -(d_alpha * (lse - rest).sigmoid() * (rest - lse).sigmoid()).sum((0, 2))
    assert 0 < model.norm() < 1e-6
    assert (found - model).norm() < 0.05 * model.norm()


@pytest.mark.parametrize("options", [
    "linear=complement", "linear=all", "linear=complement smooth_k=no",
    "linear=complement precision=qk16 dp_sums=fp16"])  # fmt: skip
def test_compiled_code_knows_how_large_kept_sums_are(on_the_simulator, options):
    """The lengths lie about those where the parts of the keys' mean change in number and length."""
    text = f"sparse_q=128 sparse_kv=64 {options}"
    dtype = torch.float16 if "fp16" in options else torch.bfloat16
    with forms.kernels_of("mma"):  # of which all have dp_sums=fp16
        operation = forms.operation(0, text, head_dim=128, dtype=dtype)
    spec = list_ops.checked(text, head_dim=128, dtype=dtype)
    for keys in (1, 255, 256, 257, 2048, 4096, 4097, 5120, 5121, 33000):
        for problem in (1, 1, 1, 129, keys), (3, 6, 2, 128, keys):
            assert mixed.bytes_of_sums(spec, problem) == operation.kept_sums_bytes(problem)


def test_nothing_is_kept_without_a_backward(on_the_simulator, monkeypatch):
    (q, k, v), _ = inputs(torch.bfloat16, 64, keys=130, batch=1)
    sizes = []
    monkeypatch.setattr(mixed, "_forward", lambda *given, run=mixed._forward: (
        found := run(*given), sizes.append(found[3].numel()))[0])  # fmt: skip
    call = functools.partial(attend, alpha=0.4, block_mask=listed(1, 1, 3, 3))
    call(q, k, v)
    with torch.no_grad():
        call(q, k, v)
    call(*(t.detach() for t in (q, k, v)))
    assert sizes[0] > 0 and sizes[1:] == [0, 0]


def test_few_functions_lie_between_a_call_and_its_launch(on_the_simulator):
    """Six in three files, decorators apart; then the prepared pass, in C++ and in its binding."""
    package = Path(sagebwd.__file__).resolve().parent

    class Watcher:
        def forward_ran(self, form):
            stack = traceback.extract_stack()
            self.stops = [at for at in stack if package in Path(at.filename).resolve().parents]

    (q, k, v), _ = inputs(torch.bfloat16, 64, keys=200)
    alpha, mask = drawn(4, seed=9, dtype=torch.float32).sigmoid(), listed(2, 2, 3, 4)
    watching.add(watcher := Watcher())
    try:
        attend(q, k, v, alpha, block_mask=mask)
    finally:
        watching.remove(watcher)
    *stops, asks_watchers = (at for at in watcher.stops if at.name != "wrapper")
    assert asks_watchers.name == "forward_ran"
    assert [at.name for at in stops] == ["sparse_linear_attention", "mixture", "forward", "_forward",
                                         "forward", "forward"]  # fmt: skip
    assert len({at.filename for at in stops}) == 3


def test_it_is_differentiated_once(on_the_simulator):
    leaves, dout = inputs(torch.bfloat16, 64, keys=130, batch=1)
    alpha = torch.full((4,), 0.4, requires_grad=True)
    out = attend(*leaves, alpha, block_mask=listed(1, 1, 3, 3))
    (of_alpha,) = torch.autograd.grad(out, alpha, dout, create_graph=True)
    with pytest.raises(NotImplementedError):
        torch.autograd.grad(of_alpha.sum(), leaves)


class Operators(TorchDispatchMode):
    """The names of PyTorch's operators, allocations and views included."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(function.__name__)
        return function(*arguments, **(keywords or {}))


#: The most operators of a forward and a backward.
MOST = {"block": 66, "head": 64}


@pytest.mark.parametrize("alpha", MOST)
def test_a_trained_module_launches_few_operators(on_the_simulator, monkeypatch, alpha):
    """Each takes the host some microseconds, which are longer than the GPU's where calls are
    short. The stand-in for a GPU's memory adds two slices."""
    module = SparseLinearAttention(64, 2, density=0.3, seq_len=512, alpha=alpha).freeze_router()
    tensors = [drawn(1, 2, 512, 64, seed=s, dtype=torch.bfloat16) for s in range(4)]
    *leaves, dout = tensors
    packed = block_sparse._packed
    # The mode that counts would send calls by the operators.
    monkeypatch.setattr(direct, "is_watched", lambda *given: False)
    monkeypatch.setattr(block_sparse, "_packed", lambda *given: (
        on_the_simulator.append("_packed"), packed(*given))[1])  # fmt: skip
    for t in leaves:
        t.requires_grad_()
    for _ in range(2):  # in the first call forms are made
        on_the_simulator.clear()
        with Operators() as found:
            out = module(*leaves)
            torch.autograd.grad(out, [*leaves, module.alpha_logit], dout)
    assert len(found.names) <= MOST[alpha], sorted(found.names)
    assert on_the_simulator == ["_packed", "_forward", "_backward"]


def test_operators_refuse_what_does_not_belong_together(on_the_simulator):
    (q, k, v), dout = inputs(torch.bfloat16, 64)
    bits, alpha = torch.zeros(1, 1, 3, 1, dtype=torch.int32), torch.ones(1, 4, 3)
    spec = "sparse_q=128 sparse_kv=64 linear=complement"
    lse = torch.zeros(q.shape[:3])

    def backward(dout=dout, kept=None, lse=None, sums=None, tokens=128, layout="bhsd", spec=spec,
                 of_rest=False, keeps_sums=False):  # fmt: skip
        given = [t.detach() for t in (q, k, v)]
        return mixed._backward(dout, *given, kept, lse, sums, bits, alpha, tokens, of_rest,
                               keeps_sums, 0.1, layout, spec)  # fmt: skip

    for why, wrong in {
        "must be like q": dict(dout=dout[:, :, :100]), "torch.float32 of": dict(dout=dout.float()),
        "belong together": dict(kept=dout), "alpha_tokens=0": dict(tokens=0),
        "with of_rest both": dict(of_rest=True),
        "keeps_sums=True without kept": dict(keeps_sums=True),
        "pass keeps_sums=True": dict(sums=torch.ones(3, dtype=torch.uint8)),
        "what the forward gave": dict(kept=dout, lse=lse, keeps_sums=True),
        "204800 bytes on cpu": dict(kept=dout, lse=lse, keeps_sums=True, sums=bits),
        "no linear attention": dict(spec="sparse_q=128 sparse_kv=64"),
    }.items():  # fmt: skip
        with pytest.raises(sagebwd.SpecError, match=why):
            backward(**wrong)
    with pytest.raises(sagebwd.SpecError, match="has linear attention"):
        list_ops.forward(q.detach(), k.detach(), v.detach(), bits, 0.1, "bhsd", spec)
    plain = "linear=all sparse_q=128 sparse_kv=64 smooth_k=no"
    given = [t.detach() for t in (q, k, v)]
    _, *kept = mixed._forward(*given, bits, alpha, 128, False, False, 0.1, "bhsd", plain)
    again, given = backward(spec=plain), backward(dout, *kept, spec=plain)
    assert all(torch.equal(x, y) for x, y in zip(again, given))


def test_nothing_to_attend_to_gives_alpha_a_gradient(on_the_simulator):
    q, k, v = (torch.zeros(1, 2, n, 64, dtype=torch.bfloat16).requires_grad_() for n in (0, 70, 70))
    alpha = torch.full((2,), 0.4, requires_grad=True)
    out = attend(q, k, v, alpha, block_mask=torch.ones(1, 1, 0, 2, dtype=torch.bool))
    found = torch.autograd.grad(out, (q, k, v, alpha), torch.zeros_like(out))
    assert all(not t.any() for t in found) and found[3].shape == (2,)
