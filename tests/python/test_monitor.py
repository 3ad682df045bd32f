"""sagebwd.Monitor on the CPU: with kernels that are the emulation, and with the emulation itself.

The exact results it compares with are held against FP64 by NumPy, written here.
"""

import numpy as np
import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from alike import relative  # noqa: E402
from packed_inputs import packed, spans_of  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from torch.utils.checkpoint import checkpoint  # noqa: E402

from sagebwd.core import watching  # noqa: E402
from sagebwd.numerics import emulation  # noqa: E402

pytestmark = [pytest.mark.usefixtures("tiny_tensors"),
              pytest.mark.filterwarnings("error::sagebwd.MonitorWarning")]  # fmt: skip
on_kernels = pytest.mark.usefixtures("kernels_on_the_cpu")
ERRORS = ("O", "dQ", "dK", "dV")


@pytest.fixture(autouse=True)
def nobody_watches_afterwards():
    yield
    left, watching.watchers = watching.watchers, ()
    assert not left


def make(m=40, n=None, b=2, h=4, hk=2, d=64, sigma=1.0, offset=0.0, seed=0, dtype=torch.bfloat16,
         layout="bhsd"):  # fmt: skip
    """[q, k, v], which take gradients, and dout."""
    generator = torch.Generator().manual_seed(seed)

    def randn(heads, tokens, scale=1.0, plus=0.0):
        x = (torch.randn(b, heads, tokens, d, generator=generator) * scale + plus).to(dtype)
        return x if layout == "bhsd" else x.transpose(1, 2).contiguous()

    n = m if n is None else n
    inputs = randn(h, m, sigma, offset), randn(hk, n, sigma, offset), randn(hk, n)
    return [t.requires_grad_() for t in inputs], randn(h, m)


def array(t):
    return t.detach().double().numpy()


def exact(q, k, v, dout, dlse=0.0, seen=None):
    """(O, dQ, dK, dV, S) of the queries (G, M, D) of one key head (N, D), in FP64."""
    s = q @ k.T / np.sqrt(q.shape[-1])
    seen = np.ones(s.shape[1:], bool) if seen is None else seen
    some = seen.any(-1)[None, :, None]
    top = np.where(seen, s, -np.inf).max(-1, keepdims=True, initial=-1e300)
    p = np.where(seen, np.exp(np.minimum(s - top, 0)), 0)
    p = p / np.where(some, p.sum(-1, keepdims=True), 1)
    out = p @ v
    delta = (dout * out).sum(-1, keepdims=True) - dlse
    ds = p * (dout @ v.T - delta)
    scale = q.shape[-1] ** -0.5
    dk, dv = (np.einsum("gmn,gmd->nd", x, y) for x, y in ((ds, q), (p, dout)))
    return out, scale * ds @ k, scale * dk, dv, np.where(seen, s, 0), ds


def check_record(record, inputs, dout, results, seen=None, dlse=None):
    """The record's figures are those of FP64; tensors are (batch, heads, tokens, channels)."""
    b, head, group = record["sequence"], record["head"], record["heads"]
    queries, kv = slice(head, head + group), head // group
    q, k, v = (array(t)[b] for t in inputs)
    rows = 0.0 if dlse is None else array(dlse)[b, queries, :, None]
    expected = exact(q[queries], k[kv], v[kv], array(dout)[b, queries], rows, seen)
    found = [array(t)[b, at] for t, at in zip(results, (queries, queries, kv, kv))]
    for name, x, y in zip(ERRORS, found, expected):
        assert record[name] == pytest.approx(relative(x, y), rel=2e-3), name
    assert record["max_logit"] == pytest.approx(np.abs(expected[4]).max(), rel=1e-4)
    return expected


