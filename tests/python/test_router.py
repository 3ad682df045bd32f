"""Lists of the best blocks, and blocks that are listed in any case (`always=`)."""

import copy
import math

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
from sagebwd.nn import SparseLinearAttention  # noqa: E402
from sagebwd.sla import route_kernels, router  # noqa: E402


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def listed_of(scores, kept, always=()):
    """The oracle: of each row `always`, and the first of the others by score."""
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for row, listed in zip(scores.flatten(0, -2).tolist(), mask.flatten(0, -2)):
        others = [i for i, x in enumerate(row) if i not in always and x != -math.inf]
        others.sort(key=lambda i, row=row: -math.inf if math.isnan(row[i]) else -row[i])
        for i in [*always, *others[: max(0, kept - len(always))]]:
            listed[i] = True
    return mask


def mask_of(numbers, count):
    mask = torch.zeros(count, dtype=torch.bool)
    mask[list(numbers)] = True
    return mask


#: What may be given, and the numbers of 12 blocks that it means.
GIVEN = {
    "slice": (slice(0, 3), (0, 1, 2)),
    "last": (slice(-2, None), (10, 11)),
    "stepped": (slice(1, None, 4), (1, 5, 9)),
    "beyond": (slice(9, 99), (9, 10, 11)),
    "range": (range(8, 2, -3), (5, 8)),
    "list": ([7, 3, 4, 3], (3, 4, 7)),
    "tuple": ((11,), (11,)),
    "none of them": ([], ()),
    "mask": (mask_of((2, 6), 12), (2, 6)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("given", GIVEN)
def test_some_blocks_are_always_listed(given, dtype):
    always, numbers = GIVEN[given]
    scores = drawn(2, 3, 4, 12).to(dtype)
    scores[0, 0, 0, 3:9] = -math.inf
    scores[0, 0, 1, :] = -math.inf
    scores[0, 0, 2, 4:] = 0.5  # of equal ones the first
    scores[0, 0, 3, 1::3] = math.nan
    for kept in (1, 2, 5, 12):
        mask = sagebwd.top_blocks(scores, kept / 12, always=always)
        assert torch.equal(mask, listed_of(scores, kept, numbers))
    assert mask[0, 0, 1].nonzero().flatten().tolist() == list(numbers)


def test_without_any_the_lists_are_what_they_were():
    scores = drawn(3, 12)
    for always in (None, [], slice(0, 0), torch.zeros(12, dtype=torch.bool)):
        assert torch.equal(sagebwd.top_blocks(scores, 0.3, always=always),
                           listed_of(scores, 3))  # fmt: skip
        assert torch.equal(sagebwd.soft_top_blocks(scores, 0.3, always=always),
                           sagebwd.soft_top_blocks(scores, 0.3))  # fmt: skip


def test_under_a_causal_mask_queries_still_see_something():
    scores, of = drawn(6, 12, seed=3), dict(causal="top-left", queries=768, keys=768)
    mask = sagebwd.top_blocks(scores, 0.25, always=[0], **of)
    first = torch.arange(6)[:, None] * 128
    seen = torch.arange(12) * 64 <= first
    assert mask[:, 0].all() and (mask & seen).any(1).all()
    assert (mask.sum(1) <= 3).all() and (mask.sum(1)[1:] == 3).all()
    assert not (mask & (torch.arange(12) * 64 > first + 127)).any()
    # Blocks at the end alone would leave the first queries without any.
    mask = sagebwd.top_blocks(scores, 0.25, always=slice(9, 12), **of)
    assert mask[:, 9:].all() and (mask & seen).any(1).all()
    assert mask.sum(1).tolist() == [4, 4, 4, 4, 4, 3 + int((scores[5, :11].argmax() < 9).item())]


def test_soft_lists_have_them_too():
    always, numbers = [1, 2, 8], (1, 2, 8)
    scores = drawn(3, 12).requires_grad_()
    rest = [i for i in range(12) if i not in numbers]
    for kept in (1, 3, 5, 12):
        soft = sagebwd.soft_top_blocks(scores, kept / 12, 0.3, always=always)
        assert (soft[:, numbers] == 1).all()
        others = max(0, kept - 3)
        assert (soft[:, rest].sum(-1) - others).abs().max() < 1e-9
        if 0 < others < 9:
            alone = sagebwd.soft_top_blocks(scores[:, rest], others / 9, 0.3)
            assert (soft[:, rest] - alone).abs().max() < 1e-9
        hard = sagebwd.top_blocks(scores, kept / 12, always=always)
        steep = sagebwd.soft_top_blocks(scores, kept / 12, 1e-6, always=always)
        assert (steep - hard.double()).abs().max() < 1e-9
        gradient = torch.autograd.grad((soft * drawn(3, 12, seed=1)).sum(), scores)[0]
        assert not gradient[:, numbers].any()
        assert gradient[:, rest].any() == (0 < others < 9)
    assert torch.autograd.gradcheck(
        lambda x: sagebwd.soft_top_blocks(x, 0.4, 0.3, always=always), (scores,)
    )


def test_what_cannot_be_always_listed_is_refused():
    scores = drawn(2, 9)

    def refused(match, always, error=sagebwd.SpecError):
        for function in (sagebwd.top_blocks, sagebwd.soft_top_blocks):
            with pytest.raises(error, match=match):
                function(scores, 0.5, always=always)

    refused("has block 9 and there are 9 key blocks: pass numbers from 0 to 8", [2, 9])
    refused(r"a number of always=-1: pass numbers of key blocks as a slice.*given: \[-1\]", [-1])
    refused("a number of always=True: pass numbers", [True, False], TypeError)
    refused("a number of always=0.5", (0.5,), TypeError)
    refused("always='x': pass numbers of key blocks", "x", TypeError)
    refused("always=3: pass numbers", 3, TypeError)
    refused("a number of always='a'", slice("a"), TypeError)
    refused("pass a slice whose step is 1 or more", slice(None, None, -1))
    refused("always is torch.int64 of ", torch.tensor([1, 2]))
    refused(r"always is torch.bool of \(2, 9\)", torch.ones(2, 9, dtype=torch.bool))
    refused(r"always has shape \(8,\) and there are 9 key blocks: pass a mask of \(9,\)",
            torch.ones(8, dtype=torch.bool))  # fmt: skip
    refused("always is on meta and the scores on cpu", torch.ones(9, dtype=torch.bool,
                                                                  device="meta"))  # fmt: skip


# ---- the module ----------------------------------------------------------------------------------


def made(**options):
    return SparseLinearAttention(8, 2, **{"alpha": "head", "block_size": (8, 4), "density": 0.3,
                                          "precision": "exact", **options}).double()  # fmt: skip


@pytest.mark.parametrize("given", ["slice", "list", "range", "mask"])
def test_a_module_lists_them(given):
    always, numbers = GIVEN[given]
    module, plain = made(always=always), made()
    q, k, v = (drawn(1, 2, 48, 8, seed=s) for s in range(3))
    mask = module.block_mask(q, k)
    scores = plain.router(q, k)
    assert torch.equal(mask, listed_of(scores.detach(), 3, numbers))
    assert not torch.equal(mask, plain.block_mask(q, k))
    again = copy.deepcopy(module)
    assert torch.equal(again.block_mask(q, k), mask)
    out = module(q, k, v)
    wanted = sagebwd.sparse_linear_attention(
        q, k, v, alpha=torch.full((2, 1), 0.5).double(), block_mask=mask, block_size=(8, 4),
        precision="exact")  # fmt: skip
    assert torch.equal(out, wanted)
    straight = module(q, k, v, routing="straight-through")
    assert (straight - out).abs().max() < 1e-12


def test_a_module_trains_with_them():
    module, plain = made(always=slice(0, 2), density=0.4), made(density=0.4)
    q, k, v = (drawn(1, 2, 48, 8, seed=s) for s in range(3))
    soft = module._lists(q, k, "soft").mask
    assert (soft[..., :2] == 1).all() and (soft.sum(-1) - 4).abs().max() < 1e-6
    loss = module.stage_one_loss(q, k, v)
    loss.backward()
    assert module.router.query_map.grad.any()
    assert loss.item() != plain.stage_one_loss(q, k, v).item()
    module.calibrate_alpha(q, k, v)
    assert module.report(q, k, v)["density"] == 4 / 12
    # More blocks than the density has: they alone are listed.
    module = made(always=range(6), density=0.1)
    lists = module._lists(q, k, "hard")
    assert lists.mask.sum(-1).unique().tolist() == [6]


def test_a_module_refuses_them_when_it_is_made():
    for always in ([-1], "x", torch.ones(3), slice(3, None, -1)):
        with pytest.raises((sagebwd.SpecError, TypeError), match="always"):
            made(always=always)


# ---- operators -----------------------------------------------------------------------------------


def test_operators_are_sound():
    q, k = drawn(2, 4, 300, 32).bfloat16(), drawn(2, 2, 200, 32, seed=1).bfloat16()
    given = q, k, [128, 64]
    torch.library.opcheck(torch.ops.sagebwd.pool_blocks.default, given)
    for sums, t, size in zip(torch.ops.sagebwd.pool_blocks(*given), (q, k), (128, 64)):
        parts = t.double().split(size, 2)
        exact = torch.stack([part.sum(2) for part in parts], 2)
        assert sums.dtype == torch.float32 and (sums - exact).abs().max() < 1e-4
    scores = drawn(2, 3, 12).float()
    for always in (None, mask_of((3, 4), 12)):
        given = scores, 5, always, [128, 64]
        torch.library.opcheck(torch.ops.sagebwd.top_blocks.default, given)
        expected = listed_of(scores, 5, () if always is None else (3, 4))
        assert torch.equal(torch.ops.sagebwd.top_blocks(*given), expected)
    maps = drawn(32, 32, seed=2).float(), drawn(4, 32, 32, seed=3).float()
    for (of_q, of_k), always in (((None, None), None), (maps, None), (maps[::-1], (0, 2))):
        forced = None if always is None else mask_of(always, 4)
        scores = sagebwd.pooled_block_scores(q, k, query_map=of_q, key_map=of_k)
        expected = sagebwd.top_blocks(scores, 0.5, always=always)
        for wants_mask in (False, True):
            given = q, k, of_q, of_k, 2, forced, [128, 64], wants_mask
            torch.library.opcheck(torch.ops.sagebwd.route_blocks.default, given)
            bits, mask = torch.ops.sagebwd.route_blocks(*given)
            assert torch.equal(bits, sagebwd.pack_blocks(expected))
            assert torch.equal(mask, expected) if wants_mask else mask.numel() == 0


@pytest.mark.parametrize("alpha", ["head", "estimated"])
def test_a_compiled_module_has_one_operator_for_its_lists(alpha, monkeypatch):
    monkeypatch.setattr(route_kernels, "_may_run", lambda *t: torch.compiler.is_compiling())
    module = SparseLinearAttention(64, 2, density=0.5, alpha=alpha, always=[0], precision="exact")
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(lambda q, k: module.block_mask(q, k), fullgraph=True, dynamic=True,
                             backend=backend)  # fmt: skip
    for tokens in (700, 1500, 3000):  # in one graph
        q, k = (drawn(1, 2, tokens, 64, seed=s).bfloat16() for s in range(2))
        assert torch.equal(compiled(q, k), module.block_mask(q, k))
    ours = [target for target in targets if target.startswith("sagebwd.")]
    assert ours == ["sagebwd.route_blocks"]


@pytest.mark.parametrize("kind", ["kernels", "PyTorch"])
def test_compiled_lists_are_those_of_eager_code(kind, monkeypatch):
    """With operators in the graph, as on a GPU, and without."""
    if kind == "kernels":
        monkeypatch.setattr(route_kernels, "_may_run", lambda *t: torch.compiler.is_compiling())
    q, k = (drawn(1, 2, 300, 64, seed=s).bfloat16() for s in range(2))

    def call(q, k):
        scores = sagebwd.pooled_block_scores(q, k)
        return sagebwd.top_blocks(scores, 0.5, always=slice(0, 1)), scores

    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        found = torch.compile(call, fullgraph=True, backend=backend)(q, k)
        expected = call(q, k)
    for x, y in zip(found, expected):
        assert torch.equal(x, y)
    ours = {target for target in targets if target.startswith("sagebwd.")}
    assert ours == ({"sagebwd.pool_blocks", "sagebwd.top_blocks"} if kind == "kernels" else set())


def test_scores_that_need_a_gradient_have_no_kernel(monkeypatch):
    monkeypatch.setattr(route_kernels, "_may_run", lambda *t: True)
    ran = []
    monkeypatch.setattr(route_kernels, "_pool_blocks", lambda q, k, sizes: ran.append(1) or tuple(
        route_kernels.block_sums(t, size) for t, size in zip((q, k), sizes)))  # fmt: skip
    q, k = (drawn(1, 2, 256, 64, seed=s).bfloat16() for s in range(2))
    sagebwd.pooled_block_scores(q, k)
    assert ran == [1]
    q.requires_grad_()
    with torch.no_grad():
        sagebwd.pooled_block_scores(q, k)
    assert ran == [1, 1]
    scores = sagebwd.pooled_block_scores(q, k)
    assert torch.autograd.grad(scores.sum(), q)[0].any() and ran == [1, 1]
    for other in ((q.detach().float(), k.float()), (q.detach()[..., :36], k[..., :36])):
        assert not route_kernels.pools(*other, (128, 64))
    assert not route_kernels.pools(q.detach(), k, (128, 32))
    assert router.block_sums is route_kernels.block_sums
