"""return_max_logits=True on a GPU, against a search among FP64's scores, and QK-clip by it."""

import pytest
from inputs import equal, leaves, listed, make, torch

import sagebwd

#: Of INT8 scores beside FP64's, relative to 1 and the number together.
OFF = 0.05


def searched(q, k, seen=None, change=None):
    """The largest score of each head, in FP64, sequence by sequence; -inf where nothing is seen."""
    found = torch.full((q.shape[1],), -torch.inf, dtype=torch.float64, device=q.device)
    for of_q, of_k in zip(q.detach().double(), k.detach().double()):
        of_k = of_k.repeat_interleave(of_q.shape[0] // of_k.shape[0], 0)
        scores = of_q @ of_k.mT / of_q.shape[-1] ** 0.5
        scores = scores if change is None else change(scores)
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        found = torch.maximum(found, scores.amax((1, 2)))
    return found


def near(found, expected):
    assert found.dtype == torch.float32 and not found.requires_grad
    finite = expected.isfinite()
    assert torch.equal(found[~finite].double(), expected[~finite])
    assert bool(((found - expected)[finite].abs() < OFF * (1 + expected[finite].abs())).all())


def positions(queries, keys):
    return (torch.arange(queries, device="cuda")[:, None], torch.arange(keys, device="cuda")[None])


@pytest.mark.parametrize("d", [64, 128, 256, 72])
@pytest.mark.parametrize("causal", [False, "top-left", "bottom-right"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_each_width_and_mask(d, causal, dtype):
    (q, k, v), dout = leaves(700, 900, d=d, dtype=dtype)
    i, j = positions(700, 900)
    seen = None if not causal else j <= i + (200 if causal == "bottom-right" else 0)
    plain = sagebwd.attention(q, k, v, causal=causal, return_lse=True)
    out, lse, found = sagebwd.attention(q, k, v, causal=causal, return_lse=True,
                                        return_max_logits=True)  # fmt: skip
    near(found, searched(q, k, seen))
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
    assert equal(torch.autograd.grad(out, (q, k, v), dout),
                 torch.autograd.grad(plain[0], (q, k, v), dout))  # fmt: skip


@pytest.mark.parametrize("told", [
    {"precision": "qk16"}, {"granularity": "block"}, {"smooth_k": False}, {"sink_keys": 0},
    {"smooth_q": True}, {"window_left": 100}, {"rotate": False}, {"group_kv": 64},
    {"softmax_scale": -0.125}])  # fmt: skip
@pytest.mark.parametrize("d", [64, 128])
def test_of_each_option(told, d):
    q, k, v, _ = make(1000, d=d)
    i, j = positions(1000, 1000)
    seen = j >= i - 100 if "window_left" in told else None
    scale = told.get("softmax_scale", d**-0.5) / d**-0.5
    plain = sagebwd.attention(q, k, v, return_lse=True, **told)
    out, lse, found = sagebwd.attention(q, k, v, return_lse=True, return_max_logits=True, **told)
    near(found, searched(q, k, seen, lambda s: s * scale))
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])


def test_scores_are_those_of_the_kernels_or_two_steps_above():
    """Without smoothing and sinks each score is one product of integers and scales."""
    q, k, v, _ = make(1500, d=128)
    told = {"smooth_k": False, "sink_keys": 0, "return_max_logits": True}
    _, expected = sagebwd.emulation.emulated_attention(q, k, v, **told)
    above = sagebwd.attention(q, k, v, **told)[1] - expected
    longest = [t.detach().double().norm(dim=-1).max() / 127 for t in (q, k)]
    assert bool((above > 0).all()) and bool((above <= 2 * longest[0] * longest[1] / 128**0.5).all())


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_every_run_gives_the_same(d, causal):
    """Many blocks at once tell one another of their heads' largest scores."""
    q, k, v, _ = make(4096, b=4, h=8, hk=8, d=d)
    _, expected = sagebwd.attention(q, k, v, causal=causal, return_max_logits=True)
    i, j = positions(4096, 4096)
    near(expected, searched(q, k, j <= i if causal else None))
    for _ in range(50):
        _, found = sagebwd.attention(q, k, v, causal=causal, return_max_logits=True)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("place", [(0, 0), (1, 3999), (2047, 17), (3999, 2048)])
def test_one_large_score_is_found_anywhere(place):
    q, k, v, _ = make(4000, b=1, h=4, hk=4)
    query, key = place
    q[0, 2, query] = k[0, 2, key] = 3.0
    _, found = sagebwd.attention(q, k, v, return_max_logits=True)
    assert abs(float(found[2]) - 72) < 1 and bool((found[[0, 1, 3]] < 20).all())


@pytest.mark.parametrize("sizes", [(128, 64), (64, 128), (128, 128), (64, 64)])
@pytest.mark.parametrize("d", [64, 128])
def test_of_lists(sizes, d):
    q, k, v, _ = make(1000, d=d)
    mask = listed(4, 1000, 1000, sizes)
    expected = torch.full((4,), -torch.inf, dtype=torch.float64, device="cuda")
    for b in range(2):
        seen = mask[b].repeat_interleave(sizes[0], 1).repeat_interleave(sizes[1], 2)
        expected = torch.maximum(expected, searched(q[b : b + 1], k[b : b + 1],
                                                    seen[:, :1000, :1000]))  # fmt: skip
    out, found = sagebwd.block_sparse_attention(q, k, v, block_mask=mask, block_size=sizes,
                                                return_max_logits=True)  # fmt: skip
    near(found, expected)
    assert torch.equal(out, sagebwd.block_sparse_attention(q, k, v, block_mask=mask,
                                                           block_size=sizes))  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
def test_of_packed_sequences_intervals_masks_and_scores(causal):
    q, k, v, _ = make(700, b=1)
    starts = torch.tensor([0, 200, 200, 700], dtype=torch.int32, device="cuda")
    i, j = positions(700, 700)
    seen = (i < 200) == (j < 200)
    seen = seen & (j <= i) if causal else seen
    expected = searched(q, k, seen)
    packed = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    near(sagebwd.attention(*packed, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=causal,
                           return_max_logits=True)[1], expected)  # fmt: skip
    documents = sagebwd.masks.documents(lengths=[200, 500], causal=causal)
    arguments = {name: t.to("cuda") if isinstance(t, torch.Tensor) else t
                 for name, t in documents.arguments.items()}  # fmt: skip
    near(sagebwd.attention(q, k, v, **arguments, return_max_logits=True)[1], expected)
    mask = "where(q < 200, 1, 0) == where(k < 200, 1, 0)" + " & k <= q" * causal
    near(sagebwd.attention(q, k, v, mask=mask, return_max_logits=True)[1], expected)
    near(sagebwd.attention(q, k, v, mask=mask, score="2.0 * tanh(s / 2.0)",
                           return_max_logits=True)[1],
         2 * torch.tanh(expected / 2))  # fmt: skip


def test_a_captured_graph_reads_changed_tensors():
    q, k, v, _ = make(512)
    sagebwd.attention(q, k, v, return_max_logits=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, found = sagebwd.attention(q, k, v, return_max_logits=True)
    for factor in (1.0, 0.25, 2.0):  # smaller ones, too: nothing stays from the run before
        q.mul_(factor)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, sagebwd.attention(q, k, v, return_max_logits=True)[1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_a_break(backend):
    (q, k, v), dout = leaves(300)

    def attend(q, k, v):
        out, found = sagebwd.attention(q, k, v, causal=True, return_max_logits=True)
        return out * 2, found

    out, expected = attend(q, k, v)
    again, found = torch.compile(attend, backend=backend, fullgraph=True)(q, k, v)
    assert torch.equal(again, out) and torch.equal(found, expected)
    assert equal(torch.autograd.grad(again, (q, k, v), dout),
                 torch.autograd.grad(out, (q, k, v), dout))  # fmt: skip


def test_nan_and_nothing_seen():
    q, k, v, _ = make(300)
    clean = sagebwd.attention(q, k, v, return_max_logits=True)[1]
    q[1, 1, 33, 5] = torch.nan
    found = sagebwd.attention(q, k, v, return_max_logits=True)[1]
    assert found[1].isnan() and torch.equal(found[[0, 2, 3]], clean[[0, 2, 3]])
    _, found = sagebwd.attention(q, k, v, mask="h > 1", return_max_logits=True)
    assert bool((found[:2] == -torch.inf).all()) and bool(found[2:].isfinite().all())


def test_clipped_projections_give_logits_at_tau():
    torch.manual_seed(0)
    q_proj = torch.nn.Linear(256, 8 * 64, device="cuda")
    k_proj = torch.nn.Linear(256, 4 * 64, device="cuda")
    x = torch.randn(2, 512, 256, device="cuda")
    with torch.no_grad():
        q_proj.weight.mul_(20)

    def logits():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            q, k = (proj(x).unflatten(-1, (-1, 64)).transpose(1, 2) for proj in (q_proj, k_proj))
            return sagebwd.attention(q, k, k, return_max_logits=True)[1]

    before = logits()
    tau = float(before.median())
    torch.cuda.set_sync_debug_mode("error")
    try:
        gamma = sagebwd.qk_clip_(q_proj, k_proj, before, tau)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = logits()
    assert bool((gamma < 1).any()) and bool((gamma == 1).any())
    assert bool(((after - before.clamp(max=tau)).abs() < 0.05 * tau).all())
