"""Pictures of recorded results, from their files alone, on any machine with matplotlib.

    python bench/plot.py                   # everything under bench/results
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
sys.path.append(str(RESULTS.parents[1]))

from experiments.plot import plot_curves  # noqa: E402


def panels_of(rows: int, columns: int, figsize: tuple[float, float], **shared: bool):
    """A figure, and its panels in rows and columns."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize)
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def metadata_of(records: list[str], folder: Path = RESULTS) -> dict[str, str]:
    """A picture names its records and their digests, so that tests find one that is too old."""
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16]
               for name in records}  # fmt: skip
    return {"Records": " ".join(f"{name}:{digest}" for name, digest in sorted(digests.items()))}


def saved(figure, path: Path, dpi: int) -> Path:
    """The figure as a picture beside the record."""
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=dpi, metadata=metadata_of([path.name], path.parent))
    return picture


def grouped_bars(panel, groups: list, heights: dict[str, list[float]]) -> None:
    """A bar of each label at every group: `heights` has one of each group by label."""
    width = 0.8 / len(heights)
    for index, label in enumerate(heights):
        places = [i + (index - (len(heights) - 1) / 2) * width for i in range(len(groups))]
        panel.bar(places, heights[label], width, label=label)
    panel.set_xticks(range(len(groups)), [str(group) for group in groups])
    panel.grid(axis="y", alpha=0.3)


def plot_speed(path: Path) -> Path:
    """TFLOPS of forward + backward, with one panel per head dimension and mask."""
    record = json.loads(path.read_text())
    rows = [row for row in record["rows"] if "error" not in row]
    panels = sorted({(row["head_dim"], row["causal"]) for row in rows})
    figure, axes = panels_of(1, len(panels), figsize=(4 * len(panels), 4), sharey=True)
    for panel, (head_dim, causal) in zip(axes[0], panels):
        chosen = [r for r in rows if (r["head_dim"], r["causal"]) == (head_dim, causal)]
        labels = list(dict.fromkeys(row["attention"] for row in chosen))
        lengths = sorted({row["tokens"] for row in chosen})
        grouped_bars(panel, lengths, {
            label: [sum(r["forward+backward"]["tflops"] for r in chosen
                        if (r["attention"], r["tokens"]) == (label, n)) for n in lengths]
            for label in labels})  # fmt: skip
        panel.set_title(f"D {head_dim}{', causal' if causal else ''}")
        panel.set_xlabel("tokens")
    axes[0][0].set_ylabel("TFLOPS, forward + backward")
    axes[0][0].legend(fontsize="small")
    figure.suptitle(record["environment"]["gpu"] or "no GPU: a trial of the script")
    figure.tight_layout()
    return saved(figure, path, dpi=120)


