"""Masks as intervals: what their constructors share, and drawings of other numbers of queries."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402

WITH_CAUSAL = {
    "documents": lambda causal: masks.documents(lengths=[3, 4], causal=causal),
    "padding": lambda causal: masks.padding([3, 7], 7, causal=causal),
    "window_and_global": lambda causal: masks.window_and_global(7, 2, 1, causal=causal),
}


@pytest.mark.parametrize("name", WITH_CAUSAL)
def test_all_constructors_take_the_same_words_for_causal(name):
    make = WITH_CAUSAL[name]
    assert make("none").causal is make(False).causal is False and make("none") == make(False)
    assert {make(causal).causal for causal in (True, "top-left", "bottom-right")} == {"top-left"}
    assert make(True) == make("top-left") == make("bottom-right") != make(False)
    above = ~torch.ones(7, 7, dtype=torch.bool).tril()
    assert not (make(True).dense(7) & above).any() and (make(False).dense(7) & above).any()
    for wrong in ("left", 1, None):
        with pytest.raises(sagebwd.SpecError, match=f"causal={wrong!r}: pass False or 'none', True, "
                                                    "'top-left' or 'bottom-right'"):
            make(wrong)


def test_a_corner_stays_where_corners_differ():
    for corner in ("top-left", "bottom-right"):
        assert masks.padding([3], 7, queries=5, causal=corner).causal == corner


TOO_MANY = 2**31
REFUSED = {
    "documents": lambda: masks.documents(lengths=[TOO_MANY - 5, 5]),
    "documents by cu_seqlens": lambda: masks.documents([0, 7, TOO_MANY]),
    "documents in more tokens": lambda: masks.documents(lengths=[5], tokens=TOO_MANY),
    "prefix_lm": lambda: masks.prefix_lm(5, TOO_MANY),
    "shared_prefix": lambda: masks.shared_prefix(TOO_MANY - 9, [4, 5]),
    "tree": lambda: masks.tree([-1, 0], lengths=[TOO_MANY - 1, 1]),
    "spans": lambda: masks.spans(TOO_MANY, []),
    "window_and_global": lambda: masks.window_and_global(TOO_MANY, 5),
    "padding": lambda: masks.padding([5], TOO_MANY),
    "queries of padding": lambda: masks.padding([5], 9, queries=TOO_MANY),
}


@pytest.mark.parametrize("name", REFUSED)
def test_more_tokens_than_int32_tells_are_refused_before_memory_is_taken(name):
    with pytest.raises(sagebwd.SpecError, match="2147483648.*int32, which has numbers up to "
                                                "2147483647: pass at most as many"):
        REFUSED[name]()


# ---- drawings of other numbers of queries --------------------------------------------------------


def drawn(capsys, *given, **more):
    masks.show(*given, **more)
    return capsys.readouterr().out.splitlines()[1:]


def test_numbers_that_reach_further_than_the_queries():
    of_more = masks.padding([3], 4, queries=9)
    with pytest.raises(sagebwd.SpecError, match="queries= is left out, which stands for 4, as many "
                                                "as keys, and the mask's numbers reach 9: pass "
                                                "queries=9"):
        masks.show(of_more)
    with pytest.raises(sagebwd.SpecError, match="^queries=5, and the mask's numbers reach 9: pass"):
        masks.show(of_more, queries=5)
    with pytest.raises(sagebwd.SpecError, match="reach 6: pass queries=6"):
        masks.show(masks.documents(lengths=[2, 4]), queries=4)


def test_a_mask_of_other_queries_than_keys_is_drawn(capsys):
    assert drawn(capsys, masks.padding([3], 4, queries=9), queries=9) == ["██████"] * 9
    assert drawn(capsys, masks.padding([3], 4, queries=2, causal="bottom-right"), queries=2) == [
        "██████"] * 2  # fmt: skip
    # More queries than the numbers reach: kernels let them see nothing.
    assert drawn(capsys, masks.padding([3], 4, queries=2), queries=3) == ["██████"] * 2 + [""]
