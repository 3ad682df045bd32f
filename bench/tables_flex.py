"""The tables of masks and of functions of the score next to flex_attention."""

from __future__ import annotations

from table_parts import lines_of

#: Columns of times, and who they are in a row of bench/intervals.py.
COLUMNS = {
    "flex_attention": "flex",
    "ours, `six-of-seven`": "six-of-seven",
    "ours, `gradients16`": "gradients16",
    "ours, an expression": "expression",
    "ours, a `BlockMask`": "block mask",
    "ours, causal alone": "causal",
}


def intervals(record: dict) -> list[str]:
    """Milliseconds of forward + backward; the fastest with the mask is bold. Records from before
    masks were expressions lack their columns."""
    measured = record["rows"][0]["forward+backward"]
    columns = {title: who for title, who in COLUMNS.items() if who in measured}
    lines = []
    for row in record["rows"]:
        if not row["correct"]:
            raise ValueError(f"the row of {row['mask']} at {row['tokens']} tokens is not correct")
        times = {who: row["forward+backward"][who]["median_ms"] for who in columns.values()}
        least = min(ms for who, ms in times.items() if who != "causal")
        cells = [f"**{ms:.2f}**" if ms == least and who != "causal" else f"{ms:.2f}"
                 for who, ms in times.items()]  # fmt: skip
        lines.append([row["mask"], str(row["tokens"]), f"{100 * row['share']:.0f} %", *cells])
    return lines_of(["mask", "tokens", "of all scores", *columns], lines)


def scores(record: dict) -> list[str]:
    """Milliseconds of forward + backward with gradients16: without a function, with it, and
    flex_attention's with it; behind ours, how many times as long as without."""
    lines = []
    for row in record["rows"]:
        if not row["correct"]:
            raise ValueError(f"the row of {row['function']}, D {row['head_dim']}, is not correct")
        ms = {who: of["median_ms"] for who, of in row["forward+backward"].items()}
        plain, ours = ms["gradients16, plain"], ms["gradients16"]
        lines.append([str(row["head_dim"]), "causal" if row["causal"] else "none", row["function"],
                      f"{plain:.2f}", f"{ours:.2f} ({ours / plain:.2f}x)",
                      f"{ms['flex']:.2f}" if "flex" in ms else "fails"])  # fmt: skip
    return lines_of(["head dimension", "mask", "function", "plain", "with the function",
                     "`flex_attention` with it"], lines)  # fmt: skip