def plot_grid(path: Path) -> Path:
    """Speed relative to cuDNN, and time and memory per head, over lengths. One column per head
    dimension."""
    record = json.loads(path.read_text())
    rows = [row for row in record["rows"] if "error" not in row and not row["heads_kv"]
            and (row["dtype"], row["layout"]) == ("bf16", "bhsd")
            and "deterministic" not in row["attention"].split(", ")]  # fmt: skip
    head_dims = sorted({row["head_dim"] for row in rows})
    labels = list(dict.fromkeys(row["attention"] for row in rows))
    figure, axes = panels_of(3, len(head_dims), figsize=(5 * len(head_dims), 11), sharex=True)

    def of_a_head(row: dict, value: float) -> float:
        return value / (row["batch"] * row["heads"])

    for column, head_dim in zip(axes.T, head_dims):
        for label in labels:
            for causal in (False, True):
                chosen = sorted((r for r in rows if (r["head_dim"], r["attention"], r["causal"])
                                 == (head_dim, label, causal)), key=lambda r: r["tokens"])
                lengths = [r["tokens"] for r in chosen]
                times = [r["forward+backward"]["median_ms"] for r in chosen]
                cudnn = {r["tokens"]: r["forward+backward"]["median_ms"] for r in rows
                         if (r["head_dim"], r["attention"], r["causal"])
                         == (head_dim, "cudnn", causal)}  # fmt: skip
                style = {"color": f"C{labels.index(label)}", "linestyle": "--" if causal else "-"}
                name = label + (", causal" if causal else "")
                both = [(n, cudnn[n] / t) for n, t in zip(lengths, times) if n in cudnn]
                column[0].plot(*zip(*both), label=name, **style) if both else None
                column[1].plot(lengths, list(map(of_a_head, chosen, times)), **style)
                column[2].plot(lengths, [of_a_head(r, r.get("peak_mib", float("nan")))
                                         for r in chosen], **style)
        column[0].set_title(f"D {head_dim}")
        column[2].set_xlabel("tokens")
        for panel in column:
            panel.set_xscale("log", base=2)
            panel.grid(alpha=0.3)
        column[1].set_yscale("log")
        if any("peak_mib" in row for row in rows):
            column[2].set_yscale("log")
    names = ("speed, of cuDNN's", "ms a head: grows as N squared", "MiB a head: grows as N")
    for panel, name in zip(axes[:, 0], names):
        panel.set_ylabel(name)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=4)
    gpu = record["environment"]["gpu"] or "no GPU: a trial of the script"
    figure.suptitle(f"{gpu}: forward + backward")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return saved(figure, path, dpi=100)


def plot_sparse(path: Path) -> Path:
    """The time of attention to random lists over their density, with one column per shape. Dotted
    lines are attention to every key."""
    record = json.loads(path.read_text())
    rows = [row for row in record["rows"] if "error" not in row and row["is_timed"]
            and row["lists"] in ("random", "all")]  # fmt: skip
    sizes = ("batch", "heads", "tokens", "head_dim")
    shapes = list(dict.fromkeys(tuple(row[name] for name in sizes) for row in rows))
    labels = list(dict.fromkeys(row["attention"] for row in rows if row["kind"] != "linear"))
    passes = "forward", "forward+backward"
    figure, axes = panels_of(2, len(shapes), figsize=(5 * len(shapes), 9), sharex=True)
    for column, shape in zip(axes.T, shapes):
        here = [row for row in rows if tuple(row[name] for name in sizes) == shape]
        for panel, name in zip(column, passes):
            for index, label in enumerate(labels):
                line = sorted((row["share"], row[name]["median_ms"]) for row in here
                              if row["attention"] == label)  # fmt: skip
                style = {"color": f"C{index % 10}", "label": label}
                if line and all(row["block_size"] is None for row in here
                                if row["attention"] == label):  # fmt: skip
                    panel.axhline(min(ms for _, ms in line), linestyle=":", **style)
                elif line:
                    panel.plot(*zip(*line), marker=".", linestyle="--" if index > 9 else "-",
                               **style)  # fmt: skip
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.grid(alpha=0.3, which="both")
        column[0].set_title("batch {}, {} heads, {} tokens, D {}".format(*shape))
        column[1].set_xlabel("density")
    for panel, name in zip(axes[:, 0], passes):
        panel.set_ylabel(f"ms, {name.replace('+', ' + ')}")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=4)
    figure.suptitle(record["environment"]["gpu"] or "no GPU: a trial of the script")
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    return saved(figure, path, dpi=100)


def plot_instructions(path: Path) -> Path:
    """Instructions per score and thread, by pipe, with one panel per kernel and head dimension."""
    rows = [row for row in json.loads(path.read_text())["kernels"]
            if row["causal"] == "none" and row["precision"] == "six-of-seven"]  # fmt: skip
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    head_dims = sorted({row["head_dim"] for row in rows})
    figure, axes = panels_of(len(head_dims), len(kernels), sharey=True,
                             figsize=(4 * len(kernels), 3 * len(head_dims)))
    for line, head_dim in zip(axes, head_dims):
        for panel, kernel in zip(line, kernels):
            chosen = [r for r in rows if (r["head_dim"], r["kernel"]) == (head_dim, kernel)]
            archs = [row["arch"].removeprefix("sm_") for row in chosen]
            base = [0.0] * len(chosen)
            for pipe in chosen[0]["pipes"] if chosen else ():
                heights = [row["pipes"][pipe] for row in chosen]
                panel.bar(archs, heights, bottom=base, label=pipe)
                base = [low + height for low, height in zip(base, heights)]
            panel.set_title(f"{kernel}, D {head_dim}")
            panel.tick_params(axis="x", labelrotation=45)
            panel.grid(axis="y", alpha=0.3)
        line[0].set_ylabel("instructions a score")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    return saved(figure, path, dpi=110)


