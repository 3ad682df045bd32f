"""Masks and score functions as expressions: traced, read, written and evaluated."""

import math
import random
import re
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402
from sagebwd.masks import operand, trace_mask, trace_score  # noqa: E402

SIZES = dict(batch=2, heads=3, queries=7, keys=9)


def of_numbers(x):
    """Python's results as int32 and float64 scalars, so that ints wrap."""
    return np.int32(x) if isinstance(x, (int, np.integer)) and not isinstance(x, bool) else x


#: Traced functions call these where they get numbers.
PLAIN = types.SimpleNamespace(
    where=lambda c, x, y: of_numbers(x if c else y), minimum=lambda x, y: of_numbers(min(x, y)),
    maximum=lambda x, y: of_numbers(max(x, y)), absolute=abs, tanh=np.tanh, exp=np.exp, log=np.log,
    sqrt=np.sqrt, sigmoid=lambda x: 1 / (1 + np.exp(-x)), pow=lambda x, y: np.float64(x) ** y,
    float_=np.float64,
)  # fmt: skip


class Clamped:
    """An array that is indexed with clamped numbers."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        return self.array[tuple(min(max(int(i), 0), n - 1)
                                for i, n in zip(index, self.array.shape))]  # fmt: skip


TENSORS = {
    "doc": torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2, 3]]),
    "slope": torch.tensor([0.5, 0.25, -2.0]), "size": torch.tensor([4, 9], dtype=torch.int32),
    "seen": torch.tensor([1, 0, 0, 1, 1, 0, 1, 0, 1]).bool(),
}  # fmt: skip
SCORES = torch.linspace(-4, 4, 2 * 3 * 7 * 9, dtype=torch.float64).view(2, 3, 7, 9)


def both_values(function, kind):
    """The values of an expression, and those of the function of (namespace, tensors, ...) for
    numbers, one by one."""
    traced = {name: operand(name, tensor) for name, tensor in TENSORS.items()}
    with_numbers = {name: Clamped(tensor.numpy()) for name, tensor in TENSORS.items()}
    arrays = types.SimpleNamespace(**with_numbers)
    symbols = types.SimpleNamespace(**traced)
    trace = trace_mask if kind == "mask" else trace_score
    made = trace((lambda b, h, q, k: function(masks, symbols, b, h, q, k)) if kind == "mask" else
                 lambda s, b, h, q, k: function(masks, symbols, s, b, h, q, k))  # fmt: skip
    found = made.dense(**SIZES, scores=None if kind == "mask" else SCORES)
    expected = torch.empty(found.shape, dtype=found.dtype)
    with np.errstate(all="ignore"):
        for at in np.ndindex(*found.shape):
            numbers = [np.int32(i) for i in at]
            numbers = numbers if kind == "mask" else [np.float64(SCORES[at]), *numbers]
            expected[at] = torch.tensor(function(PLAIN, arrays, *numbers), dtype=found.dtype)
    return made, found, expected


MASKS = {
    "q >= k": lambda m, t, b, h, q, k: q >= k,
    "q >= k & q - k < 3": lambda m, t, b, h, q, k: (q >= k) & (q - k < 3),
    "q >= k | k < size[b]": lambda m, t, b, h, q, k: (q >= k) | (k < t.size[b]),
    "doc[b, q] == doc[b, k]": lambda m, t, b, h, q, k: t.doc[b, q] == t.doc[b][k],
    "seen[k] != 0 & ~(q == k)": lambda m, t, b, h, q, k: t.seen[k] & ~(q == k),
    "(h % 2 == 0 | q < k) & b != 1":
        lambda m, t, b, h, q, k: ((h % 2 == 0) | (q < k)) & (b != 1),
    "(q - k) // 2 % 3 == -1 + h": lambda m, t, b, h, q, k: (q - k) // 2 % 3 == -1 + h,
    "(q - k) * 1000000 * 1000000 < 7": lambda m, t, b, h, q, k: (q - k) * 1000000 * 1000000 < 7,
    "2147483647 + q < k": lambda m, t, b, h, q, k: 2147483647 + q < k,
    "max(q, k) - min(q, k) <= abs(h - 3)":
        lambda m, t, b, h, q, k: m.maximum(q, k) - m.minimum(q, k) <= abs(h - 3),
    "where(q < 3, k, 2 * k) < 6": lambda m, t, b, h, q, k: m.where(q < 3, k, 2 * k) < 6,
    "where(q < 3, k < 2, k < 5)": lambda m, t, b, h, q, k: m.where(q < 3, k < 2, k < 5),
    "~(q < 3 ^ k < 3)": lambda m, t, b, h, q, k: (q < 3) == (k < 3),
    "q < 3 ^ k < 3": lambda m, t, b, h, q, k: (q < 3) != (k < 3),
    "q < 3": lambda m, t, b, h, q, k: ((q < 3) == 1) & True,
    "~(q < 3)": lambda m, t, b, h, q, k: ((q < 3) == False) | False,  # noqa: E712
    "q / 4.0 < k * 0.3125": lambda m, t, b, h, q, k: q / 4 < k * 0.3125,
    "float(q) + k >= -abs(float(h)) - slope[h + 5] / k":
        lambda m, t, b, h, q, k: m.float_(q) + m.float_(k) >= -abs(m.float_(h))
        - t.slope[h + 5] / m.float_(k),
    "doc[b, q - 3] == doc[b, k + 4]": lambda m, t, b, h, q, k: t.doc[b, q - 3] == t.doc[b, k + 4],
    "q * q - -k > 5 - (3 - h)": lambda m, t, b, h, q, k: q * q - -k > 5 - (3 - h),
    "true": lambda m, t, b, h, q, k: True,
}  # fmt: skip
FUNCTIONS = {
    "20.0 * tanh(s / 20.0)": lambda m, t, s, b, h, q, k: 20 * m.tanh(s / 20),
    "s + slope[h] * (k - q)": lambda m, t, s, b, h, q, k: s + t.slope[h] * (k - q),
    "s * slope[h] - 7.6293945e-06": lambda m, t, s, b, h, q, k: s * t.slope[h] - 2.0**-17,
    "where(q >= k, s, -inf)": lambda m, t, s, b, h, q, k: m.where(q >= k, s, -math.inf),
    "s + log(size[b])": lambda m, t, s, b, h, q, k: s + m.log(m.float_(t.size[b])),
    "pow(s, 2.0) * exp(-s) + sqrt(abs(s))":
        lambda m, t, s, b, h, q, k: s**2 * m.exp(-s) + m.sqrt(abs(s)),
    "s * sigmoid(s)": lambda m, t, s, b, h, q, k: s * m.sigmoid(s),
    "max(s, slope[min(max(q - k, 0), 2)])":
        lambda m, t, s, b, h, q, k: m.maximum(s, t.slope[m.minimum(m.maximum(q - k, 0), 2)]),
    "s / (q + 1) / 2.0": lambda m, t, s, b, h, q, k: s / (q + 1) / 2,
    "1.5 - (s - 2.0)": lambda m, t, s, b, h, q, k: 1.5 - (s - 2.0),
}  # fmt: skip


@pytest.mark.parametrize("text", MASKS)
def test_masks_are_traced_and_evaluated(text):
    made, found, expected = both_values(MASKS[text], "mask")
    assert made.text == text == str(made) and made.kind == "mask"
    assert found.dtype == torch.bool and torch.equal(found, expected)
    assert trace_mask(text).text == text
    again = trace_mask(text, {name: TENSORS[name] for name in made.operands})
    assert again.text == text and torch.equal(again.dense(**SIZES), found)
    assert torch.equal(masks.dense(text, made.operands, **SIZES), found)


@pytest.mark.parametrize("text", FUNCTIONS)
def test_scores_are_traced_and_evaluated(text):
    made, found, expected = both_values(FUNCTIONS[text], "score")
    assert made.text == text and made.kind == "score" and found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    assert trace_score(text, made.operands).text == text


class Drawn:
    """Random expressions as source code of Python, with parentheses around every operation."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def number(self, depth):
        if depth == 0:
            return self.random.choice([*"bhqk", "t.doc[b, k]", "t.doc[q, h]", "t.size[h]"])
        x, y = self.number(depth - 1), self.number(depth - 1)
        c = self.random.choice([-7, -2, -1, 1, 2, 3, 100, 70000])
        return self.random.choice([
            f"({x} + {y})", f"({x} - {y})", f"({x} * {y})", f"({x} // {c})", f"({x} % {c})",
            f"({c} - {x})", f"({x} * {c})", f"(-{x})", f"abs({x})", f"m.minimum({x}, {y})",
            f"m.maximum({x}, {c})", f"m.where({self.bool(depth - 1)}, {x}, {y})", x])  # fmt: skip

    def bool(self, depth):
        if depth == 0 or self.random.random() < 0.3:
            sign = self.random.choice(["==", "!=", "<", "<=", ">", ">="])
            return f"({self.number(depth)} {sign} {self.number(depth)})"
        x, y = self.bool(depth - 1), self.bool(depth - 1)
        return self.random.choice([f"({x} & {y})", f"({x} | {y})", f"({x} ^ {y})", f"(~{x})",
                                   f"({x} == {y})"])  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_random_masks_are_what_python_makes_of_their_source(seed, tiny_tensors):
    source = Drawn(seed).bool(4)
    function = eval(f"lambda m, t, b, h, q, k: {source}")
    made, found, expected = both_values(function, "mask")
    assert torch.equal(found, expected), (source, made.text)
    assert trace_mask(made.text).text == made.text
    assert made.text.count("(") <= source.count("(")


