"""Attention whose keys have intervals of queries that do not see them, on a GPU, against FP64."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from inputs import torch
from mask_cases import assert_near, results
from torch.utils.checkpoint import checkpoint

import sagebwd
from sagebwd import masks

MASKS = {
    "documents": lambda: masks.documents(lengths=[150, 300, 126], causal=False, device="cuda"),
    "causal documents": lambda: masks.documents(lengths=[150, 300, 126], device="cuda"),
    "prefix": lambda: masks.prefix_lm(200, 576, device="cuda"),
    "branches": lambda: masks.shared_prefix(200, [150, 226], device="cuda"),
    "spans": lambda: masks.spans(576, [(20, 160), (300, 480)], device="cuda"),
    "window": lambda: masks.window_and_global(576, 90, 3, device="cuda"),
    "padding": lambda: masks.padding([300], 576, device="cuda"),
}
TOKENS = 576
PRECISIONS = "six-of-seven", "gradients16", "dv16", "qk16"


def made(batch=2, heads=4, heads_kv=2, channels=128, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(batch, n, TOKENS, channels, device="cuda", generator=generator)
            .to(dtype).requires_grad_() for n in (heads, heads_kv, heads_kv)]  # fmt: skip


def exact(q, k, v, mask, dout):
    """(out, lse, gradients) in FP64; 0 and -inf for queries that see nothing."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    q, k, v = leaves
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    mask = mask.dense(TOKENS)
    mask = mask.repeat_interleave(q.shape[1] // mask.shape[1], 1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ v
    return out, scores.logsumexp(-1), *torch.autograd.grad(out, leaves, dout.double())


def told(mask):
    return dict(causal=mask.causal, startend_row_indices=mask.startend_row_indices)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("channels, dtype", [(64, torch.float16), (128, torch.bfloat16),
                                             (256, torch.bfloat16)])  # fmt: skip
@pytest.mark.parametrize("precision", PRECISIONS)
def test_masks_against_fp64(name, channels, dtype, precision):
    if precision == "qk16" and channels == 64 and name != "spans":
        return  # one mask of it is enough
    mask, leaves = MASKS[name](), made(channels=channels, dtype=dtype)
    dout = torch.randn_like(leaves[0])
    out, lse, *gradients = exact(*leaves, mask, dout)
    attend = lambda *given: sagebwd.attention(*given, precision=precision, **told(mask))  # noqa: E731
    assert_near(results(attend, leaves, dout), [out, *gradients])
    _, found = sagebwd.attention_forward(*leaves, precision=precision, **told(mask))
    sees = lse > -torch.inf
    assert torch.equal(found > -torch.inf, sees)
    assert (found[sees] - lse[sees]).abs().max() < 0.05


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    mask, leaves = MASKS["branches"](), made()
    dout = torch.randn_like(leaves[0])

    def attend(*given):
        return sagebwd.attention(*given, **told(mask)) * 1.0

    expected = results(attend, leaves, dout)
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    for x, y in zip(results(compiled, leaves, dout), expected):
        assert torch.equal(x, y)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    mask, leaves = MASKS["spans"](), made()
    dout = torch.randn_like(leaves[0])
    attend = lambda *given: sagebwd.attention(*given, **told(mask))  # noqa: E731
    expected = results(attend, leaves, dout)
    # Reentrant checkpoints take .backward() alone.
    checkpoint(attend, *leaves, use_reentrant=reentrant).backward(dout)
    for x, y in zip((t.grad for t in leaves), expected[1:]):
        assert torch.equal(x, y)


def test_a_captured_graph_reads_changed_intervals():
    first, second = MASKS["causal documents"](), masks.documents(
        lengths=[400, 100, 76], device="cuda")  # fmt: skip
    at = first.startend_row_indices.clone()
    leaves = made()
    dout = torch.randn_like(leaves[0])
    attend = lambda *given: sagebwd.attention(*given, causal=True, startend_row_indices=at)  # noqa: E731
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results(attend, leaves, dout)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(attend, leaves, dout)
    for mask in (second, first):
        at.copy_(mask.startend_row_indices)
        graph.replay()
        torch.cuda.synchronize()
        for x, y in zip(captured, results(attend, leaves, dout)):
            assert torch.equal(x, y)


def test_a_side_stream_reads_numbers_that_change_between_launches():
    """The stream sleeps before the first copy: what ran on another one would read other numbers."""
    masks_in_turn = [MASKS["causal documents"](),
                     masks.documents(lengths=[400, 100, 76], device="cuda"),
                     MASKS["window"](), MASKS["causal documents"]()]  # fmt: skip
    leaves, at = made(), torch.zeros_like(masks_in_turn[0].startend_row_indices)
    dout = torch.randn_like(leaves[0])
    attend = lambda *given: sagebwd.attention(*given, causal=True, startend_row_indices=at)  # noqa: E731
    expected = []
    for mask in masks_in_turn:
        at.copy_(mask.startend_row_indices)
        expected.append(results(attend, leaves, dout))
    at.zero_()
    torch.cuda.synchronize()
    found, stream = [], torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for mask in masks_in_turn:
            at.copy_(mask.startend_row_indices)
            found.append(results(attend, leaves, dout))
    torch.cuda.synchronize()
    for ours, right in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, right))
    assert not torch.equal(expected[0][0], expected[1][0])


def test_threads_with_masks_of_their_own():
    """Each has a stream, and changes the numbers between its calls."""
    leaves = made()
    dout = torch.randn_like(leaves[0])
    all_masks = [MASKS["causal documents"](), MASKS["window"](), MASKS["branches"]()]
    expected = [results(lambda *given, mask=mask: sagebwd.attention(*given, **told(mask)), leaves,
                        dout) for mask in all_masks]  # fmt: skip
    torch.cuda.synchronize()

    def work(number):
        own = [t.detach().requires_grad_() for t in leaves]
        at = torch.zeros_like(all_masks[0].startend_row_indices)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        attend = lambda *given: sagebwd.attention(*given, causal=True, startend_row_indices=at)  # noqa: E731
        same = []
        with torch.cuda.stream(stream):
            for turn in range(12):
                chosen = (number + turn) % len(all_masks)
                at.copy_(all_masks[chosen].startend_row_indices)
                same += map(torch.equal, results(attend, own, dout), expected[chosen])
        return all(same)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_the_operators_follow_pytorchs_rules():
    mask, (q, k, v) = MASKS["prefix"](), made(batch=1)
    spec = "precision=gradients16 causal=none intervals=2"
    at = masks.prefix_lm(200, TOKENS, device="cuda").startend_row_indices
    if mask.causal:
        pytest.fail("a prefix is no causal mask")
    bits = torch.ops.sagebwd.interval_bits(at, q.shape[1], TOKENS, spec)
    torch.library.opcheck(torch.ops.sagebwd.interval_bits.default, (at, q.shape[1], TOKENS, spec))
    torch.library.opcheck(torch.ops.sagebwd.interval_forward.default,
                          (q, k, v, at, bits, None, "bhsd", spec))  # fmt: skip


def test_vmap():
    mask = MASKS["causal documents"]()
    q, k, v = (t.detach().unflatten(0, (2, 1)) for t in made())
    mapped = torch.vmap(lambda *given: sagebwd.attention(*given, **told(mask)))(q, k, v)
    for i in range(2):
        assert torch.equal(mapped[i], sagebwd.attention(q[i], k[i], v[i], **told(mask)))
