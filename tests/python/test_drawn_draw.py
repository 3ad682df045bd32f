"""specs.py, draw.py, drawn_inputs.py and oracle.py of tests/drawn: what is drawn and what is
right."""

import itertools
import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import draw  # noqa: E402
import drawn_inputs  # noqa: E402
import oracle  # noqa: E402
import specs  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


@pytest.fixture(scope="module")
def drawn_specs():
    return specs.draw_specs(128, random.Random(0))


@pytest.fixture(scope="module")
def drawn(drawn_specs):
    return [draw.draw_case(i, drawn_specs, seed=0) for i in range(3000)]


# ---- specs ---------------------------------------------------------------------------------------


def _pairs(those):
    return {pair for spec in those for pair in itertools.combinations(sorted(spec.items()), 2)}


def test_specs_cover_every_value_and_every_pair(drawn_specs):
    assert len(drawn_specs) == 128 == len({tuple(spec.items()) for spec in drawn_specs})

    def value(spec, name):
        return tuple(spec[key] for key in name) if isinstance(name, tuple) else spec[name]

    for name, values in specs.CHOICES.items():
        found = [value(spec, name) for spec in drawn_specs]
        assert min(map(found.count, values)) >= 0.5 * len(drawn_specs) / len(values), name
    # Every pair of values of two options that any spec has.
    rng = random.Random(1)
    random_ones = (specs.spec_of(tuple((name, rng.choice(values))
                                       for name, values in specs.CHOICES.items()))
                   for _ in range(4000))  # fmt: skip
    assert _pairs(drawn_specs) >= _pairs(filter(specs.is_built, random_ones))
    # Half of them, and some more because only that family sums dP in FP16.
    assert 64 <= sum(spec["family"] == "mma" for spec in drawn_specs) <= 72
    assert all(spec["family"] == "mma" for spec in drawn_specs if spec["dp_sums"] == "fp16")
    assert sum(spec["family"] == "mma" and spec["precision"] == "qk16" for spec in drawn_specs) > 9


def test_specs_are_built_and_without_fp16_sums_where_no_kernel_has_them(drawn_specs):
    import sagebwd

    for spec in drawn_specs:
        sagebwd.Spec(**specs.warm_spec(spec))
    others = specs.draw_specs(40, random.Random(0), fp16_sums=False)
    assert {spec["dq_sums"] for spec in others} == {"fp32"}


# ---- cases ---------------------------------------------------------------------------------------


def test_cases_repeat_themselves(drawn, drawn_specs):
    assert drawn[:300] == [draw.draw_case(i, drawn_specs, seed=0) for i in range(300)]
    assert drawn[:300] != [draw.draw_case(i, drawn_specs, seed=1) for i in range(300)]


def test_every_value_of_every_choice_of_a_case_occurs(drawn):
    for of, values in (
        (lambda c: [c.layout], ("bhsd", "bshd")),
        (lambda c: [c.door], draw.DOORS), (lambda c: [c.told], ("", *draw.TOLD)),
        (lambda c: [c.dlse], draw.DLSE), (lambda c: [c.k_mean], (None, *draw.MEANS)),
        (lambda c: [c.sinks], (None, "logits", "some off")), (lambda c: [c.unused], draw.UNUSED),
        (lambda c: [c.says_group_q], (False, True)), (lambda c: [c.again], (False, True)),
        (lambda c: [c.sequences.said_by] if c.sequences else [],
         ("seqused", "cu_seqlens", "both")),
        *((lambda c, name=name: [c.strides[name]],
           draw.STRIDES_OF_DOUT if name[0] == "d" else draw.STRIDES) for name in draw.TENSORS),
        *((lambda c, name=name: [c.values[name][0]], draw.VALUES) for name in draw.TENSORS),
        (lambda c: [size for size in c.window if size in (*draw.WINDOWS, None)],
         (*draw.WINDOWS, None)),
    ):  # fmt: skip
        found = [value for case in drawn for value in of(case)]
        assert set(found) == set(values)
        assert min(map(found.count, values)) >= 15, values
    assert {c.head_dim for c in drawn} == {*range(32, 257, 8)}


def _gaps(case):
    where = case.sequences
    return where is not None and where.said_by == "both" and any(
        room[0] > used[0] for room, used in zip(where.rooms, where.used))


