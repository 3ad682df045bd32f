"""The comparison of these tests fails where attention is another, and where PyTorch computes."""

import functools

import pytest


def test_what_the_comparison_finds(device):
    import torch
    from comparison import compare, drawn

    import sagebwd

    function = torch.nn.functional.scaled_dot_product_attention
    inputs = [drawn(1, 2, 40, 64, seed=i, device=device) for i in range(3)]
    compare(lambda *x: torch.nn.functional.scaled_dot_product_attention(*x), inputs, sagebwd.sdpa())
    with pytest.raises(AssertionError, match="kernels computed"):
        compare(function, inputs, None)
    for other in ({"scale": 0.2}, {"is_causal": True}):
        with pytest.raises(AssertionError, match=r"\[0\.\d+, "):
            wrong = functools.partial(function, **other)
            compare(function, inputs, sagebwd.sdpa(), reference=wrong)


def test_what_the_comparison_of_models_finds(device):
    import torch
    from comparison import compare_models

    ids = torch.arange(1, 41, device=device)[None]
    with pytest.raises(AssertionError):  # both batches are the same
        compare_models({"input_ids": ids}, {"input_ids": ids}, device)
