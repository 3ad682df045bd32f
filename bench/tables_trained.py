"""The tables of trained models: errors in their layers, and fine-tunings."""

from __future__ import annotations

from statistics import fmean, median

from table_parts import lines_of

#: Models in the record of bench/trained_layers.py.
LANGUAGE_MODEL, ENCODER = "SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"
#: Schemes of bench/trained_layers.py that the page has, and how readers call them.
SCHEMES = {
    "bf16 (PyTorch)": "bf16 (PyTorch)",
    "row, six-of-seven": "the default: `row`, `six-of-seven`",
    "row, no rotation, six-of-seven": "no rotation",
    "row, no K-smoothing": "no K-smoothing",
    "row, Q-smoothing": "`smooth_q=True`",
    "row, V-smoothing": "`smooth_v=True`",
    "row, first key not apart": "`sink_keys=0`",
    "row, groups of 64 keys": "groups of 64 queries and 64 keys",
    "row, dv16": "`dv16`",
    "row, gradients16": "`gradients16`",
    "row, no rotation, gradients16": "`gradients16`, no rotation",
    "row, qk16": "`qk16`",
    "block, six-of-seven": "`block`",
    "block, no rotation, six-of-seven": "`block`, no rotation (the paper's)",
    "block, no rotation, no K-smoothing": "the same, no K-smoothing",
    "block, gradients16": "`block`, `gradients16`",
    "block, qk16": "`block`, `qk16`",
}
RESULTS = ("O", "dQ", "dK", "dV")


def layers_by_scheme(record: dict, model: str) -> list[str]:
    """The median of a model's layers, and the largest."""
    rows = [row["errors"] for row in record["rows"] if row["model"] == model]
    lines = []
    for scheme, called in SCHEMES.items():
        found = {t: [errors[scheme][t] for errors in rows if scheme in errors] for t in RESULTS}
        if all(found.values()):
            lines.append([called, *(f"{median(x):.4f}, {max(x):.4f}" for x in found.values())])
    return lines_of(["median and largest error", *RESULTS], lines)


def rotations(record: dict) -> list[str]:
    """In how many layers the rotation makes the error smaller, and the median ratio of errors with
    the rotation and without."""
    lines = []
    for model in (one["name"] for one in record["models"]):
        rows = [row["errors"] for row in record["rows"] if row["model"] == model]
        for granularity in ("row", "block"):
            cells = []
            for tensor in RESULTS:
                ratios = [errors[f"{granularity}, six-of-seven"][tensor]
                          / errors[f"{granularity}, no rotation, six-of-seven"][tensor]
                          for errors in rows]  # fmt: skip
                better = sum(ratio < 1 for ratio in ratios)
                cells.append(f"{median(ratios):.2f}, {better} of {len(ratios)}")
            lines.append([f"{model}, `{granularity}`", *cells])
    return lines_of(["with the rotation / without", *RESULTS], lines)


def tuned(record: dict) -> list[str]:
    """Held-out losses after a fine-tuning, and how far they are from SDPA's, with bands."""
    called = {"sdpa": "SDPA", "sdpa-other": "SDPA, another backend", "sagebwd": "the default",
              "sagebwd:granularity=block,no-rotate": "`block`, no rotation (the paper's)"}
    lines = [["none", f"{record['held_out_before']:.4f}", "", "", ""]]
    for attention, found in record["verdicts"]["attentions"].items():
        runs = [run for run in record["runs"] if run["attention"] == attention]
        by_sdpa = fmean(run["held_out_by_sdpa"] for run in runs)
        cells = ["", ""]
        if "pairs" in found:
            band = f"{found['paired']:+.5f} ±{found['paired_half_width']:.5f}"
            outside = found["verdict"].startswith("outside")
            cells = [", ".join(f"{x:+.5f}" for x in found["pairs"]),
                     f"**{band}**" if outside else band]  # fmt: skip
        lines.append([called[attention], f"{found['mean']:.4f}", f"{by_sdpa:.4f}", *cells])
    return lines_of(["trained with", "loss", "by SDPA", "minus SDPA, seed by seed", "mean, band"],
                    lines)  # fmt: skip
