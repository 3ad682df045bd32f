"""Tables of what is predicted for GPUs that are not at hand."""

from __future__ import annotations

from balance_model import Here, front_ms
from gpus import named
from table_parts import SHAPES, lines_of, sound

#: Plans of the table of predictions, and how readers call them.
PREDICTED = {
    "six-of-seven": "",
    "six-of-seven dp_sums=fp16": ", `dp_sums='fp16'`",
}


def predicted(record: dict) -> list[str]:
    """For each GPU that is not at hand, the speed of forward + backward at 8192 tokens relative to
    FlashAttention-2."""
    rows = {(r["gpu"], r["plan"], r["head_dim"], r["causal"], r["tokens"]): r
            for r in record["rows"]}  # fmt: skip
    shapes = {called: shape for called, shape in SHAPES.items() if shape[0] != 256}
    lines = []
    for gpu in dict.fromkeys(r["gpu"] for r in record["rows"]):
        for plan, called in PREDICTED.items():
            found = (sound(rows, gpu, plan, *shape)["predicted"]["forward+backward"]
                     for shape in shapes.values())  # fmt: skip
            lines.append([gpu + called, *(f"{one['ratio_to_fa2']:.2f}x" for one in found)])
    return lines_of(["predicted", *shapes], lines)


def predicted_layers(record: dict, layer: dict, gpu: str = "RTX 4090",
                     tokens: int = 8192) -> list[str]:  # fmt: skip
    """For a GPU that is not at hand, forward + backward of a layer's norm, RoPE and causal
    attention: milliseconds of ours, and how many times as long a compiled norm and RoPE takes with
    the same attention and with FlashAttention-2.

    Attention is that of the predictions, and norm and RoPE are those of bench/layer.py: what they
    add to a call of `six-of-seven` there."""
    rows = {(r["gpu"], r["plan"], r["head_dim"], r["causal"], r["tokens"]): r
            for r in record["rows"]}  # fmt: skip
    times = {(r["head_dim"], r["tokens"], r["front"]): r for r in layer["rows"]
             if r["attention"] == "six-of-seven" and r["heads"] == r["heads_kv"]}
    clocks = next(of["here"] for of in record["gpus"] if of["name"] == gpu)
    here = Here(*(clocks[name] for name in ("sms", "clock_ghz", "memory_gbs")))
    shapes = {f"D{head_dim} causal": head_dim for head_dim in (64, 128)}

    def front(head_dim: int, of: str) -> tuple[float, float]:
        row, alone = (sound(times, head_dim, tokens, one) for one in (of, "none"))
        forward, both = (row[name]["median_ms"] - alone[name]["median_ms"]
                         for name in ("forward", "forward+backward"))  # fmt: skip
        return front_ms(here, named(gpu), 2 * row["batch"] * row["heads"] * tokens * head_dim,
                        {"forward": forward, "backward": both - forward}, of == "ours")  # fmt: skip

    columns = []
    for head_dim in shapes.values():
        found = sound(rows, gpu, "six-of-seven", head_dim, True, tokens)
        attention, compiled = found["predicted"]["forward+backward"], front(head_dim, "compiled")
        ours = attention["ms"] + front(head_dim, "ours")[0]
        ratios = [[(attention[of] + one) / ours for one in compiled] for of in ("ms", "fa2_ms")]
        columns.append([f"{ours:.1f} ms", *("{:.2f} to {:.2f} times as long".format(*both)
                                            for both in ratios)])  # fmt: skip
    called = ["ours"] + [f"compiled norm and RoPE, {of}"
                         for of in ("`six-of-seven`", "FlashAttention-2")]  # fmt: skip
    return lines_of([f"predicted, {gpu}", *shapes],
                    [[name, *cells] for name, *cells in zip(called, *columns)])  # fmt: skip