def run(inputs, dout, call=sagebwd.attention, **options):
    """[out, dq, dk, dv]."""
    out = call(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def band(m, n, left=None, right=None, causal="top-left"):
    behind = np.arange(n)[None] - np.arange(m)[:, None] - (0 if causal == "top-left" else n - m)
    seen = np.ones((m, n), bool)
    if right is not None:
        seen &= behind <= right
    if left is not None:
        seen &= behind >= -left
    return seen


FORMS = {
    "plain": (dict(), dict(), None),
    "causal": (dict(), dict(causal=True), band(40, 40, right=0)),
    "bottom-right": (dict(m=24, n=40), dict(causal="bottom-right"),
                     band(24, 40, right=0, causal="bottom-right")),
    "rows that see nothing": (dict(m=40, n=24), dict(causal="bottom-right"),
                              band(40, 24, right=0, causal="bottom-right")),
    "window": (dict(), dict(window_left=5, window_right=2), band(40, 40, 5, 2)),
    "causal window": (dict(), dict(causal=True, window_left=7), band(40, 40, 7, 0)),
    "no grouping": (dict(hk=4), dict(), None),
    "one key head": (dict(hk=1), dict(), None),
    "bshd": (dict(layout="bshd"), dict(layout="bshd", causal=True), band(40, 40, right=0)),
    "fp16": (dict(dtype=torch.float16), dict(), None),
    "block": (dict(m=200), dict(granularity="block"), None),
    "smooth_q": (dict(m=300, offset=1.0), dict(smooth_q=True, causal=True),
                 band(300, 300, right=0)),
    "qk16": (dict(), dict(precision="qk16"), None),
    "gradients16": (dict(), dict(precision="gradients16"), None),
}  # fmt: skip


@pytest.mark.parametrize("memory", [1 << 28, 1 << 14], ids=["at once", "in steps"])
@pytest.mark.parametrize("form", FORMS)
@on_kernels
def test_figures_are_those_of_fp64(form, memory):
    of, options, seen = FORMS[form]
    inputs, dout = make(**of)
    with sagebwd.Monitor(memory=memory) as monitor:
        results = run(inputs, dout, **options)
    if "layout" in of:
        inputs, dout, results = ([t.transpose(1, 2) for t in ts]
                                 for ts in (inputs, [dout], results))  # fmt: skip
        (dout,) = dout
    expected = check_record(monitor.latest, inputs, dout, results, seen)
    assert 0 < monitor.latest["dS"] < 0.03
    mean = expected[4].sum(-1) / np.maximum(1, 40 if seen is None else seen.sum(-1))
    if form == "plain":
        above = (expected[4] - mean[..., None]).max()
        assert monitor.latest["logit_range"] == pytest.approx(above, rel=1e-4)


@pytest.mark.parametrize("scale", [1e-34, 1e-25, 1e25])
@on_kernels
def test_gradients_whose_squares_fp32_does_not_hold(scale):
    inputs, dout = make()
    dout = dout * scale
    with sagebwd.Monitor() as monitor:
        results = run(inputs, dout)
    check_record(monitor.latest, inputs, dout, results)


@on_kernels
def test_ds_is_that_of_the_trace():
    inputs, dout = make(b=1, h=1, hk=1, m=70)
    with sagebwd.Monitor() as monitor:
        run(inputs, dout, causal=True)
    table = sagebwd.trace(*[t.detach() for t in inputs], dout, causal=True)
    assert monitor.latest["dS"] == pytest.approx(table["dS"]["rel_l2"], rel=0.02)


@on_kernels
def test_a_sink_per_head():
    inputs, dout = make()
    sink = torch.linspace(-1, 2, 4).requires_grad_()
    with sagebwd.Monitor() as monitor:
        out, lse = sagebwd.attention(*inputs, return_lse=True)
        of_sink, _ = sagebwd.with_sink(out, lse, sink)
        wanted = torch.autograd.grad(of_sink, [*inputs, out, lse], dout)
        gradients, (_, dlse) = wanted[:3], wanted[3:]
        dout_of_call = wanted[3]
    one = monitor.latest
    check_record(one, inputs, dout_of_call, [out, *gradients], dlse=dlse)
    with sagebwd.Monitor() as again:
        run(inputs, dout, sink_logits=sink)
    assert {n: again.latest[n] for n in ERRORS} == {n: one[n] for n in ERRORS}


@on_kernels
def test_packed_sequences():
    inputs, dout, where = packed()
    seen = set()
    with sagebwd.Monitor(every=1) as monitor:
        for _ in range(12):
            results = run(inputs, dout, **where)
            record = monitor.latest
            i = record["sequence"]
            seen.add(i)
            (first_q, m), (first_k, n) = spans_of()[i]
            at = slice(first_q, first_q + m), slice(first_k, first_k + n)
            q, out, dq, do = (t[at[0]].transpose(0, 1)[None]
                              for t in (inputs[0], *results[:2], dout))  # fmt: skip
            k, v, dk, dv = (t[at[1]].transpose(0, 1)[None] for t in (*inputs[1:], *results[2:]))
            assert (record["queries"], record["keys"]) == (m, n)
            check_record({**record, "sequence": 0}, (q, k, v), do, (out, dq, dk, dv))
    assert seen == {0, 3, 4}  # those with queries and keys


def test_packed_sequences_of_the_emulation():
    inputs, dout, where = packed()
    with sagebwd.Monitor(every=1) as monitor:
        for _ in range(12):
            results = run(inputs, dout, emulation.emulated_attention, **where)
    assert {r["sequence"] for r in monitor.records} == {0, 3, 4}
    assert {(r["call"], r["calls"]) for r in monitor.records} == {(0, 1)}
    record = monitor.latest
    (first_q, m), (first_k, n) = spans_of()[record["sequence"]]
    of_q, of_k = slice(first_q, first_q + m), slice(first_k, first_k + n)
    q, k, v, do, out, dq, dk, dv = (
        t[at].transpose(0, 1)[None] for t, at in zip(
            (*inputs, dout, *results), (of_q, of_k, of_k, of_q, of_q, of_q, of_k, of_k)))
    check_record({**record, "sequence": 0}, (q, k, v), do, (out, dq, dk, dv))


@on_kernels
def test_padded_batches():
    inputs, dout = make(m=24)
    used = torch.tensor([24, 10], dtype=torch.int32)
    with sagebwd.Monitor(every=1) as monitor:
        for _ in range(6):
            results = run(inputs, dout, causal=True, seqused_q=used, seqused_k=used)
            length = int(used[monitor.latest["sequence"]])
            short = [[t[:, :, :length] for t in ts] for ts in (inputs, [dout], results)]
            check_record(monitor.latest, short[0], short[1][0], short[2],
                         band(length, length, right=0))  # fmt: skip
    assert {r["sequence"] for r in monitor.records} == {0, 1}


@on_kernels
def test_fewer_channels_of_v():
    inputs, dout = make(d=96)
    inputs[2], dout = inputs[2][..., :64].detach().requires_grad_(), dout[..., :64]
    with sagebwd.Monitor() as monitor:
        results = run(inputs, dout)
    check_record(monitor.latest, inputs, dout, results)


def test_the_emulation_is_watched():
    inputs, dout = make()
    with sagebwd.Monitor() as monitor:
        results = run(inputs, dout, emulation.emulated_attention)
    check_record(monitor.latest, inputs, dout, results)


# ---- no influence --------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Layers of attention over their own projections."""

    def __init__(self, layers=3, checkpointed=None, width=64, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width) for _ in range(layers))
        self.checkpointed, self.scale = checkpointed, scale

    def layer(self, linear, x):
        q, k, v = linear(x).unflatten(-1, (3, -1, 32)).transpose(1, 3).unbind(2)
        q, k, v = (t.bfloat16() for t in (q * self.scale, k * self.scale, v))
        out = sagebwd.attention(q, k, v, causal=True)
        return x + out.transpose(1, 2).flatten(2).float()

    def forward(self, x):
        for linear in self.layers:
            if self.checkpointed is None:
                x = self.layer(linear, x)
            else:
                x = checkpoint(self.layer, linear, x, use_reentrant=self.checkpointed)
        return x