@pytest.mark.parametrize("name, holds", {
    "one query": lambda c: c.seq_q == 1,
    "one key": lambda c: c.seq_kv == 1,
    "long": lambda c: max(c.seq_q, c.seq_kv) > 1500,
    "many heads": lambda c: c.heads_kv * c.group > 60,
    "more queries than keys, causal": lambda c: c.seq_q > c.seq_kv and c.spec["causal"] != "none",
    "fewer queries, causal": lambda c: c.seq_q < c.seq_kv and c.spec["causal"] != "none",
    "grouped heads": lambda c: c.group > 1,
    "no whole tiles": lambda c: c.seq_q % 64 and c.seq_kv % 64,
    "padding of dO": lambda c: c.zeros and c.zeros[0] == "dout" and c.zeros[2] == 1,
    "no window on the left of the diagonal": lambda c: (
        c.window[0] == 0 and c.spec["causal"] == "bottom-right"),
    "a window on the right under a causal mask": lambda c: (
        c.window[1] is not None and c.spec["causal"] != "none"),
    "a window on the right alone": lambda c: (
        c.window[0] is None and c.window[1] is not None and c.spec["causal"] == "none"),
    "V of fewer channels with sinks": lambda c: c.value_dim < c.head_dim and c.sinks,
    "V of fewer channels in packed sequences": lambda c: c.value_dim < c.head_dim and c.is_packed,
    "V of fewer channels in parts": lambda c: c.value_dim < c.head_dim and c.door == "parts",
    "V of fewer channels by mma": lambda c: (
        c.value_dim < c.head_dim and c.spec["family"] == "mma"),
    "sequences of unequal lengths without gaps": lambda c: (
        c.is_packed and c.sequences.said_by == "cu_seqlens" and len(set(c.sequences.used)) > 1),
    "gaps between sequences": _gaps,
    "gaps before and behind": lambda c: (
        c.is_packed and c.sequences.before[0] and c.sequences.behind[1]),
    "cu_seqlens beyond the tensors": lambda c: c.is_packed and c.sequences.beyond,
    "an empty sequence among others": lambda c: (
        c.sequences and len(c.sequences.used) > 1 and 0 in c.sequences.used[0]),
    "many sequences": lambda c: c.sequences and len(c.sequences.used) > 20,
    "seqused of one side alone": lambda c: c.sequences and c.sequences.without,
    "NaN where packed tokens do not count": lambda c: c.is_packed and c.unused == "nan",
    "a scale of zero": lambda c: c.softmax_scale == 0,
    "a negative scale": lambda c: (c.softmax_scale or 0) < 0,
    "tiny V": lambda c: c.values["v"][1] == 1e-30,
    "subnormal V": lambda c: c.values["v"][1] == draw.SUBNORMAL[c.spec["dtype"]],
    "tiny Q or K": lambda c: min(c.values["q"][1], c.values["k"][1]) == 1e-30,
    "one dO for all tokens": lambda c: c.strides["dout"] == "one number for all",
    "four strides": lambda c: len({c.strides[name] for name in draw.TENSORS}) == 4,
    "fp16 sums": lambda c: c.spec["dq_sums"] == "fp16",
    "sinks in padded batches": lambda c: c.sinks and c.sequences,
    "sinks and only a gradient of lse": lambda c: c.sinks and c.dlse == "alone",
    "a mean of packed sequences": lambda c: c.is_packed and c.k_mean,
    "dlse alone of packed sequences": lambda c: c.is_packed and c.dlse == "alone",
    "parts of a padded batch": lambda c: c.door == "parts" and c.sequences,
    "parts under a causal mask": lambda c: c.door == "parts" and c.spec["causal"] != "none",
    "an empty part": lambda c: (
        len(c.ends_of_parts) > 1 and len({0, *c.ends_of_parts}) <= len(c.ends_of_parts)),
    "parts with a gradient of lse": lambda c: c.told == "part" and c.dlse != "none",
    "smoothed queries in a window": lambda c: c.spec["smooth_q"] and c.spec["window"],
}.items())  # fmt: skip
def test_cases_cover_what_they_promise(drawn, name, holds):
    assert sum(map(bool, map(holds, drawn))) >= 10, name


def test_cases_have_no_more_scores_than_asked_for(drawn_specs):
    for i in range(500):
        case = draw.draw_case(i, drawn_specs, seed=0, scores=5000)
        assert case.batch * case.heads_kv * case.group <= 5000
        assert case.batch * case.heads_kv * case.group * case.seq_q * case.seq_kv <= 5000 * (
            1 + max(case.seq_q, case.seq_kv))


