"""precision='fastest' on the GPU that is here."""

import pytest
from inputs import equal, gradients, leaves, torch

import sagebwd


@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_bits_of_its_words(head_dim):
    words = sagebwd.fastest_precision(head_dim=head_dim)
    inputs, dout = leaves(100, d=head_dim)
    expected = gradients(inputs, dout, **words)
    with torch.no_grad():
        out = sagebwd.attention(*inputs, **words)
    compiled = torch.compile(sagebwd.attention, backend="aot_eager", fullgraph=True)
    for attention in (sagebwd.attention, sagebwd.attention, compiled):  # first by the operators
        got = attention(*inputs, precision="fastest")
        assert torch.equal(got, out)
        assert equal(torch.autograd.grad(got, inputs, dout), expected)
    others = {"gradients16", "six-of-seven"} - {words["precision"]}
    assert not equal(gradients(inputs, dout, precision=others.pop()), expected)


def test_what_is_warmed_up_serves_it():
    sagebwd.warmup(head_dim=64, precision="fastest")
    before = sagebwd.cache_stats()["counters"]["compiles"]
    inputs, dout = leaves(100)
    gradients(inputs, dout, precision="fastest")
    assert sagebwd.cache_stats()["counters"]["compiles"] == before
