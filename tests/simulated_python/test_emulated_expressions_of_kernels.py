"""Masks and score functions: kernels on a simulated GPU against the emulation, and a monitor of
them."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402
from sagebwd.numerics import emulation, tracing  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_direct_masks import taken  # noqa: E402, F401
from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mask import MASKS, dense  # noqa: E402
from test_mixed import errors, on_the_simulator  # noqa: E402, F401
from test_score import SCORES, TOKENS, exact, offset  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_simulator")

CALLS = {
    "mask": dict(mask=MASKS["prefixes of heads"][0]),
    "softcap": dict(score=SCORES["softcap"][0]),
    "bias": dict(score=SCORES["bias"][0], precision="gradients16"),
    "both": dict(mask=MASKS["documents"][0], score=SCORES["softcap"][0], causal=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_kernels_are_near_the_emulation(name):
    """The backward of the emulation is given out and lse of the kernels: roundings alone differ,
    and the GPU's tanh."""
    told = CALLS[name]
    q, k, v = (t.detach() for t in offset())
    dout = drawn(*q.shape, seed=9, dtype=q.dtype)
    dlse = drawn(*q.shape[:3], seed=8, dtype=torch.float32)
    out, lse = sagebwd.attention_forward(q, k, v, **told)
    dlse = dlse * lse.isfinite()
    found = sagebwd.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **told)
    right, right_lse = emulation.emulated_forward(q, k, v, **told)
    wanted = emulation.emulated_backward(dout, q, k, v, out, lse, dlse=dlse, **told)
    assert max(errors([out, *found], [t.double() for t in (right, *wanted)])) < 5e-3
    sees = right_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, sees)
    assert (lse[sees] - right_lse[sees]).abs().max() < 1e-4


def test_packed_sequences_have_the_same_numbers():
    """A score function's b is the number of the sequence."""
    told = dict(score="4.0 * tanh(s * float(1 + b) / 4.0) + (k - q) / 60.0", causal=True)
    packed = [t.detach()[0].transpose(0, 1).contiguous() for t in offset()]
    starts = torch.tensor([0, 130, 200], dtype=torch.int32)
    given = dict(told, cu_seqlens_q=starts, cu_seqlens_k=starts)
    out = sagebwd.attention(*packed, **given)
    wanted = emulation.emulated_attention(*packed, **given)
    assert max(errors([out], [wanted.double()])) < 5e-3


def test_block_masks():
    """They hold what tensors held when they were made, for the emulation, too."""
    documents = torch.arange(200, dtype=torch.int32)[None].repeat(2, 1) // 70
    mask = masks.trace_mask("doc[b, q] == doc[b, k]", {"doc": documents})
    kept = masks.block_mask(mask, 2, 2, 200, 200, device="cpu")
    q, k, v = (t.detach() for t in offset())
    before = emulation.emulated_attention(q, k, v, mask=mask)
    documents.fill_(0)
    assert torch.equal(emulation.emulated_attention(q, k, v, mask=kept), before)
    assert not torch.equal(emulation.emulated_attention(q, k, v, mask=mask), before)


def test_a_trace_has_the_kernels_results():
    told = CALLS["both"]
    q, k, v = (t.detach() for t in offset())
    dout = drawn(*q.shape, seed=9, dtype=q.dtype)
    rules = emulation.emulation_rules(q, k, v, causal=True)
    found = tracing._kernel_results((q, k, v, dout), rules, told, {})
    right, lse = emulation.emulated_forward(q, k, v, **told)
    gradients = emulation.emulated_backward(dout, q, k, v, right, lse, **told)
    assert [*found] == ["O", "dQ", "dK", "dV"]
    assert max(errors(found.values(), [t.double() for t in (right, *gradients)])) < 5e-3


#: By name: arguments, which keys queries see or None for all, and the change of scores in FP64.
MONITORED = {
    "mask": (CALLS["mask"], dense(MASKS["prefixes of heads"][1]), lambda s: s),
    "bias": (CALLS["bias"], None, SCORES["bias"][1]),
    "both": (CALLS["both"], dense(MASKS["documents"][1]).tril(), SCORES["softcap"][1]),
    "a score alone": (CALLS["softcap"], None, SCORES["softcap"][1]),
    "beside intervals": (
        dict(score=SCORES["softcap"][0], **masks.documents(lengths=[80, 120]).arguments),
        masks.documents(lengths=[80, 120]).dense(TOKENS), SCORES["softcap"][1]),
}  # fmt: skip


@pytest.mark.parametrize("layout, name", [*zip(["bhsd", "bshd"] * 3, MONITORED)])
@pytest.mark.filterwarnings("error::sagebwd.MonitorWarning")
def test_a_monitor_measures_the_kernels(layout, name, taken):  # noqa: F811
    told, seen, change = MONITORED[name]
    q, k, v = offset()
    dout = drawn(*q.shape, seed=9, dtype=q.dtype)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    right = exact(*wide, change, seen)[0].nan_to_num(0.0)
    wanted = dict(zip(("dQ", "dK", "dV"), torch.autograd.grad(right, wide, dout.double())))
    swap = (lambda t: t.transpose(1, 2)) if layout == "bshd" else (lambda t: t)
    with sagebwd.Monitor(every=1) as monitor:
        for _ in range(2):
            out = swap(sagebwd.attention(*map(swap, (q, k, v)), layout=layout, **told))
            found = dict(zip(("dQ", "dK", "dV"), torch.autograd.grad(out, (q, k, v), dout)))
    assert len(monitor.records) == 2 and taken[-1]  # the second one went past the operators
    for record in monitor.records:
        for of, x in {"O": out, **found}.items():
            y = {"O": right, **wanted}[of]
            x, y = (t[record["sequence"]].detach().double() for t in (x, y))
            assert record[of] == pytest.approx(float((x - y).norm() / y.norm()), rel=2e-3), of
        assert 0.001 < record["dS"] < 0.03


def test_a_monitor_measures_packed_sequences():
    score = "4.0 * tanh(s * float(1 + b) / 4.0) + (k - q) / 60.0"
    packed = [t.detach()[0].transpose(0, 1).contiguous().requires_grad_() for t in offset()]
    starts = torch.tensor([0, 130, 200], dtype=torch.int32)
    with sagebwd.Monitor(every=1) as monitor:
        for _ in range(4):
            sagebwd.attention(*packed, score=score, cu_seqlens_q=starts,
                              cu_seqlens_k=starts).sum().backward()  # fmt: skip
    assert {record["sequence"] for record in monitor.records} == {0, 1}
    assert all(0.003 < record["O"] < 0.03 for record in monitor.records)
