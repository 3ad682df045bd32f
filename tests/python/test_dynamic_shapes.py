"""torch.compile with sizes that change: one graph serves them all, and gives eager's bits."""

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from alike import assert_alike  # noqa: E402
from packed_inputs import packed  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401
import torch._dynamo.decorators  # noqa: E402
import torch.fx.experimental.symbolic_shapes  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

mark_unbacked = getattr(torch._dynamo.decorators, "mark_unbacked", None)
needs_unbacked = pytest.mark.skipif(
    not hasattr(torch.fx.experimental.symbolic_shapes, "guard_or_false"),
    reason="unknown sizes need PyTorch 2.8")  # fmt: skip
pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")

#: Queries and keys of each sequence. No two sizes of the first are equal: PyTorch would take them
#: for one size (torch.fx.experimental._config.use_duck_shape), and compile again where they differ.
LENGTHS = [((20, 7, 5, 1, 0), (24, 9, 3, 4, 2)), ((20, 7, 9), (24, 9, 8)), ((20, 7), (24, 9)),
           ((9, 8, 7, 6, 5, 1), (9, 8, 7, 6, 4, 1)), ((11,), (12,)), ((5, 6, 7, 3), (5, 6, 7, 3))]


def attend(q, k, v, where, longest):
    sinks = torch.linspace(-1, 1, 4)
    return sagebwd.attention(q * 2, k, v, causal="top-left", sink_logits=sinks, **where)


def flash(q, k, v, where, longest):
    return sagebwd.flash_attn_varlen_func(
        q * 2, k, v, *where.values(), *longest, causal=True, return_attn_probs=True)[0]  # fmt: skip


@pytest.mark.parametrize(("call", "used"), [(attend, False), (attend, True), (flash, False)])
def test_one_graph_serves_any_number_of_packed_sequences(call, used):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for lengths in LENGTHS:
        inputs, dout, where = packed(*lengths)
        if used:
            where |= {f"seqused_{of}": torch.tensor(each, dtype=torch.int32) // 2
                      for of, each in zip("qk", lengths)}  # fmt: skip
        assert_alike(call, compiled, inputs, dout, where, tuple(map(max, lengths)))
        if lengths is LENGTHS[0]:
            first = counter.frame_count
    # Some PyTorch starts once more where a float, as flash-attention's dropout_p, is compared.
    assert first == 1 or (call is flash and first == 2)
    # PyTorch compiles a size of 1 separately, which seqused has where there is one sequence.
    assert counter.frame_count == first + used


def make(m, n, batch=2, layout="bhsd"):
    generator = torch.Generator().manual_seed(m)

    def randn(heads, tokens):
        shape = (batch, heads, tokens, 64) if layout == "bhsd" else (batch, tokens, heads, 64)
        return torch.randn(shape, generator=generator).bfloat16()

    return [t.requires_grad_() for t in (randn(4, m), randn(2, n), randn(2, n))], randn(4, m)


@needs_unbacked
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": "bottom-right", "layout": "bshd"}], ids=str
)
def test_sizes_marked_unbacked(options):
    """Lengths and batch that nobody knows: no guard asks for them (vLLM's way)."""
    layout = options.get("layout", "bhsd")

    def call(q, k, v):
        parts = [sagebwd.attention(q * 2, k, v, return_lse=True, **options)]
        return sagebwd.merge(parts, layout=layout)[0]

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for m in (24, 40, 1, 9):
        inputs, dout = make(m, m if options.get("causal") is True else m + 3, layout=layout)
        for t in inputs:
            mark_unbacked(t, 0)
            mark_unbacked(t, 2 if layout == "bhsd" else 1)
        assert_alike(call, compiled, inputs, dout)
    assert counter.frame_count == 1


@needs_unbacked
def test_compiled_code_checks_what_was_assumed():
    torch._dynamo.reset()
    compiled = torch.compile(sagebwd.attention, fullgraph=True, backend="aot_eager")
    (q, k, v), _ = make(24, 24)
    for t in (q, k, v):
        mark_unbacked(t, 2)
    compiled(q, k, v)
    v = v[:, :, :16].detach()
    mark_unbacked(v, 2)
    with pytest.raises((RuntimeError, AssertionError, sagebwd.SpecError)):
        compiled(q, k, v)


def causal(q, k, v, where):
    firsts = where["cu_seqlens_q"]
    return sagebwd.attention(q * 2, k, v, causal=True, cu_seqlens_q=firsts, cu_seqlens_k=firsts)


def as_many(lengths):
    return packed(lengths, lengths)


#: Lengths of the sequences of each call, and how many graphs there are after it. PyTorch compiles
#: a size as one that varies once it has varied.
OTHER_SIZES = {
    "all change at once": [((20, 7, 5, 1, 2), 1), ((20, 7, 9), 2), ((20, 7), 2), ((9, 8, 7, 6), 2),
                           ((5, 6, 7, 3, 8, 2), 2)],
    "tokens before sequences": [((20, 7, 5), 1), ((20, 7, 9), 2), ((11, 7, 30), 2), ((20, 7), 3),
                                ((9, 8, 7, 6), 3), ((5, 6, 7, 3, 8, 2), 3)],
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_sizes_that_nobody_marked_make_a_graph_when_they_first_change(name):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(causal, fullgraph=True, backend=counter)
    for lengths, graphs in OTHER_SIZES[name]:
        inputs, dout, where = as_many(lengths)
        assert_alike(causal, compiled, inputs, dout, where)
        assert counter.frame_count == graphs, lengths


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_sizes_that_are_marked_make_one_graph(name):
    """As docs/use/pytorch.md shows."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(causal, fullgraph=True, backend=counter)
    for lengths, _ in OTHER_SIZES[name]:
        inputs, dout, where = as_many(lengths)
        for t in (*inputs, *where.values()):
            torch._dynamo.mark_dynamic(t, 0)
        assert_alike(causal, compiled, inputs, dout, where)
    assert counter.frame_count == 1
