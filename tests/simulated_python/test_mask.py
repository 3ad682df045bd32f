"""Attention under masks that are expressions, on a simulated GPU, against FP64 and dense masks that
plain Python makes."""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_intervals import exact, made  # noqa: E402
from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mixed import errors, on_the_simulator  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("on_the_simulator")

QUERIES = 200
_DOCUMENTS = torch.tensor([[0] * 90 + [1] * 110, [0] * 150 + [1] * 50], dtype=torch.int32)
_OF_DOCUMENT = masks.operand("doc", _DOCUMENTS)
_LENGTHS = torch.tensor([30, 120])

#: By name: a mask, and the predicate of ints that it says.
MASKS = {
    "text": ("q >= k & q - k < 70", lambda b, h, q, k: q >= k and q - k < 70),
    "function": (lambda b, h, q, k: (q // 64 == k // 64) | (k < 5),
                 lambda b, h, q, k: q // 64 == k // 64 or k < 5),
    "documents": (
        masks.trace_mask(lambda b, h, q, k: _OF_DOCUMENT[b, q] == _OF_DOCUMENT[b, k]),
        lambda b, h, q, k: int(_DOCUMENTS[b, q]) == int(_DOCUMENTS[b, k]),
    ),
    "prefixes of heads": (
        masks.trace_mask("k < length[h] | doc[b, q] > doc[b, k]",
                         {"length": _LENGTHS, "doc": _DOCUMENTS}),
        lambda b, h, q, k: k < int(_LENGTHS[h]) or int(_DOCUMENTS[b, q]) > int(_DOCUMENTS[b, k]),
    ),
    "flex": (masks.from_flex(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx % 3 != 0)),
             lambda b, h, q, k: q >= k and k % 3 != 0),
}  # fmt: skip


def dense(sees, batch=2, heads=2, queries=QUERIES, keys=QUERIES):
    points = itertools.product(range(batch), range(heads), range(queries), range(keys))
    return torch.tensor([sees(*at) for at in points]).view(batch, heads, queries, keys)


def gradients(out, q, k, v, weights):
    return torch.autograd.grad((out.double() * weights).sum(), (q, k, v))


@pytest.mark.parametrize("name", MASKS)
def test_masks_against_fp64(name):
    mask, sees = MASKS[name]
    q, k, v = made(QUERIES)
    out, lse = sagebwd.attention(q, k, v, mask=mask, return_lse=True)
    right, right_lse = exact(q, k, v, dense(sees))
    weights = drawn(*out.shape, seed=9, dtype=torch.float64)
    found, wanted = gradients(out, q, k, v, weights), gradients(right, q, k, v, weights)
    assert max(errors([out, *found], [right, *wanted])) < 0.03
    sees_some = right_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, sees_some)
    assert (lse[sees_some] - right_lse[sees_some]).abs().max() < 0.05
    assert not out[~sees_some].any()


def test_beside_a_causal_mask_tokens_first_and_under_checkpointing():
    mask, sees = MASKS["documents"]
    q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in made(QUERIES))

    def attend(q, k, v):
        return sagebwd.attention(q, k, v, mask=mask, causal=True, layout="bshd")

    seen = dense(lambda b, h, q, k: q >= k and sees(b, h, q, k))
    right = exact(*(t.transpose(1, 2) for t in (q, k, v)), seen)[0].transpose(1, 2)
    weights = drawn(*right.shape, seed=9, dtype=torch.float64)
    out = checkpoint(attend, q, k, v, use_reentrant=False)
    found, wanted = gradients(out, q, k, v, weights), gradients(right, q, k, v, weights)
    assert max(errors([out, *found], [right, *wanted])) < 0.03


def test_forward_and_backward_are_autograds():
    mask, _ = MASKS["prefixes of heads"]
    q, k, v = made(QUERIES)
    with torch.no_grad():
        out, lse = sagebwd.attention_forward(q, k, v, mask=mask)
    dout = drawn(*out.shape, seed=8, dtype=out.dtype)
    found = sagebwd.attention_backward(dout, q, k, v, out, lse, mask=mask)
    wanted = torch.autograd.grad(sagebwd.attention(q, k, v, mask=mask), (q, k, v), dout)
    assert all(torch.equal(*pair) for pair in zip(found, wanted))


def test_tables_are_read_when_kernels_run():
    lengths = torch.tensor([200], dtype=torch.int32)
    mask = masks.trace_mask("k < length[0]", {"length": lengths})
    q, k, v = (t.detach() for t in made(QUERIES))
    whole = sagebwd.attention(q, k, v, mask=mask)
    lengths.fill_(70)
    assert torch.equal(sagebwd.attention(q, k, v, mask=mask),
                       sagebwd.attention(q, k, v, mask="k < 70"))  # fmt: skip
    assert not torch.equal(whole, sagebwd.attention(q, k, v, mask=mask))


def test_dense_compares_floats_as_kernels_do():
    """FP32 does not have all ints beyond 2^24. With q = 0, exp(lse) is how many keys are seen."""
    at = masks.operand("at", (1 << 24) + torch.arange(QUERIES, dtype=torch.int32))
    mask = masks.trace_mask(lambda b, h, q, k: at[q] == at[k] * 1.0)
    q, k, v = (t.detach() for t in made(QUERIES))
    _, lse = sagebwd.attention(0 * q, k, v, mask=mask, return_lse=True)
    seen = mask.dense(2, 2, QUERIES, QUERIES).sum(-1)
    assert torch.equal(lse.exp().round().long(), seen) and seen.max() > 1


def test_vmap_is_a_call_for_each():
    q, k, v = (torch.stack([t.detach(), 2 * t.detach()]) for t in made(QUERIES))
    mask, _ = MASKS["documents"]
    found = torch.func.vmap(lambda q, k, v: sagebwd.attention(q, k, v, mask=mask))(q, k, v)
    for i in range(2):
        assert torch.equal(found[i], sagebwd.attention(q[i], k[i], v[i], mask=mask))


@pytest.mark.parametrize("given, message", [
    (dict(mask=5), "mask is an int; pass a function of"),
    (dict(mask="doc[b, q] == 1"), r"mask indexes doc, and no tensor of that name is given"),
    (dict(mask="q +"), "column"),
    (dict(mask="q + k"), "a mask is a bool"),
    (dict(mask="q >= k", window_left=3, causal=True), "with a window: leave one of the two out"),
    (dict(mask="q >= k", smooth_q=True), "with smooth_q: leave one of the two out"),
    (dict(mask="q >= k", seqused_k=torch.tensor([3, 4], dtype=torch.int32)),
     "seqused_k and mask are given together"),
    (dict(mask="q >= k", startend_row_indices=torch.zeros(1, 1, 200, 2, dtype=torch.int32)),
     "startend_row_indices and mask are given together"),
    (dict(mask=masks.trace_mask("doc[q] == 1.0", {"doc": torch.ones(200)})),
     "masks compare ints"),
    (dict(mask=lambda q, k: q >= k), "a mask is a function of"),
    (dict(mask=masks.trace_score("s + 1.0")), "mask is"),
])  # fmt: skip
def test_refusals(given, message):
    q, k, v = (t.detach() for t in made(QUERIES))
    with pytest.raises((sagebwd.SpecError, TypeError), match=message):
        sagebwd.attention(q, k, v, **given)
