"""The table of a layer's norm, RoPE and attention, from bench/results/layer.json."""

from __future__ import annotations

from table_parts import lines_of, sound

#: Columns: a front and an attention of bench/layer.py.
COLUMNS = {
    "eager modules, cuDNN": ("eager", "cudnn"),
    "torch.compile, cuDNN": ("compiled", "cudnn"),
    "Liger-Kernel, cuDNN": ("liger", "cudnn"),
    "ours, `six-of-seven`": ("ours", "six-of-seven"),
    "ours, `gradients16`": ("ours", "gradients16"),
}


def layers(record: dict) -> list[str]:
    """Milliseconds of forward + backward of each shape; the fastest is bold."""
    keys = ("heads", "heads_kv", "head_dim", "tokens")
    rows = {(*(r[key] for key in keys), r["front"], r["attention"]): r for r in record["rows"]}
    lines, told = [], None
    for shape in dict.fromkeys(key[:4] for key in rows):
        times = [sound(rows, *shape, *of)["forward+backward"]["median_ms"]
                 for of in COLUMNS.values()]  # fmt: skip
        cells = [f"**{ms:.2f}**" if ms == min(times) else f"{ms:.2f}" for ms in times]
        heads, heads_kv, head_dim, tokens = shape
        name = f"D{head_dim}, {heads} heads" + (f" on {heads_kv}" if heads_kv != heads else "")
        lines.append(["" if name == told else name, str(tokens), *cells])
        told = name
    return lines_of(["ms of forward + backward", "tokens", *COLUMNS], lines)
