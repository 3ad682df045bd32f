"""Gradients of tensors that score functions index, on a simulated GPU, against FP64 by PyTorch's
autograd; and the sums alone."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402
from sagebwd.core import table_gradients  # noqa: E402
from sagebwd.masks import table_sums  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_intervals import made  # noqa: E402
from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mixed import errors, on_the_simulator  # noqa: E402, F401
from test_score import exact, offset  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_simulator")

TOKENS = 200  # as of test_score
AT = torch.arange(TOKENS)
BEHIND = AT[:, None] - AT[None]  # q - k


def table(*shape, around=0.0):
    return (around + 0.5 * drawn(*shape, seed=5, dtype=torch.float32)).requires_grad_()


def heads(t):
    return t[:, None, None]


#: By name: a text, its tensors, and what it does to scores of (batch, heads, queries, keys), all of
#: them in FP64.
CASES = {
    "distance": ("s + bias[h, k - q + 199]", {"bias": table(2, 399)},
                 lambda s, bias: s + bias[:, 199 - BEHIND]),
    "clamped": ("s + bias[h, min(max(q - k, -30), 30) + 30]", {"bias": table(2, 61)},
                lambda s, bias: s + bias[:, BEHIND.clamp(-30, 30) + 30]),
    "slopes": ("s - slope[h] * abs(q - k)", {"slope": table(2)},
               lambda s, slope: s - heads(slope * 1.0) * BEHIND.abs()),
    "temperature": ("s * t[h]", {"t": table(2, around=1.0)}, lambda s, t: s * heads(t)),
    "of keys": ("s + of[b, k]", {"of": table(2, TOKENS)}, lambda s, of: s + of[:, None, None]),
    "of all": ("s + of[q, k]", {"of": table(TOKENS, TOKENS)}, lambda s, of: s + of),
    "not affine": ("s + of[q * k % 7]", {"of": table(7)},
                   lambda s, of: s + of[AT[:, None] * AT % 7]),
    "beyond the ends": ("s + of[k - q]", {"of": table(50)},
                        lambda s, of: s + of[(-BEHIND).clamp(0, 49)]),
    "capped before": ("2.0 * tanh(s / 2.0) + bias[h, k - q + 199] / 3.0", {"bias": table(2, 399)},
                      lambda s, bias: 2 * torch.tanh(s / 2) + bias[:, 199 - BEHIND] / 3),
    "chosen": ("where(q > k, s - a[h], s * c[h] + a[0])",
               {"a": table(2), "c": table(2, around=1.0)},
               lambda s, a, c: torch.where(BEHIND > 0, s - heads(a), s * heads(c) + a[0])),
}  # fmt: skip


def compared(name, seen=None, of_lse=True, **given):
    """The relative errors of all gradients to those in FP64."""
    text, tables, change = CASES[name]
    q, k, v = offset()
    names = list(tables)
    found = sagebwd.attention(q, k, v, score=masks.trace_score(text, tables), return_lse=True,
                              **given)  # fmt: skip
    wide = {name: tables[name].detach().double().requires_grad_() for name in names}
    right = exact(q, k, v, lambda s: change(s, *wide.values()), seen)
    weights = drawn(*right[0].shape, seed=9, dtype=torch.float64)
    weight = drawn(*right[1].shape, seed=8, dtype=torch.float64) * of_lse
    both = []
    for (out, lse), of in ((found, tables), (right, wide)):
        total = (out.double() * weights).sum()
        total = total + (lse.double() * weight).sum() if of_lse else total
        both.append(torch.autograd.grad(total, (q, k, v, *of.values())))
    return errors(*both)


@pytest.mark.parametrize("name", CASES)
def test_against_fp64(name):
    of_q, of_k, of_v, *of_tables = compared(name)
    assert max(of_q, of_k, of_v) < 0.03
    assert max(of_tables) < 0.01


@pytest.mark.parametrize("scores", [1, 2 * 2 * 200 * 7])
def test_in_parts(scores, monkeypatch):
    monkeypatch.setattr(table_gradients, "SCORES", scores)
    for name in ("distance", "not affine"):
        assert max(compared(name)) < 0.03


class Largest(TorchDispatchMode):
    """`numbers` is how many the largest tensor has that PyTorch makes within."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_no_more_than_a_part_of_the_scores_is_there_at_a_time(monkeypatch):
    monkeypatch.setattr(table_gradients, "SCORES", 2000)
    q, k, v = (t.detach() for t in offset())
    bias = torch.zeros(2 * 399).view(torch.int32)
    with Largest() as largest:
        table_gradients._table_gradients(
            q, q, k, v, None, bias, [2, 399], None, "bhsd",
            "causal=none score=s+bias[h,k-q+199]", "bias")  # fmt: skip
    assert largest.numbers <= q.numel() < 2 * 2 * TOKENS * TOKENS


def test_beside_masks():
    document = AT // 70
    mask = masks.trace_mask("doc[q] == doc[k]", {"doc": document})
    together = document[:, None] == document[None]
    assert max(compared("distance", (BEHIND >= 0) & together, mask=mask, causal=True)) < 0.03
    assert max(compared("temperature", (BEHIND >= 0) & (BEHIND <= 50), window_left=50,
                        causal=True)) < 0.03  # fmt: skip
    assert max(compared("slopes", (BEHIND >= -9) & (BEHIND <= 50), window_left=50,
                        window_right=9)) < 0.03  # fmt: skip


