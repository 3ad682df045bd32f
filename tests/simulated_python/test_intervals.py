"""Attention whose keys have intervals of queries that do not see them, on a simulated GPU, against
FP64, dense masks and the emulation."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402
from sagebwd.numerics import emulation  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mixed import errors, on_the_simulator  # noqa: E402, F401

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from interval_cases import NUMBERS, numbers_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_simulator")

#: By name: a mask, and how many queries it is for.
MASKS = {
    "documents": lambda: (masks.documents(lengths=[70, 130, 60], causal=False), 260),
    "causal documents": lambda: (masks.documents(lengths=[70, 130, 60]), 260),
    "prefix": lambda: (masks.prefix_lm([90, 30], 200), 200),
    "branches": lambda: (masks.shared_prefix(80, [50, 70]), 200),
    "spans": lambda: (masks.spans(200, [(20, 60), (100, 180)]), 200),
    "window": lambda: (masks.window_and_global(260, 40, 3, causal=True), 260),
    "padding": lambda: (masks.padding([150, 200], 200), 200),
}


def exact(q, k, v, mask):
    """(out, lse) in FP64; 0 and -inf for queries that see nothing."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    p = scores.softmax(-1).nan_to_num(0.0)
    return p @ v, scores.logsumexp(-1)


def made(queries, batch=2, heads=2, heads_kv=1, channels=64, dtype=torch.bfloat16):
    of = [(batch, heads, queries), (batch, heads_kv, queries), (batch, heads_kv, queries)]
    return [drawn(*shape, channels, seed=i, dtype=dtype).requires_grad_()
            for i, shape in enumerate(of)]  # fmt: skip


def of_heads(mask, heads):
    """A dense mask for each head of queries."""
    return mask if mask.shape[1] == 1 else mask.repeat_interleave(heads // mask.shape[1], 1)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("precision", ["six-of-seven", "gradients16"])
def test_masks_against_fp64(name, precision):
    mask, queries = MASKS[name]()
    q, k, v = made(queries)
    out, lse = sagebwd.attention(q, k, v, causal=mask.causal, precision=precision, return_lse=True,
                                 startend_row_indices=mask.startend_row_indices)  # fmt: skip
    dense = mask.dense(queries).expand(2, -1, -1, -1)
    right, right_lse = exact(q, k, v, of_heads(dense, 2))
    weights = drawn(*out.shape, seed=9, dtype=torch.float64)
    found = torch.autograd.grad((out.double() * weights).sum(), (q, k, v))
    wanted = torch.autograd.grad((right * weights).sum(), (q, k, v))
    assert max(errors([out, *found], [right, *wanted])) < 0.03
    sees = right_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, sees)
    assert (lse[sees] - right_lse[sees]).abs().max() < 0.05
    assert not out[~sees].any()


def test_a_mask_of_each_head_tokens_first_and_under_checkpointing():
    mask = masks.from_bool(torch.stack([
        masks.documents(lengths=[100, 100]).dense(200)[0, 0],
        masks.documents(lengths=[50, 150]).dense(200)[0, 0],
    ])[None], causal=True)  # fmt: skip
    q, k, v = made(200, heads=4, heads_kv=2)
    dense = of_heads(mask.dense(200), 4)
    right, _ = exact(q, k, v, dense)
    weights = drawn(*right.shape, seed=9, dtype=torch.float64)
    wanted = torch.autograd.grad((right * weights).sum(), (q, k, v))

    def attend(*given):
        given = [t.transpose(1, 2) for t in given]
        return sagebwd.attention(*given, layout="bshd", causal=True,
                                 startend_row_indices=mask.startend_row_indices).transpose(1, 2)  # fmt: skip

    for run in (attend, lambda *given: checkpoint(attend, *given, use_reentrant=False)):
        out = run(q, k, v)
        found = torch.autograd.grad((out.double() * weights).sum(), (q, k, v))
        assert max(errors([out, *found], [right, *wanted])) < 0.03


def test_forward_and_backward_separately():
    mask, queries = MASKS["branches"]()
    q, k, v = (t.detach() for t in made(queries))
    told = dict(causal=mask.causal, startend_row_indices=mask.startend_row_indices)
    out, lse = sagebwd.attention_forward(q, k, v, **told)
    dout = drawn(*out.shape, seed=9, dtype=out.dtype)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    same = sagebwd.attention(*leaves, **told)
    assert torch.equal(out, same)
    gradients = sagebwd.attention_backward(dout, q, k, v, out, lse, **told)
    for x, y in zip(gradients, torch.autograd.grad(same, leaves, dout)):
        assert torch.equal(x, y)


