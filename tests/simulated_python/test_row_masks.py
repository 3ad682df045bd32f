"""PyTorch's attn_mask that differs among queries, on a simulated GPU, beside PyTorch's function."""

import sys
from itertools import cycle
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from torch.nn.functional import scaled_dot_product_attention as pytorchs  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd.integrations import _row_masks  # noqa: E402

import simulator_needed  # noqa: E402, F401

from alike import relative  # noqa: E402
from test_block_mask import Operators  # noqa: E402
from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mixed import on_the_simulator  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("on_the_simulator")

QUERIES, KEYS = 70, 150


def inputs(queries=QUERIES, heads=2):
    shapes = (2, heads, queries, 64), (2, heads, KEYS, 64), (2, heads, KEYS, 64)
    return [drawn(*shape, seed=i, dtype=torch.bfloat16).requires_grad_()
            for i, shape in enumerate(shapes)]  # fmt: skip


def refiner():
    """As HunyuanVideo's: tokens see each other, and padding the first key alone."""
    tokens = torch.arange(KEYS) < torch.tensor([[61], [133]])
    mask = tokens[:, None, :QUERIES, None] & tokens[:, None, None]
    mask[..., 0] = True
    return mask


def packs():
    """As CogView4's trainer has them: documents one behind the other, and padding."""
    of = torch.tensor([[0] * 30 + [1] * 40 + [2] * 50 + [-1] * 30, [0] * 100 + [1] * 50])
    return ((of[:, :QUERIES, None] == of[:, None]) & (of[:, None] >= 0))[:, None]


def mixed_documents():
    of = torch.randint(0, 4, (KEYS,), generator=torch.Generator().manual_seed(5))
    return of[:QUERIES, None] == of


def added(mask, hidden):
    return torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, hidden)


def ones():
    """As the pipelines of Chroma and CogView4 have them: pairs of tokens have 1 added to scores."""
    tokens = torch.arange(KEYS) < torch.tensor([[61], [133]])
    return (tokens[:, None, :QUERIES, None] & tokens[:, None, None]).bfloat16()


CAUSAL = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(7)
MASKS = {
    "refiner": refiner(), "packs": packs(), "mixed documents": mixed_documents(), "causal": CAUSAL,
    "nothing seen by some": CAUSAL & (torch.arange(QUERIES)[:, None] % 5 > 0),
    "of each head": packs().repeat(1, 2, 1, 1), "-10000": added(mixed_documents(), -10000.0),
    "-inf": added(refiner(), -torch.inf), "ones": ones(),
}  # fmt: skip


