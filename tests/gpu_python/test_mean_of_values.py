"""A mean of V that is taken off and added to O again, as docs/algorithm.md advises."""

from inputs import torch

import sagebwd


def gradients(attend, q, k, v, dout):
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = attend(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def taken_off(q, k, v):
    mean = v.mean(2, keepdim=True)
    return sagebwd.attention(q, k, v - mean, causal=True) + mean


def exact(q, k, v):
    scores = (q @ k.transpose(2, 3)) / q.shape[3] ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def test_it_takes_errors_of_one_sign_away():
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 192, 64, generator=generator) for _ in range(4))
    given = [t.to("cuda", torch.bfloat16) for t in (q, 2 * k, v + 2, dout + 0.5)]
    expected = gradients(exact, *(t.double() for t in given))
    plain = gradients(lambda *qkv: sagebwd.attention(*qkv, causal=True), *given)
    mended = gradients(taken_off, *given)

    def error(found, i):
        return float((found[i].double() - expected[i]).norm() / expected[i].norm())

    def bias(found):
        return float((found[0].double() - expected[0]).mean() / expected[0].abs().mean())

    assert bias(plain) < -0.002 and abs(bias(mended)) < 0.001
    assert error(mended, 1) < 0.5 * error(plain, 1) and error(mended, 2) < 0.6 * error(plain, 2)
    assert error(mended, 3) < 1.1 * error(plain, 3) < 0.03
