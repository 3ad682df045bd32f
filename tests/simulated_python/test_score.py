"""Attention with score functions, on a simulated GPU, against FP64 by PyTorch's autograd."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_intervals import made  # noqa: E402
from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mixed import errors, on_the_simulator  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("on_the_simulator")

TOKENS = 200
_SLOPES = torch.tensor([0.05, 0.002])
_BIAS = torch.linspace(-1, 1, 2 * (2 * TOKENS - 1)).view(2, -1)
_BIAS_OF = masks.operand("bias", _BIAS)


def positions():
    at = torch.arange(TOKENS, dtype=torch.float64)
    return at[:, None], at[None, :]


def alibi(s):
    q, k = positions()
    return s + _SLOPES.double()[:, None, None] * (k - q)


def bias_by_distance(s):
    q, k = positions()
    return s + _BIAS.double()[:, (k - q + TOKENS - 1).long()]


#: By name: a score function, and what it does to FP64 scores of (batch, heads, queries, keys).
SCORES = {
    "softcap": ("5.0 * tanh(s / 5.0)", lambda s: 5 * torch.tanh(s / 5)),
    "function": (lambda s, b, h, q, k: s * (1 + h),
                 lambda s: s * torch.tensor([1.0, 2.0])[:, None, None]),
    "alibi": (masks.trace_score("s + slope[h] * (k - q)", {"slope": _SLOPES}), alibi),
    "bias": (masks.trace_score(lambda s, b, h, q, k: s + _BIAS_OF[h, k - q + TOKENS - 1]),
             bias_by_distance),
    "flex": (masks.from_flex(lambda score, b, h, q, k: 5.0 * torch.tanh(score / 5.0)),
             lambda s: 5 * torch.tanh(s / 5)),
}  # fmt: skip


def exact(q, k, v, change, seen=None):
    """(out, lse) in FP64."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = change(q @ k.mT / q.shape[-1] ** 0.5)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def offset():
    """q, k and v whose keys have a mean, which smoothing subtracts."""
    q, k, v = made(TOKENS)
    return q, (k.detach() + 0.5).requires_grad_(), v


def judged(found, wanted, q, k, v, limit=0.03):
    weights = drawn(*wanted[0].shape, seed=9, dtype=torch.float64)
    of_lse = drawn(*wanted[1].shape, seed=8, dtype=torch.float64)
    gradients = [torch.autograd.grad((out.double() * weights).sum() + (lse.double() * of_lse).sum(),
                                     (q, k, v)) for out, lse in (found, wanted)]  # fmt: skip
    assert max(errors([found[0], *gradients[0]], [wanted[0], *gradients[1]])) < limit
    assert (found[1] - wanted[1]).abs().max() < 0.1


@pytest.mark.parametrize("name, precision", [
    *((name, "six-of-seven") for name in SCORES), ("softcap", "gradients16")])  # fmt: skip
def test_scores_against_fp64(name, precision):
    score, change = SCORES[name]
    q, k, v = offset()
    found = sagebwd.attention(q, k, v, score=score, precision=precision, return_lse=True)
    judged(found, exact(q, k, v, change), q, k, v)


def test_beside_a_mask_and_a_causal_one():
    q, k, v = offset()
    at_q, at_k = positions()
    document = torch.arange(TOKENS) // 70
    mask = masks.trace_mask("doc[q] == doc[k]", {"doc": document})
    seen = (at_q >= at_k) & (document[:, None] == document[None, :])
    for name in ("softcap", "alibi"):
        score, change = SCORES[name]
        found = sagebwd.attention(q, k, v, score=score, mask=mask, causal=True, return_lse=True)
        judged(found, exact(q, k, v, change, seen), q, k, v)


def test_beside_intervals_windows_and_sinks():
    q, k, v = offset()
    at_q, at_k = positions()
    score, change = SCORES["softcap"]
    intervals = masks.documents(lengths=[80, 120])
    document = torch.arange(TOKENS) >= 80
    seen = (at_q >= at_k) & (document[:, None] == document[None, :])
    found = sagebwd.attention(q, k, v, score=score, **intervals.arguments, return_lse=True)
    judged(found, exact(q, k, v, change, seen), q, k, v)
    seen = (at_q >= at_k) & (at_q - at_k <= 50)
    found = sagebwd.attention(q, k, v, score=score, window_left=50, causal=True, return_lse=True)
    judged(found, exact(q, k, v, change, seen), q, k, v)
    logits = torch.tensor([0.5, -1.0])
    out, lse = exact(q, k, v, change)
    total = torch.logaddexp(lse, logits.double()[:, None])
    wanted = out * (lse - total).exp()[..., None]
    found = sagebwd.attention(q, k, v, score=score, sink_logits=logits)
    assert max(errors([found], [wanted])) < 0.03


def test_packed_sequences_count_from_their_own_first_tokens():
    q, k, v = (t.detach() for t in offset())
    score = "s * (1.0 + q / 300.0) + (k - q) / 100.0"
    lengths = [130, 70]
    packed = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    starts = torch.tensor([0, 130, 200], dtype=torch.int32)
    out = sagebwd.attention(*packed, score=score, cu_seqlens_q=starts, cu_seqlens_k=starts)
    for begin, length in zip((0, 130), lengths):
        own = (t[:1, :, begin : begin + length] for t in (q, k, v))
        alone = sagebwd.attention(*own, score=score)
        assert torch.equal(out[begin : begin + length].transpose(0, 1), alone[0])


