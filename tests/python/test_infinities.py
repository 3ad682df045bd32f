"""Formulas outside the kernels at the edges: queries that see nothing, infinite sinks, empty parts.

Both passes have the right values there, and no NaN spreads.
"""

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from alike import relative  # noqa: E402
from test_combining import make  # noqa: E402

from sagebwd.core import combining  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")

INF, NAN = torch.inf, torch.nan
LAYOUTS = ["bhsd", "bshd"]


def in_layout(layout, *tensors):
    return [t.transpose(1, 2) if layout == "bshd" else t for t in tensors]


def leaves_of(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def of_both(results, inputs, dout, dlse):
    """out, lse, and gradients of a sum over both."""
    return *results, *torch.autograd.grad(results, inputs, (dout, dlse))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_part_is_the_whole_where_queries_see_nothing(layout):
    """More queries than keys: the first see none, and are zero in all gradients."""
    (q, k, v), dout, _ = make(48, 32)
    dlse = torch.randn(2, 4, 48, generator=torch.Generator().manual_seed(1))
    q, k, v, dout = in_layout(layout, q, k, v, dout)

    def run(merged):
        inputs = leaves_of((q, k, v))
        results = sagebwd.attention(*inputs, causal="bottom-right", layout=layout, return_lse=True)
        results = sagebwd.merge([results], layout=layout) if merged else results
        return of_both(results, inputs, dout, dlse)

    found, expected = run(True), run(False)
    assert (found[1][..., :16] == -INF).all()
    assert not in_layout(layout, found[2])[0][:, :, :16].any()
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    for x, y in zip(found[2:], expected[2:]):  # dO, rounded to INT8, is zero in those rows
        assert relative(x, y) < 0.02


@pytest.mark.parametrize("empty", [0, 1])
def test_a_part_without_keys_changes_nothing(empty):
    (q, k, v), dout, _ = make(24, 24)
    dlse = torch.ones(2, 4, 24)

    def run(parts):
        inputs = leaves_of((q, k, v))
        q_, k_, v_ = inputs
        parts = [sagebwd.attention(q_, k_[:, :, at], v_[:, :, at], return_lse=True) for at in parts]
        return of_both(sagebwd.merge(parts), inputs, dout, dlse)

    parts = [slice(0, 24)]
    expected = run(parts)
    parts.insert(empty, slice(0, 0))
    for x, y in zip(run(parts), expected):
        assert torch.equal(x, y)


def test_merged_values_and_gradients_at_each_kind_of_row():
    """Columns: finite, one part blind, all blind, one endless, two endless, NaN."""
    lses = [torch.tensor([[[1.0, 2.0, -INF, INF, INF, NAN]]]),
            torch.tensor([[[3.0, -INF, -INF, 5.0, INF, 0.0]]])]  # fmt: skip
    outs = [torch.full((1, 1, 6, 2), value) for value in (10.0, 20.0)]
    inputs = leaves_of((*outs, *lses))
    out, lse, *gradients = of_both(sagebwd.merge(list(zip(inputs[:2], inputs[2:]))), inputs,
                                   torch.ones(1, 1, 6, 2), torch.ones(1, 1, 6))  # fmt: skip
    w = torch.sigmoid(torch.tensor(-2.0))  # the first part's share of the first row
    equal = dict(rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse[0, 0], torch.tensor(
        [3 - torch.log(1 - w), 2, -INF, INF, INF, NAN]), **equal)  # fmt: skip
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor(
        [20 - 10 * w, 10, 0, 10, 15, NAN]), **equal)  # fmt: skip
    of_outs, of_lses = gradients[:2], gradients[2:]
    shares = [w, 1, 0, 1, 0.5, NAN], [1 - w, 0, 0, 0, 0.5, NAN]
    of_out = w * (1 - w) * (10 - 20) * 2  # of two channels
    expected = [w + of_out, 1, 0, 0, 0, NAN], [1 - w - of_out, 0, 0, 0, 0, NAN]
    for i in range(2):
        torch.testing.assert_close(of_outs[i][0, 0, :, 0], torch.tensor(shares[i]), **equal)
        torch.testing.assert_close(of_lses[i][0, 0], torch.tensor(expected[i]), **equal)


def with_sink_of(out, lse, sink, dout=1.0, dlse=1.0):
    """(out, lse, and gradients of out, lse and sink) of one row of one head and one channel."""
    inputs = leaves_of((torch.full((1, 1, 1, 1), out), torch.full((1, 1, 1), lse),
                        torch.tensor([sink])))  # fmt: skip
    results = of_both(sagebwd.with_sink(*inputs), inputs, torch.full((1, 1, 1, 1), dout),
                      torch.full((1, 1, 1), dlse))  # fmt: skip
    return torch.stack([t.flatten()[0] for t in results])


