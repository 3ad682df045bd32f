"""sagebwd.Monitor on the CPU: with kernels that are the emulation, and with the emulation itself.

The exact results it compares with are held against FP64 by NumPy, written here.
"""

import functools
import json
import warnings

import numpy as np
import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from packed_inputs import packed, spans_of  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from torch.utils.checkpoint import checkpoint  # noqa: E402

from sagebwd import emulation, watching  # noqa: E402

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


def relative(x, y):
    return np.linalg.norm(x - y) / np.linalg.norm(y)


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
    "smooth_q": (dict(m=300, offset=1.0), dict(smooth_q=True, causal=True), band(300, 300, right=0)),
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
