"""The masks that bench/intervals.py measures, and the table of its records."""

import pytest

torch = pytest.importorskip("torch")

import intervals  # noqa: E402
import tables_flex  # noqa: E402

from sagebwd import masks  # noqa: E402

TOKENS = 256


@pytest.mark.parametrize("mask", intervals.masks_of(TOKENS, 0, "cpu"), ids=lambda mask: mask.name)
def test_intervals_and_expressions_say_the_same(mask):
    expression = masks.from_flex(mask.seen).dense(1, 1, TOKENS, TOKENS)
    assert torch.equal(expression, mask.intervals.dense(TOKENS))
    assert 0 < expression.sum() < TOKENS**2


def row(**ms):
    times = {who.replace("_", " "): {"median_ms": time} for who, time in ms.items()}
    return {"mask": "prefix", "tokens": 8192, "share": 0.5, "correct": True,
            "forward+backward": times | {"of causal's time": 1.2}}  # fmt: skip


def test_the_table_has_the_columns_that_were_measured():
    before = {"flex": 3.0, "six-of-seven": 2.5, "gradients16": 2.25, "causal": 2.0}
    text = "\n".join(tables_flex.intervals({"rows": [row(**before)]}))
    assert "| 3.00 | 2.50 | **2.25** | 2.00 |" in text and "expression" not in text
    with_both = {"rows": [row(**before, expression=2.4, block_mask=2.1)]}
    text = "\n".join(tables_flex.intervals(with_both))
    assert "| 3.00 | 2.50 | 2.25 | 2.40 | **2.10** | 2.00 |" in text
    assert "an expression | ours, a `BlockMask` | ours, causal alone |" in text
    with_both["rows"][0]["correct"] = False
    with pytest.raises(ValueError, match="prefix at 8192 tokens is not correct"):
        tables_flex.intervals(with_both)