def plot_balance(path: Path) -> Path:
    """Predicted speed of forward + backward relative to FlashAttention-2, with one panel per head
    dimension and mask. Lines are what has been published for the paper's kernels."""
    record = json.loads(path.read_text())
    rows = [row for row in record["rows"] if row["correct"]]
    panels = sorted({(r["head_dim"], r["causal"], r["tokens"]) for r in rows},
                    key=lambda panel: (-panel[2], *panel))  # fmt: skip
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = panels_of(lines, columns, figsize=(4 * columns, 4 * lines), sharey=True)
    gpus, plans = (list(dict.fromkeys(row[key] for row in rows)) for key in ("gpu", "plan"))
    for panel, (head_dim, causal, tokens) in zip(axes.flat, panels):
        chosen = [r for r in rows
                  if (r["head_dim"], r["causal"], r["tokens"]) == (head_dim, causal, tokens)]
        ratios = {(r["plan"], r["gpu"]): r["predicted"]["forward+backward"]["ratio_to_fa2"]
                  for r in chosen}  # fmt: skip
        grouped_bars(
            panel, gpus, {plan: [ratios.get((plan, g), 0) for g in gpus] for plan in plans}
        )
        for row in chosen:
            if row["published"]:
                place = gpus.index(row["gpu"])
                panel.hlines(row["published"]["ratio_to_fa2"], place - 0.45, place + 0.45,
                             color="black", linestyle="--")  # fmt: skip
        panel.axhline(1, color="gray", linewidth=1)
        panel.set_title(f"D {head_dim}, {tokens} tokens{', causal' if causal else ''}")
    axes[0][0].set_ylabel("predicted speed, FlashAttention-2 = 1")
    axes[0][0].legend(fontsize="small")
    gpu = record["environment"]["gpu"] or "no GPU: a trial of the script"
    figure.suptitle(f"{gpu}, slowed: forward + backward")
    figure.tight_layout()
    return saved(figure, path, dpi=110)


def plot_figures() -> list[Path]:
    """The figures of README.md and of the pages, which the site draws as well."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "docs/_site"))
    import figures

    folder = RESULTS / "figures"
    folder.mkdir(exist_ok=True)
    pictures = {name: folder / f"{name}.png" for name in figures.FIGURES}
    for name, picture in pictures.items():
        figures.png(name, picture, metadata_of)
    return list(pictures.values())


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("folder", nargs="?", type=Path, default=RESULTS)
    folder = options.parse_args(arguments).folder
    pictures = [(plot_grid if path.stem.startswith("speed-grid") else plot_speed)(path)
                for path in sorted(folder.glob("speed*.json"))]
    pictures += [plot_sparse(path) for path in sorted(folder.glob("sparse*.json"))
                 if not path.stem.startswith("sparse-video")]
    pictures += [plot_instructions(path) for path in sorted(folder.glob("instructions*.json"))]
    pictures += [plot_balance(path) for path in sorted(folder.glob("balance*.json"))
                 if not path.stem.startswith(("balance-lists", "balance-masks"))]
    pictures += [plot_curves(path) for path in sorted(folder.glob("*curves*.csv"))]
    if folder == RESULTS:
        pictures += plot_figures()
    if not pictures:
        print(f"{folder} holds no speed*.json, no sparse*.json, no instructions*.json, "
              "no balance*.json and no *curves*.csv", file=sys.stderr)
        return 1
    for picture in pictures:
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
