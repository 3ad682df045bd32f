"""Kernels of norm and RoPE on a GPU, against FP64."""

import front_inputs
import pytest
from inputs import torch

import sagebwd
from sagebwd.core import front_direct


@pytest.mark.parametrize("name", front_inputs.NAMES)
@pytest.mark.parametrize(
    "dtype, channels, of",
    [
        (torch.bfloat16, 64, {}),
        (torch.float16, 128, dict(layout="bshd")),
        (torch.bfloat16, 72, dict(slices=True)),
        (torch.bfloat16, 256, {}),
        (torch.float32, 64, {}),
        (torch.bfloat16, 20, {}),
    ],
)
def test_results_and_gradients_are_near_fp64(monkeypatch, front_passes, name, dtype, channels, of):
    monkeypatch.setattr(front_direct, "_known", {})  # the first call goes by operators

    def once():
        return front_inputs.assert_call(sagebwd.qk_norm_rope, name, dtype, "cuda", channels, **of)

    found = once()
    has_kernels = dtype != torch.float32 and channels != 20
    assert len(front_passes) == 2 * has_kernels
    for first, second in zip(found, once()):
        assert all(torch.equal(a, b) for a, b in zip(first, second)) or not has_kernels
    assert len(front_passes) == 4 * has_kernels


def test_many_tokens():
    """Of blocks that take several heads, and gains whose gradients have many parts."""
    q, k = (front_inputs.drawn(2, heads, 5000, 128, seed=heads).cuda().bfloat16()
            for heads in (16, 4))  # fmt: skip
    rope = front_inputs.table(5000, 64, device="cuda")
    given = dict(q_norm=torch.ones(16, 128).cuda() * 1.1, k_norm=torch.ones(128).cuda(), rope=rope)
    weights = front_inputs.weights_like(q, k, torch.bfloat16)
    found = front_inputs.with_gradients(sagebwd.qk_norm_rope, q, k, given, weights)
    in_fp64 = given | {name: given[name].double() for name in ("q_norm", "k_norm")}
    wanted = front_inputs.with_gradients(front_inputs.exact, q.double(), k.double(), in_fp64,
                                         weights)  # fmt: skip
    last = front_inputs.LAST[torch.bfloat16]
    for results, of in zip(found, wanted):
        for i, (y, exact) in enumerate(zip(results, of)):
            front_inputs.assert_near(y, exact, str(i), last if y.dtype == torch.bfloat16 else 1e-5)


def test_operators_pass_opcheck():
    q, k = front_inputs.inputs(torch.bfloat16, "cuda")
    tables = [t.expand(2, tokens, 32) for tokens in (37, 50)
              for t in front_inputs.table(tokens, 32, device="cuda")]  # fmt: skip
    gain, inv_rms = torch.ones(4, 64, device="cuda"), torch.ones(2, 50, device="cuda")
    given = (q, k, gain, None, None, inv_rms, *tables, [True, True], 1e-6, 0, False, "bhsd")
    torch.library.opcheck(torch.ops.sagebwd.front_forward.default, given)
    torch.library.opcheck(torch.ops.sagebwd.front_backward.default,
                          (q, k, *given, [True, False, False, True]))  # fmt: skip


def test_compiled_code_gives_the_same_bits():
    q, k = front_inputs.inputs(torch.bfloat16, "cuda")
    given = front_inputs.calls("cuda")["shared gains"]
    weights = front_inputs.weights_like(q, k, torch.bfloat16)
    compiled = torch.compile(sagebwd.qk_norm_rope, fullgraph=True)
    found = front_inputs.with_gradients(compiled, q, k, given, weights)
    wanted = front_inputs.with_gradients(sagebwd.qk_norm_rope, q, k, given, weights)
    for first, second in zip(found, wanted):
        assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_a_captured_graph_replays():
    q, k = front_inputs.inputs(torch.bfloat16, "cuda")
    given = front_inputs.calls("cuda")["gains of heads"]
    wanted = sagebwd.qk_norm_rope(q, k, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sagebwd.qk_norm_rope(q, k, **given)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
