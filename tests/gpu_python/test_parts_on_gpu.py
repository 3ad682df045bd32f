"""Parts of the keys on a GPU: a shared mean, and gradients of a part by itself."""

import pytest
from inputs import make, torch

import sagebwd

KINDS = [{}, {"granularity": "block"}, {"precision": "qk16"},
         {"precision": "gradients16", "deterministic": False}]  # fmt: skip


def relative(x, expected):
    x, expected = x.double(), expected.double()
    return float((x - expected).norm() / expected.norm())


def keys_with_a_mean(d):
    """Of few bits, so that their sums are exact in FP32 in any order; parts' means are apart."""
    q, k, v, dout = make(300, 512, d=d)
    part = (torch.arange(512, device="cuda") // 171).bfloat16()
    return q, ((k * 8).round() / 8 + 2 + part[:, None] / 4), v, dout


@pytest.mark.parametrize("d", [64, 128, 160])
@pytest.mark.parametrize("chosen", KINDS, ids=str)
def test_the_mean_of_the_keys_changes_nothing(d, chosen):
    q, k, v, dout = keys_with_a_mean(d)

    def run(k_mean):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out, lse = sagebwd.attention(*leaves, k_mean=k_mean, return_lse=True, **chosen)
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    mean = k.float().mean(2)
    for i, (x, y) in enumerate(zip(run(mean), run(None))):
        assert torch.equal(x, y) or (i == 2 and relative(x, y) < 1e-3 and len(chosen) == 2)


@pytest.mark.parametrize("how", ["mean", "part", "naive"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("chosen", KINDS, ids=str)
def test_gradients_of_parts_are_those_of_the_whole(d, chosen, how):
    q, k, v, dout = keys_with_a_mean(d)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    repeated = (t.repeat_interleave(2, 1) for t in leaves[1:])
    expected = torch.nn.functional.scaled_dot_product_attention(leaves[0], *repeated)
    wanted = torch.autograd.grad(expected, leaves, dout.double())
    given = chosen | ({"k_mean": k.float().mean(2)} if how == "mean" else {})
    parts = [(q, *x) for x in zip(k.chunk(3, 2), v.chunk(3, 2))]
    forward = [sagebwd.attention_forward(*x, **given) for x in parts]
    out, lse = sagebwd.merge(forward)
    gradients = [
        sagebwd.attention_backward(
            dout, *x, out, lse, part=of_part if how == "part" else None, **given
        )
        for x, of_part in zip(parts, forward)
    ]
    dq, dk, dv = zip(*gradients)
    limit = 0.08 if "granularity" in chosen else 0.04
    assert relative(torch.cat(dk, 2), wanted[1]) < limit
    assert relative(torch.cat(dv, 2), wanted[2]) < limit
    error = relative(sum(g.float() for g in dq), wanted[0])
    assert error > 0.1 if how == "naive" else error < limit