@pytest.mark.parametrize("precision", ["six-of-seven", "gradients16", "qk16"])
@pytest.mark.parametrize("columns, causal", NUMBERS)
def test_kernels_are_near_the_emulation(columns, causal, precision):
    """The backward of the emulation is given out and lse of the kernels: roundings alone differ."""
    told = dict(causal=causal, precision=precision,
                startend_row_indices=numbers_of(columns, causal, 2, 2, 197))  # fmt: skip
    q, k, v = (t.detach() for t in made(197, heads=4, heads_kv=2))
    dout = drawn(*q.shape, seed=9, dtype=q.dtype)
    out, lse = sagebwd.attention_forward(q, k, v, **told)
    found = sagebwd.attention_backward(dout, q, k, v, out, lse, **told)
    right, right_lse = emulation.emulated_forward(q, k, v, **told)
    wanted = emulation.emulated_backward(dout, q, k, v, out, lse, **told)
    assert max(errors([out, *found], [t.double() for t in (right, *wanted)])) < 5e-3
    sees = right_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, sees)
    assert (lse[sees] - right_lse[sees]).abs().max() < 1e-4


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.filterwarnings("error::sagebwd.MonitorWarning")
def test_a_monitor_measures_the_kernels(layout):
    mask, queries = MASKS["window"]()
    q, k, v = made(queries)
    dout = drawn(*q.shape, seed=9, dtype=q.dtype)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    right, _ = exact(*leaves, mask.dense(queries))
    wanted = dict(zip(("dQ", "dK", "dV"), torch.autograd.grad(right, leaves, dout.double())))
    swap = (lambda t: t.transpose(1, 2)) if layout == "bshd" else (lambda t: t)
    with sagebwd.Monitor(every=1) as monitor:
        out = swap(sagebwd.attention(*map(swap, (q, k, v)), layout=layout, **mask.arguments))
        found = dict(zip(("dQ", "dK", "dV"), torch.autograd.grad(out, (q, k, v), dout)))
    record, expected = monitor.latest, {"O": right, **wanted}
    for name, x in {"O": out, **found}.items():
        x, y = (t[record["sequence"]].detach().double() for t in (x, expected[name]))
        assert record[name] == pytest.approx(float((x - y).norm() / y.norm()), rel=2e-3), name


def test_threads_with_masks_of_their_own():
    """Numbers change between calls, and forms, bits and workspaces are not those of others."""
    q, k, v = made(200)
    dout = drawn(*q.shape, seed=9, dtype=q.dtype)
    all_masks = [masks.documents(lengths=lengths) for lengths in ([70, 130], [150, 50], [200])]

    def results(at, *leaves):
        out = sagebwd.attention(*leaves, causal=True, startend_row_indices=at)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    expected = [results(mask.startend_row_indices, q, k, v) for mask in all_masks]
    assert not torch.equal(expected[0][0], expected[1][0])

    def work(number):
        own = [t.detach().requires_grad_() for t in (q, k, v)]
        at = torch.zeros_like(all_masks[0].startend_row_indices)
        same = []
        for turn in range(4):
            chosen = (number + turn) % len(all_masks)
            at.copy_(all_masks[chosen].startend_row_indices)
            same += map(torch.equal, results(at, *own), expected[chosen])
        return all(same)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_strides_and_alignment():
    """Numbers that kernels cannot read as they lie are copied."""
    mask = masks.documents(lengths=[70, 130], causal=False)
    q, k, v = made(200)
    at = mask.startend_row_indices
    expected = sagebwd.attention(q, k, v, startend_row_indices=at)
    wide = torch.zeros(*at.shape[:3], 5, dtype=torch.int32)
    wide[..., 1:3] = at
    shifted = torch.zeros(at.numel() + 1, dtype=torch.int32)
    shifted[1:] = at.flatten()
    for same in (wide[..., 1:3], shifted[1:].view(at.shape), at.expand(2, 1, -1, -1)):
        assert torch.equal(sagebwd.attention(q, k, v, startend_row_indices=same), expected)


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("dim", [0, 3, -1])
def test_vmap_over_intervals(dim):
    q, k, v = (t.detach() for t in made(200))
    each = [masks.documents(lengths=lengths).startend_row_indices for lengths in ([70, 130], [200])]

    def attend(at):
        return sagebwd.attention(q, k, v, causal=True, startend_row_indices=at)

    found = torch.func.vmap(attend, in_dims=dim)(torch.stack(each, dim))
    assert torch.equal(found, torch.stack(list(map(attend, each))))
    assert not torch.equal(*found)


def test_what_is_not_supported():
    mask, queries = MASKS["documents"]()
    at = mask.startend_row_indices
    q, k, v = made(queries)
    refused = [
        (dict(startend_row_indices=at.long()), r"is torch\.int64; pass torch\.int32"),
        (dict(startend_row_indices=at[:, :, :100]), r"it is torch.int32 of \(2 or 1, 1 or 1, 260"),
        (dict(startend_row_indices=at[0]), r"it is \(batch or 1, heads_kv or 1, keys, columns\)"),
        (dict(startend_row_indices=at[..., :1]),
         "startend_row_indices of 1 columns is not supported .* a key has 2 or 4 numbers there"),
        (dict(startend_row_indices=at[..., :0]), "with 1, 2 or 4 columns"),
        (dict(startend_row_indices=at.repeat(1, 1, 1, 2), causal=True), "has 1 or 2 numbers there"),
        (dict(startend_row_indices=at, window_left=10), "with a window.*window_and_global"),
        (dict(startend_row_indices=at, smooth_q=True), "smooth_q"),
        (dict(startend_row_indices=at, sink_keys=1), "sink_keys = 1 is not supported"),
        (dict(startend_row_indices=at, k_mean=torch.zeros(2, 1, 64)), "k_mean and startend_row"),
        (dict(startend_row_indices=at, seqused_k=torch.zeros(2).int()), "masks.padding"),
    ]  # fmt: skip
    for given, message in refused:
        with pytest.raises(sagebwd.SpecError, match=message):
            sagebwd.attention(q, k, v, **given)
    with pytest.raises(TypeError, match="startend_row_indices is a list"):
        sagebwd.attention(q, k, v, startend_row_indices=[1])