def trained(model, steps=4, after=lambda: None):
    """The parameters after some steps, and the state of the random numbers."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(2, 24, 64, requires_grad=True)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
    return [p.detach().clone() for p in model.parameters()] + [torch.get_rng_state()]


def equal(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


KINDS = {
    "eager": dict(),
    "checkpoint": dict(checkpointed=False),
    "reentrant checkpoint": dict(checkpointed=True),
    "compiled": dict(compiled=True),
    "compiled checkpoint": dict(checkpointed=False, compiled=True),
}


def of_kind(compiled=False, **given):
    model = Model(**given)
    if compiled:
        torch._dynamo.reset()
        return torch.compile(model, backend="aot_eager", fullgraph=True)
    return model


UNWATCHED = {}  #: What is trained without a monitor, by kind.


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@on_kernels
def test_no_bit_changes(kind, limited):
    if kind not in UNWATCHED:
        UNWATCHED[kind] = trained(of_kind(**KINDS[kind]))
    model = of_kind(**KINDS[kind])
    with sagebwd.Monitor(model if limited else None, every=1) as monitor:
        assert equal(trained(model), UNWATCHED[kind])
    assert [(r["step"], r["calls"]) for r in monitor.records] == [(s, 3) for s in (1, 2, 3, 4)]
    # by turns, the last layer first
    assert [r["call"] for r in monitor.records] == [2, 1, 0, 2]


@on_kernels
def test_autocast_modes_and_frozen_inputs():
    from torch.utils.flop_counter import FlopCounterMode

    inputs, dout = make()
    inputs[1].requires_grad_(False)

    def step():
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            out = sagebwd.attention(*inputs, causal=True)
            with FlopCounterMode(display=False):
                return [out.detach(), *torch.autograd.grad(out, (inputs[0], inputs[2]), dout)]

    expected = step()
    with sagebwd.Monitor() as monitor:
        assert equal(step(), expected)
        assert torch.get_float32_matmul_precision() == "highest"
    assert len(monitor.records) == 1


@on_kernels
def test_nothing_is_done_between_samples(monkeypatch):
    from sagebwd.monitoring import sample

    taken = []
    before = sample.measured
    monkeypatch.setattr(sample, "measured", lambda *given: taken.append(0) or before(*given))
    inputs, dout = make()
    with sagebwd.Monitor(every=5) as monitor:
        for _ in range(11):
            run(inputs, dout)
        assert 0 < monitor.overhead < 1
    assert [r["step"] for r in monitor.records] == [1, 6, 11] and len(taken) == 3
    run(inputs, dout)
    assert len(taken) == 3


@on_kernels
def test_a_failing_sample_leaves_training_alone(monkeypatch):
    from sagebwd.monitoring import sample

    def fail(*given):
        raise torch.OutOfMemoryError("no memory is left")

    inputs, dout = make()
    expected = run(inputs, dout)
    monkeypatch.setattr(sample, "measured", fail)
    with pytest.warns(sagebwd.MonitorWarning, match="no memory is left") as caught:
        with sagebwd.Monitor(every=1) as monitor:
            for _ in range(3):
                assert equal(run(inputs, dout), expected)
    assert len(caught) == 1 and monitor.latest is None


def test_who_saw_nothing_says_so():
    with pytest.warns(sagebwd.MonitorWarning, match="saw no attention of sagebwd"):
        with sagebwd.Monitor():
            torch.nn.functional.scaled_dot_product_attention(*make(h=2)[0])


@on_kernels
def test_a_model_that_raises_is_left():
    """Calls behind it, of another form, are not the model's."""

    class Raises(torch.nn.Module):
        def forward(self, inputs, dout, error=None):
            if error:
                raise error
            return run(inputs, dout)

    model, of_model, other = Raises(), make(), make(m=24)
    with sagebwd.Monitor(model, every=1) as monitor:
        model(*of_model)
        with pytest.raises(KeyError):
            model(*of_model, KeyError("wrong"))
        run(*other)
        model(*of_model)
    assert {record["queries"] for record in monitor.records} == {40}
