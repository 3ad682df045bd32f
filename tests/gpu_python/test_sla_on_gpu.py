"""SLA2's parts in PyTorch on a GPU, against the same in FP64."""

import gc

import pytest
from inputs import listed, relative, torch
from torch.utils.checkpoint import checkpoint

import sagebwd
from sagebwd.nn import SparseLinearAttention
from sagebwd.sla import linear_kernels, mixed
from sagebwd.sla.exact import listed_attention
from sagebwd.sla.linear import linear_branch

BLOCKS = (128, 64)


def tensors(dtype, heads=4, heads_kv=2, queries=700, keys=900):
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(h, n):
        return torch.randn(2, h, n, 64, generator=generator, device="cuda").to(dtype)

    given = drawn(heads, queries), drawn(heads_kv, keys) + 0.5, drawn(heads_kv, keys)
    return [t.requires_grad_() for t in given], drawn(heads, queries)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("soft", [False, True])
def test_branches_are_those_of_fp64(dtype, soft):
    given, dout = tensors(dtype)
    scores = sagebwd.pooled_block_scores(*given[:2]).detach()
    mask = sagebwd.soft_top_blocks(scores, 0.3) if soft else sagebwd.top_blocks(scores, 0.3)
    if soft:
        mask.requires_grad_()
    at_most = 1e-5 if dtype == torch.float32 else 0.008
    for branch in (lambda q, k, v, m: listed_attention(q, k, v, m, BLOCKS, 0.125)[0],
                   lambda q, k, v, m: linear_branch(q, k, v, m, BLOCKS)):  # fmt: skip
        leaves = [*given, mask] if soft else given
        out = branch(*given, mask)
        gradients = torch.autograd.grad(out, leaves, dout)
        exact = [t.detach().double().requires_grad_() for t in leaves]
        expected = branch(*exact[:3], exact[3] if soft else mask)
        wanted = torch.autograd.grad(expected, exact, dout.double())
        for x, y in zip((out, *gradients), (expected, *wanted)):
            assert relative(x.detach(), y.detach()) < at_most


@pytest.mark.parametrize("alpha", ["block", "head", "estimated"])
def test_the_module_trains_in_two_stages(alpha):
    (q, k, v), dout = tensors(torch.bfloat16)
    has_kernels = hasattr(sagebwd, "block_sparse_attention")
    module = SparseLinearAttention(
        64, 4, heads_kv=2, density=0.2, alpha=alpha, seq_len=700,
        precision="six-of-seven" if has_kernels else "exact").cuda()  # fmt: skip
    module.calibrate_alpha(q, k, v)
    loss = module.stage_one_loss(q, k, v)
    loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in module.parameters())
    assert module.report(q, k, v)["error"] < 1
    module.freeze_router()
    exact = SparseLinearAttention(64, 4, heads_kv=2, density=0.2, alpha=alpha, seq_len=700,
                                  precision="exact").cuda().double()  # fmt: skip
    exact.load_state_dict(module.state_dict())
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = exact(*leaves)
    out = module(q, k, v)
    results = out, *torch.autograd.grad(out, (q, k, v), dout)
    wanted = expected, *torch.autograd.grad(expected, leaves, dout.double())
    for x, y in zip(results, wanted):
        assert relative(x.detach(), y.detach()) < (0.03 if has_kernels else 0.01)


@pytest.mark.parametrize("alpha", [0.3, "estimated"])
def test_both_branches_in_one_function_err_no_more_than_two_functions(alpha):
    """One function rounds the exact branch's output on the way, two the linear branch's. One
    rounding more, of the size of the last one, makes at most sqrt(2) of the error."""
    given, dout = tensors(torch.bfloat16)
    mask = sagebwd.top_blocks(sagebwd.pooled_block_scores(*given[:2]).detach(), 0.3)

    def results(leaves, precision, two):
        out = sagebwd.sparse_linear_attention(*leaves, alpha=alpha, block_mask=mask,
                                              precision=precision, return_branches=two)
        out = out[0] if two else out
        return out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))

    exact = results([t.detach().double().requires_grad_() for t in given], "exact", False)
    one, two = (results(given, "six-of-seven", two) for two in (False, True))
    for x, y, expected in zip(one, two, exact):
        assert relative(x.detach(), expected) < 2**0.5 * relative(y.detach(), expected)


