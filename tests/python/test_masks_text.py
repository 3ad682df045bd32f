"""Masks and score functions as text: how it is read, what is refused, and the canonical text."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402
from sagebwd.masks import trace_mask, trace_score  # noqa: E402


@pytest.mark.parametrize("text, canonical", [
    ("q>=k", "q >= k"), ("((q)) >= (k)", "q >= k"), ("q+(h*k)<1", "q + h * k < 1"),
    ("(q+h)*k < 1", "(q + h) * k < 1"), ("q-(h-k)<1", "q - (h - k) < 1"),
    ("q < 2 * 3 + 4", "q < 10"),
    ("(q<1)&((k<1)&(h<1))", "q < 1 & (k < 1 & h < 1)"), ("q<1|k<1&h<1", "q < 1 | k < 1 & h < 1"),
    ("(q<1|k<1)&h<1", "(q < 1 | k < 1) & h < 1"), ("~(q<1)", "~(q < 1)"), ("~~true", "true"),
    ("~~(q<1)", "~~(q < 1)"), ("1 < 2 & 3 != 4 | false ^ true", "true"), ("q<-0.0", "q < -0.0"),
    ("q < 1000000.0", "q < 1e+06"), ("q<0.1", "q < 0.1"), ("q<16777217.0", "q < 16777216.0"),
    ("q < 123456789.0", "q < 123456792.0"),
    ("q < 1.0 / 3", "q < 0.33333334"), ("q < 1 / 0", "q < inf"),
    ("q < sqrt(4)", "q < 2.0"), ("q < exp(1)", "q < exp(1.0)"),
    ("q < pow(q, 2)", "q < pow(q, 2.0)"), ("q < max(1, 2.5)", "q < 2.5"),
    ("q < where(true, 1, 2.0)", "q < 1.0"), ("q<float(1.5)", "q < 1.5"),
    ("q < -(-2147483648)", "q < -2147483648"), ("q < float(k)", "float(q) < k"),
    ("0.5*float(q+k)<h", "0.5 * (q + k) < h"), ("float(q)/float(k)<1", "q / k < 1.0"),
    ("where(q<1, float(q), float(k)) < 1", "where(q < 1, float(q), k) < 1.0"),
    ("- - q<1", "--q < 1"), ("-(-3) < q", "3 < q"), ("-(q+1)*2<1", "-(q + 1) * 2 < 1"),
    ("q<1.50", "q < 1.5"), ("q<1e3", "q < 1000.0"), ("q<1e-9", "q < 1e-09"),
    ("q//(1+1)<1", "q // 2 < 1"), ("q < -7 // 2", "q < -4"),
    ("q < -7 % 3", "q < 2"), ("q < 2147483647 + 1", "q < -2147483648"), ("q == -2147483648",) * 2,
    ("a[ q ,k ]<1", "a[q, k] < 1"), ("where(q<1,k,2)<1", "where(q < 1, k, 2) < 1"), ("true",) * 2,
    ("q < inf", "q < inf"), ("min(3, max(2, 1)) < q", "2 < q"), ("q < -inf",) * 2,
    ("  abs(-5) < q ", "5 < q"), ("where(q < 1, k < 1, h < 1)",) * 2,
])  # fmt: skip
def test_canonical_text(text, canonical):
    assert trace_mask(text).text == canonical == trace_mask(canonical).text


@pytest.mark.parametrize("text, column, told", [
    ("", 1, "the end stands where a number"), ("q >=", 5, "the end stands"),
    ("q >= k)", 7, r"'\)' stands where an operator or the end"), ("(q < k", 7, r"'\)' is expected"),
    ("q < k and h < 1", 7, "'and' is not supported: write &"), ("not q < k", 1, "write ~"),
    ("q < k or h < 1", 7, r"write \|"), ("q < k && b < 1", 7, "write &"), ("q ** 2 < k", 3, "pow"),
    ("q = k", 3, "write =="), ("!(q < k)", 1, "write ~"), ("q < k ? h : b", 7, "where"),
    ("q < k if h < 1 else true", 7, "where"), ("0 < q < k", 7, "not chained: write x < y & y < z"),
    ("q << 2 < k", 3, r"\* of a power"), ("True", 1, "write true"), ("$q < k", 1, r"'\$' is not"),
    ("q < k & h < é", 13, "'é' is not supported: there are b, h, q, k"),
    ("q <\u00a0k", 4, "is not supported"), ("q < k\0", 6, "is not supported"),
    ("doc < k", 1, r"'doc' is neither .* read as doc\[q\]"), ("q.k < 1", 2, r"'\.' stands"),
    ("Doc[q] < 1", 1, "small letters"), ("abcdefghijklmnopq[q] < 1", 1, "at most 16"),
    ("q[k] < 1", 2, r"'\[' stands"), ("doc[q, k, h] < 1", 1, "3 numbers; pass 1 or 2"),
    ("doc[1.5] < 1", 1, "a float, 1.5; pass an int"), ("doc[] < 1", 5, r"'\]' stands"),
    ("doc[q] < doc[q, k]", 10, "indexed with 2 numbers, and has 1"),
    ("foo(q) < 1", 1, "no function 'foo'"), ("min(q) < 1", 1, "min has 1 arguments; pass 2"),
    ("abs(q, k) < 1", 1, "abs has 2 arguments; pass 1"), ("min(q, k, h, b) < 1", 12, r"'\)' is"),
    ("minimum(q, k) < 1", 1, "write min"), ("q // k < 1", 3, "a constant other than zero"),
    ("q % 0 < 1", 3, "a constant other than zero"), ("q // (1 - 1) < 1", 3, "other than zero"),
    ("q % 2.0 < 1", 3, r"an int \(q\) and a float \(2.0\): it takes ints"),
    ("pow(s, q) < 1", 1, "a constant as the second argument"),
    ("q & k < 1", 3, r"& of an int \(q\) and a bool \(k < 1\): it takes bools"),
    ("~q < 1", 1, "it takes bools"), ("(q < k) + 1 < 2", 9, r"where\(x, 1, 0\)"),
    ("where(q, 1, 2) < k", 1, "a bool and two numbers"), ("q < k\n", 6, "is not supported"),
    ("q < .5", 5, r"'\.' stands"), ("q < 2.", 5, "'2.' is no number: numbers are as 12, 0.5"),
    ("q < 012", 5, "'012' is no number"), ("q < 1e99", 5, "FP32 does not have: pass inf"),
    ("q < 1e-99", 5, "FP32 does not have"), ("q_idx < 1", 1, "write q"), ("in[q] < 1", 1, "joined"),
    ("where(q < 1, 1, true) < k", 1, "a bool and two numbers"),
    ("q < 0/0", 6, "0.0 / 0.0 is NaN"), ("q < inf - inf", 9, "inf - inf is NaN"),
    ("q < 2147483648", 5, "does not fit int32"), ("q < 3k", 5, "'3k' is no number"),
    ("(" * 101 + "q" + ")" * 101, 102, "more than 100 brackets"),
    ("doc[where(q < a[k], 1, 0) - b[q]] < 1", 30, r"'\[' stands"),
    ("q < " + "q + " * 260 + "1", None, "500 nodes"),
    (" & ".join(f"x{i}[q] < 1" for i in range(9)), 97, "x8 is one tensor too many"),
])  # fmt: skip
def test_texts_that_are_no_expression(text, column, told):
    with pytest.raises(sagebwd.SpecError, match=told) as caught:
        trace_mask(text)
    if column:
        assert str(caught.value).startswith(f"column {column} of ")


def test_nesting_up_to_the_limit_is_read():
    """By a parser and an evaluator that call themselves, on Python's stack."""
    assert trace_mask("(" * 100 + "q < k" + ")" * 100).text == "q < k"
    text = "abs(1 + q * " * 99 + "k" + ")" * 99 + " < 1"
    assert masks.dense(text, {}, 1, 1, 2, 2).shape == (1, 1, 2, 2)
    chain = "q" + " + k" * 240 + " < 9"
    assert trace_mask(chain).text == chain and masks.dense(chain, {}, 1, 1, 2, 2)[0, 0, 1, 0]
    with pytest.raises(sagebwd.SpecError, match="has 2400 characters; at most 2000"):
        trace_mask("q < 1" + " " * 2395)