@pytest.mark.parametrize(
    ("lse", "sink", "expected"),
    [  # out is 6 where a key is seen; of out, lse and the sink each
        (2.0, -INF, (6, 2, 1, 1, 0)),  # off
        (-INF, -INF, (0, -INF, 1, 1, 0)),
        (INF, -INF, (6, INF, 1, 1, 0)),
        (2.0, INF, (0, INF, 0, 0, 0)),  # takes everything
        (-INF, INF, (0, INF, 0, 0, 0)),
        (INF, INF, (0, INF, 0, 0, 0)),
        (-INF, 2.0, (0, 2, 0, 0, 1)),  # a query that sees nothing leaves it all to the sink
        (INF, 2.0, (6, INF, 1, 1, 0)),
        (2.0, 1e30, (0, 1e30, 0, 0, 1)),
        (2.0, -1e30, (6, 2, 1, 1, 0)),
        (2.0, 2.0, (3, 2 + 0.6931472, 0.5, 6 / 4 + 0.5, -6 / 4 + 0.5)),
    ],
)
def test_sinks_of_every_size(lse, sink, expected):
    found = with_sink_of(0.0 if lse == -INF else 6.0, lse, sink)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


def test_a_sink_of_nan_is_seen_in_its_head_alone():
    (q, k, v), dout, sink = make(24, 24)
    sink = sink.index_fill(0, torch.tensor([1]), NAN)
    inputs = leaves_of((q, k, v, sink))
    out, lse = sagebwd.attention(*inputs[:3], sink_logits=inputs[3], return_lse=True)
    others = torch.tensor([0, 2, 3])
    assert out[:, 1].isnan().all() and lse[:, 1].isnan().all()
    assert out[:, others].isfinite().all() and lse[:, others].isfinite().all()
    of_sink = torch.autograd.grad(out, inputs[3], dout)[0]
    assert torch.equal(of_sink.isnan(), torch.tensor([False, True, False, False]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinks_that_are_off_beside_padding(layout):
    """Heads that tensor parallelism pads, and tokens that the batch pads (seqused_*)."""
    (q, k, v), dout, _ = make(32, 32)
    used = torch.tensor([32, 20], dtype=torch.int32)
    q, k, v, dout = in_layout(layout, q, k, v, dout)

    def run(sink):
        inputs = leaves_of((q, k, v, *([] if sink is None else [sink])))
        out, lse = sagebwd.attention(
            *inputs[:3], causal=True, seqused_q=used, seqused_k=used, layout=layout,
            sink_logits=None if sink is None else inputs[3], return_lse=True)  # fmt: skip
        dlse = torch.ones(lse.shape)
        return of_both((out, lse), inputs, dout, dlse)

    off = torch.full((4,), -INF)
    found, expected = run(off), run(None)
    assert not found[5].any()
    for x, y in zip(found, expected):
        assert torch.equal(x, y)

    mixed = torch.tensor([-INF, 0.5, INF, -1e30])
    out, lse, dq, dk, dv, of_sink = run(mixed)
    out, dq = in_layout(layout, out, dq)
    assert all(t.isfinite().all() for t in (out, dq, dk, dv, of_sink))
    assert not out[:, 2].any() and (lse[:, 2] == INF).all()
    assert not out[1, :, 20:].any() and not dq[1, :, 20:].any()
    # The 12 rows that see nothing count in a finite sink's gradient, however small the sink.
    assert of_sink[0] == of_sink[2] == 0 and of_sink[3] == 12 and of_sink[1] != 0
    assert torch.equal(lse[1, 1, 20:], torch.full((12,), 0.5))


def test_sinks_of_parts_that_are_merged():
    """A head's sink takes everything in one part, and so it does in the whole."""
    (q, k, v), dout, _ = make(24, 48)
    sink = torch.tensor([-INF, 0.0, INF, 1.0])
    inputs = leaves_of((q, k, v, sink))
    parts = [sagebwd.attention(inputs[0], inputs[1][:, :, at], inputs[2][:, :, at],
                               return_lse=True, sink_logits=inputs[3] if last else None)
             for last, at in ((False, slice(0, 24)), (True, slice(24, 48)))]  # fmt: skip
    found = of_both(sagebwd.merge(parts), inputs, dout, torch.ones(2, 4, 24))
    whole = sagebwd.attention(*inputs[:3], sink_logits=inputs[3], return_lse=True)
    expected = of_both(whole, inputs, dout, torch.ones(2, 4, 24))
    assert torch.equal(found[1] == INF, expected[1] == INF) and not found[0][:, 2].any()
    for x, y in zip(found[2:], expected[2:]):
        assert x.isfinite().all() and float((x - y).norm()) < 0.03 * float(y.norm())


def test_the_share_of_a_part_whose_sum_is_infinite():
    lse = torch.tensor([[[INF, INF, -INF]]])
    of_lse = torch.tensor([[[INF, 3.0, -INF]]])
    ones = torch.ones(1, 1, 3, 64)
    dout, *_, dlse = combining.of_part((ones, of_lse), ones, ones, lse)
    assert torch.equal(dout[0, 0, :, 0], torch.tensor([1.0, 0.0, 0.0])) and dlse.isfinite().all()


@pytest.mark.parametrize("above", [5.0, 20.0, 60.0])
def test_a_sink_of_a_small_share_has_its_gradient(above):
    """The share itself is lost beside 1 in FP32; the gradient is not."""
    torch.manual_seed(0)
    out, dout = torch.randn(2, 1, 2, 9, 16)
    lse = torch.randn(1, 2, 9) + above
    sink = torch.zeros(2, requires_grad=True)
    found, _ = combining.with_sink(out, lse, sink)
    (found * dout).sum().backward()
    share = torch.special.expit(-lse.double())
    expected = -((out * dout).double().sum(-1) * share * (1 - share)).sum((0, 2))
    torch.testing.assert_close(sink.grad.double(), expected, rtol=1e-4, atol=0)