def large(channels, monkeypatch):
    """64 MiB each, of which the backward is computed in parts."""
    monkeypatch.setattr(mixed, "LEAST_QUERIES", 1 << 16)
    shape = 1, 2048 // channels, 16384, channels
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    mask = torch.rand(1, shape[1], 128, 128, device="cuda") < 0.05
    return [t.requires_grad_() for t in (q, k, v)], mask, dout


@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("form", ["rows", "estimated"])
def test_the_memory_of_both_branches(channels, form, monkeypatch):
    """Five times V, of which four are the output and the three gradients."""
    (q, k, v), mask, dout = large(channels, monkeypatch)
    learned = torch.rand((q.shape[1], 128) if form == "rows" else q.shape[1], device="cuda",
                         requires_grad=True)  # fmt: skip
    told = dict(alpha=learned) if form == "rows" else dict(alpha=form, beta=learned)

    def both_passes():
        out = sagebwd.sparse_linear_attention(q, k, v, block_mask=mask, block_size=(128, 128),
                                              **told)  # fmt: skip
        return out, torch.autograd.grad(out, (q, k, v, learned), dout)

    both_passes()  # cuBLAS keeps a workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = both_passes()
    peak, of_v = torch.cuda.max_memory_allocated() - before, v.numel() * v.element_size()
    assert len(results[1]) == 4 and peak <= 5 * of_v


@pytest.mark.parametrize("alpha", ["rows", "estimated"])
@pytest.mark.parametrize("linear", ["complement", "all"])
def test_parts_of_the_heads_give_the_same_bits(monkeypatch, alpha, linear):
    """The place of the gradients makes no difference, either: with a graph that is kept, and in a
    checkpoint."""
    leaves, mask, dout = large(128, monkeypatch)
    learned = torch.rand((16, 128) if alpha == "rows" else 16, device="cuda", requires_grad=True)
    told = dict(alpha=learned) if alpha == "rows" else dict(alpha=alpha, beta=learned)
    leaves.append(learned)

    def call(*tensors):
        return sagebwd.sparse_linear_attention(*tensors[:3], block_mask=mask, linear=linear,
                                               block_size=(128, 128), **told)  # fmt: skip

    out = call(*leaves)
    found = [torch.autograd.grad(out, leaves, dout, retain_graph=keeps) for keeps in (True, False)]
    out = checkpoint(call, *leaves, use_reentrant=False)
    found.append(torch.autograd.grad(out, leaves, dout))
    assert mixed.in_parts(leaves[0]) > 1
    monkeypatch.setattr(mixed, "PARTS", 1)
    whole = torch.autograd.grad(call(*leaves), leaves, dout)
    for gradients in found:
        assert all(torch.equal(x, y) for x, y in zip(gradients, whole))


def test_the_same_inputs_give_the_same_bits():
    (q, k, v), dout = tensors(torch.bfloat16)
    mask = sagebwd.top_blocks(sagebwd.pooled_block_scores(q, k).detach(), 0.3)
    found = []
    for _ in range(2):
        out = sagebwd.block_linear_attention(q, k, v, block_mask=mask)
        found.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    assert all(torch.equal(x, y) for x, y in zip(*found))


def test_a_graph_is_replayed_with_other_lists():
    (q, k, v), _ = tensors(torch.bfloat16)
    masks = [torch.rand(2, 4, 6, 15, device="cuda") < 0.5 for _ in range(2)]
    mask = masks[0].clone()
    with torch.no_grad():
        sagebwd.block_linear_attention(q, k, v, block_mask=mask)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sagebwd.block_linear_attention(q, k, v, block_mask=mask)
        for other in masks:
            mask.copy_(other)
            graph.replay()
            assert torch.equal(out, sagebwd.block_linear_attention(q, k, v, block_mask=other))


@pytest.fixture
def taken(monkeypatch):
    """The answers of linear_kernels.take(), call by call, and a list: once that has anything, they
    are no."""
    answers, without = [], []
    take = linear_kernels.take

    def asked(*given):
        answers.append(take(*given) and not without)
        return answers[-1]

    monkeypatch.setattr(linear_kernels, "take", asked)
    return answers, without