# ---- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strides", draw.STRIDES_OF_DOUT)
def test_layouts_hold_the_values_between_nans(strides):
    x = torch.randn(2, 3, 5, 64).to(torch.bfloat16)
    view = drawn_inputs.laid_out(x, strides)
    assert view.shape == x.shape
    if strides.startswith("one "):
        first = {"head": x[:, :1], "batch": x[:1], "number": x[:1, :1, :1, :1]}[strides.split()[1]]
        assert torch.equal(view, first.expand_as(x)) and 0 in view.stride()
        return
    assert torch.equal(view, x)
    whole = torch.as_strided(view, (view.untyped_storage().nbytes() // 2,), (1,), 0)
    assert torch.isnan(whole).sum() == whole.numel() - x.numel()
    if strides in draw.STRIDES:
        assert view.stride(3) == 1 and view.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in view.stride()[:3])


@pytest.mark.parametrize("kind", draw.VALUES)
def test_distributions_are_what_they_are_called(kind):
    x = drawn_inputs.drawn(kind, (2, 3, 400, 32), torch.Generator().manual_seed(0), "cpu")
    assert x.isfinite().all()
    lengths = x.norm(dim=-1)
    assert {
        "gaussian": lambda: abs(float(x.std()) - 1) < 0.01,
        "one-hot": lambda: ((x != 0).sum(-1) == 1).all() and torch.allclose(
            lengths, torch.tensor(32**0.5)),
        "duplicates": lambda: x[0, 0].unique(dim=0).shape[0] == 4,
        "alternating": lambda: torch.equal(x[:, :, 1:], -x[:, :, :-1]) and (x.abs() == 1).all(),
        "one huge token": lambda: (lengths > 200).sum() == 6,
        "few tokens": lambda: 0.02 < (lengths > 0).float().mean() < 0.1,
        "few numbers": lambda: 0.01 < (x != 0).float().mean() < 0.03,
        "common offset": lambda: abs(float(x.mean()) - 4) < 0.05,
    }[kind]()


def test_what_does_not_count_is_filled_and_nothing_else(drawn):
    for case in itertools.islice((c for c in drawn if c.is_packed and c.unused == "nan"
                                  and c.seq_q * c.batch < 300 and not c.sinks), 12):  # fmt: skip
        given = drawn_inputs.inputs_of(case, "cpu")
        for name, of in (("q", 0), ("k", 1), ("v", 1)):
            x = getattr(given, name)
            counts = torch.zeros(x.shape[2], dtype=torch.bool)
            for spans in given.spans:
                counts[spans[of][1] : spans[of][2]] = True
            assert x[:, :, counts].isfinite().all() and x[:, :, ~counts].isnan().all()


# ---- what is right -------------------------------------------------------------------------------


@pytest.mark.parametrize("mask, table", [
    ((3, 3, "none", None, None), ("111", "111", "111")),
    ((3, 3, "top-left", None, None), ("1..", "11.", "111")),
    ((2, 4, "top-left", None, None), ("1...", "11..")),
    ((2, 4, "bottom-right", None, None), ("111.", "1111")),
    ((4, 2, "bottom-right", None, None), ("..", "..", "1.", "11")),
    ((4, 2, "top-left", None, None), ("1.", "11", "11", "11")),
    # A query's own key and one before it: a sliding_window of 2.
    ((4, 4, "top-left", 1, None), ("1...", "11..", ".11.", "..11")),
    ((2, 4, "top-left", 0, None), ("1...", ".1..")),
    ((2, 4, "bottom-right", 0, None), ("..1.", "...1")),
    ((2, 4, "bottom-right", 1, 3), (".11.", "..11")),  # none behind its own, whatever is said
    # Without a causal mask the last query's own key is the last one.
    ((4, 4, "none", 1, 1), ("11..", "111.", ".111", "..11")),
    ((2, 4, "none", 1, 0), (".11.", "..11")),
    ((2, 4, "none", None, 0), ("111.", "1111")),
    ((2, 4, "none", 0, None), ("..11", "...1")),
    ((4, 2, "none", 0, 0), ("..", "..", "1.", ".1")),
    ((4, 2, "none", 0, 1), ("..", "1.", "11", ".1")),
    ((2, 3, "none", 600, 600), ("111", "111")),
])  # fmt: skip
def test_the_mask_is_the_documented_one(mask, table):
    expected = torch.tensor([[letter == "1" for letter in row] for row in table])
    assert torch.equal(oracle.visible(*mask), expected)


@pytest.mark.parametrize("tokens, batch, firsts, used, expected", [
    (10, 2, None, None, [(0, 0, 10), (1, 0, 10)]),
    (10, 2, None, [3, 0], [(0, 0, 3), (1, 0, 0)]),
    (10, 1, [0, 4, 4, 10], None, [(0, 0, 4), (0, 4, 4), (0, 4, 10)]),
    (10, 1, [1, 4, 9], [2, 5], [(0, 1, 3), (0, 4, 9)]),
    (10, 1, [2, 6, 1000], None, [(0, 2, 6), (0, 6, 10)]),  # cut off at the tensor's end
    (10, 1, [0, 4, 10], [9, 1], [(0, 0, 4), (0, 4, 5)]),
])  # fmt: skip
def test_spans_are_the_documented_ones(tokens, batch, firsts, used, expected):
    given = [None if numbers is None else torch.tensor(numbers) for numbers in (firsts, used)]
    assert oracle.spans(tokens, batch, *given) == expected


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("causal", ["none", "bottom-right"])
def test_the_oracle_is_attention_and_its_gradient(causal, with_sink):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16()

    q, k, v, dout = randn(2, 4, 9, 16), randn(2, 2, 7, 16), randn(2, 2, 7, 8), randn(2, 4, 9, 8)
    dlse, sink = randn(2, 4, 9).float(), randn(4).float() if with_sink else None
    seen = oracle.visible(9, 7, causal, None, None)
    truth = oracle.attention(q, k, v, dout, dlse, seen, 0.3, sink)

    leaves = [x.double().requires_grad_() for x in (q, k, v, *([sink] if with_sink else []))]
    keys, values = (x.repeat_interleave(2, 1) for x in leaves[1:3])
    scores = (0.3 * leaves[0] @ keys.mT).masked_fill(~seen, -torch.inf)
    if with_sink:
        scores = torch.cat([scores, leaves[3].view(1, 4, 1, 1).expand(2, 4, 9, 1)], -1)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0)
    lse = scores.logsumexp(-1)
    out = torch.softmax(scores, -1).masked_fill(blind, 0)[..., :7] @ values
    gradients = torch.autograd.grad(
        [out, lse.masked_fill(blind[..., 0], 0)], leaves, [dout.double(), dlse.double()])
    lse = lse.masked_fill(blind[..., 0], -torch.inf)
    assert torch.allclose(truth.exact["lse"], lse) and torch.allclose(truth.exact["O"], out)
    for name, gradient in zip(("dQ", "dK", "dV", "dSink"), gradients):
        assert torch.allclose(truth.exact[name], gradient), name
        error = (truth.sixteen[name] - gradient).norm() / gradient.norm()
        assert error == 0 or name == "dSink" or 1e-4 < error < 0.01
        assert (truth.scale[name] >= truth.exact[name].abs()).all()
    assert torch.equal(truth.sees[0, 0], seen.any(1)) and truth.is_seen.all()


