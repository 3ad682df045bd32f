"""Masks and score functions as expressions without kernels: in FP64 and emulated.

The masks are those that loops write (mask_cases.py), and PyTorch's operations are the score
functions (score_cases.py).
"""

import functools
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import mask_cases  # noqa: E402
import score_cases  # noqa: E402
from test_emulation import NAMES, assert_same  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import masks, reference  # noqa: E402
from sagebwd.masks import slopes  # noqa: E402
from sagebwd.numerics import emulation, expressions, numerics  # noqa: E402

BATCH, HEADS, HEADS_KV = mask_cases.BATCH, mask_cases.HEADS, mask_cases.HEADS_KV
N = 140
#: Bends scores where s is positive, and has a slope of its own on each side.
_KINKED = score_cases.Case("where(s > 0.1 * t[b], min(s, 1.5), 0.5 * s - abs(s) * 0.25)",
                           lambda s, t: torch.where(s > 0.1 * t[:, None, None, None],
                                                    torch.minimum(s, s.new_tensor(1.5)),
                                                    0.5 * s - 0.25 * s.abs()),
                           {"t": torch.tensor([-1.0, 2.0])})  # fmt: skip
SCORES = {**score_cases.CASES, "kinked": _KINKED}
#: By name: a mask or None, a score function or None, and options.
CALLS = {
    **{name: (name, None, {}) for name in mask_cases.CASES},
    **{name: (None, name, {}) for name in SCORES},
    "both": ("documents", "softcap", {}),
    "a causal mask too": ("windows_of_heads", "bias by distance", dict(causal="top-left")),
    "a window": (None, "softcap", dict(window_left=40, causal="bottom-right")),
    "16-bit scores": ("documents", "softcap", dict(precision="qk16")),
    "16-bit gradients": ("prefix_lm", "alibi", dict(precision="gradients16")),
    "no smoothing": ("jagged", "softcap", dict(smooth_k=False)),
    "blocks": ("documents", None, dict(granularity="block")),
    "dP of INT8": ("documents", "temperature", dict(precision=("s", "dp", "dq"))),
}  # fmt: skip


def given_of(name, n=N):
    """(arguments, options, what is seen, the change of scores in FP64) of a call."""
    of_mask, of_score, more = CALLS[name]
    given, seen, change = {}, torch.ones(1, 1, n, n, dtype=torch.bool), lambda s: s
    if of_mask:
        given["mask"], seen = mask_cases.CASES[of_mask](n, "cpu")
    if of_score:
        case = SCORES[of_score]
        given["score"] = masks.trace_score(case.text, case.tables) if case.tables else case.text
        wide = {name: t.double() for name, t in case.tables.items()}
        change = functools.partial(case.exact, **wide)
    if "causal" in more:
        at = score_cases.behind(torch.empty(*seen.shape[2:]))
        seen = seen & (at >= 0) & (at <= more.get("window_left", n))
    return given, more, seen, change


def arrays(seen, seed=0):
    """q, k, v and dout, rounded to bf16; the keys have a mean, which smoothing subtracts."""
    m, n = seen.shape[2:]
    found = reference.random_inputs(m, head_dim=64, heads=HEADS, heads_kv=HEADS_KV, batch=BATCH,
                                    seq_kv=n, seed=seed)  # fmt: skip
    found[1][...] += 0.5
    return [reference.round_to(x, "bf16") for x in found]