#: A score function that is not finite where nobody looks, what it does in FP64 where somebody
#: does, and what hides the rest.
_DISTANCE = positions()[0] - positions()[1]
NOT_FINITE = {
    "above the diagonal": ("s * sqrt(float(q - k)) / 8.0",
                           lambda s: s * _DISTANCE.clamp(min=0).sqrt() / 8, dict(causal=True)),
    "beside the diagonal": ("s / float(q - k + 1)", lambda s: s / (_DISTANCE.clamp(min=0) + 1),
                            dict(mask="q >= k")),
    "past the last query": (f"s - sqrt(float({TOKENS - 1} - q))", lambda s: s, {}),
    "past the last query, in its slope": (
        f"s * sqrt(float({TOKENS - 1} - q)) / 8.0",
        lambda s: s * (TOKENS - 1 - positions()[0]).sqrt() / 8, {}),
}  # fmt: skip


@pytest.mark.parametrize("name, precision",
                         [*zip(NOT_FINITE, ["six-of-seven", "gradients16"] * 2)])  # fmt: skip
def test_functions_are_not_finite_where_nobody_looks(name, precision):
    score, change, hides = NOT_FINITE[name]
    q, k, v = made(TOKENS)
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    if hides:
        seen = seen.tril()
    out = sagebwd.attention(q, k, v, score=score, precision=precision, **hides)
    right = exact(q, k, v, change, seen)[0]
    weights = drawn(*out.shape, seed=9, dtype=torch.float64)
    gradients = [torch.autograd.grad((x.double() * weights).sum(), (q, k, v))
                 for x in (out, right)]  # fmt: skip
    assert max(errors([out, *gradients[0]], [right, *gradients[1]])) < 0.04


def test_tangents_of_tensors_are_refused():
    q, k, v = (t.detach() for t in made(TOKENS))
    with torch.autograd.forward_ad.dual_level():
        slopes = torch.autograd.forward_ad.make_dual(_SLOPES, torch.ones(2))
        score = masks.trace_score("s + slope[h] * (k - q)", {"slope": slopes})
        with pytest.raises(sagebwd.SpecError, match="tangent"):
            sagebwd.attention(q, k, v, score=score)


@pytest.mark.parametrize("score, lowest", [
    ("s + m[q, k]", -torch.inf), ("s + m[q, k]", torch.finfo(torch.bfloat16).min),
    ("5.0 * tanh(s / 5.0) + m[q, k]", -torch.inf),
])  # fmt: skip
def test_a_table_hides_keys(score, lowest):
    """As masks that are added to scores do; whole blocks of keys are hidden from the first rows."""
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    matrix = torch.zeros(TOKENS, TOKENS).masked_fill(~seen, lowest)
    q, k, v = made(TOKENS)
    change = SCORES["softcap"][1] if "tanh" in score else lambda s: s
    given = dict(score=masks.trace_score(score, {"m": matrix}))
    right = exact(q, k, v, change, seen)
    judged(sagebwd.attention(q, k, v, return_lse=True, **given), right, q, k, v)
    emulated = sagebwd.emulation.emulated_attention(q, k, v, **given)
    assert errors([emulated], right)[0] < 0.03


def test_a_tensors_factor_is_not_finite_where_nobody_looks():
    t = torch.tensor([0.3, 0.1], requires_grad=True)
    score = masks.trace_score("s - t[h] * log(float(q - k) + 1.0)", {"t": t})
    q, k, v = made(TOKENS)
    out = sagebwd.attention(q, k, v, score=score, causal=True)
    weights = drawn(*out.shape, seed=9, dtype=torch.float64)
    (found,) = torch.autograd.grad((out.double() * weights).sum(), t)
    penalty = (_DISTANCE.clamp(min=0) + 1).log()
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    right = exact(q, k, v, lambda s: s - t.double()[:, None, None] * penalty, seen)[0]
    (wanted,) = torch.autograd.grad((right * weights).sum(), t)
    assert errors([found], [wanted])[0] < 0.03


def test_checkpointing_and_the_passes_alone_give_the_same_bits():
    q, k, v = offset()
    score, _ = SCORES["bias"]

    def attend(q, k, v):
        return sagebwd.attention(q, k, v, score=score)

    plain = torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
    again = torch.autograd.grad(checkpoint(attend, q, k, v, use_reentrant=False).sum(), (q, k, v))
    with torch.no_grad():
        out, lse = sagebwd.attention_forward(q, k, v, score=score)
    passes = sagebwd.attention_backward(torch.ones_like(out), q, k, v, out, lse, score=score)
    for gradients in (again, passes):
        assert all(torch.equal(*pair) for pair in zip(plain, gradients))


@pytest.mark.parametrize("given, message", [
    (dict(score=5), "score is an int; pass a function of"),
    (dict(score="s + bias[h]"), "score indexes bias, and no tensor of that name is given"),
    (dict(score="s >"), "column"),
    (dict(score="q + 1.0"), "a score is a float that is formed of s"),
    (dict(score="where(q >= k, s, -inf)"), r"with inf in it: a mask hides keys"),
    (dict(score="tanh(s)", smooth_q=True), "with smooth_q: leave one of the two out"),
    (dict(score="tanh(s)", granularity="block"), "under 'block': take 'row'"),
    (dict(score="tanh(s)", dp_sums="fp16"), "with dp_sums = fp16"),
    (dict(score="tanh(s)", sink_keys=1), "sink_keys = 1 is not supported with a score function"),
    (dict(score="tanh(s)", gradient_kernels="fused"), "with a score function"),
    (dict(score=masks.trace_score("s + x[h]", {"x": torch.ones(2)}),
          seqused_k=torch.tensor([3, 4], dtype=torch.int32)), "are given together"),
])  # fmt: skip
def test_refusals(given, message):
    q, k, v = (t.detach() for t in made(TOKENS))
    with pytest.raises((sagebwd.SpecError, TypeError), match=message):
        sagebwd.attention(q, k, v, **given)
