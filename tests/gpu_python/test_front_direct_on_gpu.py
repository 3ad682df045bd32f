"""Norm and RoPE past the operators, and formed again in the backward, on a GPU: captured graphs,
other streams, and memory."""

import front_inputs
import pytest
from inputs import torch

import sagebwd
from sagebwd.core import front_direct

TOKENS, CHANNELS = 512, 64


def leaves_and_given(seed=0):
    """q, k, v and a gain of 16 bits, all learned, and what else there is."""
    made = [front_inputs.drawn(2, heads, TOKENS, CHANNELS, seed=seed + heads).bfloat16().cuda()
            for heads in (4, 2, 2)]  # fmt: skip
    made.append((1 + 0.2 * front_inputs.drawn(CHANNELS, seed=seed)).bfloat16().cuda())
    rope = front_inputs.table(TOKENS, CHANNELS // 2, device="cuda")
    return [t.requires_grad_() for t in made], dict(k_norm=True, rope=rope)


def front(leaves, given, **_):
    q, k, _, gain = leaves
    found = sagebwd.qk_norm_rope(q, k, q_norm=gain, **given)
    return *found, *torch.autograd.grad(found, (q, k, gain), tuple(y.detach() for y in found))


def attention(leaves, given, **more):
    q, k, v, gain = leaves
    out = sagebwd.attention(q, k, v, q_norm=gain, causal=True, **given, **more)
    return out, *torch.autograd.grad(out, leaves, out.detach())


def formed_again(leaves, given):
    return attention(leaves, given, recompute_qk=True)


PASSES = [front, attention, formed_again]


def assert_same(found, wanted):
    torch.cuda.synchronize()
    for x, y in zip(found, wanted):
        assert torch.equal(x, y) and y.isfinite().all() and y.any()


def by_operators(passes, leaves, given):
    """The results of calls that are checked and go by operators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front_direct, "key_of", lambda *given: None)
        return [t.clone() for t in passes(leaves, given)]


@pytest.mark.parametrize("passes", PASSES)
def test_a_captured_graph_is_replayed_with_other_numbers(passes):
    leaves, given = leaves_and_given()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            passes(leaves, given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = passes(leaves, given)
    for seed in (10, 20):
        others, _ = leaves_and_given(seed)
        with torch.no_grad():
            for t, other in zip(leaves, others):
                t.copy_(other)
        graph.replay()
        assert_same(found, by_operators(passes, others, given))


@pytest.mark.parametrize("passes", PASSES)
def test_it_runs_on_the_current_stream(passes):
    """Another stream is busy for a while, and changes the inputs before the call."""
    leaves, given = leaves_and_given()
    others, _ = leaves_and_given(10)
    wanted = by_operators(passes, others, given)
    for _ in range(2):
        passes(leaves, given)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            for t, other in zip(leaves, others):
                t.copy_(other)
        found = passes(leaves, given)
    assert_same(found, wanted)


def test_formed_again_q_and_k_take_no_memory():
    leaves, given = leaves_and_given()
    q, k, v, gain = leaves
    kept = []
    for more in ({}, {}, dict(recompute_qk=True)):
        before = torch.cuda.memory_allocated()
        out = sagebwd.attention(q, k, v, q_norm=gain, **given, **more)
        kept.append(torch.cuda.memory_allocated() - before)
        del out
    assert kept[1] - kept[2] == q.numel() * 2 + k.numel() * 2
    assert_same(formed_again(leaves, given), by_operators(attention, leaves, given))
