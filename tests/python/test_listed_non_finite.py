"""NaN and Inf beside lists of blocks, without kernels: they show where FP64 shows them, and stay in
their batch and key head. tests/gpu/listed_non_finite_test.cpp has what kernels do."""

import numpy as np
import pytest

import sagebwd
from sagebwd import reference

torch = pytest.importorskip("torch", reason="needs PyTorch")

from sla_inputs import BLOCKS, EXACT, inputs, listed  # noqa: E402

from sagebwd.numerics.emulation import emulated_block_sparse_attention  # noqa: E402

NAMES = ("q", "k", "v", "dout")
VALUES = (torch.nan, torch.inf, -torch.inf)


def seen_and_kept(found, clean, exact, name):
    """Whether the value shows where it should, and changes nothing of other batches and key heads.
    The value is in batch 0 and key head 0, where the first two query heads are."""
    near = torch.zeros_like(found, dtype=torch.bool)
    near[0, : 2 if name in ("out", "lse", "dq") else 1] = True
    shown = ~torch.as_tensor(exact).isfinite() & clean.isfinite()
    return not (found.isfinite() & shown).any() and torch.equal(found[~near], clean[~near])


def both_passes(function, tensors, dout, **given):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out, *rest = function(*leaves, **given)
    gradients = torch.autograd.grad(out, leaves, dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients))), rest


def with_value(tensors, name, place, value):
    changed = [t.detach().clone() for t in tensors]
    changed[NAMES.index(name)][place] = value
    return changed


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("causal", ["none", "top-left"])
@pytest.mark.parametrize("smooth_k", [True, False])
def test_the_emulation_shows_what_fp64_shows(value, causal, smooth_k):
    torch.manual_seed(0)
    tensors = [torch.randn(2, h, s, 64, dtype=torch.bfloat16)
               for h, s in ((4, 150), (2, 330), (2, 330), (4, 150))]  # fmt: skip
    mask = torch.rand(2, 4, 2, 6) < 0.4
    mask[..., 4] = False
    mask[0, 1, 1, 1] = True
    given = dict(block_mask=mask, causal=causal, smooth_k=smooth_k, return_lse=True)

    def emulated(q, k, v, dout):
        found, (lse,) = both_passes(emulated_block_sparse_attention, (q, k, v), dout, **given)
        return found | {"lse": lse.detach()}

    clean = emulated(*tensors)
    places = {"q": (0, 1, 140, 33), "dout": (0, 1, 140, 33), "k": (0, 0, 70, 33),
              "v": (0, 0, 70, 33)}  # fmt: skip
    for name, place in places.items():
        changed = with_value(tensors, name, place, value)
        found = emulated(*changed)
        exact = reference.exact(*(t.float() for t in changed), block_mask=mask, causal=causal)
        shows = 0
        for output, x in found.items():
            assert seen_and_kept(x, clean[output], exact[output], output), (name, output)
            shows += int((~np.isfinite(exact[output])).sum())
        assert shows
    # A value in a block that no list names changes nothing that FP64 could show.
    hidden = with_value(tensors, "v", (0, 0, 4 * 64 + 5, 33), value)
    exact = reference.exact(*(t.float() for t in hidden), block_mask=mask, causal=causal)
    assert np.isfinite(exact["out"]).all() and np.isfinite(exact["dq"]).all()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("alpha", [0.3, "estimated"])
def test_both_branches_show_them(value, alpha):
    """Every key is either listed or in the complement: one that is not finite shows in every query
    of its key head, and a query in its own row alone."""
    tensors, dout = inputs()
    tensors.append(dout)
    mask = listed(2, 4, 3, 5)

    def attend(q, k, v, dout):
        given = dict(alpha=alpha, block_mask=mask, return_branches=True, **EXACT)
        return both_passes(sagebwd.sparse_linear_attention, (q, k, v), dout, **given)[0]

    clean = attend(*tensors)
    for name in NAMES:
        head = 1 if name in ("q", "dout") else 0
        found = attend(*with_value(tensors, name, (0, head, 17, 2), value))
        bad = {output: ~x.isfinite().all(-1) for output, x in found.items()}
        for output, x in found.items():
            assert seen_and_kept(x, clean[output], clean[output], output), (name, output)
        if name in ("k", "v"):
            assert bad["out"][0, :2].all() and bad["dq"][0, :2].all()
        elif name == "q":
            assert torch.equal(bad["out"].nonzero(), torch.tensor([[0, 1, 17]]))
            assert torch.equal(bad["dq"].nonzero(), torch.tensor([[0, 1, 17]]))
            named = mask[0, 1, 2].repeat_interleave(BLOCKS[1])[: bad["dk"].shape[2]]
            assert bad["dk"][0, 0, named].all() and bad["dv"][0, 0, named].any()
        else:
            assert not bad["out"].any() and bad["dq"][0, 1, 17] and bad["dq"].sum() == 1
            assert bad["dv"][0, 0].all()


@pytest.mark.parametrize("value", VALUES)
def test_the_linear_branch_alone_shows_them(value):
    (q, k, v), _ = inputs()
    mask = torch.zeros(1, 1, 3, 5, dtype=torch.bool)
    clean = sagebwd.block_linear_attention(q, k, v, block_mask=mask, block_size=BLOCKS)
    for name in ("q", "k", "v")[value == -torch.inf :]:  # phi of it is 0 in that channel, exactly
        changed = with_value((q, k, v), name, (1, 1, 4, 1), value)
        found = sagebwd.block_linear_attention(*changed, block_mask=mask, block_size=BLOCKS)
        bad = ~found.isfinite().all(-1)
        heads = torch.zeros(2, 4, dtype=torch.bool)
        if name == "q":
            assert torch.equal(bad.nonzero(), torch.tensor([[1, 1, 4]]))
        else:
            heads[1, 2:] = True
            assert torch.equal(bad.all(-1), heads) and torch.equal(bad.any(-1), heads)
            assert torch.equal(found[~heads], clean[~heads])