def naive(q, k, v, dout, seen, change, dlse=0.0):
    """{name: array} in FP64, by autograd; 0 and -inf for queries that see nothing."""
    leaves = [torch.from_numpy(x).double().requires_grad_() for x in (q, k, v)]
    keys, values = (t.repeat_interleave(HEADS // HEADS_KV, 1) for t in leaves[1:])
    scores = change(leaves[0] @ keys.mT / 8).masked_fill(~seen, -torch.inf)
    out, lse = scores.softmax(-1).nan_to_num(0) @ values, scores.logsumexp(-1)
    loss = (out * torch.from_numpy(dout)).sum()
    loss = loss + (lse.masked_fill(lse == -torch.inf, 0) * torch.as_tensor(dlse)).sum()
    return {name: x.detach() for name, x in
            zip(NAMES, (out, lse, *torch.autograd.grad(loss, leaves)))}  # fmt: skip


def gradient_of_lse(seen):
    shape = BATCH, HEADS, seen.shape[2]
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", CALLS)
def test_exact_results(name):
    given, more, seen, change = given_of(name)
    inputs, dlse = arrays(seen), gradient_of_lse(seen)
    more = {name: x for name, x in more.items() if name in ("causal", "window_left")}
    found = reference.exact(*inputs, dlse=dlse, **given, **more)
    expected = naive(*inputs, seen, change, dlse)
    for of in NAMES:
        np.testing.assert_allclose(found[of], expected[of], atol=2e-6, err_msg=of)


@pytest.mark.parametrize("name", CALLS)
def test_the_emulation_equals_the_reference(name):
    given, more, seen, _ = given_of(name)
    inputs, dlse = arrays(seen), gradient_of_lse(seen)
    expected = reference.emulate(*inputs, dlse=dlse, **given, **more)
    q, k, v, dout = (torch.from_numpy(x).bfloat16() for x in inputs)
    problem = BATCH, HEADS, HEADS_KV, *seen.shape[2:]
    of, tables = expressions.told(given.get("mask"), given.get("score"), problem, q.device)
    rules = emulation.emulation_rules(q, k, v, expressions=of, **more)
    q, k, v, dout, dlse, at = emulation.grouped(HEADS_KV, q, k, v, dout, torch.from_numpy(dlse),
                                                expressions.heads_of(q))  # fmt: skip
    expressed = expressions.expressed(of, tables, at)
    out, lse, _ = numerics.forward_chunk(q, k, v, rules, expressed=expressed)
    gradients = numerics.backward_chunk(q, k, v, out, lse, dout, dlse, rules, expressed=expressed)
    assert_same({name: t.unflatten(0, (BATCH, HEADS_KV)).flatten(1, 2)
                 for name, t in zip(NAMES, (out, lse, *gradients))}, expected)  # fmt: skip


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", ["flamingo", "bias by distance", "both", "a window"])
def test_emulated_attention_and_its_passes(name, layout, monkeypatch):
    given, more, seen, change = given_of(name)
    inputs = arrays(seen)
    expected = naive(*inputs, seen, change)
    tensors = (torch.from_numpy(x).bfloat16() for x in inputs)
    q, k, v, dout = emulation.swapped(layout, *tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    given |= dict(more, layout=layout)
    out, lse = emulation.emulated_attention(*leaves, return_lse=True, **given)
    found = out, *torch.autograd.grad(out, leaves, dout)
    monkeypatch.setattr(emulation, "CHUNK_ELEMENTS", 1)  # one key head at a time
    parts = emulation.emulated_forward(q, k, v, **given)
    gradients = emulation.emulated_backward(dout, q, k, v, *parts, **given)
    assert all(map(torch.equal, (out, lse, *found[1:]), (*parts, *gradients)))
    for x, of in zip(emulation.swapped(layout, *found), ("out", "dq", "dk", "dv")):
        assert (x.double() - expected[of]).norm() < 0.03 * expected[of].norm(), of
    sees = seen.any(-1).expand(lse.shape)
    assert torch.equal(lse > -torch.inf, sees)
    assert not emulation.swapped(layout, out)[0][~sees].any()


def test_sequences_count_from_their_own_first_tokens_and_are_b():
    """Packed and padded sequences have the results of each alone, whose number b is."""
    seen = torch.ones(1, 1, N, N, dtype=torch.bool)
    q, k, v, dout = (torch.from_numpy(x[:1]).bfloat16() for x in arrays(seen))
    first, second = (dict(score=f"4.0 * tanh(s * {scale} / 4.0) + (k - q) / 60.0", causal=True)
                     for scale in (1.0, 2.0))  # fmt: skip
    both = dict(first, score="4.0 * tanh(s * float(1 + b) / 4.0) + (k - q) / 60.0")
    packed = [t[0].transpose(0, 1).contiguous().requires_grad_() for t in (q, k, v)]
    starts = torch.tensor([0, 80, N], dtype=torch.int32)
    out = emulation.emulated_attention(*packed, cu_seqlens_q=starts, cu_seqlens_k=starts, **both)
    found = [out, *torch.autograd.grad(out, packed, dout[0].transpose(0, 1))]
    used = torch.tensor([80, N - 80], dtype=torch.int32)
    rows = [torch.nn.functional.pad(t[:, :, part], (0, 0, 0, 80 - part.stop + part.start))
            for t in (q, k, v) for part in (slice(0, 80), slice(80, N))]  # fmt: skip
    padded = [torch.cat(rows[i : i + 2]) for i in (0, 2, 4)]
    of_padded = emulation.emulated_attention(*padded, seqused_q=used, seqused_k=used, **both)
    for i, (part, given) in enumerate(((slice(0, 80), first), (slice(80, N), second))):
        own = [t[:, :, part].detach().requires_grad_() for t in (q, k, v)]
        alone = emulation.emulated_attention(*own, **given)
        wanted = [alone, *torch.autograd.grad(alone, own, dout[:, :, part])]
        for x, y in zip(found, wanted):
            assert torch.equal(x[part].transpose(0, 1)[None], y)
        assert torch.equal(of_padded[i : i + 1, :, : used[i]], alone)


def test_tables_are_read_in_each_pass():
    """A table that changes between the passes raises an error, as PyTorch's own operations do."""
    slope = torch.tensor([0.1, 0.2, 0.3, 0.4])
    q, k, v = (torch.randn(1, h, 20, 64).bfloat16().requires_grad_() for h in (4, 2, 2))
    score = masks.trace_score("s + slope[h] * float(k)", {"slope": slope})
    out = emulation.emulated_attention(q, k, v, score=score)
    expected = emulation.emulated_attention(q, k, v, score="s + 0.2 * float(k)")[:, 1]
    assert torch.equal(out[:, 1], expected)
    slope.fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- slopes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [
    "tanh(s)", "exp(s / 2.0)", "log(s * s + 1.0)", "sqrt(s * s + 2.0)", "sigmoid(3.0 * s)",
    "pow(s * s + 1.0, 1.5)", "s * s * s", "1.0 / (s * s + 1.0)", "-s", "abs(s - 0.3)",
    "min(s, 2.0 * s)", "max(0.5, s)", "where(s > 0.0, s * x[h], float(q) - s)", "s - tanh(s) / s",
    "s + float(k)", "s * 0.0", "pow(s, 1.0) + pow(s, 2.0)",
])  # fmt: skip
def test_slopes_are_autograds(text):
    s = torch.linspace(-3, 3, 2 * 30 * 40, dtype=torch.float64).view(1, 2, 30, 40)
    tables = {"x": torch.tensor([0.5, 2.0])}
    places = {}
    for axis, (name, n) in enumerate(zip("bhqk", s.shape)):
        shape = [-1 if i == axis else 1 for i in range(4)]
        places[name] = torch.arange(n, dtype=torch.int32).view(shape)
    s.requires_grad_()
    value, slope = slopes.scored(text, {**places, "s": s}, tables)
    expected = masks.dense(text, {"x": tables["x"]} if "x[" in text else {}, *s.shape, scores=s)
    (right,) = torch.autograd.grad(expected.sum(), s)
    assert torch.equal(value, expected)
    torch.testing.assert_close(slope, right, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("text, slope", [
    ("min(s, 3.0 * s)", 1.0), ("min(3.0 * s, s)", 3.0), ("max(s, 3.0 * s)", 1.0), ("abs(s)", 1.0),
    ("0.0 * sqrt(s) + s", 1.0), ("where(s > 0.0, sqrt(s), 2.0 * s)", 2.0)])  # fmt: skip
def test_slopes_at_zero(text, slope):
    """What the kernels' derivative is there (generator/expression.h), where autograd has others."""
    place = torch.zeros(1, dtype=torch.int32)
    places = {**dict.fromkeys("bhqk", place), "s": torch.zeros(1, dtype=torch.float64)}
    assert slopes.scored(text, places, {})[1].tolist() == [slope]


@pytest.mark.parametrize("text, bends", [
    ("s + float(k)", False), ("s - 2.0", False), ("tanh(s)", True), ("2.0 * s", True),
    ("where(q > k, s + 1.0, s)", False)])  # fmt: skip
def test_bends(text, bends):
    assert expressions.Expressions(score=text).bends == bends


# ---- what is refused -----------------------------------------------------------------------------

X = torch.zeros(2, 4, 8, 64, dtype=torch.bfloat16)
_DOC = masks.trace_mask("doc[q] == doc[k]", {"doc": torch.zeros(8, dtype=torch.int32)})
_SLOPE = torch.ones(4, requires_grad=True)
_ALIBI = masks.trace_score("s * t[h]", {"t": torch.ones(4)})
_INTERVALS = masks.documents(lengths=[3, 5], causal=False).startend_row_indices
WRONG = {
    "mask is an int; pass a function of": dict(mask=5),
    "mask indexes doc, and no tensor of that name is given": dict(mask="doc[b, q] == 1"),
    "with a window: leave one of the two out": dict(mask="q >= k", window_left=3),
    "with smooth_q: leave one of the two out": dict(score="tanh(s)", smooth_q=True),
    "under 'block': take 'row'": dict(score="tanh(s)", granularity="block"),
    "sink_keys = 1 is not supported with a mask": dict(mask="q >= k", sink_keys=1),
    "startend_row_indices and mask are given together":
        dict(mask="q >= k", startend_row_indices=_INTERVALS),
    "startend_row_indices and a score that indexes tensors are given together":
        dict(score=_ALIBI, startend_row_indices=_INTERVALS),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_expressions(message):
    for function, more in ((emulation.emulated_attention, ()), (reference.emulate, (X,))):
        with pytest.raises((sagebwd.SpecError, TypeError), match=message):
            function(X, X, X, *more, **WRONG[message])


@pytest.mark.parametrize("given, message", [
    (dict(score=masks.trace_score("s * t[h]", {"t": _SLOPE})),
     r"indexes t, which requires grad, and the emulation gives .* or pass t.detach\(\)"),
    (dict(mask="q >= k", k_mean=torch.zeros(2, 4, 64)), "k_mean and mask are given together"),
    (dict(score=_ALIBI, seqused_k=torch.tensor([3, 4], dtype=torch.int32)),
     "seqused_k and a score that indexes tensors are given together"),
    (dict(mask=masks.trace_mask("doc[q] == doc[k]", {"doc": torch.zeros(8).int().to("meta")})),
     "the tables are on meta and q on cpu: move the mask"),
])  # fmt: skip
def test_what_the_emulation_refuses(given, message):
    with pytest.raises(sagebwd.SpecError, match=message):
        emulation.emulated_attention(X, X, X, **given)


@pytest.mark.parametrize("made", [
    lambda: dict(mask=masks.trace_mask("doc[q] == doc[k]", {"doc": torch.arange(8) // 3})),
    lambda: dict(score=masks.trace_score("s * t[h]", {"t": torch.ones(4)})),
    lambda: masks.documents(lengths=[3, 5]).arguments,
], ids=["mask", "score", "intervals"])  # fmt: skip
def test_what_inference_mode_has_made_trains(made):
    q, k, v = (torch.randn(2, 4, 8, 64).bfloat16().requires_grad_() for _ in range(3))
    with torch.inference_mode():
        given = made()
    found, wanted = (torch.autograd.grad(
        emulation.emulated_attention(q, k, v, **how).float().square().sum(), (q, k, v))
        for how in (given, made()))  # fmt: skip
    assert all(map(torch.equal, found, wanted))


LISTS = torch.ones(1, 1, 1, 1, dtype=torch.bool)
EITHER = {"mask": _DOC, "score": "tanh(s)"}


def test_lists_of_blocks_have_neither():
    for name, given in EITHER.items():
        for function in (reference.exact, reference.emulate):
            with pytest.raises(sagebwd.SpecError, match=f"block_mask and {name} are given"):
                function(X, X, X, X, block_mask=LISTS, **{name: given})
        with pytest.raises(TypeError, match=name):
            emulation.emulated_block_sparse_attention(X, X, X, block_mask=LISTS, **{name: given})


def test_texts_without_pytorch():
    code = """
import sys; sys.modules["torch"] = None
from sagebwd import SpecError, reference
x = reference.random_inputs(20, head_dim=64)
found = reference.emulate(*x, mask="q >= k", score="2.0 * s")
other = reference.emulate(*x, causal=True, softmax_scale=0.25, sink_keys=0)
print(abs(found["dq"] - other["dq"]).max() < 0.05 < abs(found["dq"]).max())
for given in (dict(mask="doc[q] == 1"), dict(score="s + x[h]"),
              dict(mask=lambda b, h, q, k: q >= k)):
    try: reference.exact(*x, **given)
    except (SpecError, TypeError) as error: print(error)
"""
    lines = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert lines[0] == "True"
    assert [line.partition(",")[0].partition(";")[0] for line in lines[1:]] == [
        "mask indexes doc", "score indexes x", "mask is a function"]  # fmt: skip
    assert all("PyTorch" in line for line in lines[1:])


def test_a_mask_that_memory_does_not_hold():
    """The C++ reference has a byte for each score, 16 TiB of them here."""
    q = np.zeros((1, 1, 1 << 22, 1), np.float32)
    with pytest.raises(sagebwd.SpecError, match="this takes about 1.64e[+]04 GiB of memory"):
        reference.exact(q, q, q, mask="q >= k")
