"""Helpers of the tables that bench/tables.py prints."""

from __future__ import annotations

#: The columns of several tables: head dimension, mask, tokens.
SHAPES = {f"D{d}{' causal' if causal else ''}": (d, causal, 8192)
          for d in (64, 128, 256) for causal in (False, True)}  # fmt: skip


def sound(rows: dict, *key) -> dict:
    """The row with that key, which must have been measured and found right."""
    row = rows.get(key)
    why = ("there is none" if row is None else row.get("error")
           or (None if row.get("correct", row.get("passed", True)) else "its results are wrong"))
    if why:
        raise SystemExit(f"tables: the row of {', '.join(map(str, key))}: {why}")
    return row


def lines_of(head: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table of these cells."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]
