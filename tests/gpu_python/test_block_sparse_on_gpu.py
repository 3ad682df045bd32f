"""Lists of blocks through PyTorch on a GPU: kernels, graphs whose lists change, compiled calls."""

import pytest
from alike import compiled
from inputs import torch
from test_torch import CHECKS

import sagebwd
from sagebwd.numerics import emulation

SIZES = [(128, 64), (64, 64), (128, 128)]


def tensors(m=1000, n=1500, head_dim=128, heads=4, heads_kv=2):
    torch.manual_seed(0)
    return [torch.randn(2, h, s, head_dim, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for h, s in ((heads, m), (heads_kv, n), (heads_kv, n))]  # fmt: skip


def mask_of(q, k, sizes, density=0.3, heads=None):
    rows, columns = -(-q.shape[2] // sizes[0]), -(-k.shape[2] // sizes[1])
    torch.manual_seed(1)
    return torch.rand(q.shape[0], heads or q.shape[1], rows, columns, device="cuda") < density


def both_passes(inputs, dout, **told):
    out, lse = sagebwd.block_sparse_attention(*inputs, return_lse=True, **told)
    return out, lse, *torch.autograd.grad(out, inputs, dout)


def assert_same(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("chosen", [{}, {"causal": "bottom-right"}, {"precision": "qk16"}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_is_near_the_emulation(sizes, chosen, head_dim):
    inputs = tensors(head_dim=head_dim)
    told = dict(block_mask=mask_of(*inputs[:2], sizes), block_size=sizes, **chosen)
    dout = torch.randn_like(inputs[0])
    found = both_passes(inputs, dout, **told)
    out, lse = emulation.emulated_block_sparse_attention(*inputs, return_lse=True, **told)
    expected = out, lse, *torch.autograd.grad(out, inputs, dout)
    for x, y in zip(found, expected):
        seen = y.isfinite()
        assert torch.equal(seen, x.isfinite())
        assert (x[seen].double() - y[seen].double()).norm() <= 0.01 * y[seen].double().norm()


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_masks_indices_and_bits_give_the_same(heads):
    inputs = tensors()
    dout = torch.randn_like(inputs[0])
    mask = mask_of(*inputs[:2], (128, 64), heads=heads)
    expected = both_passes(inputs, dout, block_mask=mask)
    columns = torch.arange(mask.shape[-1], device="cuda", dtype=torch.int32)
    order = torch.rand(mask.shape, device="cuda").where(mask, 2.0).argsort(-1)
    indices = torch.where(mask, columns, -1).gather(-1, order)
    counts = mask.sum(-1, dtype=torch.int32)
    assert_same(both_passes(inputs, dout, block_indices=indices, block_counts=counts), expected)
    bits = sagebwd.pack_blocks(mask)
    assert torch.equal(bits.cpu(), sagebwd.pack_blocks(mask.cpu()))
    assert_same(both_passes(inputs, dout, block_bits=bits), expected)
    per_head = mask.repeat_interleave(4 // heads, 1)
    assert_same(both_passes(inputs, dout, block_mask=per_head), expected)


def test_a_graph_takes_other_lists():
    inputs = tensors()
    dout = torch.randn_like(inputs[0])
    mask = mask_of(*inputs[:2], (128, 64))
    both_passes(inputs, dout, block_mask=mask)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both_passes(inputs, dout, block_mask=mask)
    for density in (0.1, 0.0, 1.0, 0.5):
        mask.copy_(torch.rand(mask.shape, device="cuda") < density)
        graph.replay()
        assert_same(found, both_passes(inputs, dout, block_mask=mask.clone()))


def test_wrong_lists_are_nan_and_nothing_waits_for_the_device():
    inputs = tensors()
    indices = torch.zeros(1, 1, 8, 2, dtype=torch.int32, device="cuda")
    indices[0, 0, 2, 1] = 24
    sagebwd.block_sparse_attention(*inputs, block_indices=indices)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = sagebwd.block_sparse_attention(*inputs, block_indices=indices, return_lse=True)
        out.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wrong = torch.arange(1000, device="cuda") // 128 == 2
    assert torch.equal(lse.isnan(), wrong.expand_as(lse))
    assert torch.equal(out.isnan(), wrong[:, None].expand_as(out))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_it_is_the_same(backend):
    if backend == "inductor":
        pytest.importorskip("triton", reason="needs Triton for Inductor")
    inputs = tensors()
    mask = mask_of(*inputs[:2], (128, 64))
    dout = torch.randn_like(inputs[0])

    def call(*inputs):
        return sagebwd.block_sparse_attention(*inputs, block_mask=mask)

    expected = call(*inputs)
    found = compiled(call, backend=backend)(*inputs)
    assert_same([found], [expected])
    assert_same(torch.autograd.grad(found, inputs, dout),
                torch.autograd.grad(expected, inputs, dout))  # fmt: skip


def test_the_operators_are_sound():
    inputs = tensors(300, 500)
    bits = sagebwd.pack_blocks(mask_of(*inputs[:2], (128, 64)))
    text = "causal=none granularity=row sparse_q=128 sparse_kv=64"
    told = (bits, None, "bhsd", text)
    torch.library.opcheck(torch.ops.sagebwd.block_sparse_forward.default, (*inputs, *told),
                          test_utils=CHECKS)  # fmt: skip
    mask = mask_of(*inputs[:2], (128, 64))
    torch.library.opcheck(torch.ops.sagebwd.pack_block_mask.default, (mask, (128, 64)),
                          test_utils=CHECKS)  # fmt: skip
