"""The tables of measured figures in docs and bench/README.md, from bench/results.

    python bench/tables.py             # writes them
    python bench/tables.py --check     # says whether they are what the records give

A table stands between `<!-- NAME.json -->` and `<!-- end -->`. Text that quotes figures is written
by hand: read it when a table changes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import partial
from pathlib import Path

from table_parts import SHAPES, lines_of, sound
from tables_flex import intervals, scores
from tables_inference import adapted, forwards, of_layers
from tables_layer import layers
from tables_others import dense, judged, very_wide
from tables_predicted import beside_flex, held, limits, predicted, predicted_layers
from tables_trained import ENCODER, LANGUAGE_MODEL, layers_by_scheme, rotations, tuned

ROOT = Path(__file__).resolve().parent.parent

#: Rows of the table of errors: input, mask, scheme, and the name of the row.
ERRORS = [
    *((f"sigma {sigma}", "none", "row", "six-of-seven") for sigma in (1, 3, 5, 8, 10)),
    ("sigma 1", "none", "row dv16", "dv16"),
    ("sigma 1", "none", "row qk16", "qk16"),
    ("sigma 1", "none", "row gradients16", "gradients16"),
    ("sigma 1", "none", "block 128x64", "six-of-seven, `block`"),
    ("sigma 1", "none", "bf16 (PyTorch)", "PyTorch, bf16"),
    ("16384 tokens", "none", "row", "six-of-seven"),
    ("heavy channels", "top-left", "row", "six-of-seven"),
    ("sink", "top-left", "row", "six-of-seven"),
]
#: The names of the attentions of bench/speed.py and bench/grid.py.
PEERS = {"cudnn": "cuDNN", "fa2": "FlashAttention-2"}
NOT_DETERMINISTIC = "sagebwd:precision=gradients16,no-deterministic"
#: Rows of the table of speed in docs, and of that of mma.sync.
SPEED = {
    "cudnn": "PyTorch, cuDNN",
    "fa2": "PyTorch, FlashAttention-2",
    "sagebwd": "`six-of-seven` (default)",
    "sagebwd:precision=gradients16": "`gradients16`",
    NOT_DETERMINISTIC: "`gradients16`, `deterministic=False`",
    "sagebwd:precision=dv16": "`dv16`",
    "sagebwd:precision=qk16": "`qk16`",
    "sagebwd:smooth-q": "`six-of-seven`, `smooth_q=True`",
}
MMA_SPEED = {
    "fa2": "FlashAttention-2",
    "sagebwd-mma": "`six-of-seven`",
    "sagebwd-mma:no-deterministic": "`six-of-seven`, `deterministic=False`",
    "sagebwd-mma:precision=gradients16": "`gradients16`",
    "sagebwd-mma:precision=gradients16,no-deterministic": "`gradients16`, `deterministic=False`",
}


def errors(record: dict, listed: list = ERRORS) -> list[str]:
    """The errors of O, dQ, dK and dV for each input, with Table 1 of the paper in brackets."""
    rows = {(r["input"].removesuffix(", causal"), r["causal"], r["scheme"]): r
            for r in record["rows"]}  # fmt: skip
    lines = []
    for name, causal, scheme, called in listed:
        row = sound(rows, name, causal, scheme)
        paper = row.get("paper_table_1") if scheme == "row" and name != "16384 tokens" else None
        cells = [f"{row['errors'][x]['rel_l2']:.4f}" + (f" ({paper[x]:.4f})" if paper else "")
                 for x in ("O", "dQ", "dK", "dV")]  # fmt: skip
        lines.append([name + (", causal" if causal != "none" else ""), called, *cells])
    return lines_of(["input", "precision", "O", "dQ", "dK", "dV"], lines)


def speed(record: dict, listed: dict = SPEED, peer: str = "cudnn") -> list[str]:
    """Times of forward + backward, and the speed relative to the peer in the same run."""
    rows = {(r["attention"], r["head_dim"], r["causal"], r["tokens"]): r
            for r in record["rows"]}  # fmt: skip

    def time(attention: str, shape: tuple) -> float:
        return sound(rows, attention, *shape)["forward+backward"]["median_ms"]

    lines = [[called, *(f"{time(attention, shape):.1f} ms"
                        + (f", {time(peer, shape) / time(attention, shape):.2f}x"
                           if attention != peer else "") for shape in SHAPES.values())]
             for attention, called in listed.items()]  # fmt: skip
    return lines_of([f"speed relative to {PEERS[peer]}", *SHAPES], lines)


#: Rows of the table of lengths: the name, the attention, and how its cell differs.
PLAIN = {"dtype": "bf16", "layout": "bhsd", "heads_kv": 0}
LENGTHS = (1024, 4096, 16384, 32768, 131072)
GRID = {"`six-of-seven`": "sagebwd", "`gradients16`, `deterministic=False`": NOT_DETERMINISTIC}


def lengths(record: dict) -> list[str]:
    """The speed of forward + backward relative to cuDNN, at LENGTHS."""
    rows = [r for r in record["rows"] if all(r[key] == value for key, value in PLAIN.items())]
    cells = {(r["attention"], r["head_dim"], r["causal"], r["tokens"]): r for r in rows}

    def time(*key) -> float:
        return sound(cells, *key)["forward+backward"]["median_ms"]

    lines = []
    for head_dim in sorted({r["head_dim"] for r in rows}):
        for causal in (False, True):
            for called, attention in GRID.items():
                shapes = [(head_dim, causal, n) for n in LENGTHS]
                ratios = [time("cudnn", *shape) / time(attention, *shape) for shape in shapes]
                lines.append([f"D{head_dim}{' causal' if causal else ''}, {called}",
                              *(f"{ratio:.2f}" for ratio in ratios)])  # fmt: skip
    return lines_of(["tokens", *map(str, LENGTHS)], lines)


def deterministic(record: dict) -> list[str]:
    """Speed and memory of forward + backward under torch.use_deterministic_algorithms."""
    rows = {(r["attention"], r["head_dim"], r["causal"], r["tokens"]): r for r in record["rows"]
            if all(r[key] == value for key, value in PLAIN.items())}  # fmt: skip
    peer, ours = ([sound(rows, name, *shape) for shape in SHAPES.values()]
                  for name in ("fa2, deterministic", "sagebwd"))  # fmt: skip
    times = [[r["forward+backward"]["median_ms"] for r in rows] for rows in (peer, ours)]
    cells = {
        "speed of `six-of-seven`": [f"{fa2 / ms:.2f}x" for fa2, ms in zip(*times)],
        "memory, FlashAttention-2": [f"{r['peak_mib']:.0f} MiB" for r in peer],
        "memory, `six-of-seven`": [f"{r['peak_mib']:.0f} MiB" for r in ours],
    }
    return lines_of(["relative to FlashAttention-2", *SHAPES],
                    [[called, *row] for called, row in cells.items()])  # fmt: skip


#: The names of the masks of bench/masks.py, at its 32768 tokens.
MASKS = {
    ("dense", "none"): "none",
    ("causal", "top-left"): "causal",
    ("window", "top-left"): "causal window of 1024",
    ("window, both sides", "none"): "window of 1024, half on each side",
    ("window, four times", "top-left"): "causal window of 4096",
    ("packed, halves", "none"): "packed, each half as long as the one before",
    ("packed, halves", "top-left"): "the same, causal",
    ("packed, documents", "none"): "packed, documents of random lengths",
    ("packed, documents", "top-left"): "the same, causal",
    ("packed, equal", "none"): "packed, 32 of 1024 tokens",
    ("packed, equal", "top-left"): "the same, causal",
}


def masks(record: dict) -> list[str]:
    """For forward + backward the speed relative to the peer, and the time over the ideal one."""
    rows = {(r["case"], r["causal"], r["head_dim"]): r for r in record["rows"]}
    dims = sorted({r["head_dim"] for r in record["rows"]})
    lines = []
    for (case, causal), called in MASKS.items():
        cells = []
        for dim in dims:
            one = dict(sound(rows, case, causal, dim)["forward+backward"])
            ratio = one.pop("ratio_to_fa2")
            cells.append(f"{ratio:.2f}x, {next(iter(one.values())):.2f}")
        lines.append([called, *cells])
    return lines_of(["mask", *(f"D{d}" for d in dims)], lines)


def generation(record: dict) -> list[str]:
    """The time at each size, and that of the best peer."""
    lines = []
    for row in record["rows"]:
        if not row["correct"]:
            raise SystemExit(f"tables: generation.json: {row['keys']} keys: results are wrong")
        times = [f"{row[who]['median_ms'] * 1e3:.0f} us" for who in ("sagebwd", "fa2", "cudnn")]
        lines.append([str(row["queries"]), str(row["keys"]), *times])
    return lines_of(["queries", "keys", "sagebwd", "FlashAttention-2", "cuDNN"], lines)


#: Rows of the table of lists of blocks: attentions of bench/sparse.py, and how readers call them.
LISTED = {
    "cudnn": "all keys, cuDNN",
    "FlashAttention-4 128x128": "the listed blocks, FlashAttention-4",
    "flex_attention 128x128": "the same, flex_attention",
    "sagebwd 128x128": "the same, `block_sparse_attention`",
    "sagebwd gradients16 128x128": 'the same, `precision="gradients16"`',
    "all in 128x128": "SLA2, `nn.SparseLinearAttention`",
    "all in gradients16 128x128": 'the same, `precision="gradients16"`',
}


def listed(record: dict, shape: str = "1x16x32768x128") -> list[str]:
    """For each density of random lists the times of forward and of forward + backward, and how many
    times as fast as cuDNN on all keys the latter is."""
    rows = {(r["cell"], r["attention"]): r for r in record["rows"]}
    densities, lines = record["parameters"]["density"], []
    for attention, name in LISTED.items():
        cells = []
        for density in densities:
            row, whole = (sound(rows, f"{shape} random {density}", of)
                          for of in (attention, "cudnn"))  # fmt: skip
            forward, both = (row[x]["median_ms"] for x in ("forward", "forward+backward"))
            ratio = whole["forward+backward"]["median_ms"] / both
            cells.append(f"{forward:.1f}, {both:.1f} ms"
                         + (f" ({ratio:.1f}x)" if row is not whole else ""))  # fmt: skip
        lines.append([name, *cells])
    return lines_of(["forward, forward + backward", *(f"{d:.0%} of blocks" for d in densities)],
                    lines)  # fmt: skip


#: Rows of the table of sequences that GPUs share: attentions of bench/context_parallel.py.
SHARED = {
    "ring": '`method="ring"`',
    "ulysses": '`method="ulysses"`',
    "context_parallel, cuDNN": "PyTorch's `context_parallel`, cuDNN",
    "Ulysses, cuDNN": "Ulysses, cuDNN",
    "context_parallel, FA2": "PyTorch's `context_parallel`, FlashAttention-2",
    "Ulysses, FA2": "Ulysses, FlashAttention-2",
}
SHARED_RECORDS = ("context-parallel.json context-parallel-256k.json context-parallel-512k.json "
                  "context-parallel-4.json")  # fmt: skip
#: Columns: the record's index, GPUs, tokens.
SHARED_COLUMNS = [(0, 2, 32768), (0, 2, 131072), (1, 2, 262144), (2, 2, 524288), (3, 4, 131072)]


def shared(*records: dict) -> list[str]:
    """The time and TFLOPS per GPU of forward + backward with causal masks, and one GPU's time over
    theirs times their number, with such masks and without."""
    rows = [{(r["attention"], r["gpus"], r["tokens"], r["causal"]): r for r in record["rows"]}
            for record in records]  # fmt: skip
    called = [f"{gpus} GPUs, {tokens // 1024}K, {records[index]['parameters']['heads']} heads"
              for index, gpus, tokens in SHARED_COLUMNS]  # fmt: skip
    lines = []
    for attention, name in SHARED.items():
        cells = []
        for index, *column in SHARED_COLUMNS:
            causal, full = (sound(rows[index], attention, *column, mask) for mask in (True, False))
            cells.append(f"{causal['median_ms']:.0f} ms, {causal['tflops_per_gpu']:.0f}, "
                         f"{causal['efficiency']:.0%} / {full['efficiency']:.0%}")  # fmt: skip
        lines.append([name, *cells])
    return lines_of(["causal: time, TFLOPS per GPU, efficiency / not causal", *called], lines)


#: Rows of the table of trained models: attentions of the study, and how readers call them.
TRAINED = {
    "sdpa": "SDPA: loss",
    "sdpa-other": "SDPA, another backend",
    "sagebwd": "`six-of-seven`",
    "sagebwd:front": "the same, which norms and rotates itself",
    "sagebwd:precision=gradients16": "`gradients16`",
    "sagebwd:precision=qk16": "`qk16`",
    "sagebwd:no-smooth-k": "no K-smoothing",
    "sagebwd:no-smooth-k,smooth-q": "Q-smoothing alone",
    "sagebwd:smooth-q": "Q- and K-smoothing",
    "emulated:precision=s+pv+dv+dp+dq+dk": "dP in INT8 (emulated)",
    "sagebwd:granularity=block": "`block`",
    "sagebwd:granularity=block,no-rotate": "`block`, no rotation (the paper's)",
    "sagebwd:granularity=block,no-smooth-k,no-rotate": "the same, no K-smoothing",
}


def trained(record: dict, model: str = "26m") -> list[str]:
    """For each regime of a model SDPA's validation loss, and how far that of each other attention
    is from it in runs of the same seed, with the 95 % band of such a difference. A regime without
    a band, which takes seeds of another attention, too, is left out."""
    found = []
    for regime, results in record["regimes"].items():
        of, bare, tokens, steps = re.fullmatch(
            r"(\w+), .*, (no )?QK-norm, (\d+)K a step, (\d+) steps, .*", regime
        ).groups()
        if of == model and any("paired" in arm for arm in results["arms"].values()):
            name = f"{tokens}K x {steps}{', no QK-norm' if bare else ''}"
            found.append(((int(tokens), -int(steps), bool(bare)), name, results["arms"]))
    found.sort(key=lambda one: one[0])

    def cell(arm: dict | None) -> str:
        if arm is None:
            return ""
        if diverged := len(arm["diverged_seeds"]):
            return f"**{diverged} of {diverged + len(arm['seeds'])} diverged**"
        if "paired" not in arm:
            return f"{arm['final_val_loss']:.4f}"
        shown = f"{arm['paired']:+.4f} ±{arm['paired_half_width']:.4f}"
        return f"**{shown}**" if arm["verdict"].startswith("outside") else shown

    lines = [[name, *(cell(arms.get(attention)) for _, _, arms in found)]
             for attention, name in TRAINED.items()]  # fmt: skip
    return lines_of(["tokens a step x steps", *(name for _, name, _ in found)],
                    [line for line in lines if any(line[1:])])  # fmt: skip


#: Records that may be missing, whose tables are then left as they are.
OPTIONAL = {"balance-lists.json", "balance-masks.json"}
#: The tables of each file, by their records. A word after a record distinguishes its tables.
TABLES = {
    "docs/benchmarks.md": {"speed.json": speed, "speed-grid.json deterministic": deterministic,
                           "speed-grid.json lengths": lengths, "errors.json": errors,
                           "../others-h100.json": dense, "../others-h100.json errors": judged,
                           "layer.json": layers, SHARED_RECORDS: shared},
    "docs/predicted.md": {"balance.json": predicted, "balance.json layer.json": predicted_layers,
                          "balance-masks.json": beside_flex, "instructions.json": limits},
    "docs/training.md": {"study-full/study.json": trained,
                         "study-full/study.json 110m": partial(trained, model="110m")},
    "docs/training-further.md": {"study/study.json": trained, "study-front/study.json": trained},
    "docs/trained-models.md": {
        "trained-layers.json language": partial(layers_by_scheme, model=LANGUAGE_MODEL),
        "trained-layers.json encoder": partial(layers_by_scheme, model=ENCODER),
        "trained-layers.json rotation": rotations, "fine-tune.json": tuned},
    "docs/supported.md": {"very_wide.json": very_wide},
    "docs/use/masks.md": {"intervals.json": intervals},
    "docs/use/scores.md": {"scores.json": scores},
    "docs/use/inference.md": {"inference.json": forwards, "trained.json layers": of_layers,
                              "trained.json": adapted},
    "docs/use/sparse-speed.md": {"sparse.json": listed},
    "bench/README.md": {"speed.json": partial(speed, listed=MMA_SPEED, peer="fa2"),
                        "masks.json": masks, "generation.json": generation,
                        "balance-lists.json": held},
}  # fmt: skip


def with_tables(file: str, text: str, results: Path) -> str:
    """The text of the file, with each table replaced by what its record gives."""
    for name, table in TABLES[file].items():
        if name.split()[0] in OPTIONAL and not (results / name.split()[0]).exists():
            continue
        records = [json.loads((results / word).read_text()) for word in name.split()
                   if word.endswith(".json")]  # fmt: skip
        if any(record.get("status", "finished") != "finished" for record in records):
            raise SystemExit(f"tables: {name} is of a run that did not end")
        lines = "\n".join(table(*records))
        parts = re.split(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", text, flags=re.DOTALL)
        if len(parts) != 4:
            raise SystemExit(f"{file} has {len(parts) // 3} tables between '<!-- {name} -->' "
                             "and '<!-- end -->', expected one")  # fmt: skip
        text = f"{parts[0]}{parts[1]}{lines}\n{parts[2]}{parts[3]}"
    return text


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--check", action="store_true", help="write nothing; exit 1 if different")
    options = options.parse_args(arguments)
    differ = []
    for file in TABLES:
        old = (ROOT / file).read_text()
        new = with_tables(file, old, ROOT / "bench/results")
        if new != old:
            differ.append(file)
            if not options.check:
                (ROOT / file).write_text(new)
    if options.check and differ:
        print(f"the tables of {' and '.join(differ)} are not those of bench/results: "
              "python bench/tables.py")  # fmt: skip
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