@pytest.mark.parametrize("trace, text, told", [
    (trace_mask, "q + k", r"'q \+ k' is an int: a mask is a bool"), (trace_mask, "s < 1", "has s"),
    (trace_mask, "where(q < k, 1.0, 2.0)", "is a float: a mask"),
    (trace_score, "q < k", "is a bool: a score is a float"), (trace_score, "1.5 * q", "has no s"),
])  # fmt: skip
def test_masks_are_bools_and_scores_are_formed_of_s(trace, text, told):
    with pytest.raises(sagebwd.SpecError, match=told):
        trace(text)


def test_operands_of_texts():
    assert trace_mask("a[q] < 1").operands == {}
    assert trace_score("s + a[q]").text == "s + a[q]"
    made = trace_mask("b2[k] < a[q]", {"a": torch.ones(3), "b2": torch.ones(3).bool()})
    assert list(made.operands) == ["b2", "a"]
    assert [t.dtype for t in made.operands.values()] == [torch.int32, torch.float32]
    for operands, told in (({}, "column 1 .*no tensor 'a': pass it in operands="),
                           ({"a": torch.ones(2, 2)}, "1 numbers, and has 2 dimensions"),
                           ({"a": torch.ones(2), "c": torch.ones(2)}, "'c', which .* not index"),
                           ({"a": torch.ones(2, 2, 2)}, "pass a tensor of 1 or 2 dimensions"),
                           ({"a": 3}, "is an int; pass a torch tensor")):  # fmt: skip
        with pytest.raises(sagebwd.SpecError, match=told):
            trace_mask("a[q] < 1", operands)
    with pytest.raises(sagebwd.SpecError, match="belongs to a text"):
        trace_mask(lambda b, h, q, k: q < k, {"a": torch.ones(2)})
    with pytest.raises(TypeError, match="the mask is an int; pass a function or a text"):
        trace_mask(3)
