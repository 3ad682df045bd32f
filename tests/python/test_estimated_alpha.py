"""An estimated alpha where it is nearly 1: the gradient of beta, and beta's calibration."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
from sagebwd.lists.given import Lists  # noqa: E402
from sagebwd.nn import SparseLinearAttention  # noqa: E402
from sagebwd.numerics import emulation  # noqa: E402
from sagebwd.reference import sparse_linear  # noqa: E402
from sagebwd.sla import mixing  # noqa: E402

HEADS, TOKENS, CHANNELS = 3, 512, 64


class Emulated(SparseLinearAttention):
    """The module with the INT8 products of the sparse branch."""

    def attend_blocks(self, q, k, v, lists, sizes, scale, kernels):
        return emulation.emulated_block_sparse_attention(
            q, k, v, block_mask=lists.mask, block_size=sizes, softmax_scale=scale, return_lse=True)


class Apart(SparseLinearAttention):
    """The module with a function of autograd for each branch."""

    def attend_blocks(self, *given):
        return super().attend_blocks(*given)


def sharp(seed, times=4.0):
    """q, k, v and dout, of bf16; scores have a standard deviation of times ** 2."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(1, HEADS, TOKENS, CHANNELS, generator=generator)
                     for _ in range(4))  # fmt: skip
    return [t.bfloat16() for t in (times * q, times * k, v, dout)]


def module_of(kind=SparseLinearAttention, dtype=torch.float32, **more):
    return kind(CHANNELS, HEADS, density=0.34, alpha="estimated", precision="exact",
                router="pooled", **more).to(dtype)  # fmt: skip


def gradient_of_beta(given, kind, dtype):
    """By a module, in FP64 as it arrives."""
    module = module_of(kind, torch.float64 if dtype == torch.float64 else torch.float32)
    *qkv, dout = (t.to(dtype) for t in given)
    (found,) = torch.autograd.grad(module(*qkv), module.beta, dout)
    return found.double()


def expected_of_beta(q, k, v, dout):
    mask = sagebwd.top_blocks(sagebwd.pooled_block_scores(q, k), 0.34)
    found = sparse_linear(*(t.double().numpy() for t in (q, k, v, dout)), beta=np.zeros(HEADS),
                          alpha="estimated", block_mask=mask.numpy(),
                          block_size=(128, 64))  # fmt: skip
    return torch.from_numpy(found["dbeta"]), found


def rest_of(q, k, mask):
    """The estimate of what unlisted keys weigh, in FP64, which alpha's forms have in common."""
    return mixing.estimated_rest(q.double(), k.double(), mask, (128, 64), CHANNELS**-0.5).numpy()


def off(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", [SparseLinearAttention, Apart])
def test_the_gradient_of_beta_has_its_bits_where_alpha_is_nearly_one(kind):
    """alpha (1 - alpha) from alpha in FP32 is nothing above a logit of 17."""
    given = sharp(0)
    expected, found = expected_of_beta(*given)
    assert found["alpha"].mean() > 0.999 and expected.abs().max() > 0
    assert off(gradient_of_beta(given, kind, torch.float64), expected) < 1e-7
    assert off(gradient_of_beta(given, kind, torch.float32), expected) < 1e-4
    assert off(gradient_of_beta(given, kind, torch.bfloat16), expected) < 0.02


@pytest.mark.parametrize("seed", range(3))
def test_with_int8_it_errs_as_the_sparse_branch_makes_it(seed):
    """The model: the sum over the queries in FP64, of the sparse branch's output and lse as INT8
    products give them. All else must add nothing that counts."""
    q, k, v, dout = sharp(seed)
    expected, exact = expected_of_beta(q, k, v, dout)
    mask = sagebwd.top_blocks(sagebwd.pooled_block_scores(q, k), 0.34)
    out, lse = (t.double().numpy() for t in emulation.emulated_block_sparse_attention(
        q, k, v, block_mask=mask, return_lse=True))  # fmt: skip
    logit = lse - rest_of(q, k, mask)
    slope = np.exp(-np.logaddexp(0, logit) - np.logaddexp(0, -logit))
    d_alpha = (dout.double().numpy() * (out - exact["out_linear"])).sum(-1)
    model = torch.from_numpy(-(d_alpha * slope).sum((0, 2)))
    found = gradient_of_beta((q, k, v, dout), Emulated, torch.bfloat16)
    assert off(found, model) < 0.01
    # The page docs/use/sparse.md says this of such inputs.
    assert 0.02 < off(model, expected) < 0.5


def test_calibration_is_right_in_the_mean_where_little_is_left():
    """Tokens that drift: of many queries the listed keys have nearly all the weight, which what
    INT8 loses of lse would hide. The right mean is near the least squares, too."""
    generator = torch.Generator().manual_seed(0)

    def randn():
        return torch.randn(1, HEADS, TOKENS, CHANNELS, generator=generator)

    drift = 0.14 * randn().cumsum(2)
    drift = drift - drift.mean(2, keepdim=True)
    q, k, v = (t.bfloat16() for t in (drift + 0.5 * randn(), drift + 0.5 * randn(), randn()))
    module = module_of(Emulated)
    module.calibrate_alpha(q, k, v)
    mask = module.block_mask(q, k)
    lists = Lists(mask, None, dict(block_mask=mask))
    _, lse = module.attend_blocks(q, k, v, lists, (128, 64), CHANNELS**-0.5, None)
    exact = sparse_linear(*(t.double().numpy() for t in (q, k, v)), alpha="estimated",
                          block_mask=mask.numpy(), block_size=(128, 64))  # fmt: skip
    logit = lse.double().numpy() - rest_of(q, k, mask)
    some = ~mask.all(-1).repeat_interleave(128, 2).numpy() & mask.any(-1).repeat_interleave(
        128, 2).numpy()  # fmt: skip

    def apart(beta):
        """alpha's distance from the exact one, by query."""
        alpha = 1 / (1 + np.exp(beta[:, None] - logit))
        return np.where(some, alpha - exact["exact_alpha"], 0)

    beta = module.beta.detach().double().numpy()
    np.testing.assert_allclose(apart(beta).mean((0, 2)), 0, atol=1e-3)
    steps = np.linspace(-6, 6, 601)
    squares = np.stack([(apart(np.full(HEADS, b)) ** 2).mean((0, 2)) for b in steps])
    least = steps[squares.argmin(0)]
    assert np.abs(beta - least).max() < 0.3, (beta, least)
