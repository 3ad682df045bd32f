"""Attention under masks that are expressions, on a GPU, against FP64 and dense masks."""

import pytest
from alike import equal
from inputs import torch
from mask_cases import BATCH, CASES, HEADS, assert_near, exact, inputs, results
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sagebwd
from sagebwd import masks

TOKENS = 575
PRECISIONS = "six-of-seven", "gradients16", "dv16", "qk16"


def made(name, channels=128, dtype=torch.bfloat16):
    """(the mask, which keys queries see, inputs, the gradient of the output)."""
    mask, seen = CASES[name](TOKENS, "cuda")
    return mask, seen.cuda(), *inputs(seen, "cuda", channels, dtype)


def under(mask, **given):
    return lambda *qkv: sagebwd.attention(*qkv, mask=mask, **given)


# Kernels are compiled for each mask, so that not all masks have all precisions and channels.
@pytest.mark.parametrize("name, channels, dtype, precision", [
    *((name, 128, torch.bfloat16, "six-of-seven") for name in CASES),
    *(("documents", channels, dtype, precision) for precision in PRECISIONS
      for channels, dtype in ((64, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16))),
    ("flamingo", 64, torch.bfloat16, "gradients16"),
])  # fmt: skip
def test_masks_against_fp64(name, channels, dtype, precision):
    mask, seen, leaves, dout = made(name, channels, dtype)
    lse, right = exact(leaves, dout, seen)
    assert_near(results(under(mask, precision=precision), leaves, dout), right)
    _, found = sagebwd.attention_forward(*leaves, mask=mask, precision=precision)
    sees = lse > -torch.inf
    assert torch.equal(found > -torch.inf, sees)
    assert (found[sees] - lse[sees]).abs().max() < 0.05


@pytest.mark.parametrize("name", ["documents", "natten"])
def test_flex_attention_has_the_same_masks(name):
    """It computes in bf16, which is what an error may be without INT8."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="needs flex_attention")
    mask, seen, leaves, dout = made(name)
    queries, keys = seen.shape[2:]
    table = seen.expand(BATCH, HEADS, queries, keys).contiguous()
    block_mask = flex.create_block_mask(lambda b, h, q, k: table[b, h, q, k], BATCH, HEADS, queries,
                                        keys, device="cuda")  # fmt: skip
    torch._dynamo.reset()
    attend = torch.compile(flex.flex_attention, dynamic=False)
    _, right = exact(leaves, dout, seen)
    theirs = results(lambda *qkv: attend(*qkv, block_mask=block_mask, enable_gqa=True), leaves,
                     dout)  # fmt: skip
    assert_near(theirs, right, 0.015)
    assert_near(results(under(mask), leaves, dout), right)


@pytest.mark.parametrize("kept", [False, True], ids=["expression", "block mask"])
@pytest.mark.parametrize("name", ["documents", "window"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend, name, kept):
    mask, seen, leaves, dout = made(name)
    if kept:
        mask = masks.block_mask(mask, BATCH, HEADS, *seen.shape[2:])

    def attend(*qkv):
        return sagebwd.attention(*qkv, mask=mask) * 1.0

    expected = results(attend, leaves, dout)
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    assert equal(results(compiled, leaves, dout), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    mask, _, leaves, dout = made("prefix_lm")
    expected = results(under(mask), leaves, dout)
    # Reentrant checkpoints take .backward() alone.
    checkpoint(under(mask), *leaves, use_reentrant=reentrant).backward(dout)
    assert equal([t.grad for t in leaves], expected[1:])


def captured(attend, leaves, dout):
    """A graph of both passes, and the tensors in which it leaves its results."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results(attend, leaves, dout)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(attend, leaves, dout)
    return graph, found


