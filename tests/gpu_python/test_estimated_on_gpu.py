"""The kernels of an estimated alpha on a GPU, against PyTorch's products in FP64."""

import pytest
from inputs import listed, torch

import sagebwd
from sagebwd.numerics import emulation
from sagebwd.sla import estimated_kernels, mixing


def drawn(dtype, channels, heads, heads_kv, queries, keys):
    """q, k, and a gradient of rest. Keys lie around centres and have a large mean."""
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape):
        return torch.randn(2, *shape, generator=generator, device="cuda")

    k = normal(heads_kv, keys, channels) + 10
    k += normal(heads_kv, -(-keys // 50), channels).repeat_interleave(50, 2)[:, :, :keys]
    q, drest = normal(heads, queries, channels), normal(heads, queries)
    return [t.to(dtype).requires_grad_() for t in (q, k)], drest


def results(q, k, drest, *told):
    rest = mixing.estimated_rest(q, k, *told)
    return (rest, *torch.autograd.grad(rest, (q, k), drest))


CASES = [
    (torch.bfloat16, 64, (128, 64), 4, 2, 1000, 5000),
    (torch.bfloat16, 128, (128, 64), 4, 4, 2048, 4096),
    (torch.bfloat16, 128, (128, 128), 2, 1, 600, 8193),
    (torch.float16, 64, (64, 128), 4, 1, 8192, 700),
    (torch.float16, 128, (64, 64), 2, 2, 513, 640),
]


@pytest.mark.parametrize("dtype, channels, sizes, heads, heads_kv, queries, keys", CASES)
def test_rest_and_its_gradients(dtype, channels, sizes, heads, heads_kv, queries, keys):
    (q, k), drest = drawn(dtype, channels, heads, heads_kv, queries, keys)
    mask, scale = listed(heads_kv, queries, keys, sizes), channels**-0.5
    assert estimated_kernels.take(q, k, mask, sizes)
    rest, *grads = results(q, k, drest, mask, sizes, scale)
    exact = [t.detach().double().requires_grad_() for t in (q, k)]
    wanted, *wanted_grads = results(*exact, drest.double(), mask, sizes, scale)
    left = wanted.isfinite()
    assert torch.equal(rest.isfinite(), left) and (rest[~left] == -torch.inf).all()
    assert (rest - wanted)[left].square().mean().sqrt() < (
        0.002 if dtype == torch.bfloat16 else 0.0003)  # fmt: skip
    limits = (0.005, 0.006) if dtype == torch.bfloat16 else (0.001, 0.004)
    for x, y, limit in zip(grads, wanted_grads, limits):
        assert (x - y).norm() < limit * y.norm()
    again = results(q, k, drest, mask, sizes, scale)
    assert all(torch.equal(x, y) for x, y in zip((rest, *grads), again))


def test_other_devices_and_types_have_none():
    (q, k), _ = drawn(torch.bfloat16, 64, 2, 2, 200, 200)
    mask = listed(2, 200, 200, (128, 64))
    assert not estimated_kernels.take(q.float(), k.float(), mask, (128, 64))
    assert not estimated_kernels.take(q.cpu(), k.cpu(), mask.cpu(), (128, 64))
    assert not estimated_kernels.take(q, k, mask.float(), (128, 64))
    assert not estimated_kernels.take(q, k, mask[..., :1, :1], (200, 200))


def test_a_graph_is_replayed_with_other_lists():
    (q, k), drest = drawn(torch.bfloat16, 128, 4, 2, 700, 900)
    masks = [listed(4, 700, 900, (128, 64)), listed(4, 700, 900, (128, 64)).flip(-1)]
    mask, told = masks[0].clone(), ((128, 64), 0.1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results(q, k, drest, mask, *told)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(q, k, drest, mask, *told)
    for other in masks:
        mask.copy_(other)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(found, results(q, k, drest, other, *told)))


def test_compiled_and_under_autocast():
    (q, k), _ = drawn(torch.bfloat16, 64, 4, 2, 600, 384)
    mask = listed(4, 600, 384, (128, 64))
    v, dout = torch.randn_like(k).requires_grad_(), torch.randn_like(q)
    beta = torch.zeros(4, device="cuda", requires_grad=True)
    leaves = q, k, v, beta

    def call(q, k, v, beta):
        return sagebwd.sparse_linear_attention(q, k, v, alpha="estimated", beta=beta,
                                               block_mask=mask)  # fmt: skip

    expected = call(*leaves)
    wanted = torch.autograd.grad(expected, leaves, dout)
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    found = torch.autograd.grad(out, leaves, dout)
    for x, y in zip((out, *found), (expected, *wanted)):
        assert y.detach().any()
        assert (x.detach() - y.detach()).norm() < 0.01 * y.detach().norm()
    with torch.autocast("cuda", torch.bfloat16):
        out = call(q.float(), k.float(), v.float(), beta)
    assert torch.equal(out, expected)


def test_operators_are_sound():
    (q, k), drest = drawn(torch.bfloat16, 64, 4, 2, 256, 384)
    q, k, mask = q.detach(), k.detach(), listed(4, 256, 384, (128, 64))
    given = q, k, mask, [128, 64], 0.125
    torch.library.opcheck(torch.ops.sagebwd.estimated_rest_forward.default, given)
    _, *kept = torch.ops.sagebwd.estimated_rest_forward(*given)
    torch.library.opcheck(torch.ops.sagebwd.estimated_rest_backward.default,
                          (drest, q, mask, *kept, [128, 64], 0.125, 384))  # fmt: skip


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("channels", [64, 128])
def test_the_gradient_of_beta_errs_as_int8_makes_it(channels, calibrated):
    """Sharp scores, of which the listed keys have nearly all the weight unless beta is calibrated.
    The model is FP64 with the emulated sparse branch and the estimate of the kernels."""
    generator = torch.Generator("cuda").manual_seed(2)
    q, k, v, dout = (torch.randn(1, 4, 1024, channels, generator=generator, device="cuda")
                     for _ in range(4))  # fmt: skip
    q, k, v, dout = (t.bfloat16() for t in (4 * q, 4 * k, v, dout))
    mask, scale = sagebwd.top_blocks(sagebwd.pooled_block_scores(q, k), 0.34), channels**-0.5
    out, lse = emulation.emulated_block_sparse_attention(q, k, v, block_mask=mask, return_lse=True)
    logit = lse.double() - mixing.estimated_rest(q, k, mask, (128, 64), scale)
    beta = logit.mean((0, 2)) if calibrated else torch.zeros(4, device="cuda")
    beta = beta.float().requires_grad_()
    linear = sagebwd.block_linear_attention(*(t.double() for t in (q, k, v)), block_mask=mask)
    d_alpha = (dout.double() * (out.double() - linear)).sum(-1)
    logit = logit - beta.detach().double()[:, None]
    model = -(d_alpha * logit.sigmoid() * (-logit).sigmoid()).sum((0, 2))
    mixed = sagebwd.sparse_linear_attention(q, k, v, alpha="estimated", beta=beta, block_mask=mask)
    (found,) = torch.autograd.grad(mixed, beta, dout)
    assert (found - model).norm() < 0.03 * model.norm()
