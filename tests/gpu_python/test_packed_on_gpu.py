"""Packed sequences through PyTorch: operators, graphs whose lengths change, compiled layers."""

import pytest
from alike import assert_alike, compiled
from inputs import torch
from packed_inputs import alone, assert_equal, firsts, packed, spans_of
from test_torch import CHECKS

import sagebwd
from sagebwd.core import options

#: Queries and keys of seven sequences: empty ones, tiles' edges, and a long one among short ones.
LENGTHS_Q = (200, 0, 64, 65, 1, 700, 127)
LENGTHS_K = (130, 50, 0, 128, 9, 640, 129)
CHOSEN = [{}, {"causal": "top-left"}, {"causal": "bottom-right"}, {"window_left": 70},
          {"precision": "gradients16", "causal": "top-left"}]  # fmt: skip


def together(inputs, dout, where, **chosen):
    out, lse = sagebwd.attention(*inputs, return_lse=True, **where, **chosen)
    return out, lse, *torch.autograd.grad(out, inputs, dout)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_each_sequence_has_the_bits_it_has_alone(head_dim, chosen):
    inputs, dout, where = packed(LENGTHS_Q, LENGTHS_K, device="cuda", head_dim=head_dim)
    expected = alone(inputs, dout, spans_of(LENGTHS_Q, LENGTHS_K), **chosen)
    assert_equal(together(inputs, dout, where, **chosen), expected)


def test_what_is_not_used_is_zero():
    inputs, dout, where = packed(LENGTHS_Q, LENGTHS_K, device="cuda")
    used = {"seqused_q": (150, 0, 64, 0, 1, 699, 64), "seqused_k": (1, 50, 0, 128, 9, 200, 0)}
    spans = [((q, m), (k, n)) for ((q, _), (k, _)), m, n in
             zip(spans_of(LENGTHS_Q, LENGTHS_K), *used.values())]  # fmt: skip
    where |= {name: torch.tensor(n, dtype=torch.int32, device="cuda") for name, n in used.items()}
    assert_equal(together(inputs, dout, where), alone(inputs, dout, spans))


def test_a_graph_takes_other_lengths():
    inputs, dout, where = packed(LENGTHS_Q, LENGTHS_K, device="cuda")
    together(inputs, dout, where, causal="top-left")  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = together(inputs, dout, where, causal="top-left")
    for shift in range(4):
        lengths = [tuple(of[(i + shift) % len(of)] for i in range(len(of)))
                   for of in (LENGTHS_Q, LENGTHS_K)]  # fmt: skip
        for tensor, of in zip(where.values(), lengths):
            tensor.copy_(firsts(of))
        graph.replay()
        assert_equal(found, alone(inputs, dout, spans_of(*lengths), causal="top-left"))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_it_is_the_same(backend, dynamic):
    if backend == "inductor":
        pytest.importorskip("triton", reason="needs Triton for Inductor")

    def layer(q, k, v, where):
        return sagebwd.attention(q * 2, k, v, causal="top-left", **where) * 0.5

    fast = compiled(layer, backend=backend, dynamic=dynamic)
    for count in (7, 6):
        inputs, dout, where = packed(LENGTHS_Q[:count], LENGTHS_K[:count], device="cuda")
        assert_alike(fast, layer, inputs, dout, where)


@pytest.mark.parametrize("flash", [False, True])
def test_one_compilation_serves_any_number_of_sequences(flash):
    from torch._dynamo.testing import CompileCounterWithBackend

    def layer(q, k, v, where, longest):
        if flash:
            return sagebwd.flash_attn_varlen_func(q * 2, k, v, *where.values(), *longest)
        return sagebwd.attention(q * 2, k, v, **where)

    counter = CompileCounterWithBackend("aot_eager")
    fast = compiled(layer, backend=counter, dynamic=True)
    for count in (7, 6, 5, 2, 1):
        lengths = LENGTHS_Q[:count], LENGTHS_K[:count]
        inputs, dout, where = packed(*lengths, device="cuda")
        assert_alike(fast, layer, inputs, dout, where, tuple(map(max, lengths)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("backward", [False, True])
def test_opcheck(backward):
    inputs, dout, where = packed(LENGTHS_Q, LENGTHS_K, device="cuda")
    q, k, v = (t.detach()[None].requires_grad_(not backward) for t in inputs)
    given = (None, "bshd", options.text_of({"causal": "top-left"}), *where.values())
    arguments, operator = (q, k, v, *given), torch.ops.sagebwd.forward.default
    if backward:
        arguments = (dout[None], q, k, v, *operator(*arguments), None, *given)
        operator = torch.ops.sagebwd.backward.default
    torch.library.opcheck(operator, arguments, test_utils=CHECKS, atol=2e-2, rtol=2e-2)
