"""Attention with functions of the score on a GPU, against FP64 and itself."""

from itertools import cycle

import pytest
from inputs import torch

import score_cases as cases

#: Each size and precision, with every function in two of them: each is compiled by itself.
SIZES = [(64, torch.float16, "six-of-seven"), (128, torch.bfloat16, "gradients16"),
         (256, torch.bfloat16, "dv16"), (72, torch.bfloat16, "qk16"),
         (64, torch.bfloat16, "gradients16"), (128, torch.float16, "six-of-seven"),
         (256, torch.bfloat16, "six-of-seven"), (128, torch.bfloat16, "qk16")]  # fmt: skip


@pytest.mark.parametrize("name, size", [*zip(cycle(cases.CASES), SIZES)])
def test_precisions(name, size):
    channels, dtype, precision = size
    cases.check(name, "cuda", queries=576, keys=576, channels=channels, dtype=dtype,
                precision=precision)  # fmt: skip


@pytest.mark.parametrize("name, beside, channels", [
    (name, beside, 64 if (i + j) % 2 else 128)
    for i, name in enumerate(cases.CASES) for j, beside in enumerate(cases.BESIDE)])  # fmt: skip
def test_beside_masks(name, beside, channels):
    cases.check(name, "cuda", queries=500, keys=620, channels=channels, beside=beside)


@cases.each
@pytest.mark.parametrize("queries, keys", [(1, 63), (65, 129), (300, 65), (257, 257)])
def test_odd_lengths(name, queries, keys):
    cases.check(name, "cuda", queries=queries, keys=keys)


def test_packed_sequences():
    cases.check_packed("cuda")


@cases.each
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(name, backend):
    cases.check_compiled(name, "cuda", backend)


@cases.each
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(name, reentrant):
    cases.check_checkpointed(name, "cuda", reentrant)


@cases.each
def test_repeated(name):
    cases.check_repeated(name, "cuda")


@cases.each
def test_a_captured_graph_reads_changed_tables(name):
    attend, leaves, dout = cases.attending(name, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cases.results(attend, leaves, dout)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cases.results(attend, leaves, dout)
    for factor in (1.0, 0.5, 2.0):
        for table in leaves[3:]:
            table.data.mul_(factor)
        graph.replay()
        torch.cuda.synchronize()
        assert cases.equal(captured, cases.results(attend, leaves, dout))


@cases.each
def test_on_a_side_stream(name):
    attend, leaves, dout = cases.attending(name, "cuda")
    wanted = cases.results(attend, leaves, dout)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = cases.results(attend, leaves, dout)
    torch.cuda.synchronize()
    assert cases.equal(found, wanted)


@pytest.fixture
def models():
    return pytest.importorskip("score_models", reason="needs transformers")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["gemma2", "t5"])
def test_models(models, name, padded):
    models.check(name, "cuda", padded)


@pytest.mark.parametrize("name", ["gemma2", "t5"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_models_compiled_in_one_graph(models, name, backend):
    models.check(name, "cuda", backend=backend)
