"""Tables beside other attentions: on an H100 (bench/others-h100.json), and of very wide heads."""

from __future__ import annotations

from table_parts import SHAPES, lines_of, sound

#: Rows of the table of times: attentions of the record, and how readers call them.
DENSE = {
    "cudnn": "cuDNN",
    "fa4": "FlashAttention-4",
    "cudnn-fp8": "cuDNN, FP8",
    "gradients16": "`gradients16`, `deterministic=False`",
    "cudnn-det": "cuDNN, deterministic",
    "fa4-det": "FlashAttention-4, deterministic",
    "six-of-seven": "`six-of-seven` (deterministic)",
    "gradients16, deterministic": "`gradients16` (deterministic)",
}
#: Rows of the table of errors against FP64.
JUDGED = {
    "cudnn-fp8": "cuDNN, FP8",
    "six-of-seven": "`six-of-seven`",
    "gradients16": "`gradients16`",
    "fa4": "FlashAttention-4, bf16",
    "cudnn": "cuDNN, bf16",
}


def dense(record: dict) -> list[str]:
    """Milliseconds of forward + backward at 8192 tokens; the fastest is bold, once among all and
    once among those that are deterministic."""
    rows = {(r["attention"], r["head_dim"], r["causal"], r["tokens"]): r
            for r in record["rows"]}  # fmt: skip
    times = {name: [rows[key]["forward+backward"]["median_ms"] if key in rows else None
                    for key in ((name, *shape) for shape in SHAPES.values())]
             for name in DENSE}  # fmt: skip
    least = [min(filter(None, column)) for column in zip(*times.values())]
    kept = [min(filter(None, column)) for column in
            zip(*(times[name] for name, called in DENSE.items() if "deterministic" in called
                  and "False" not in called))]  # fmt: skip
    lines = []
    for name, called in DENSE.items():
        cells = ["" if ms is None else f"**{ms:.1f}**" if ms in best else f"{ms:.1f}"
                 for ms, *best in zip(times[name], least, kept)]  # fmt: skip
        memory = sound(rows, name, 128, False, 8192)["peak_mib"]
        lines.append([called, *cells, f"{memory} MiB"])
    return lines_of(["ms of forward + backward", *SHAPES, "memory, D128"], lines)


def judged(record: dict) -> list[str]:
    """Relative L2 errors against FP64 at 128 channels."""
    rows = {r["attention"]: r["rel_l2"] for r in record["errors"] if r["head_dim"] == 128}
    return lines_of(["attention", "O", "dQ", "dK", "dV"], [
        [called, *(f"{rows[name][x]:.4f}" for x in ("O", "dQ", "dK", "dV"))]
        for name, called in JUDGED.items()])  # fmt: skip


def very_wide(record: dict) -> list[str]:
    """TFLOPS of heads of 512 channels, forward and both passes. A peer that a row lacks has a dash."""
    attentions = {"six-of-seven": "`six-of-seven`", "gradients16": "`gradients16`",
                  "ffpa": "ffpa-attn", "efficient": "PyTorch's memory-efficient", "math": "its math"}  # fmt: skip
    lines = []
    for row in record["rows"]:
        if not row["correct"]:
            raise SystemExit(f"tables: a row of very wide heads is not right: {row}")
        rates = [[row[f"{of} TFLOPS"].get(name) for of in ("forward", "forward+backward")]
                 for name in attentions]  # fmt: skip
        lines.append([f"{row['tokens']}{', causal' if row['causal'] else ''}",
                      *(f"{a:.0f}, {b:.0f}" if a else "-" for a, b in rates)])  # fmt: skip
    return lines_of(["tokens", *attentions.values()], lines)
