"""BlockMasks of flex_attention: what messages about them advise is right."""

import math
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="needs flex_attention")

import sagebwd  # noqa: E402
from sagebwd.numerics import emulation  # noqa: E402


def every_third(size):
    return lambda b, h, q, k: ((q // size) * 7 + k // size + h) % 3 != 0


def causal(b, h, q, k):
    return q >= k


def drawn(tokens, heads=2):
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(1, heads, tokens, 64, generator=generator).bfloat16() for _ in range(4)]


def made(mask_mod, tokens, size, heads=2):
    return flex.create_block_mask(mask_mod, 1, heads, tokens, tokens, device="cpu", BLOCK_SIZE=size)


def advice_of(call, mask):
    """The keywords that the error's message says to pass for this mask."""
    with pytest.raises(TypeError, match="is flex_attention's BlockMask") as caught:
        call(mask)
    told = str(caught.value)
    if "make it with BLOCK_SIZE=128" in told:
        mask = flex.create_block_mask(mask.mask_mod, 1, 2, *mask.seq_lengths, device="cpu",
                                      BLOCK_SIZE=128)  # fmt: skip
    text = re.search(r"pass (block_mask=\S+) and (block_size=\(.*?\))", told)
    given = eval(f"dict({text[1]}, {text[2]})", dict(mask=mask))  # noqa: S307
    corner = re.search(r"pass (causal='.*?')", told)
    return given, eval(f"dict({corner[1]})")  # noqa: S307


def exact(q, k, v, dout, mask_mod):
    """(out, dq, dk, dv) in FP64, by the function of the mask itself."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    places = torch.arange(q.shape[2])
    heads = torch.arange(q.shape[1])[:, None, None]
    seen = mask_mod(0, heads, places[:, None], places).expand(q.shape[1], -1, -1)
    scores = (q @ k.mT / 8).masked_fill(~seen, -torch.inf)
    out = scores.softmax(-1) @ v
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


def off(x, y):
    return float((x.double() - y).norm() / y.norm())


CALLS = {
    "kernels": lambda *qkv: lambda m: sagebwd.block_sparse_attention(
        *(t.to("meta") for t in qkv), block_mask=m),
    "as indices": lambda *qkv: lambda m: sagebwd.block_sparse_attention(
        *(t.to("meta") for t in qkv), block_indices=m),
    "emulation": lambda q, k, v: lambda m: emulation.emulated_block_sparse_attention(
        q, k, v, block_mask=m),
    "SLA2": lambda q, k, v: lambda m: sagebwd.sparse_linear_attention(
        q, k, v, alpha=0.5, block_mask=m),
    "linear": lambda q, k, v: lambda m: sagebwd.block_linear_attention(q, k, v, block_mask=m),
    "bits": lambda q, k, v: sagebwd.pack_blocks,
    "a check": lambda q, k, v: lambda m: sagebwd.check_block_indices(m, keys=q.shape[2]),
    "exact": lambda q, k, v: lambda m: sagebwd.reference.exact(
        *(t.float().numpy() for t in (q, k, v)), block_mask=m),
    "reference": lambda q, k, v: lambda m: sagebwd.reference.sparse_linear(
        *(t.float().numpy() for t in (q, k, v)), alpha=0.5, block_mask=m),
    "trace": lambda q, k, v: lambda m: sagebwd.trace(
        *(t.float().numpy() for t in (q, k, v, q)), block_mask=m),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("tokens, size", [(512, 128), (500, 128), (320, 64), (512, 256)])
def test_the_advice_for_masks_of_whole_blocks_is_right(call, tokens, size):
    """Also where the last blocks are short, which flex_attention counts among those in part."""
    *qkv, dout = drawn(tokens)
    mask_mod = every_third(max(size, 128) if size != 64 else 64)
    given, _ = advice_of(CALLS[call](*qkv), made(mask_mod, tokens, size))
    leaves = [t.requires_grad_() for t in qkv]
    out = emulation.emulated_block_sparse_attention(*leaves, **given)
    found = out.detach(), *torch.autograd.grad(out, leaves, dout)
    for x, y in zip(found, exact(*qkv, dout, mask_mod)):
        assert off(x, y) < 0.03
    expected = sagebwd.sparse_linear_attention(*qkv, alpha=1.0, precision="exact", **given)
    assert off(out.detach(), expected.detach().double()) < 0.03


@pytest.mark.parametrize("tokens", [512, 500])
def test_the_advice_for_a_causal_mask_is_right(tokens):
    *qkv, dout = drawn(tokens)
    mask = made(causal, tokens, 128)
    given, corner = advice_of(CALLS["emulation"](*qkv), mask)
    leaves = [t.requires_grad_() for t in qkv]
    out = emulation.emulated_block_sparse_attention(*leaves, **given, **corner)
    found = out.detach(), *torch.autograd.grad(out, leaves, dout)
    for x, y in zip(found, exact(*qkv, dout, causal)):
        assert off(x, y) < 0.03
    with pytest.raises(TypeError):  # SLA2 has no causal form, as the advice says
        sagebwd.sparse_linear_attention(*qkv, alpha=0.5, precision="exact", **given, **corner)
    assert off(emulation.emulated_block_sparse_attention(*qkv, **given).detach(), found[0]) > 0.3


def test_other_attentions_refer_to_flex_attention_which_has_it():
    q, k, v, dout = drawn(256)
    mask = made(every_third(64), 256, 128)
    with pytest.raises(TypeError, match="arbitrary masks .*flex_attention has it"):
        sagebwd.attention(q, k, v, attn_mask=mask)
    with pytest.raises(sagebwd.SpecError, match="arbitrary masks .*flex_attention has it"):
        sagebwd.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with pytest.raises(TypeError, match="sagebwd.block_sparse_attention has it"):
        sagebwd.attention(q, k, v, block_mask=mask)
    found = flex.flex_attention(q.float(), k.float(), v.float(), block_mask=mask)
    assert off(found, exact(q, k, v, dout, every_third(64))[0]) < 1e-3


def test_transformers_models_are_referred_to_what_takes_it():
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import sagebwd.integrations.transformers as integration

    class Attention(torch.nn.Module):
        is_causal = True

    q, k, v, _ = drawn(256)
    with pytest.raises(sagebwd.SpecError, match="a BlockMask: .*attn_implementation='flex_att"):
        integration.attend(Attention(), q, k, v, made(causal, 256, 128))
    assert "flex_attention" in ALL_ATTENTION_FUNCTIONS.valid_keys()


# ---- indices as torch.topk gives them ------------------------------------------------------------


def test_indices_of_int64_are_those_of_int32():
    q, k, v, _ = drawn(640)
    scores = sagebwd.pooled_block_scores(q, k)
    indices = scores.topk(3).indices
    counts = torch.tensor([1, 2, 3, 3, 2]).expand(1, 2, 5).contiguous()
    assert indices.dtype == counts.dtype == torch.int64
    for of_counts in (None, counts):
        narrow = dict(block_indices=indices.int(),
                      block_counts=None if of_counts is None else of_counts.int())  # fmt: skip
        wide = dict(block_indices=indices, block_counts=of_counts)
        assert torch.equal(sagebwd.pack_blocks(**wide, keys=640),
                           sagebwd.pack_blocks(**narrow, keys=640))  # fmt: skip
        sagebwd.check_block_indices(*wide.values(), keys=640)
        for function in (emulation.emulated_block_sparse_attention, sagebwd.block_linear_attention):
            assert torch.equal(function(q, k, v, **wide), function(q, k, v, **narrow))
        told = dict(alpha=0.3, precision="exact")
        assert torch.equal(sagebwd.sparse_linear_attention(q, k, v, **told, **wide),
                           sagebwd.sparse_linear_attention(q, k, v, **told, **narrow))  # fmt: skip


@pytest.mark.parametrize("number", [2**32 + 1, 2**31, -(2**32) + 1, 2**63 - 1, -(2**63), 10, -1])
@pytest.mark.parametrize("what", ["index", "count"])
def test_numbers_that_int32_has_not_are_wrong_and_not_others(number, what):
    """2 ** 32 + 1 has the low bits of 1, which is a block."""
    q, k, v, _ = drawn(640)
    indices, counts = torch.zeros(1, 1, 5, 2, dtype=torch.int64), torch.full((1, 1, 5), 2)
    (indices if what == "index" else counts[..., None])[0, 0, 1, 0] = number
    told = dict(block_indices=indices, block_counts=counts)
    words = sagebwd.pack_blocks(**told, keys=640)[0, 0, :, -1] < 0
    assert words.tolist() == [False, True, False, False, False]
    with pytest.raises(sagebwd.SpecError, match=f"is {number}[;.]"):
        sagebwd.check_block_indices(indices, counts, keys=640)
    mixed = sagebwd.sparse_linear_attention(q, k, v, alpha=0.5, precision="exact", **told)
    for out in (emulation.emulated_block_sparse_attention(q, k, v, **told), mixed):
        assert out[0, 0, :, 0].isnan().nonzero().flatten().tolist() == list(range(128, 256))
    no_room = sagebwd.pack_blocks(block_indices=indices[..., :0], block_counts=counts, keys=640)
    assert (no_room < 0).all()


# ---- top_blocks under a causal mask --------------------------------------------------------------


@pytest.mark.parametrize("corner", ["top-left", "bottom-right"])
@pytest.mark.parametrize("queries, keys, sizes", [
    (512, 512, (128, 64)), (500, 500, (128, 64)), (300, 640, (64, 128)), (640, 300, (128, 128)),
    (90, 700, (128, 64))])  # fmt: skip
def test_causal_lists_leave_no_query_without_keys(corner, queries, keys, sizes):
    generator = torch.Generator().manual_seed(3)
    shape = [-(-queries // sizes[0]), -(-keys // sizes[1])]
    scores = torch.randn(2, 3, *shape, generator=generator)
    shift = keys - queries if corner == "bottom-right" else 0
    seen = np.arange(keys) <= np.arange(queries)[:, None] + shift
    ahead = np.ones(shape, bool)
    for i in range(shape[0]):
        for j in range(shape[1]):
            ahead[i, j] = not seen[i * sizes[0] : (i + 1) * sizes[0],
                                   j * sizes[1] : (j + 1) * sizes[1]].any()  # fmt: skip
    plain = sagebwd.top_blocks(scores, 0.3)
    found = sagebwd.top_blocks(scores, 0.3, causal=corner, queries=queries, keys=keys,
                               block_size=sizes)  # fmt: skip
    assert not (found & torch.from_numpy(ahead)).any()
    tokens = found.repeat_interleave(sizes[0], 2).repeat_interleave(sizes[1], 3)
    tokens = tokens[..., :queries, :keys] & torch.from_numpy(seen)
    assert torch.equal(tokens.any(-1), torch.from_numpy(seen.any(-1)).expand(2, 3, -1))
    kept = max(1, int(0.3 * shape[1]))
    expected = np.minimum(kept, (~ahead).sum(-1))
    assert (found.sum(-1) == torch.from_numpy(expected)).all()
    # Rows whose best blocks are seen by their first query keep them.
    same = (plain == found).all(-1)
    first = torch.from_numpy(seen[:: sizes[0], :: sizes[1]])
    assert same[(plain & first).any(-1) & ~(plain & torch.from_numpy(ahead)).any(-1)].all()


def test_causal_lists_of_scores_that_are_not_finite():
    of = {"causal": True, "queries": 256, "keys": 256, "block_size": (128, 64)}
    scores = torch.zeros(2, 4)
    scores[0, 1] = math.nan  # which the first query of its row does not see
    assert sagebwd.top_blocks(scores, 0.25, **of).tolist() == [
        [True, False, False, False], [True, False, False, False]]  # fmt: skip
    assert sagebwd.top_blocks(scores, 0.5, **of)[0].tolist() == [True, True, False, False]
    scores = torch.zeros(2, 4)
    scores[0, :2] = -math.inf  # a block of score -inf is never listed
    assert not sagebwd.top_blocks(scores, 0.25, **of)[0].any()
    assert sagebwd.top_blocks(scores, 0.25, **of)[1].any()


def test_causal_lists_make_no_row_of_zeros():
    q, k, v, _ = drawn(512)
    scores = sagebwd.pooled_block_scores(q, k).clone()
    scores[..., -1] = 9.0  # the last block is the best, and lies ahead of nearly all
    plain = sagebwd.top_blocks(scores, 0.2)
    out = emulation.emulated_block_sparse_attention(q, k, v, block_mask=plain, causal=True)
    assert (out == 0).all(-1).any()
    mask = sagebwd.top_blocks(scores, 0.2, causal=True, queries=512, keys=512)
    out = emulation.emulated_block_sparse_attention(q, k, v, block_mask=mask, causal=True)
    assert not (out == 0).all(-1).any()


@pytest.mark.parametrize("given, match", [
    (dict(causal=True), "pass queries= and keys="),
    (dict(causal=True, queries=500, keys=300), "ambiguous"),
    (dict(causal="top-left", queries=512, keys=512, block_size=(64, 64)), r"\(8, 8\) blocks of"),
    (dict(causal="left", queries=512, keys=300), "pass False or 'none'"),
    (dict(is_causal=True), "pass causal="),
])  # fmt: skip
def test_wrong_lengths_of_causal_lists_are_refused(given, match):
    scores = torch.zeros(1, 1, 4, 8 if given.get("keys") != 300 else 5)
    with pytest.raises((sagebwd.SpecError, TypeError), match=match):
        sagebwd.top_blocks(scores, 0.5, **given)
