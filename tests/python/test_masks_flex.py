"""Functions that were written for flex_attention, as it evaluates them."""

import functools

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="needs flex_attention")

import sagebwd  # noqa: E402
from sagebwd.masks import from_flex  # noqa: E402

BATCH, HEADS, TOKENS = 2, 4, 24
DOC = torch.tensor([[0] * 7 + [1] * 9 + [2] * 8, [0] * 20 + [1] * 4])
LENGTHS = torch.tensor([5, 11], dtype=torch.int32)
IMAGE = torch.tensor([False] * 6 + [True] * 8 + [False] * 10)


def evaluated(function):
    """A function as flex_attention evaluates it: vmap over the batch, heads, queries and keys."""
    score = SCORES if function.__code__.co_argcount == 5 else None
    places = [torch.arange(n) for n in (BATCH, HEADS, TOKENS, TOKENS)]
    given = places if score is None else [score, *places]
    for at in range(3, -1, -1):
        dims = [0 if i == at else None for i in range(4)]
        function = torch.vmap(function, in_dims=tuple(dims if score is None else [0, *dims]))
    return function(*given)


SCORES = torch.linspace(-6, 6, BATCH * HEADS * TOKENS * TOKENS).view(BATCH, HEADS, TOKENS, TOKENS)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 5)


def prefix_lm(b, h, q_idx, kv_idx):
    return (kv_idx < LENGTHS[b]) | (q_idx >= kv_idx)


def documents(b, h, q_idx, kv_idx):
    return torch.logical_and(DOC[b, q_idx] == DOC[b][kv_idx], causal(b, h, q_idx, kv_idx))


def images(b, h, q_idx, kv_idx):
    both = torch.logical_and(IMAGE[q_idx], IMAGE[kv_idx]).to(q_idx.device)  # moved nowhere
    return torch.logical_or(q_idx >= kv_idx, both)


def flamingo(b, h, q_idx, kv_idx):
    """A token sees the image before it alone; the last number of images so far is its index."""
    return IMAGE[kv_idx].logical_not().bitwise_and(DOC[b, q_idx].eq(DOC[b, kv_idx])) | (
        kv_idx.ge(LENGTHS[b]) & ~(q_idx < 3).bool())  # fmt: skip


def natten(b, h, q_idx, kv_idx):
    """Neighbours in an image of 4 x 6, by 3 x 3, whose window stays inside at the edges."""
    q_x, q_y, k_x, k_y = q_idx // 6, q_idx % 6, kv_idx // 6, kv_idx % 6
    centre_x, centre_y = q_x.clamp(1, 4 - 1 - 1), torch.clamp(q_y, min=1, max=6 - 1 - 1)
    return ((centre_x - k_x).abs() <= 1) & (torch.abs(centre_y - k_y) <= 1)