@pytest.mark.parametrize("name, layout", [*zip(MASKS, cycle(["bhsd", "bshd"]))])
def test_results_are_those_of_pytorch(name, layout):
    leaves, mask = inputs(), MASKS[name]
    dout = drawn(2, 2, QUERIES, 64, seed=7, dtype=torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    right = pytorchs(*exact, attn_mask=mask.double() if mask.is_floating_point() else mask)
    wanted = right, *torch.autograd.grad(right, exact, dout.double())
    given = [t.transpose(1, 2) if layout == "bshd" else t for t in leaves]
    out = sagebwd.scaled_dot_product_attention(*given, attn_mask=mask, layout=layout)
    out = out.transpose(1, 2) if layout == "bshd" else out
    found = out, *torch.autograd.grad(out, leaves, dout)
    assert all(relative(ours, theirs) < 0.03 for ours, theirs in zip(found, wanted))


def test_layers_share_the_blocks_of_a_mask():
    q, k, v = inputs()
    mask = refiner()
    with Operators() as operators:
        for _ in range(2):
            out = checkpoint(lambda *x: sagebwd.scaled_dot_product_attention(*x, attn_mask=mask),
                             q, k, v, use_reentrant=False)  # fmt: skip
            out.sum().backward()
        assert operators.found == 1
        mask[..., 3] = True
        sagebwd.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert operators.found == 2


def test_masks_of_many_queries():
    used = torch.randint(0, KEYS, (2, 2 * _row_masks.ROWS + 5),
                         generator=torch.Generator().manual_seed(6))  # fmt: skip
    seen = torch.arange(KEYS) < used[..., None]
    mask = _row_masks.said(seen, (2, 1, *seen.shape[1:]))
    assert torch.equal(mask.expression.dense(2, 1, *seen.shape[1:])[:, 0], seen)


def test_a_mask_of_neither_kind():
    window = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril().triu(-9)
    assert _row_masks.said(window[None], (2, 2, QUERIES, KEYS)) is None
    with pytest.raises(sagebwd.SpecError, match="hide the same keys"):
        sagebwd.scaled_dot_product_attention(*inputs(), attn_mask=window.float())
    almost = packs()
    almost[0, 0, 3, 120] = True  # a pair too many
    with pytest.raises(sagebwd.SpecError, match="any two see the same keys or none in common"):
        sagebwd.scaled_dot_product_attention(*inputs(), attn_mask=almost)


# ---- models of diffusers -------------------------------------------------------------------------


def step(model, inputs):
    out = model(**inputs, return_dict=False)[0]
    out.float().square().sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return out.detach(), torch.cat(gradients)


def test_hunyuan_video_and_its_refiner():
    test_diffusers = pytest.importorskip("test_diffusers", reason="needs diffusers")

    def made():
        return test_diffusers.made(lambda: (test_diffusers.hunyuan(),
                                            test_diffusers.hunyuan_inputs()))  # fmt: skip

    expected = step(*made())
    with sagebwd.sdpa() as mode, Operators() as operators:
        found = step(*made())
    assert mode.calls == 3 and not mode.fallbacks and operators.found == 1
    assert relative(found[0], expected[0]) < 0.05 and relative(found[1], expected[1]) < 0.1


def test_chroma_with_its_pipelines_masks():
    test_diffusers = pytest.importorskip("test_diffusers", reason="needs diffusers")

    def made(dtype):
        return test_diffusers.made(lambda: test_diffusers.chroma(dtype))

    expected = step(*made(torch.bfloat16))
    with sagebwd.sdpa() as mode:
        found = step(*made(torch.bfloat16))
    assert mode.calls == 2 and not mode.fallbacks
    errors = [relative(x, y) for x, y in zip(found, expected)]
    assert errors[0] < 0.05 and errors[1] < 0.1
    assert relative(step(*made(torch.bool))[0], expected[0]) > 2 * errors[0]


@pytest.mark.parametrize("kind", ["inference", "training", "packed"])
def test_cogview4(kind):
    """The processor adds 1 to scores. The one for training writes bools of (batch, 1, tokens,
    tokens): pairs, or packed documents."""
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
    from diffusers.models.transformers import transformer_cogview4 as cogview4

    text, latent = torch.ones(2, 12, dtype=torch.int32), torch.ones(2, 30, dtype=torch.int32)
    text[0, 7:], latent[1, 20:] = 0, 0
    more = {"latent_attn_mask": latent, "text_attn_mask": text}
    processor = cogview4.CogView4TrainingAttnProcessor()
    if kind == "inference":
        processor, more = cogview4.CogView4AttnProcessor(), {"attention_mask": text}
    elif kind == "packed":
        more["batch_flag"] = torch.tensor([0, 0])
    states = [drawn(2, n, 64, seed=n, dtype=torch.bfloat16) for n in (30, 12)]
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        attn = diffusers.models.attention_processor.Attention(
            query_dim=64, heads=2, dim_head=32, out_dim=64, bias=True, qk_norm="layer_norm",
            elementwise_affine=False, processor=processor,
        ).bfloat16()  # fmt: skip
        attn.to_q.weight.data *= 4
        with sagebwd.sdpa() if ours else torch.no_grad(), torch.enable_grad():
            image, words = (t.clone() for t in states)  # which a processor may write into
            out = attn(hidden_states=image, encoder_hidden_states=words, **more)
        seen = torch.cat([out[0][latent.bool()], out[1][text.bool()]])
        seen.float().square().sum().backward()
        results.append((seen, torch.cat([p.grad.flatten() for p in attn.parameters()])))
    assert relative(results[1][0], results[0][0]) < 0.05
    assert relative(results[1][1], results[0][1]) < 0.1