def test_scales_are_roots_of_sums_of_squares_or_the_result():
    one = torch.ones(1, 1, 1, 8).bfloat16()
    keys, v = torch.zeros(1, 1, 4, 8).bfloat16(), torch.ones(1, 1, 4, 8).bfloat16()
    v[:, :, 2:] = -1
    seen = oracle.visible(1, 4, "none", None, None)
    truth = oracle.attention(one, keys, v, one, None, seen, 1.0)
    assert not truth.exact["O"].any()
    assert torch.allclose(truth.scale["O"], torch.tensor(0.5, dtype=torch.float64))
    truth = oracle.attention(one, keys, v.abs(), one, None, seen, 1.0)
    assert torch.allclose(truth.scale["O"], torch.tensor(1.0, dtype=torch.float64))


def test_sequences_are_placed_among_what_counts_for_nothing(drawn):
    case = next(c for c in drawn if c.is_packed and c.sequences.behind[1] and c.sequences.used[0][1]
                and c.sequences.used[0][0] and c.seq_q * c.batch < 300)  # fmt: skip
    case = replace(case, sinks=None)
    given = drawn_inputs.inputs_of(case, "cpu")
    one = given.alone(0)
    seen = torch.ones(one.q.shape[2], one.k.shape[2], dtype=torch.bool)
    alone = oracle.attention(one.q, one.k, one.v, one.dout, None, seen, 0.1)
    queries, keys = given.spans[0]
    whole = oracle.placed([(alone, queries, keys)], {"q": given.q, "k": given.k, "v": given.v})
    assert torch.equal(whole.exact["dV"][0, :, keys[1] : keys[2]], alone.exact["dV"][0])
    assert whole.exact["dV"].norm() == alone.exact["dV"].norm()
    assert whole.sees.sum() == alone.sees.sum() and whole.is_seen.sum() == alone.is_seen.sum()
    assert (whole.exact["lse"] > -torch.inf).sum() == alone.exact["lse"].numel()
