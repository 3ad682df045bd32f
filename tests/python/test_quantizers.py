"""The transform before quantisation, by itself."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from sagebwd.numerics import quantizers  # noqa: E402


def test_signs_spread_what_all_channels_have_in_common():
    assert [c for c in range(64) if quantizers.signs(64)[c] < 0][:6] == [3, 7, 11, 15, 19, 23]
    for channels in (64, 128, 256):
        rows = quantizers.hadamard(torch.eye(channels))  # those of the matrix, or their negatives
        largest = quantizers.hadamard((rows * channels**0.5).sign()).abs().max()
        assert float(largest) == pytest.approx(2**0.5 if channels == 128 else 1)


def test_hadamard_is_orthogonal_and_blocked():
    matrix = quantizers.hadamard(torch.eye(96, dtype=torch.float32) * quantizers.signs(96))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(96))
    assert bool((matrix[:32, 32:] == 0).all())  # 32 is the largest power of two in 96
    sylvester = torch.tensor([[1.0, 1], [1, -1]])
    for _ in range(4):
        sylvester = torch.cat((torch.cat((sylvester, sylvester), 1),
                               torch.cat((sylvester, -sylvester), 1)))  # fmt: skip
    torch.testing.assert_close(matrix[:32, :32] * 32**0.5, sylvester)
