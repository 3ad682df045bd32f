"""smooth_v=True on a GPU: bits, biases, compiled, captured and checkpointed calls."""

import pytest
from inputs import torch
from torch.utils.checkpoint import checkpoint

import sagebwd


def shifted(n=2000, b=2, h=4, hk=2, d=64, mean=2.0, dtype=torch.bfloat16):
    """q, k, v, dout: sharp scores, and values and dout with a mean in each channel."""
    generator = torch.Generator("cuda").manual_seed(n + d)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    q, k, v, dout = (normal(b, heads, n, d) for heads in (h, hk, hk, h))
    v += mean * normal(1, hk, 1, d)
    dout += normal(1, h, 1, d)
    return [t.to(dtype).requires_grad_() for t in (2 * q, k, v)], dout.to(dtype)


def exact(q, k, v, causal=False):
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


def error(x, ref):
    return float((x.double() - ref).norm() / ref.norm())


def bias(x, ref):
    return float(((x.double() - ref) * ref).sum() / ref.square().sum())


@pytest.mark.parametrize("told", [
    {}, {"granularity": "block"}, {"precision": "qk16"}, {"precision": "gradients16"},
    {"smooth_k": False}, {"sink_keys": 0}])  # fmt: skip
@pytest.mark.parametrize("d, causal", [(64, False), (96, True), (128, True), (256, False)])
def test_outputs_have_no_bias_and_gradients_are_nearer(d, causal, told):
    (q, k, v), dout = shifted(n=1111, d=d, b=1, h=2, hk=1)
    ref = exact(q, k, v, causal)
    wanted = torch.autograd.grad(ref, (q, k, v), dout.double())
    far = {}
    for smooth in (False, True):
        out = sagebwd.attention(q, k, v, causal=causal, smooth_v=smooth, **told)
        found = torch.autograd.grad(out, (q, k, v), dout)
        far[smooth] = error(out, ref), *(error(x, y) for x, y in zip(found, wanted))
        assert (abs(bias(out, ref)) < 3e-4) == smooth
    ratios = [smoothed / plain for smoothed, plain in zip(far[True], far[False])]
    few = 1.0 if "granularity" in told else 0.8  # scales of blocks have errors of their own
    assert ratios[0] < 0.7 and ratios[1] < few and ratios[2] < few + 0.1 and ratios[3] < 1.02


def test_the_same_bits_every_time_and_on_another_stream():
    (q, k, v), _ = shifted()
    expected = sagebwd.attention(q, k, v, causal=True, smooth_v=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            assert torch.equal(sagebwd.attention(q, k, v, causal=True, smooth_v=True), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_and_checkpointed(backend):
    (q, k, v), dout = shifted(n=700)

    def attend(q, k, v):
        return 2 * sagebwd.attention(q, k, v, causal=True, smooth_v=True)

    out = attend(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for function in (compiled, lambda *x: checkpoint(attend, *x, use_reentrant=False)):
        again = function(q, k, v)
        assert torch.equal(again, out)
        assert all(map(torch.equal, torch.autograd.grad(again, (q, k, v), dout), gradients))


def test_a_captured_graph_finds_the_mean_of_changed_values():
    (q, k, v), _ = shifted(n=600)
    q, k, v = (t.detach() for t in (q, k, v))
    sagebwd.attention(q, k, v, smooth_v=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sagebwd.attention(q, k, v, smooth_v=True)
    for shift in (0.0, 3.0, -5.0):
        v.add_(shift)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, sagebwd.attention(q, k, v, smooth_v=True))


def test_lists_of_blocks():
    (q, k, v), _ = shifted(n=1024)
    mask = torch.rand(2, 4, 8, 8, device="cuda") < 0.5
    mask[..., 0] = True
    seen = mask.repeat_interleave(128, 2).repeat_interleave(128, 3)
    keys, values = (t.double().repeat_interleave(2, 1) for t in (k, v))
    scores = (q.double() @ keys.mT / 8).masked_fill(~seen, -torch.inf)
    ref = scores.softmax(-1) @ values
    found = {smooth: sagebwd.block_sparse_attention(q, k, v, block_mask=mask, smooth_v=smooth,
                                                    block_size=(128, 128))
             for smooth in (False, True)}  # fmt: skip
    assert bias(found[False], ref) < -1e-3 and abs(bias(found[True], ref)) < 3e-4


def test_packed_sequences():
    (q, k, v), _ = shifted(n=700, b=1)
    starts = torch.tensor([0, 200, 200, 700], dtype=torch.int32, device="cuda")
    packed = [t.detach()[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    out = sagebwd.attention(*packed, cu_seqlens_q=starts, cu_seqlens_k=starts, smooth_v=True)
    for first, end in ((0, 200), (200, 700)):
        alone = [t[first:end].transpose(0, 1)[None].contiguous() for t in packed]
        ref = exact(*alone)[0].transpose(0, 1)
        assert error(out[first:end], ref) < 0.02 and abs(bias(out[first:end], ref)) < 3e-4
