"""The router's kernels on a simulated GPU, whose memory is that of PyTorch's CPU tensors, against
PyTorch's own operations."""

import math

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
from sagebwd.core import forms  # noqa: E402
from sagebwd.nn import BlockRouter, SparseLinearAttention  # noqa: E402
from sagebwd.sla import best_lists, route_kernels  # noqa: E402

import simulator_needed  # noqa: E402, F401


@pytest.fixture
def on_the_simulator(monkeypatch):
    """CPU tensors take the kernels that they would take on a GPU. Gives the kernels' names."""
    ran = []
    operation = forms.operation
    monkeypatch.setattr(forms, "operation", lambda device, *told, **of: operation(0, *told, **of))
    monkeypatch.setattr(forms, "stream_of", lambda device: 0)
    monkeypatch.setattr(route_kernels, "_may_run", lambda *tensors: True)
    for module, name in ((route_kernels, "_pool_blocks"), (route_kernels, "_top_blocks"),
                         (best_lists, "_launch")):  # fmt: skip
        function = getattr(module, name)

        def counted(*given, name=name, function=function):
            ran.append(name)
            return function(*given)

        monkeypatch.setattr(module, name, counted)
    torch.use_deterministic_algorithms(True)
    assert torch.ones(3).new_empty(3).isnan().all()
    yield ran
    torch.use_deterministic_algorithms(False)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", [(128, 64), (64, 128)])
@pytest.mark.parametrize("shape", ["bhsd", "bshd", "slice"])
@pytest.mark.parametrize("channels", [64, 72, 128])
def test_scores_are_those_of_the_means(on_the_simulator, channels, shape, sizes):
    q, k = drawn(2, 4, 300, channels), drawn(2, 2, 260, channels, seed=1) + 3
    q, k = (t.to(torch.bfloat16 if channels == 64 else torch.float16) for t in (q, k))
    if shape == "bshd":
        q, k = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k))
    if shape == "slice":  # of tensors with tokens at places that kernels do not read
        q, k = (torch.nn.functional.pad(t, (1, 3))[..., 1:-3] for t in (q, k))
    scores = sagebwd.pooled_block_scores(q, k, block_size=sizes)
    assert on_the_simulator == ["_pool_blocks"]
    exact = sagebwd.pooled_block_scores(q.double(), k.double(), block_size=sizes)
    assert on_the_simulator == ["_pool_blocks"] and scores.dtype == torch.float32
    assert (scores - exact).abs().max() < 1e-5


@pytest.mark.parametrize("always", [None, slice(0, 3), [5, 9]])
@pytest.mark.parametrize("count", [12, 100, 300, 1100])
def test_lists_are_those_of_a_stable_sort(on_the_simulator, count, always):
    scores = drawn(2, 3, 5, count)
    scores[0, 0] = scores[0, 0].round()
    scores[0, 1, :, ::5] = -math.inf
    scores[0, 1, 0] = -math.inf
    scores[0, 2, :, ::7] = math.nan
    scores[1, 0] = torch.where(scores[1, 0] > 0, 0.0, -0.0)
    for density in (0.01, 0.2, 1.0):
        for of in (scores, scores.transpose(1, 2)):
            mask = sagebwd.top_blocks(of, density, always=always)
            expected = sagebwd.top_blocks(of.double(), density, always=always)
            assert mask.dtype == torch.bool and torch.equal(mask, expected)
    assert on_the_simulator == ["_top_blocks"] * 6


ROUTERS = {
    "pooled": lambda: "pooled",
    "learned": lambda: "learned",
    "of heads": lambda: BlockRouter(64, heads=4),
}


@pytest.mark.parametrize("alpha", ["head", "estimated"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kind", ROUTERS)
def test_a_module_lists_by_one_operation(on_the_simulator, kind, layout, alpha):
    module = SparseLinearAttention(64, 4, heads_kv=2, density=0.3, alpha=alpha, layout=layout,
                                   router=ROUTERS[kind](), always=[1],
                                   score="softmax" if layout == "bshd" else "logits")  # fmt: skip
    for seed, weight in enumerate(module.router.parameters()):
        weight.data.copy_(drawn(*weight.shape, seed=seed) / 8)
    q, k = drawn(2, 4, 700, 64).bfloat16(), drawn(2, 2, 690, 64, seed=1).bfloat16() + 2
    if layout == "bshd":
        q, k = (t.transpose(1, 2).contiguous() for t in (q, k))
    found = module.block_mask(q, k)
    assert on_the_simulator == ["_launch"]
    bhsd = (t if layout == "bhsd" else t.transpose(1, 2) for t in (q, k))
    scores = module.router.double()(*(t.double() for t in bhsd))
    assert torch.equal(found, sagebwd.top_blocks(scores, 0.3, always=[1]))
    assert on_the_simulator == ["_launch"]


def test_a_router_that_is_no_longer_ours_is_called(on_the_simulator, monkeypatch):
    q, k = drawn(1, 2, 256, 64).bfloat16(), drawn(1, 2, 640, 64, seed=1).bfloat16()

    class Other(BlockRouter):
        def forward(self, q, k):
            return -super().forward(q, k)

    def made(router="learned"):
        return SparseLinearAttention(64, 2, density=0.3, alpha="head", router=router)

    plain, hooked, replaced = made(), made(), made()
    expected = plain.block_mask(q, k)
    assert on_the_simulator == ["_launch"]
    hooked.router.register_forward_hook(lambda module, given, scores: -scores)
    replaced.router.forward = lambda q, k: -plain.router(q, k)
    others = [module.block_mask(q, k) for module in (made(Other(64)), hooked, replaced)]
    assert on_the_simulator.count("_launch") == 1
    assert not torch.equal(others[0], expected)
    assert all(torch.equal(other, others[0]) for other in others)
    monkeypatch.setattr(best_lists, "MOST_BLOCKS", 9)
    assert torch.equal(plain.block_mask(q, k), expected)
    monkeypatch.setattr(best_lists, "MOST_BLOCKS", 10)
    plain.double()
    assert plain.block_mask(q, k).shape == expected.shape
    assert on_the_simulator.count("_launch") == 1


def test_what_has_no_kernels(on_the_simulator):
    scores = drawn(4, 6)
    for of, more in ((scores.double(), {}), (scores.bfloat16(), {}), (scores[:0], {}),
                     (scores, dict(causal="top-left", queries=512, keys=384))):  # fmt: skip
        sagebwd.top_blocks(of, 0.5, **more)
    q = drawn(1, 1, 128, 64)
    sagebwd.pooled_block_scores(q, q)
    sagebwd.pooled_block_scores(q.half(), q.half(), block_size=(32, 64))
    sagebwd.pooled_block_scores(q.half().requires_grad_(), q.half())
    assert not on_the_simulator
