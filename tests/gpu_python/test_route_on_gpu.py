"""The router's kernels on a GPU, against PyTorch's own operations."""

import math

import pytest
from inputs import torch

import sagebwd
from sagebwd.nn import BlockRouter, SparseLinearAttention
from sagebwd.sla import route_kernels


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")


@pytest.mark.parametrize("channels, sizes", [(64, (128, 64)), (128, (64, 128)), (72, (64, 64))])
def test_sums_of_blocks(channels, sizes):
    q, k = drawn(2, 1000, 4, channels).bfloat16(), drawn(2, 5000, 2, channels).bfloat16()
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    assert route_kernels.pools(q, k, sizes)
    found = route_kernels.sums_of_both(q, k, sizes)
    for sums, t, size in zip(found, (q, k), sizes):
        exact = route_kernels.block_sums(t.double(), size)
        assert sums.shape == exact.shape and (sums - exact).abs().max() < 1e-3
    again = route_kernels.sums_of_both(q, k, sizes)
    assert all(torch.equal(x, y) for x, y in zip(found, again))


@pytest.mark.parametrize("always", [None, slice(0, 3), [5, 7]])
@pytest.mark.parametrize("count", [9, 128, 500, 1024, 3000])
def test_lists_are_those_of_a_stable_sort(count, always):
    scores = drawn(2, 3, 40, count)
    scores[0, 0] = scores[0, 0].round()
    scores[0, 1, :, ::5] = -math.inf
    scores[0, 2, :, ::7] = math.nan
    for density in (0.001, 0.05, 0.3, 1.0):
        found = sagebwd.top_blocks(scores, density, always=always)
        expected = sagebwd.top_blocks(scores.double(), density, always=always)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("channels, keys", [(64, 5000), (128, 32768), (72, 64 * 1500), (256, 700)])
def test_a_module_lists_by_one_operation(channels, keys, per_head):
    """Lists differ only where FP32 cannot part two scores."""
    of_heads = BlockRouter(channels, heads=4 if per_head else None)
    module = SparseLinearAttention(channels, 4, heads_kv=2, density=0.1, alpha="head",
                                   router=of_heads, always=slice(0, 2)).cuda()  # fmt: skip
    for weight in module.router.parameters():
        weight.data.add_(drawn(*weight.shape) / 16)
    q, k = drawn(2, 4, 1000, channels).bfloat16(), drawn(2, 2, keys, channels).bfloat16() + 1
    found = module.block_mask(q, k)
    with torch.no_grad():
        scores = module.router.double()(q.double(), k.double())
    expected = sagebwd.top_blocks(scores, 0.1, always=slice(0, 2))
    assert torch.equal(found.sum(-1), expected.sum(-1)) and found[..., :2].all()
    scores[..., :2] = float("inf")
    worst = scores.masked_fill(~found, float("inf")).amin(-1)
    best_left = scores.masked_fill(found, -float("inf")).amax(-1)
    assert (best_left - worst).max() < 1e-5
    module.float()
    assert torch.equal(found, module.block_mask(q, k))


def test_a_graph_is_replayed_with_other_tensors():
    q, k = (drawn(1, 2, 1024, 64).bfloat16() for _ in range(2))

    def call():
        scores = sagebwd.pooled_block_scores(q, k)
        return sagebwd.top_blocks(scores, 0.25, always=[0, 3])

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = call()
    for of_k in (k.clone(), k.flip(2)):
        k.copy_(of_k)
        graph.replay()
        assert torch.equal(mask, call())


def test_operators_are_sound_and_compiled():
    q, k = (drawn(1, 2, 1024, 64).bfloat16() for _ in range(2))
    torch.library.opcheck(torch.ops.sagebwd.pool_blocks.default, (q, k, [128, 64]))
    scores = sagebwd.pooled_block_scores(q, k)
    for always in (None, torch.arange(16, device="cuda") < 2):
        given = scores, 4, always, [128, 64]
        torch.library.opcheck(torch.ops.sagebwd.top_blocks.default, given)

    maps = drawn(64, 64), drawn(2, 64, 64)
    for always, wants_mask in ((None, False), (torch.arange(16, device="cuda") < 2, True)):
        given = q, k, *maps, 4, always, [128, 64], wants_mask
        torch.library.opcheck(torch.ops.sagebwd.route_blocks.default, given)

    def call(q, k):
        return sagebwd.top_blocks(sagebwd.pooled_block_scores(q, k), 0.25)

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k)
    assert torch.equal(found, call(q, k))