def test_no_parentheses_can_be_left_out():
    """A canonical text without one of its pairs of parentheses has another meaning, or none."""
    tried = 0
    for seed in range(40):
        text = trace_mask(eval(f"lambda b, h, q, k: {Drawn(seed).bool(3)}", {
            "m": masks, "t": types.SimpleNamespace(**{n: operand(n, x) for n, x in TENSORS.items()})
        })).text  # fmt: skip
        opened = []
        for i, character in enumerate(text):
            if character == "(":
                opened.append(i)
            elif character == ")":
                begin = opened.pop()
                if text[:begin][-1:].isalpha():  # a call's
                    continue
                tried += 1
                without = text[:begin] + text[begin + 1 : i] + text[i + 1 :]
                try:
                    assert trace_mask(without).text != text, (without, text)
                except sagebwd.SpecError:
                    continue
    assert tried > 40


# ---- tracing -------------------------------------------------------------------------------------


ROWS = [[1, 2]]


def m(function):
    return lambda: trace_mask(function)


@pytest.mark.parametrize("call, told", [
    (m(lambda b, h, q, k: q >= k and q < 3), "no truth value .* and, or, not, if, .* write & | ~"),
    (m(lambda b, h, q, k: q >= k or q < 3), "no truth value"),
    (m(lambda b, h, q, k: not q), "no truth value"),
    (m(lambda b, h, q, k: q if q < k else k), "where, minimum and maximum"),
    (m(lambda b, h, q, k: 0 < q < k), "chained comparisons"),
    (m(lambda b, h, q, k: min(q, k) < 3), "min, max"),
    (m(lambda b, h, q, k: math.tanh(q) < 3), "no value as a float .* tanh"),
    (m(lambda b, h, q, k: int(q) < 3), "no integer value"),
    (m(lambda b, h, q, k: [1, 2][q] < 3), r"operand\(name, tensor\)\[q\]"),
    (m(lambda b, h, q, k: q + torch.ones(3) < 3), "index it with symbols as sagebwd"),
    (m(lambda b, h, q, k: torch.ones(3) < q), "index it with symbols"),
    (m(lambda b, h, q, k: TENSORS["doc"][b, q] < 1),
     r"torch tensor of shape \(2, 9\) is indexed with a symbol: wrap it, .*from_flex, which takes"),
    (m(lambda b, h, q, k: TENSORS["doc"][0][q] < 1), r"torch tensor of shape \(9,\) is indexed"),
    (m(lambda b, h, q, k: np.ones(3)[q] < 1), r"no value in an array .* operand\(name, tensor\)"),
    (m(lambda b, h, q, k: np.ones((3, 3))[q, k] < 1), "no value in an array .* torch.as_tensor"),
    (m(lambda b, h, q, k: ROWS[q, k] < 1), r"not tuple. .*operand\(name, tensor\)\[q, k\]"),
    (m(lambda b, h, q, k: {0: 1}[q] < 1), r"no hash .*operand\(name, tensor\)\[q\]"),
    (m(lambda b, h, q, k: q < "3"), "a str in an expression"), (m(lambda b, h, q, k: None), "None"),
    (m(lambda b, h, q, k: q < math.nan), "nan is no number"),
    (lambda: trace_score(lambda s, b, h, q, k: s + float("nan")), "nan is no number"),
    (lambda: trace_score("s + 0.0 / 0.0"), "column 9 .*: 0.0 / 0.0 is NaN, which is no number"),
    (lambda: trace_score("s * (1.0 - inf * 0)"), r"inf \* 0.0 is NaN"),
    (lambda: trace_score(lambda s, b, h, q, k: s + masks.log(-1.0)), r"log\(-1.0\) is NaN"),
    (lambda: trace_score("s * pow(-2.0, 0.5)"), r"pow\(-2.0, 0.5\) is NaN"),
    (m(lambda b, h, q, k: 2**q < 3), "pow of an int .* a constant as the second argument"),
    (m(lambda b, h, q, k: 9 // q < 3), "a constant other than zero"),
    (m(lambda q, k: q < k), r"a mask is a function of \(b, h, q, k\)"),
    (lambda: trace_score(lambda b, h, q, k: q), r"a score is a function of \(s, b, h, q, k\)"),
    (m(lambda b, h, q, k: operand("q", torch.ones(3))[q] < 1), "means something else"),
    (m(lambda b, h, q, k: operand("aB", torch.ones(3))[q] < 1), "small letters"),
    (m(lambda b, h, q, k: operand("a", torch.ones(3))[:] < 1), "one number or symbol per dim"),
    (m(lambda b, h, q, k: operand("a", torch.ones(3))[q, k] < 1), "with 2 numbers, and has 1"),
    (m(lambda b, h, q, k: operand("a", torch.ones(3))[3] < q), "indexed with 3, and has 3 numbers"),
    (m(lambda b, h, q, k: operand("a", torch.ones(3))[q / 2] < 1), "a float, q / 2.0; pass an int"),
    (m(lambda b, h, q, k: operand("in", torch.ones(3))[q] < 1), "which means something else"),
    (lambda: trace_score("s + a[where(s < 1, 0, 1)]"), "and not of s, the score"),
    (m(lambda b, h, q, k: q < 1e39), "FP32 does not have"),
    (m(lambda b, h, q, k: sum(operand("a", torch.ones(3))) < q), "no sequence while"),
    (m(lambda b, h, q, k: operand("a", torch.ones(0))[q] < 1), r"shape \(0,\)"),
    (m(lambda b, h, q, k: operand("a", torch.ones(3).cfloat())[q] < 1), "complex64"),
    (m(lambda b, h, q, k: operand("a", torch.tensor([1 << 40]))[q] < 1), "fit int32"),
    (m(lambda b, h, q, k: operand("a", torch.ones(3))[q] < operand("a", torch.ones(3))[k]),
     "two tensors are called 'a'"),
])  # fmt: skip
def test_what_tracing_refuses(call, told):
    with pytest.raises(sagebwd.SpecError, match=told):
        call()


def test_one_tensor_may_be_wrapped_twice():
    made = trace_mask(lambda b, h, q, k: operand("doc", TENSORS["doc"])[b, q]
                      == operand("doc", TENSORS["doc"])[b, k])  # fmt: skip
    assert made.text == "doc[b, q] == doc[b, k]" and made.operands["doc"].dtype == torch.int32


def test_negative_constants_count_from_the_end():
    doc = operand("doc", TENSORS["doc"])
    assert trace_mask(lambda b, h, q, k: doc[-1, -9] < doc[1][8]).text == "doc[1, 0] < doc[1, 8]"


def test_large_functions_are_refused_before_they_grow():
    def doubled(b, h, q, k):
        for _ in range(60):  # which has 2**60 nodes as text
            q = q + q
        return q < k

    with pytest.raises(sagebwd.SpecError, match="more than 500 nodes"):
        trace_mask(doubled)

    def deep(times):
        def nested(s, b, h, q, k):
            for _ in range(times):
                s = masks.tanh(s)
            return s

        return nested

    assert trace_score(deep(100)).text.count("tanh") == 100
    for times, told in ((101, "more than 100 brackets"), (400, "has 2401 characters")):
        with pytest.raises(sagebwd.SpecError, match=told):
            trace_score(deep(times))


def test_gradients_reach_tensors_that_are_float32():
    table = torch.zeros(3, requires_grad=True)
    slope = operand("slope", table)
    made = trace_score(lambda s, b, h, q, k: s * slope[h])
    assert made.operands["slope"] is table
    made.dense(**SIZES, scores=SCORES).sum().backward()
    torch.testing.assert_close(table.grad, SCORES.sum((0, 2, 3)).float())


def test_what_dense_refuses():
    with pytest.raises(sagebwd.SpecError, match="pass scores="):
        masks.dense("s * 2", {}, **SIZES)
    with pytest.raises(sagebwd.SpecError, match="queries=-1"):
        masks.dense("q < k", {}, 1, 1, -1, 1)
    with pytest.raises(sagebwd.SpecError, match="no tensor 'doc': pass it"):
        masks.dense("doc[q] < k", None, **SIZES)
    with pytest.raises(TypeError, match="'doc' is a list"):
        masks.dense("doc[q] < k", {"doc": [1]}, **SIZES)
    with pytest.raises(TypeError, match="is a function; pass a function or a text"):
        masks.dense(lambda b, h, q, k: q < k, {}, **SIZES)


@pytest.mark.parametrize("score, told", [
    ("s + bias[x[q]]", "as indices"), ("s + bias[x[q] % 2]", "as indices"),
    ("where(x[q] == x[k], s, s - 20.0)", "beyond 2^24"),
])  # fmt: skip
def test_what_a_score_makes_of_ints_is_refused(score, told):
    tensors = {"bias": torch.zeros(3), "x": torch.tensor([0, 1, 16777217])}
    used = {name: t for name, t in tensors.items() if name + "[" in score}
    with pytest.raises(sagebwd.SpecError, match=re.escape(told)):
        masks.trace_score(score, used)
    assert masks.trace_score("s + log(x[q])", {"x": tensors["x"][:2]}).text


@pytest.mark.parametrize("operands, told", [
    ([torch.zeros(3)], "a dict of tensors by name"),
    ({"doc": torch.zeros(3, dtype=torch.int32).to_sparse()}, "doc.to_dense()"),
])  # fmt: skip
def test_wrong_operands(operands, told):
    with pytest.raises((sagebwd.SpecError, TypeError), match=re.escape(told)):
        trace_mask("doc[q] == doc[k]", operands)


@pytest.mark.parametrize("function", [
    lambda b, h, q, k: (q - k).abs() < 3, lambda b, h, q, k: torch.where(q > k, q, k) > 3,
    lambda b, h, q, k: np.tanh(q) > 0,
])  # fmt: skip
def test_functions_of_pytorch_are_for_from_flex(function):
    with pytest.raises((AttributeError, TypeError), match="sagebwd.masks.from_flex"):
        masks.trace_mask(function)
