"""Intervals of hidden queries per key without kernels: in FP64, emulated, traced and monitored.

The masks are those that loops write from the numbers (interval_cases.py).
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from interval_cases import NUMBERS, numbers_of, seen_by  # noqa: E402
from test_emulation import NAMES, assert_same  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import masks, reference  # noqa: E402
from sagebwd.core import watching  # noqa: E402
from sagebwd.numerics import emulation, numerics  # noqa: E402
from sagebwd.numerics.exact import exact_attention  # noqa: E402
from sagebwd.numerics.tracing import TENSORS, _trace_torch  # noqa: E402

N = 150
HEADS, HEADS_KV, BATCH = 4, 2, 2


def arrays(n=N, seed=0):
    return reference.random_inputs(n, head_dim=64, heads=HEADS, heads_kv=HEADS_KV, batch=BATCH,
                                   seed=seed)  # fmt: skip


def naive(q, k, v, dout, seen, dlse=0.0):
    """{name: array} in FP64; 0 and -inf for queries that see nothing."""
    leaves = [torch.from_numpy(x).double().requires_grad_() for x in (q, k, v)]
    keys, values = (t.repeat_interleave(HEADS // HEADS_KV, 1) for t in leaves[1:])
    scores = (leaves[0] @ keys.mT / 8).masked_fill(~seen, -torch.inf)
    out, lse = scores.softmax(-1).nan_to_num(0) @ values, scores.logsumexp(-1)
    finite = lse.where(lse > -torch.inf, 0)
    loss = (out * torch.from_numpy(dout)).sum() + (finite * torch.as_tensor(dlse)).sum()
    return dict(zip(NAMES, (out, lse, *torch.autograd.grad(loss, leaves))))


def told(columns, causal, batch=BATCH, heads=HEADS_KV, n=N):
    numbers = numbers_of(columns, causal, batch, heads, n)
    return dict(causal=causal, startend_row_indices=numbers), seen_by(numbers, causal, HEADS, n)


@pytest.mark.parametrize("columns, causal", NUMBERS)
@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_exact_results(columns, causal, batch, heads):
    q, k, v, dout = arrays()
    dlse = np.random.default_rng(1).standard_normal((BATCH, HEADS, N)).astype(np.float32)
    given, seen = told(columns, causal, batch, heads)
    expected = naive(q, k, v, dout, seen, dlse)
    found = reference.exact(q, k, v, dout, dlse=dlse, **given)
    tensors = [torch.from_numpy(x) for x in (q, k, v, dout)]
    of_torch = exact_attention(*tensors, dlse=torch.from_numpy(dlse), **given)
    for name in NAMES:
        np.testing.assert_allclose(found[name], expected[name].detach(), atol=2e-6)
        np.testing.assert_allclose(getattr(of_torch, name), expected[name].detach(), atol=2e-6)


@pytest.mark.parametrize("columns, causal", NUMBERS)
@pytest.mark.parametrize("options", [{}, {"granularity": "block"}, {"precision": "gradients16"},
                                     {"precision": "qk16", "smooth_k": False}], ids=str)  # fmt: skip
@pytest.mark.parametrize("heads", [1, 2])
def test_the_emulation_equals_the_reference(columns, causal, options, heads):
    inputs = [reference.round_to(x, "bf16") for x in arrays()]
    given, _ = told(columns, causal, heads=heads)
    expected = reference.emulate(*inputs, **given, **options)
    q, k, v, dout = (torch.from_numpy(x).bfloat16() for x in inputs)
    width, hidden = emulation.intervals_of(given["startend_row_indices"], q, k)
    rules = emulation.emulation_rules(q, k, v, causal=causal, intervals=width, **options)
    q, k, v, dout, hidden = emulation.grouped(HEADS_KV, q, k, v, dout, hidden)
    out, lse, _ = numerics.forward_chunk(q, k, v, rules, listed=hidden)
    gradients = numerics.backward_chunk(q, k, v, out, lse, dout, None, rules, listed=hidden)
    assert_same({name: t.unflatten(0, (BATCH, HEADS_KV)).flatten(1, 2)
                 for name, t in zip(NAMES, (out, lse, *gradients))}, expected)  # fmt: skip


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("columns, causal", NUMBERS)
def test_emulated_attention_and_its_passes(columns, causal, layout):
    given, seen = told(columns, causal)
    inputs = arrays()
    expected = naive(*inputs, seen)
    tensors = (torch.from_numpy(x).bfloat16() for x in inputs)
    q, k, v, dout = emulation.swapped(layout, *tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = emulation.emulated_attention(*leaves, layout=layout, return_lse=True, **given)
    found = out, *torch.autograd.grad(out, leaves, dout)
    parts = emulation.emulated_forward(q, k, v, layout=layout, **given)
    gradients = emulation.emulated_backward(dout, q, k, v, *parts, layout=layout, **given)
    assert all(map(torch.equal, (out, lse, *found[1:]), (*parts, *gradients)))
    for x, name in zip(emulation.swapped(layout, *found), ("out", "dq", "dk", "dv")):
        assert (x.double() - expected[name]).norm() < 0.03 * expected[name].norm(), name
    assert torch.equal(lse > -torch.inf, seen.any(-1))
    assert not emulation.swapped(layout, out)[0][~seen.any(-1)].any()


@pytest.mark.parametrize("columns, causal", NUMBERS)
def test_traces(columns, causal):
    inputs = [reference.round_to(x, "bf16") for x in arrays()]
    given, _ = told(columns, causal)
    table = sagebwd.trace(*inputs, **given)
    exact, emulated = (f(*inputs, **given) for f in (reference.exact, reference.emulate))
    for name, key in (("O", "out"), ("dQ", "dq"), ("dK", "dk"), ("dV", "dv")):
        error = np.linalg.norm(emulated[key] - exact[key]) / np.linalg.norm(exact[key])
        assert table[name]["rel_l2"] == pytest.approx(error, rel=1e-3), name
    as_array = {**given, "startend_row_indices": given["startend_row_indices"].numpy()}
    assert sagebwd.trace(*inputs, **as_array) == table
    chosen = sagebwd.Spec(head_dim=64, causal=causal and "top-left", intervals=columns)
    chosen = {name: getattr(chosen, name) for name in ("causal", "granularity", "smooth_k",
                                                       "rotate", "precision")}  # fmt: skip
    of_torch = _trace_torch([torch.from_numpy(x) for x in inputs], "cpu", "bf16", None,
                            chosen, {}, as_array["startend_row_indices"])  # fmt: skip
    for name in TENSORS:
        assert of_torch[name]["rel_l2"] == pytest.approx(table[name]["rel_l2"], rel=5e-3), name


@pytest.mark.parametrize("columns, causal", NUMBERS)
@pytest.mark.parametrize("memory", [1 << 28, 1 << 15], ids=["at once", "in steps"])
@pytest.mark.filterwarnings("error::sagebwd.MonitorWarning")
def test_monitors(columns, causal, memory):
    given, seen = told(columns, causal)
    inputs = [reference.round_to(x, "bf16") for x in arrays()]
    expected = naive(*inputs, seen)
    q, k, v, dout = (torch.from_numpy(x).bfloat16() for x in inputs)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with sagebwd.Monitor(every=1, memory=memory) as monitor:
        for _ in range(4):
            out = emulation.emulated_attention(*leaves, **given)
            found = dict(zip(("out", "dq", "dk", "dv"),
                             (out.detach(), *torch.autograd.grad(out, leaves, dout))))  # fmt: skip
    assert not watching.watchers and len(monitor.records) == 4
    assert len({(r["sequence"], r["head"]) for r in monitor.records}) > 1
    for record in monitor.records:
        b, head = record["sequence"], record["head"]
        at = {"out": slice(head, head + 2), "dq": slice(head, head + 2)}
        for name, key in (("O", "out"), ("dQ", "dq"), ("dK", "dk"), ("dV", "dv")):
            of_head = at.get(key, slice(head // 2, head // 2 + 1))
            right = expected[key][b, of_head].detach()
            error = (found[key][b, of_head].double() - right).norm() / right.norm()
            assert record[name] == pytest.approx(float(error), rel=2e-3), name
        assert 0.002 < record["dS"] < 0.05


def test_one_monitor_measures_calls_with_intervals_and_without():
    given, _ = told(2, False)
    q, k, v, dout = (torch.from_numpy(x).bfloat16().requires_grad_() for x in arrays())
    with sagebwd.Monitor(every=1) as monitor:
        for more in (given, {}):
            emulation.emulated_attention(q, k, v, **more).backward(dout)
    assert [r["O"] < 0.03 for r in monitor.records] == [True, True]


# ---- what is refused -----------------------------------------------------------------------------

DOCUMENTS = masks.documents(lengths=[50, 100], causal=False).startend_row_indices
WRONG = {
    "is int64 of": dict(startend_row_indices=DOCUMENTS.long()),
    r"int32 of \(1, 1, 100, 2\); for these q and k it is int32 of \(2 or 1, 2 or 1, 150, columns":
        dict(startend_row_indices=DOCUMENTS[:, :, :100]),
    r"int32 of \(1, 150, 2\); .*with 1, 2 or 4 columns": dict(startend_row_indices=DOCUMENTS[0]),
    r"\(1, 1, 150, 0\)": dict(startend_row_indices=DOCUMENTS[..., :0]),
    "startend_row_indices of 1 columns is not supported without a causal mask: a key has 2 or 4":
        dict(startend_row_indices=DOCUMENTS[..., :1]),
    "with a window.*window_and_global": dict(startend_row_indices=DOCUMENTS, window_left=5),
    "sink_keys = 1 is not supported": dict(startend_row_indices=DOCUMENTS, sink_keys=1),
}  # fmt: skip


FUNCTIONS = sagebwd.trace, reference.emulate, emulation.emulated_attention, reference.exact


@pytest.mark.parametrize("function, message", [
    (function, message) for function in FUNCTIONS for message, given in WRONG.items()
    if function is not reference.exact or "sink_keys" not in given])  # fmt: skip
def test_wrong_intervals(function, message):
    given = WRONG[message]
    inputs = [torch.from_numpy(x).bfloat16() for x in arrays()]
    if function is emulation.emulated_attention:
        inputs.pop()
    with pytest.raises(sagebwd.SpecError, match=message):
        function(*inputs, **given)
    with pytest.raises(TypeError, match="startend_row_indices is a list; pass an int32 array"):
        function(*inputs, startend_row_indices=[1])


def test_what_does_not_go_together():
    *inputs, dout = (torch.from_numpy(x).bfloat16() for x in arrays())
    lists = dict(block_mask=torch.ones(1, 1, 2, 3, dtype=torch.bool))
    for function in (sagebwd.trace, reference.emulate, reference.exact):
        with pytest.raises(sagebwd.SpecError, match="block_mask and startend_row_indices are"):
            function(*inputs, dout, startend_row_indices=DOCUMENTS, **lists)
    for given in (dict(seqused_k=torch.tensor([9, 9])), dict(k_mean=torch.zeros(2, 2, 64))):
        with pytest.raises(sagebwd.SpecError, match=f"{[*given][0]} and startend_row_indices are"):
            emulation.emulated_attention(*inputs, startend_row_indices=DOCUMENTS, **given)
    with pytest.raises(sagebwd.SpecError, match="is on meta and q on cpu: move it"):
        emulation.emulated_attention(*inputs, startend_row_indices=DOCUMENTS.to("meta"))
    with pytest.raises(TypeError, match="startend_row_indices is an? .*ndarray; pass a torch"):
        emulation.emulated_attention(*inputs, startend_row_indices=DOCUMENTS.numpy())
