"""FlashMask's function on a simulated GPU, against FP64 and masks that loops write."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mixed import errors, on_the_simulator  # noqa: E402, F401

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from interval_cases import NUMBERS, numbers_of, seen_by  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_simulator")

def exact(q, k, v, mask, dout):
    """(out, lse, gradients) of (batch, tokens, heads, channels) tensors in FP64."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    q, k, v = (t.transpose(1, 2) for t in leaves)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    out = (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)
    return out, scores.logsumexp(-1), *torch.autograd.grad(out, leaves, dout.double())


def made(n, heads=4, heads_kv=2, batch=2):
    return [drawn(batch, n, of, 64, seed=i, dtype=torch.bfloat16).requires_grad_()
            for i, of in enumerate((heads, heads_kv, heads_kv))]  # fmt: skip


@pytest.mark.parametrize("columns, causal", NUMBERS)
@pytest.mark.parametrize("of_heads", [1, 2])
def test_results_and_gradients(columns, causal, of_heads):
    n = 197
    numbers = numbers_of(columns, causal, 2, of_heads, n)
    q, k, v = made(n)
    dout = drawn(*q.shape, seed=9, dtype=q.dtype)
    out, lse, *gradients = exact(q, k, v, seen_by(numbers, causal, 4, n), dout)
    found, found_lse = sagebwd.flashmask_attention(q, k, v, numbers, causal=causal,
                                                   return_softmax_lse=True)  # fmt: skip
    assert max(errors([found, *torch.autograd.grad(found, (q, k, v), dout)],
                      [out, *gradients])) < 0.03  # fmt: skip
    sees = lse > -torch.inf
    assert torch.equal(found_lse > -torch.inf, sees)
    assert (found_lse[sees] - lse[sees]).abs().max() < 0.05
    assert not found.transpose(1, 2)[~sees].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 30, (30, 12)])
def test_calls_without_intervals(causal, window):
    n = 130
    q, k, v = made(n)
    dout = drawn(*q.shape, seed=9, dtype=q.dtype)
    behind = torch.arange(n) - torch.arange(n)[:, None]
    left, right = (30, 30) if window == 30 else window or (n, n)
    mask = (behind >= -left) & (behind <= (0 if causal else right))
    out, _, *gradients = exact(q, k, v, mask.expand(2, 4, n, n), dout)
    found = sagebwd.flashmask_attention(q, k, v, causal=causal, window_size=window,
                                        softmax_scale=64**-0.5, dropout=0.3, training=False)  # fmt: skip
    assert max(errors([found, *torch.autograd.grad(found, (q, k, v), dout)],
                      [out, *gradients])) < 0.03  # fmt: skip
