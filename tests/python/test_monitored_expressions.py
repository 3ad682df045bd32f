"""sagebwd.Monitor on calls with masks and score functions that are expressions, of the emulation.

FP64 is PyTorch's autograd on dense masks and scores (test_emulated_expressions.py); the kernels on
a simulated GPU are in tests/simulated_python.
"""

import json
import math

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from test_emulated_expressions import BATCH, HEADS, HEADS_KV, arrays, given_of, naive  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402
from sagebwd.core import watching  # noqa: E402
from sagebwd.monitoring import sample  # noqa: E402
from sagebwd.numerics import emulation  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error::sagebwd.MonitorWarning")
RESULTS = {"O": "out", "dQ": "dq", "dK": "dk", "dV": "dv"}


def tensors_of(seen):
    """[q, k, v], which take gradients, dout, and all of them in FP32."""
    inputs = arrays(seen)
    *leaves, dout = (torch.from_numpy(x).bfloat16() for x in inputs)
    return [t.requires_grad_() for t in leaves], dout, inputs


def check(record, found, expected):
    """The record has the relative errors of its head's results."""
    b, first = record["sequence"], record["head"]
    group = HEADS // HEADS_KV
    of_queries, of_keys = slice(first, first + group), slice(first // group, first // group + 1)
    for name, key in RESULTS.items():
        at = b, of_queries if name in ("O", "dQ") else of_keys
        right = expected[key][at].double()
        error = float((found[key][at].double() - right).norm() / right.norm())
        assert record[name] == pytest.approx(error, rel=2e-3), name


@pytest.mark.parametrize("memory", [1 << 28, 1 << 20], ids=["at once", "in steps"])
@pytest.mark.parametrize("name", [
    "window", "windows_of_heads", "flamingo", "jagged", "softcap", "alibi", "both",
    "a causal mask too", "a window",
])  # fmt: skip
def test_figures_are_those_of_fp64(name, memory):
    given, more, seen, change = given_of(name)
    leaves, dout, inputs = tensors_of(seen)
    expected = naive(*inputs, seen, change)
    with sagebwd.Monitor(every=1, memory=memory) as monitor:
        for _ in range(4):
            out = emulation.emulated_attention(*leaves, **given, **more)
            gradients = torch.autograd.grad(out, leaves, dout)
    assert not watching.watchers and len(monitor.records) == 4
    assert len({(r["sequence"], r["head"]) for r in monitor.records}) > 1
    found = dict(zip(RESULTS.values(), (out.detach(), *gradients)))
    table = sagebwd.trace(*inputs, **given, **more)
    for record in monitor.records:
        check(record, found, expected)
        if memory == 1 << 28 or seen.any(-1).all():  # else dS may be of queries that see nothing
            assert 0.5 < record["dS"] / table["dS"]["rel_l2"] < 2
        assert record["warnings"] == []


def test_logits_are_those_before_the_score_function():
    """The INT8 scores are these, and a bias that hides distant keys is no error."""
    seen = torch.ones(1, 1, 100, 100, dtype=torch.bool)
    leaves, dout, inputs = tensors_of(seen)
    with sagebwd.Monitor(every=1) as monitor:
        for score in ("s - 2.0 * abs(q - k)", "s * 1.0", None):
            emulation.emulated_attention(*leaves, score=score, sink_keys=0).backward(dout)
    q, k = (torch.from_numpy(x).double() for x in inputs[:2])
    s = (q @ k.repeat_interleave(HEADS // HEADS_KV, 1).mT / 8).unflatten(1, (HEADS_KV, -1))
    for record in monitor.records:
        of_head = s[record["sequence"], record["head"] // (HEADS // HEADS_KV)]
        assert record["max_logit"] == pytest.approx(float(of_head.abs().max()), rel=1e-4)
        above = (of_head - of_head.mean(-1, keepdim=True)).max()
        assert record["logit_range"] == pytest.approx(float(above), rel=1e-3)


def test_a_gradient_of_lse():
    given, _, seen, change = given_of("both")
    leaves, dout, inputs = tensors_of(seen)
    dlse = torch.linspace(-1, 1, BATCH * HEADS * seen.shape[2]).view(BATCH, HEADS, -1)
    expected = naive(*inputs, seen, change, dlse.double())
    with sagebwd.Monitor(every=1) as monitor:
        out, lse = emulation.emulated_attention(*leaves, return_lse=True, **given)
        gradients = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    check(monitor.latest, dict(zip(RESULTS.values(), (out.detach(), *gradients))), expected)


class Writer:
    def __init__(self):
        self.names = []

    def add_scalar(self, name, value, step):
        self.names.append(name)


def test_errors_of_what_is_exactly_zero(tmp_path):
    """Queries that see one key have P = 1 and, without a gradient of lse, dS = 0."""
    path, plain, writer = tmp_path / "errors.jsonl", [], Writer()
    leaves, dout, _ = tensors_of(torch.eye(100, dtype=torch.bool)[None, None])
    with sagebwd.Monitor(every=1, to=[path, plain.append, writer]) as monitor:
        emulation.emulated_attention(*leaves, mask="q == k").backward(dout)
        assert [name for name in sample.ERRORS if monitor.latest[name] is None] == [
            "dQ", "dK", "dS"]  # fmt: skip
        assert 0 < monitor.latest["dV"] < 0.02 and json.loads(path.read_text())["dS"] is None
        assert "sagebwd/O" in plain[0] and "sagebwd/O" in writer.names
        assert "sagebwd/dS" not in plain[0] and "sagebwd/dS" not in writer.names
        assert str(monitor.table()).count("exact 0") == 3
        out, lse = emulation.emulated_attention(*leaves, mask="q == k", return_lse=True)
        torch.autograd.backward((out, lse), (dout, 10 * torch.ones_like(lse)))
    assert all(0 < monitor.latest[name] < 0.05 for name in ("dQ", "dK", "dS"))


@pytest.mark.parametrize("error, found", [(0.0, 0.0), (1.0, None), (math.nan, math.nan)])
def test_an_error_without_anything_exact(error, found):
    sums = dict.fromkeys(sample._SUMS, 0.0) | {"error of dS": error}
    figures, *_ = sample.figures(list(sums.values()), {})
    assert figures["dS"] == pytest.approx(found, nan_ok=True)


def test_packed_sequences_of_a_score_function():
    """Positions count from each sequence's own first tokens, and b is its number."""
    score = "4.0 * tanh(s * float(1 + b) / 4.0) + float(k - q) / 60.0"
    seen = torch.ones(1, 1, 140, 140, dtype=torch.bool)
    leaves, dout, inputs = tensors_of(seen)
    packed = [t.detach()[0].transpose(0, 1).contiguous().requires_grad_() for t in leaves]
    starts = torch.tensor([0, 80, 140], dtype=torch.int32)
    dout = dout[0].transpose(0, 1)
    with sagebwd.Monitor(every=1) as monitor:
        for _ in range(6):
            out = emulation.emulated_attention(*packed, score=score, cu_seqlens_q=starts,
                                               cu_seqlens_k=starts)  # fmt: skip
            gradients = torch.autograd.grad(out, packed, dout)
    assert {r["sequence"] for r in monitor.records} == {0, 1}
    for record in monitor.records:
        part = (slice(0, 80), slice(80, 140))[record["sequence"]]
        own = [x[:1, :, part] for x in inputs]
        place = torch.arange(part.stop - part.start)
        scale, behind = 1 + record["sequence"], (place[None] - place[:, None]) / 60

        def change(s, scale=scale, behind=behind):
            return 4 * torch.tanh(s * scale / 4) + behind

        expected = naive(*own, seen[..., : len(place), : len(place)], change)
        found = [t[part].transpose(0, 1)[None] for t in (out.detach(), *gradients)]
        check({**record, "sequence": 0}, dict(zip(RESULTS.values(), found)), expected)


def test_a_function_chooses_by_the_texts():
    seen = torch.ones(1, 1, 60, 60, dtype=torch.bool)
    leaves, dout, _ = tensors_of(seen)
    told = []
    with sagebwd.Monitor(lambda call: told.append(call) or call["mask"] == "q>=k", every=1) as one:
        for given in (dict(mask="q >= k"), dict(score="tanh(s)"), dict(mask="k >= q"), {}):
            emulation.emulated_attention(*leaves, **given).backward(dout)
    assert len(one.records) == 1
    assert [(call["mask"], call["score"]) for call in told] == [
        ("q>=k", ""), ("", "tanh(s)"), ("k>=q", ""), ("", "")]  # fmt: skip


@pytest.mark.filterwarnings("default::sagebwd.MonitorWarning")
@pytest.mark.parametrize("given, has", [
    ({}, True), (dict(mask="q >= k"), False), (dict(score="s / 2.0"), False),
    (masks.documents(lengths=[60], causal=False).arguments, False)], ids=str)  # fmt: skip
def test_remedies_are_such_as_the_call_takes(given, has):
    """Calls with masks and scores have no smooth_q."""
    q, k, v = (torch.randn(1, 1, 60, 64) + plus for plus in (4, 0, 0))
    leaves = [t.bfloat16().requires_grad_() for t in (q, k, v)]
    monitor = sagebwd.Monitor(every=1, thresholds={"O": 1e-6})
    with pytest.warns(sagebwd.MonitorWarning) as caught, monitor:
        emulation.emulated_attention(*leaves, **given).sum().backward()
    assert any("smooth_q" in str(w.message) for w in caught) == has
