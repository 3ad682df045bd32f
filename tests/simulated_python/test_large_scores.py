"""Up to which scores results are numbers, as docs/algorithm.md says."""


import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_linear_branch import drawn, kernels_for_lists, on_the_simulator  # noqa: E402, F401


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("precision", "most", "channels"), [
    *(("six-of-seven", 2**20, channels) for channels in (64, 128, 256)),
    *(("qk16", 2**28, channels) for channels in (64, 128)),
])  # fmt: skip
def test_scores_of_this_size_give_numbers(
    kernels_for_lists, channels, precision, most, causal  # noqa: F811
):
    q, k, v = (drawn(1, 2, 130, channels, seed=s, dtype=torch.bfloat16) for s in range(3))
    largest = float((q.double() @ k.double().mT).abs().max()) / channels**0.5
    for scale, is_finite in ((most / largest, True), (4 * most / largest, False)):
        out, lse = sagebwd.attention((q.float() * scale).bfloat16(), k, v, precision=precision,
                                     causal=causal, return_lse=True)  # fmt: skip
        assert bool(out.isfinite().all() and lse.isfinite().all()) is is_finite