def held(record: dict) -> list[str]:
    """For each GPU that is not at hand, at each density of random lists, the executed rate of the
    attention kernels as a share of that on all keys: in the forward, in both passes, and in
    brackets in both passes where on all keys two kernels compute the gradients."""
    densities = record["parameters"]["density"]
    rows = {(r["gpu"], r["head_dim"], r["precision"], r["block_size"], r["density"]): r
            for r in record["rows"]}  # fmt: skip
    lines = []
    for gpu, head_dim, precision, block_size in dict.fromkeys(key[:4] for key in rows if key[3]):
        cells = []
        for density in densities:
            row = sound(rows, gpu, head_dim, precision, block_size, density)
            if row["of_dense"] is None:
                raise SystemExit(f"tables: {row['plan']}: attention to all keys failed")
            forward, both = (row["of_dense"][x] for x in ("forward", "forward+backward"))
            split = row["of_split"] and f" ({row['of_split']['forward+backward']:.2f})"
            cells.append(f"{forward:.2f}, {both:.2f}{split or ''}")
        lines.append([f"{gpu}, D{head_dim}, {block_size}, `{precision}`", *cells])
    return lines_of(["of the rate on all keys", *(f"{d:.0%} of blocks" for d in densities)], lines)


def beside_flex(record: dict) -> list[str]:
    """For GPUs that are not at hand, the speed of forward + backward under each mask relative to
    the least time of flex_attention, and in brackets to that of five products in the backward."""
    rows = {(r["gpu"], r["mask"], r["tokens"], r["precision"]): r for r in record["rows"]}
    precisions, lines = record["parameters"]["precision"], []
    for gpu, mask, tokens in dict.fromkeys(key[:3] for key in rows if key[1]):
        of_mask = [sound(rows, gpu, mask, tokens, precision) for precision in precisions]
        both = (row["predicted"]["forward+backward"] for row in of_mask)
        cells = [f"{one['ratio_to_flex']:.2f}x ({one['ratio_to_fewest_products']:.2f}x)"
                 for one in both]  # fmt: skip
        lines.append([f"{gpu}, {mask}", str(tokens),
                      f"{100 * of_mask[0]['share_of_blocks']:.0f} %", *cells])  # fmt: skip
    return lines_of(["predicted", "tokens", "of all blocks", *(f"`{p}`" for p in precisions)],
                    lines)  # fmt: skip


#: Columns of the table of limits: precision, and the pass that forms all gradients.
LIMITS = {
    "`six-of-seven`": ("six-of-seven", ("fused", "backward")),
    "`gradients16`": ("gradients16", ("backward",)),
    "`gradients16`, `deterministic=False`": ("gradients16", ("fused",)),
}


def limits(record: dict) -> list[str]:
    """For GPUs that are not at hand, what instructions allow for forward + backward at D64 and D128
    without a mask, relative to the limit of FlashAttention-2. The first kernels that are there
    count. The forward has two of the seven products, and the backward five."""
    found: dict[str, dict] = {}
    for row in record["bounds"]:
        if row["causal"] == "none" and not row["gpu"].startswith("H100"):
            key = row["head_dim"], row["precision"], row["pass"]
            found.setdefault(row["gpu"], {})[key] = row
    lines: dict[tuple, list[str]] = {}
    for gpu, rows in found.items():
        cells = []
        for precision, passes in LIMITS.values():
            ratios = {}
            for head_dim in (64, 128):
                forward = rows[head_dim, "six-of-seven", "forward"]
                keys = [(head_dim, precision, one) for one in passes]
                if kernels := [rows[key] for key in keys if key in rows]:
                    ours = 2 / forward["tflops"] + 5 / kernels[0]["tflops"]
                    ratios[head_dim] = f"{7 / forward['flash_attention_2'] / ours:.2f}x"
            same = len(set(ratios.values())) == 1 and len(ratios) == 2
            cells.append(ratios[64] if same
                         else ", ".join(f"D{d} {ratio}" for d, ratio in ratios.items()))
        lines.setdefault(tuple(cells), []).append(gpu)
    return lines_of(["limit", *LIMITS],
                    [[", ".join(gpus), *cells] for cells, gpus in lines.items()])  # fmt: skip