@pytest.mark.parametrize("kept", [False, True], ids=["expression", "block mask"])
def test_a_captured_graph_reads_changed_tensors(kept):
    mask, seen, leaves, dout = made("documents")
    given = masks.block_mask(mask, BATCH, HEADS, *seen.shape[2:]) if kept else mask
    doc = mask.operands["doc"]
    first = doc.clone()
    graph, found = captured(under(given), leaves, dout)
    for documents in (first.flip(0), first // 2, first):
        doc.copy_(documents)
        if kept:
            given.refresh()
        graph.replay()
        torch.cuda.synchronize()
        assert equal(found, results(under(mask), leaves, dout))


def test_another_stream():
    mask, _, leaves, dout = made("jagged")
    expected = results(under(mask), leaves, dout)
    length, stream = mask.operands["length"], torch.cuda.Stream()
    length -= 100
    other = results(under(mask), leaves, dout)
    length += 100
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        length -= 100  # long after the call was made
        found = results(under(mask), leaves, dout)
    stream.synchronize()
    assert equal(found, other) and not equal(other, expected)


class Found(TorchDispatchMode):
    """Counts how often the blocks of a mask are found."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.sagebwd.mask_bits.default
        return function(*args, **(kwargs or {}))


def test_a_block_mask_serves_many_calls():
    mask, seen, leaves, dout = made("flamingo")
    expected = results(under(mask), leaves, dout)
    kept = masks.block_mask(mask, BATCH, HEADS, *seen.shape[2:])
    with Found() as found:
        assert equal(results(under(kept), leaves, dout), expected)
        assert equal(results(under(kept, causal=False), leaves, dout), expected)
    assert found.count == 0
    mask.operands["image"].fill_(-1)
    assert equal(results(under(kept), leaves, dout), expected)  # until it is told
    assert not any(x.any() for x in results(under(kept.refresh()), leaves, dout))


def test_the_operators_follow_pytorchs_rules():
    _, _, (q, k, v), _ = made("documents")
    q, k, v = (t.detach()[:, :, :100].contiguous() for t in (q, k, v))
    spec = "precision=gradients16 causal=none mask=doc[b,q]==doc[b,k]"
    tables = torch.arange(2 * 100, dtype=torch.int32, device="cuda") // 30
    given = q, k, tables, [2, 100], "bhsd", spec
    bits = torch.ops.sagebwd.mask_bits(*given)
    torch.library.opcheck(torch.ops.sagebwd.mask_bits.default, given)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(torch.ops.sagebwd.masked_forward.default,
                          (*leaves, tables, [2, 100], bits, None, "bhsd", spec))  # fmt: skip


@pytest.mark.parametrize("given", [{}, {"score": "4.0 * tanh(s / 4.0)", "causal": True}], ids=str)
def test_a_trace_has_the_emulation_and_the_kernels(given):
    mask, _, leaves, dout = made("documents", 64)
    table = sagebwd.trace(*(t.detach() for t in leaves), dout, mask=mask, **given)
    for name in ("O", "dQ", "dK", "dV"):
        emulated, of_kernels = table[name]["rel_l2"], table["kernels"][name]["rel_l2"]
        assert 0.003 < emulated < 0.03, name
        assert of_kernels == pytest.approx(emulated, rel=0.05, abs=2e-3), name


def test_a_monitor_measures_the_errors_under_a_mask():
    mask, seen, leaves, dout = made("documents", 64)
    _, right = exact(leaves, dout, seen)
    with sagebwd.Monitor(every=1) as monitor:
        for _ in range(2):
            found = results(under(mask), leaves, dout)
    assert len(monitor.records) == 2
    for record in monitor.records:  # of one key head, and the query heads that read it
        first, count = record["head"], record["heads"]
        heads = dict.fromkeys(("O", "dQ"), slice(first, first + count))
        for name, x, y in zip(("O", "dQ", "dK", "dV"), found, right):
            part = record["sequence"], heads.get(name, first // count)
            x, y = (t[part].detach().double() for t in (x, y))
            assert record[name] == pytest.approx(float((x - y).norm() / y.norm()), rel=5e-3), name