def drawn(dtype, channels, heads, heads_kv, queries, keys):
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v, dout = (torch.randn(2, h, n, channels, generator=generator, device="cuda").to(dtype)
                     for h, n in ((heads, queries), (heads_kv, keys), (heads_kv, keys),
                                  (heads, queries)))  # fmt: skip
    return [t.requires_grad_() for t in (q, k + 0.5, v)], dout


KERNEL_CASES = [
    (torch.bfloat16, 64, (128, 64), 4, 2, 700, 900, True, "block", "complement"),
    (torch.bfloat16, 128, (128, 128), 2, 2, 1000, 1111, True, "head", "complement"),
    (torch.float16, 128, (64, 64), 4, 1, 513, 640, False, "block", "complement"),
    (torch.float16, 64, (64, 128), 2, 2, 300, 129, True, "number", "all"),
    (torch.bfloat16, 128, (128, 64), 4, 2, 600, 700, True, "estimated", "complement"),
]


@pytest.mark.parametrize(
    "dtype, channels, sizes, heads, heads_kv, queries, keys, smooth_k, alpha, linear", KERNEL_CASES
)
def test_kernels_are_as_near_fp64_as_pytorch(
    taken, dtype, channels, sizes, heads, heads_kv, queries, keys, smooth_k, alpha, linear
):
    answers, without = taken
    leaves, dout = drawn(dtype, channels, heads, heads_kv, queries, keys)
    mask = listed(heads, queries, keys, sizes)
    shapes = {"block": (heads, mask.shape[2]), "head": (heads,), "estimated": (heads,)}
    if alpha in shapes:
        leaves.append(torch.rand(shapes[alpha], device="cuda").requires_grad_())

    def results(q, k, v, learned=0.3, *, of_dout):
        told = dict(alpha=learned)
        if alpha == "estimated":
            told = dict(alpha="estimated", beta=learned)
        given = [t for t in (q, k, v, learned) if isinstance(t, torch.Tensor)]
        out = sagebwd.sparse_linear_attention(q, k, v, block_mask=mask, block_size=sizes,
                                              smooth_k=smooth_k, linear=linear,
                                              precision="exact", **told)  # fmt: skip
        return out, *torch.autograd.grad(out, given, of_dout)

    of_kernels = results(*leaves, of_dout=dout)
    assert answers == [True] * (2 if alpha == "estimated" else 1)
    without.append(True)
    answers.clear()
    of_pytorch = results(*leaves, of_dout=dout)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wanted = results(*exact, of_dout=dout.double())
    assert answers and not any(answers)
    for x, y, z in zip(of_kernels, of_pytorch, wanted):
        assert relative(x.detach(), z.detach()) < 0.012
        assert relative(x.detach(), z.detach()) < 1.3 * relative(y.detach(), z.detach()) + 1e-4


def test_tensors_without_kernels_take_pytorch(taken):
    answers, _ = taken
    leaves, _ = drawn(torch.bfloat16, 64, 2, 2, 200, 200)
    mask = listed(2, 200, 200, (100, 40))
    sagebwd.block_linear_attention(*leaves, block_mask=mask, block_size=(100, 40))
    wide = [torch.cat([t, t[..., :32]], -1) for t in leaves]
    mask = listed(2, 200, 200, (128, 64))
    sagebwd.block_linear_attention(*wide, block_mask=mask)
    sagebwd.block_linear_attention(*(t.float() for t in leaves), block_mask=mask)
    sagebwd.block_linear_attention(*leaves, block_mask=mask)
    assert answers == [False, False, False, True]


def test_kernels_give_the_same_bits_on_every_stream():
    leaves, dout = drawn(torch.bfloat16, 128, 4, 2, 700, 900)
    mask = listed(4, 700, 900, (128, 128))
    alpha = torch.rand(4, device="cuda", requires_grad=True)

    def results():
        out = sagebwd.sparse_linear_attention(*leaves, alpha=alpha, block_mask=mask,
                                              block_size=(128, 128), precision="exact")  # fmt: skip
        return out, *torch.autograd.grad(out, (*leaves, alpha), dout)

    first = results()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = torch.zeros_like(dout).copy_(dout)
        dout = late
        second = results()
    stream.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(first, second))