def block_diffusion(b, h, q_idx, kv_idx):
    """Noised tokens and then clean ones, in blocks of 3."""
    half, size = TOKENS // 2, 3
    clean_q, clean_k = q_idx >= half, kv_idx >= half
    block_q = torch.where(clean_q == 1, (q_idx - half) // size, q_idx // size)
    block_k = torch.where(clean_k == 1, (kv_idx - half) // size, kv_idx // size)
    own = (block_q == block_k) & (clean_q == clean_k)
    before = (block_q > block_k) & (clean_k == 1) & (clean_q == 0)
    text = (block_q >= block_k) & (clean_k == 1) & (clean_q == 1)
    return own | before | text


OFFSET = torch.tensor(3)


def offset(b, h, q_idx, kv_idx):
    return q_idx + OFFSET >= kv_idx.to(torch.int32)


def every_other(b, h, q_idx, kv_idx):
    kept = torch.remainder(q_idx - kv_idx, 2).eq(0).logical_xor(h < 2)
    return torch.where(h > 2, kept, torch.ne(q_idx, kv_idx)) & torch.bitwise_not(b > 1)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = torch.linspace(-1, 1, 2 * 9 * HEADS).view(HEADS, 18)
CAP = torch.tensor(4.0)


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def alibi_of_powers(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx) * torch.exp2(-((h + 1) * 8.0 / HEADS))


def softcap(score, b, h, q_idx, kv_idx):
    return 20 * torch.tanh(score / 20)


def softcap_of_a_tensor(score, b, h, q_idx, kv_idx):
    return CAP * (score / CAP).tanh()


def relative_bias(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, (q_idx - kv_idx).clamp(-8, 8) + 9]


def causal_score(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def many_functions(score, b, h, q_idx, kv_idx):
    x = torch.sigmoid(score).mul(2).sub(1) + torch.square(score) * (h == 1).float()
    x = torch.maximum(x, torch.exp(-score)) - torch.minimum(score, x) / kv_idx.add(1).float()
    return x + torch.sqrt(score.abs()) + torch.log(torch.add(q_idx, 1)) + 0.5 * score.pow(2)


FUNCTIONS = {
    causal: "q >= k", sliding_window: "q >= k & q - k <= 5", prefix_lm: "k < LENGTHS[b] | q >= k",
    documents: "DOC[b, q] == DOC[b, k] & q >= k",
    images: "q >= k | IMAGE[q] != 0 & IMAGE[k] != 0", flamingo: None,
    natten: "abs(min(max(q // 6, 1), 2) - k // 6) <= 1 & abs(min(max(q % 6, 1), 4) - k % 6) <= 1",
    block_diffusion: None, offset: "q + OFFSET[0] >= k", every_other: None,
    alibi: "s + SLOPES[h] * (k - q)", alibi_of_powers: None, softcap: "20.0 * tanh(s / 20.0)",
    softcap_of_a_tensor: "CAP[0] * tanh(s / CAP[0])",
    relative_bias: "s + TABLE[h, min(max(q - k, -8), 8) + 9]",
    causal_score: "where(q >= k, s, -inf)", many_functions: None,
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions_of_flex_attention_mean_the_same(function, tiny_tensors):
    made, expected = from_flex(function), evaluated(function)
    is_mask = made.kind == "mask"
    assert is_mask == (function.__code__.co_argcount == 4)
    found = made.dense(BATCH, HEADS, TOKENS, TOKENS, scores=None if is_mask else SCORES)
    if is_mask:
        assert torch.equal(found, expected) and found.any() and not found.all()
    else:
        torch.testing.assert_close(found.float(), expected, rtol=2e-6, atol=2e-6)
    text = FUNCTIONS[function]
    if text is not None:  # globals are called in capitals here, which no operand is
        for i, name in enumerate(n for n in ("LENGTHS", "DOC", "IMAGE", "OFFSET", "SLOPES", "TABLE",
                                             "CAP") if n in text):  # fmt: skip
            text = text.replace(name, f"t{i}")
        assert made.text == text


def test_tensors_keep_the_names_that_they_have_in_the_function():
    doc, b = DOC, SLOPES

    def function(score, batch, h, q, k):
        return score * b[h] + b[0] + doc[batch, q] + doc[batch, k]

    made = from_flex(function)
    assert made.text == "s * t0[h] + t1[0] + doc[b, q] + doc[b, k]"  # b means the batch
    assert list(made.operands) == ["t0", "t1", "doc"] and made.operands["t0"] is SLOPES
    assert made.operands["t1"].tolist() == [0.5]


def test_masks_that_pytorch_combines():
    both = from_flex(flex.and_masks(causal, sliding_window))
    assert both.text == "q >= k & (q >= k & q - k <= 5)"
    assert from_flex(flex.or_masks(causal, documents)).text == (
        "q >= k | t0[b, q] == t0[b, k] & q >= k")  # fmt: skip
    made = flex.create_block_mask(causal, 1, 1, 128, 128, device="cpu")
    assert from_flex(made.mask_mod).text == "q >= k"
    partial = functools.partial(lambda size, b, h, q, k: q - k < size, 7)
    assert from_flex(partial).text == "q - k < 7"
    assert from_flex(lambda b, h, q, k, size=7: q - k < size).text == "q - k < 7"
    named = functools.partial(lambda b, h, q, k, size: q - k < size, size=7)
    assert from_flex(named).text == "q - k < 7"


BIG = torch.zeros(2, 2, 2)


@pytest.mark.parametrize("function, told", [
    (lambda b, h, q, k: torch.sin(q) < k, r"torch.sin has no place .* tanh"),
    (lambda b, h, q, k: q.sin() < k, r"Tensor.sin has no place in an expression"),
    (lambda b, h, q, k: torch.logical_and(q < k, torch.fmod(q, 2) == 0), "torch.fmod has no place"),
    (lambda b, h, q, k: q.add(k, alpha=2) < 3, "Tensor.add with 2 arguments and alpha has no"),
    (lambda b, h, q, k: torch.div(q, 2, rounding_mode="trunc") < k, "rounding_mode='trunc'"),
    (lambda b, h, q, k: (q / 2).int() < k, "a float, q / 2.0, is made torch.int32"),
    (lambda b, h, q, k: q.to("cuda") < k, "moved or converted to what is no dtype"),
    (lambda b, h, q, k: q.mul_(2) < k, r"Tensor.mul_ has no place"),
    (lambda b, h, q, k: DOC.take(q) < k, "Tensor.take has no place"),
    (lambda b, h, q, k: torch.stack([q, k]).amin() < 1, "torch.stack has no place"),
    (lambda b, h, q, k: DOC + q < k, r"a tensor of shape \(2, 24\) in an expression"),
    (lambda b, h, q, k: BIG[b, q, k] < 1, r"shape \(2, 2, 2\); pass a tensor of 1 or 2"),
    (lambda b, h, q, k: DOC[b, :] < 1, "one number or symbol per dimension"),
    (lambda b, h, q, k: DOC[b] < 1, "t0 is indexed with 1 of its 2 dimensions: give one index"),
    (lambda b, h, q, k: DOC[b] == DOC[b], "indexed with 1 of its 2 dimensions"),
    (lambda b, h, q, k: q >= k and q < 3, "no truth value"),
    (lambda b, h, q, k: torch.where(q < k), "torch.where with 1 arguments has no place"),
    (lambda b, h, q, k: b.new_ones((2,)) < q, r"a tensor of shape \(2,\)"),
    (lambda b, h, q, k: q & k < 3, "it takes bools"),
    (lambda b, h, q, k: q << 1 < k, "<< is not supported: there are b, h, q, k"),
    (lambda b, h, q, k: q, "is an int: a mask is a bool"),
    (lambda s, b, h, q, k: s < 1, "is a bool: a score is a float"),
    (lambda q, k: q < k, "pass a mask_mod, of"), (3, "pass a mask_mod"),
    (flex.create_block_mask(causal, 1, 1, 128, 128, device="cpu"), "pass its mask_mod"),
])  # fmt: skip
def test_what_expressions_lack_is_named(function, told):
    with pytest.raises(sagebwd.SpecError, match=told):
        from_flex(function)


def test_symbols_are_asked_for_their_dtype_and_shape():
    def function(b, h, q, k):
        assert (q.dtype, q.ndim, q.shape) == (torch.int32, 0, ())
        assert ((q < k).dtype, (q / 2).dtype) == (torch.bool, torch.float32)
        assert not hasattr(q, "numpy_array")
        return (q < k).type(torch.int64) == b.new_zeros((), dtype=torch.bool).int()

    assert from_flex(function).text == "where(q < k, 1, 0) == 0"
