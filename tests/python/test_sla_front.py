"""Norm, RoPE and gate as arguments of `sagebwd.nn.SparseLinearAttention`."""

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

import front_inputs  # noqa: E402
from sla_inputs import BLOCKS, drawn  # noqa: E402
from test_sla_modules import CHANNELS, HEADS, KEYS, QUERIES, made, tensors  # noqa: E402

from sagebwd.nn import BlockRouter  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


def front_of(layout="bhsd"):
    """Arguments of norm and RoPE whose result has other best blocks."""
    tables = [drawn(tokens, 2, seed=s) for tokens, s in ((QUERIES, 5), (KEYS, 6))]
    rope, rope_k = ((5 * t.cos(), 5 * t.sin()) for t in tables)
    return dict(q_norm=drawn(HEADS, CHANNELS, seed=7), k_norm=drawn(CHANNELS, seed=8),
                norm_eps=0.01, rope=rope, rope_k=rope_k, rope_style="interleaved")  # fmt: skip


@pytest.mark.parametrize("alpha", ["block", "estimated"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("routing", ["hard", "soft", "straight-through"])
def test_norm_and_rope_come_before_the_router_and_both_branches(routing, layout, alpha):
    module, given = made(layout=layout, alpha=alpha), front_of()
    q, k, v = tensors()
    gate = drawn(*q.shape, seed=9)
    y = front_inputs.exact(q, k, **given)

    def placed(*of):
        return [t if layout == "bhsd" else t.transpose(1, 2) for t in of]

    leaves = [t.detach().requires_grad_() for t in (q, k, v, gate, given["q_norm"])]
    found = module(*placed(*leaves[:3]), routing=routing, **given | {"q_norm": leaves[4]},
                   gate=placed(leaves[3])[0])  # fmt: skip
    expected = module(*placed(*y, v), routing=routing) / (1 + torch.exp(-placed(gate)[0]))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    assert all(g.any() for g in torch.autograd.grad(found.square().sum(), leaves))
    assert not torch.equal(module.block_mask(*placed(*y)), module.block_mask(*placed(q, k)))


def test_a_router_of_ones_own_sees_them():
    class Sees(torch.nn.Module):
        def forward(self, q, k):
            self.seen = q, k
            return own(q, k)

    own, given = BlockRouter(CHANNELS, block_size=BLOCKS, learned=False), front_of()
    module = made(router=Sees())
    q, k, v = tensors()
    module(q, k, v, **given)
    torch.testing.assert_close(module.router.seen, front_inputs.exact(q, k, **given), atol=1e-9,
                               rtol=1e-9)  # fmt: skip


def test_what_is_wrong_with_norm_and_rope_is_said():
    module, (q, k, v) = made(), tensors()
    with pytest.raises(sagebwd.SpecError, match="rope_style='interleaved' is given without rope"):
        module(q, k, v, rope_style="interleaved")
    with pytest.raises(sagebwd.SpecError, match="gate has shape"):
        module(q, k, v, gate=q[..., :1])
    with pytest.raises(sagebwd.SpecError, match="recompute_qk=True is given without norm or RoPE"):
        module(q, k, v, gate=q, recompute_qk=True)
    with pytest.raises(TypeError, match=r"forward\(\) .*'cos'; pass rope=\(cos, sin\)"):
        module(q, k, v, cos=q)
