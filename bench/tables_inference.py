"""The table of forwards for inference."""

from __future__ import annotations

from table_parts import lines_of

WHO = {"sagebwd": "sagebwd", "comfy-kitchen": "comfy-kitchen", "cudnn": "cuDNN",
       "fa2": "FlashAttention-2"}  # fmt: skip


def forwards(record: dict) -> list[str]:
    """Milliseconds of a forward and the relative L2 error of its output."""
    lines = []
    for row in record["rows"]:
        if not row["correct"]:
            raise ValueError(f"the row of {row['inputs']}, D {row['head_dim']}, is not correct")
        cells = [f"{row['forward'][who]['median_ms']:.2f} ms, {row['errors'][who]['rel_l2']:.4f}"
                 for who in WHO]  # fmt: skip
        lines.append([str(row["head_dim"]), str(row["tokens"]), row["inputs"], *cells])
    return lines_of(["head dimension", "tokens", "inputs", *WHO.values()], lines)