def test_a_graph_of_both_branches_and_their_gradients_is_replayed():
    if not hasattr(sagebwd, "block_sparse_attention"):
        pytest.skip("needs kernels for lists")
    (q, k, v), dout = drawn(torch.bfloat16, 128, 4, 2, 700, 900)
    masks = [listed(4, 700, 900, (128, 64)), listed(4, 700, 900, (128, 64)).flip(-1)]
    mask, alpha = masks[0].clone(), torch.rand(4, 6, device="cuda", requires_grad=True)

    def results(mask):
        out = sagebwd.sparse_linear_attention(q, k, v, alpha=alpha, block_mask=mask)
        return out, *torch.autograd.grad(out, (q, k, v, alpha), dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results(mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(mask)
    for other in masks:
        mask.copy_(other)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(found, results(other)))


@pytest.mark.parametrize("alpha", [0.4, "estimated", "module"])
def test_a_captured_backward_is_replayed_without_its_forward(alpha):
    """The backward does not write to what it reads: with retain_graph=True it gives the same bits
    again, as that of other attentions does."""
    gc.collect()  # graphs of an earlier test, whose memory must not be freed during a capture
    leaves, dout = drawn(torch.bfloat16, 128, 4, 2, 700, 900)
    mask = listed(4, 700, 900, (128, 64))
    if alpha == "module":
        call = SparseLinearAttention(128, 4, heads_kv=2, density=0.2, alpha="head").cuda()
        call.freeze_router()
    else:
        def call(q, k, v):
            return sagebwd.sparse_linear_attention(q, k, v, alpha=alpha, block_mask=mask)
    learned = list(call.parameters()) if alpha == "module" else []
    wanted = [*leaves, *(p for p in learned if p.requires_grad)]
    expected = torch.autograd.grad(call(*leaves), wanted, dout)
    samples = tuple(t.detach().clone().requires_grad_() for t in leaves)
    graphed = torch.cuda.make_graphed_callables(call, samples, allow_unused_input=True)
    out = graphed(*leaves)
    for _ in range(3):
        found = torch.autograd.grad(out, wanted, dout, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(found, expected))


@pytest.mark.parametrize("both", [False, True])
def test_compiled(both):
    if both and not hasattr(sagebwd, "block_sparse_attention"):
        pytest.skip("needs kernels for lists")
    leaves, dout = drawn(torch.bfloat16, 64, 4, 2, 256, 384)
    mask = listed(4, 256, 384, (128, 64))

    def call(q, k, v):
        if both:
            return sagebwd.sparse_linear_attention(q, k, v, alpha=0.4, block_mask=mask)
        return sagebwd.block_linear_attention(q, k, v, block_mask=mask)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    out, expected = compiled(*leaves), call(*leaves)
    assert relative(out.detach(), expected.detach()) < 0.003
    found, wanted = (torch.autograd.grad(t, leaves, dout) for t in (out, expected))
    assert all(relative(x, y) < 0.003 for x, y in zip(found, wanted))


def test_operators_are_sound():
    leaves, dout = drawn(torch.bfloat16, 64, 4, 2, 256, 384)
    q, k, v = (t.detach() for t in leaves)
    told = listed(4, 256, 384, (128, 64)), [128, 64], True
    for name, given in (("forward", (q, k, v, *told)), ("backward", (dout, q, k, v, *told))):
        torch.library.opcheck(getattr(torch.ops.sagebwd, f"linear_branch_{name}").default, given)


def test_memory_is_linear_in_the_length():
    """The linear branch of one head of 65536 tokens, forward and backward: 9 times V at most, of
    which four are results and one a copy of dout."""
    q, k, v = (torch.randn(1, 1, 65536, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for _ in range(3))  # fmt: skip
    mask = torch.rand(1, 1, 512, 1024, device="cuda") < 0.03
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sagebwd.block_linear_attention(q, k, v, block_mask=mask).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 9 * v.numel() * v.element_size()