def test_queries_that_see_nothing_add_nothing():
    q, k, v = offset()
    t = table(2)
    out = sagebwd.attention(q, k, v, mask="q >= 100", score=masks.trace_score("s * t[h]", {"t": t}))
    part = [q.detach()[:, :, 100:].contiguous(), k.detach(), v.detach()]
    other = sagebwd.attention(*part, score=masks.trace_score("s * t[h]", {"t": t}))
    weights = drawn(*out.shape, seed=9, dtype=torch.float32)
    found, = torch.autograd.grad((out.float() * weights).sum(), t)
    wanted, = torch.autograd.grad((other.float() * weights[:, :, 100:]).sum(), t)
    assert found.isfinite().all()
    assert errors([found], [wanted])[0] < 0.02


def test_layouts_precisions_and_other_dtypes():
    q, k, v = (t.detach() for t in offset())
    t = table(2, 399).detach().half().requires_grad_()
    score = masks.trace_score(CASES["distance"][0], {"bias": t})
    weights = drawn(*q.shape, seed=9, dtype=torch.float32)
    found = []
    for precision in ("six-of-seven", "gradients16"):
        out = sagebwd.attention(q, k, v, score=score, precision=precision)
        found += torch.autograd.grad((out.float() * weights).sum(), t)
        turned = (x.transpose(1, 2) for x in (q, k, v))
        out = sagebwd.attention(*turned, score=score, precision=precision, layout="bshd")
        found += torch.autograd.grad((out.transpose(1, 2).float() * weights).sum(), t)
    assert all(x.dtype == torch.float16 for x in found)
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    assert errors(found[2:3], found[:1])[0] < 0.02


def attend(q, k, v, t):
    return sagebwd.attention(q, k, v, causal=True, score=masks.trace_score("s * t[h]", {"t": t}))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_give_the_same_bits(reentrant):
    leaves = [*(t.detach().requires_grad_() for t in offset()), table(2)]
    wanted = torch.autograd.grad(attend(*leaves).sum(), leaves)
    checkpoint(attend, *leaves, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(x.grad, y) for x, y in zip(leaves, wanted))


def test_compiled_in_one_graph_it_gives_the_same_bits():
    leaves = [*offset(), table(2)]
    weight = torch.full((2,), 1.5)

    def layer(q, k, v):
        score = masks.trace_score("2.5 * tanh(s / 2.5) + t[h] * (k - q)", {"t": leaves[3] / 100})
        return sagebwd.attention(q, k, v, causal=True, score=score) * weight[0]

    wanted = torch.autograd.grad(layer(*leaves[:3]).sum(), leaves)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*leaves[:3]).sum(), leaves)
    assert all(torch.equal(*pair) for pair in zip(found, wanted))


def test_a_table_of_frozen_projections_trains_alone():
    q, k, v = (t.detach() for t in offset())
    t = table(2)
    attend(q, k, v, t).sum().backward()
    assert t.grad.abs().sum() > 0


def test_a_step_along_the_gradient_lowers_the_loss():
    q, k, v = (t.detach() for t in offset())
    target = attend(q, k, v, torch.tensor([2.0, 0.5])).float()
    t = torch.ones(2, requires_grad=True)
    losses = []
    for _ in range(8):
        loss = (attend(q, k, v, t).float() - target).square().mean()
        t.data -= 10 * torch.autograd.grad(loss, t)[0]
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("text, message", [
    ("tanh(s + t[h])", r"the score has tanh\(s \+ t\[h\]\), and a tensor in it requires grad"),
    ("s / t[h]", r"the score has s / t\[h\], and"),
    ("s * max(t[h], 0.5)", r"the score has max\(t\[h\], 0.5\), and")])  # fmt: skip
def test_tensors_within_functions_are_refused(text, message):
    q, k, v = made(70)
    score = masks.trace_score(text, {"t": table(2, around=1.0)})
    with pytest.raises(sagebwd.SpecError, match=message):
        sagebwd.attention(q, k, v, score=score)
    with torch.no_grad():
        sagebwd.attention(q, k, v, score=score)


def test_what_else_is_refused():
    q, k, v = made(70)
    t = table(2)
    out, lse = sagebwd.attention_forward(q, k, v, score=masks.trace_score("s * t[h]", {"t": t}))
    with pytest.raises(sagebwd.SpecError, match="attention_backward gives the gradients of q, k"):
        sagebwd.attention_backward(out, q, k, v, out, lse,
                                   score=masks.trace_score("s * t[h]", {"t": t}))  # fmt: skip
    gradient, = torch.autograd.grad(out.sum(), t, create_graph=True)
    with pytest.raises(NotImplementedError):
        torch.autograd.grad(gradient.sum(), t)


def test_sums_over_diagonals():
    x = torch.arange(12.0).view(1, 1, 3, 4)
    wanted = [x[0, 0].diagonal(d).sum() for d in range(-2, 4)]
    assert torch.equal(table_sums.diagonal_sums(x).flatten(), torch.stack(wanted))


def test_its_products_are_counted():
    q, k, v = offset()
    counts = []
    for t in (table(2), table(2).detach()):
        with FlopCounterMode(display=False) as counter:
            attend(q, k, v, t).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] - counts[1] == 2 * 2 * (2 * 2 * TOKENS * TOKENS) * 64  # of all, hidden or not


def test_the_operator_says_its_shapes():
    q, k, v = (t.detach() for t in offset())
    lse = drawn(2, 2, TOKENS, seed=8, dtype=torch.float32)
    tables, spec = torch.ones(2).view(torch.int32), "causal=none score=s*t[h]"
    given = (q, q, k, v, lse, tables, [1, 2], None, "bhsd", spec, "t")
    torch.library.opcheck(torch.ops.sagebwd.table_gradients.default, given,
                          test_utils=("test_schema", "test_faketensor"))  # fmt: skip
