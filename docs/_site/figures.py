"""The figures of README.md and of the pages, drawn from bench/results.

Pages show `bench/results/figures/NAME.png`, NAME being a function here, which bench/plot.py draws.
The site shows SVG in its place, drawn when it is built, that takes the page's colours.
"""

from __future__ import annotations

import csv
import io
import re

import matplotlib.pyplot as plt
from figure_parts import COLOURS, INK, PLAIN, READ, axes, lengths_on, record, text_of, times_of
from front_figures import layer, parity, skipped
from mask_examples import MASKS, TOKENS
from matplotlib.colors import ListedColormap

#: bench's names of attentions and schemes, as readers know them.
ATTENTIONS = {
    "cudnn": "PyTorch, cuDNN",
    "sagebwd": "sagebwd, six-of-seven (default)",
    "sagebwd:precision=gradients16,no-deterministic": "sagebwd, gradients16, deterministic=False",
}
SCHEMES = {
    "bf16 (PyTorch)": "PyTorch, bf16", "row gradients16": "gradients16", "row qk16": "qk16",
    "row dv16": "dv16", "row": "six-of-seven", "block 128x64": "six-of-seven, block",
}  # fmt: skip


def deterministic():
    """Bars: deterministic training is faster than PyTorch's FlashAttention-2 at every head
    dimension."""
    figure, panel = axes(4.7, 3.5)
    _deterministic(panel)
    return figure


def wide():
    """Lines: at head dimension 256 it is faster than cuDNN on long sequences."""
    figure, panel = axes(4.7, 3.5)
    _wide(panel)
    return figure


def _deterministic(left):
    times = times_of("speed-grid.json", **PLAIN)
    for i, causal in enumerate((False, True)):
        speeds = [times["fa2, deterministic", d, causal, 8192] / times["sagebwd", d, causal, 8192]
                  for d in (64, 128, 256)]  # fmt: skip
        bars = left.bar([x + (i - 0.5) * 0.4 for x in range(3)], speeds, 0.37, color=COLOURS[i],
                        label="causal" if causal else "no mask")  # fmt: skip
        left.bar_label(bars, [f"{speed:.1f}" for speed in speeds], padding=2)
    left.set_xticks(range(3), ["D64", "D128", "D256"])
    left.grid(axis="x", visible=False)
    left.set_title("Deterministic training in PyTorch, 8192 tokens", fontsize=11)
    left.set_ylabel("speed, FlashAttention-2 = 1")
    left.set_ylim(0, 3.8)
    _finish(left)


def _wide(right):
    times = times_of("speed-grid.json", **PLAIN)
    for i, causal in enumerate((False, True)):
        points = [(n, times["cudnn", 256, causal, n] / ms) for (a, d, c, n), ms
                  in sorted(times.items()) if (a, d, c) == ("sagebwd", 256, causal)]  # fmt: skip
        right.plot(*zip(*points), marker="o", markersize=4, color=COLOURS[i],
                   label="causal" if causal else "no mask")  # fmt: skip
    lengths_on(right)
    right.set_title("Head dimension 256", fontsize=11)
    right.set_ylabel("speed, cuDNN = 1")
    _finish(right)


def _finish(panel):
    panel.axhline(1, color=INK, linewidth=1)
    panel.legend(loc="upper left")


def speed():
    """Bars: speed of both passes relative to cuDNN, by head dimension and mask."""
    times = times_of("speed.json", tokens=8192)
    shapes = [(d, causal, 8192) for d in (64, 128, 256) for causal in (False, True)]
    figure, panel = axes()
    for i, (attention, called) in enumerate(ATTENTIONS.items()):
        places = [x + (i - 1) * 0.27 for x in range(len(shapes))]
        panel.bar(places, [times[("cudnn", *s)] / times[(attention, *s)] for s in shapes], 0.25,
                  label=called, color=COLOURS[-1] if attention == "cudnn" else COLOURS[i - 1],
                  )  # fmt: skip
    panel.axhline(1, color=INK, linewidth=1)
    panel.grid(axis="x", visible=False)
    names = [f"D{d}" + (",\ncausal" if causal else "") for d, causal, _ in shapes]
    panel.set_xticks(range(len(shapes)), names)
    panel.set_ylabel("speed, cuDNN = 1")
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return figure


def sigmas():
    """Lines: relative L2 error of dQ over the standard deviation of queries and keys."""
    rows = [r for r in record("errors.json")["rows"] if re.fullmatch(r"sigma \d+", r["input"])]
    figure, panel = axes()
    for i, (scheme, called) in enumerate(reversed(SCHEMES.items())):
        points = sorted((int(r["input"].split()[1]), r["errors"]["dQ"]["rel_l2"])
                        for r in rows if r["scheme"] == scheme)  # fmt: skip
        panel.plot(*zip(*points), marker="o", markersize=4, label=called, color=COLOURS[i])
    panel.set_yscale("log")
    panel.set_yticks([0.003, 0.01, 0.03, 0.1, 0.3], ["0.003", "0.01", "0.03", "0.1", "0.3"])
    panel.minorticks_off()
    panel.set_xlabel("standard deviation of Q and K")
    panel.set_ylabel("relative L2 error of dQ")
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    return figure


def inputs():
    """Points: relative L2 error of dQ on inputs as trained models have them, by precision."""
    rows = [r for r in record("errors.json")["rows"]
            if not re.fullmatch(r"sigma \d+|D 64.*|.* tokens", r["input"])
            or r["input"] == "massive tokens"]  # fmt: skip
    named = list(dict.fromkeys((r["input"], r["causal"]) for r in rows))
    figure, panel = axes(height=0.34 * len(named) + 1.4)
    shown = [s for s in SCHEMES if s not in ("row dv16", "block 128x64")]
    for i, scheme in enumerate(shown):
        found = {(r["input"], r["causal"]): r["errors"]["dQ"]["rel_l2"]
                 for r in rows if r["scheme"] == scheme}  # fmt: skip
        places = [y for y, key in enumerate(named) if key in found]
        beside = [y + 0.16 * (i - 1.5) for y in places]  # equal errors hide no dot
        panel.plot([found[named[y]] for y in places], beside, "o", markersize=5,
                   label=SCHEMES[scheme], color=[COLOURS[-1], *COLOURS][i])  # fmt: skip
    masked = ", causal"
    panel.set_yticks(
        range(len(named)),
        [
            name.removesuffix(masked) + (masked if causal != "none" else "")
            for name, causal in named
        ],
    )
    panel.set_xscale("log")
    panel.set_xticks([0.003, 0.01, 0.03], ["0.003", "0.01", "0.03"])
    panel.minorticks_off()
    panel.invert_yaxis()
    panel.set_xlabel("relative L2 error of dQ")
    panel.legend(loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=2)
    return figure


def lengths():
    """Lines: speed relative to cuDNN over the number of tokens, by head dimension, not causal."""
    times = times_of("speed-grid.json", causal=False, **PLAIN)
    figure, panel = axes()
    for i, head_dim in enumerate((64, 128, 256)):
        for attention, style in zip(list(ATTENTIONS)[1:], ("-", "--")):
            points = [(n, times["cudnn", head_dim, False, n] / ms)
                      for (a, d, _, n), ms in sorted(times.items())
                      if (a, d) == (attention, head_dim)]  # fmt: skip
            called = ATTENTIONS[attention].removeprefix("sagebwd, ").removesuffix(" (default)")
            panel.plot(*zip(*points), style, color=COLOURS[i], label=f"D{head_dim}, {called}")
    panel.axhline(1, color=INK, linewidth=1)
    lengths_on(panel)
    panel.set_ylabel("speed, cuDNN = 1")
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return figure


def training():
    """Lines over the steps of small language models, one seed: how far the validation losses of
    INT8 attentions are above SDPA's, and the largest score, which grows with larger errors."""
    called = {"sdpa": "SDPA", "row": "six-of-seven (default)", "paper": "block, no rotation",
              "paper-no-smooth-k": "the same, no K-smoothing"}  # fmt: skip
    figure, (gaps, scores) = plt.subplots(1, 2, figsize=(7.4, 4), layout="constrained")
    for model, style, more in ("small", "-", ""), ("small-no-qk-norm", "--", ", no QK-norm"):
        peer = record(f"study-full/{model}-sdpa-0.json")["curve"]
        for colour, (arm, name) in zip(COLOURS, called.items()):
            own = record(f"study-full/{model}-{arm}-0.json")["curve"]
            steps = [row[0] for row in own]
            gaps.plot(steps, [a[3] - b[3] for a, b in zip(own, peer)], style, color=colour)
            scores.semilogy(steps, [row[5] for row in own], style, color=colour, label=name + more)
    gaps.set_ylim(-0.02, 0.15)
    gaps.set_ylabel("loss above SDPA's, nats")
    scores.set_ylabel("largest |score|")
    scores.set_ylim(5, 100000)
    for panel in (gaps, scores):
        panel.set_xlabel("step")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def warned():
    """Lines: how far the training losses of three runs are above SDPA's, over steps: another exact
    attention, `block` without K-smoothing, and the same with default options after a warning."""
    rows = list(csv.DictReader(text_of("study/warning-paper-no-smooth-k.csv").splitlines()))
    monitor = record("study/warning-paper-no-smooth-k.json")["monitor"]
    called = {"sdpa-other": "SDPA, another backend",
              "monitored": "block, no rotation, no K-smoothing",
              "remedied": "default options after the warning"}  # fmt: skip
    figure, panel = axes()
    for name, label in called.items():
        gaps = [float(row[name]) - float(row["sdpa"]) for row in rows]
        panel.plot([sum(gaps[max(0, i - 9) : i + 1]) / min(i + 1, 10) for i in range(len(gaps))],
                   label=label)  # fmt: skip
    panel.axvline(monitor["first_warning"], color=INK, linestyle="--", linewidth=1,
                  label="first warning")  # fmt: skip
    panel.set_ylim(-0.035, 0.095)
    panel.set_xlabel("step")
    panel.set_ylabel("training loss above SDPA's, nats")
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return figure


def sparse():
    """Lines: the time of forward and backward over the share of blocks that are listed, for SLA2,
    lists of blocks with and without INT8 gradients, flex_attention and, at all blocks, cuDNN."""
    called = {"flex_attention 128x128": "flex_attention", "sagebwd 128x128": "six-of-seven",
              "sagebwd gradients16 128x128": "gradients16", "all in 128x128": "SLA2, all in",
              "cudnn": "cuDNN, all keys"}  # fmt: skip
    figure, panel = axes()
    times = {(r["attention"], r["density"]): r["forward+backward"]["median_ms"]
             for r in record("sparse.json")["rows"]
             if r["is_timed"] and r["cell"].startswith("1x16x32768x128")
             and r["lists"] in ("all", "random")}  # fmt: skip
    for attention, name in called.items():
        points = sorted((density, ms) for (of, density), ms in times.items() if of == attention)
        panel.plot(*zip(*points), "-" if attention != "cudnn" else "--", marker="o", label=name)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks([0.03, 0.05, 0.1, 1], ["3 %", "5 %", "10 %", "all"])
    panel.set_xticks([], minor=True)
    panel.set_yticks([3, 5, 10, 20, 50], ["3", "5", "10", "20", "50"])
    panel.set_yticks([], minor=True)
    panel.set_xlabel("listed blocks")
    panel.set_ylabel("ms, forward + backward")
    panel.legend(loc="lower right")
    return figure


def granularities():
    """Drawing: which of the first 32 tokens by 32 channels share a scale; one colour, one scale."""
    shades = ListedColormap(["#00897b", "#80cbc4", "#d9a55c", "#7a6fd1"])
    copies = {
        "block": lambda token, channel: 0,
        "row: Q for scores": lambda token, channel: token % 4,
        "row: K for scores": lambda token, channel: token % 8 // 2,
        "row: other copies": lambda token, channel: channel % 4,
    }
    figure, panels = plt.subplots(2, 2, figsize=(5.2, 5.4), layout="constrained",
                                  sharex=True, sharey=True)  # fmt: skip
    for panel, (title, scale) in zip(panels.flat, copies.items()):
        scales = [[scale(token, channel) for channel in range(32)] for token in range(32)]
        panel.imshow(scales, cmap=shades, vmin=0, vmax=3, extent=(0, 32, 32, 0))
        panel.set(xticks=[0, 16, 32], yticks=[0, 8, 16, 24, 32], title=title)
        panel.grid(visible=False)
    for panel in panels[1]:
        panel.set_xlabel("channels")
    for panel in panels[:, 0]:
        panel.set_ylabel("tokens")
    return figure


def masks():
    """Drawing: which of 16 keys each of 16 queries sees, for masks that sagebwd.masks makes."""
    shades = ListedColormap(["#80808026", "#00897b"])
    figure, panels = plt.subplots(2, 4, figsize=(7.4, 4.6), layout="constrained",
                                  sharex=True, sharey=True)  # fmt: skip
    for panel, (call, sees) in zip(panels.flat, MASKS.items()):
        seen = [[bool(sees(q, k)) for k in range(TOKENS)] for q in range(TOKENS)]
        panel.imshow(seen, cmap=shades, vmin=0, vmax=1, extent=(0, TOKENS, TOKENS, 0))
        panel.set(xticks=[0, 8, TOKENS], yticks=[0, 8, TOKENS])
        name, _, arguments = call.removesuffix(")").partition("(")
        panel.set_title(name + "\n" + arguments.replace(", lengths", ",\nlengths").replace(
            ", causal", ",\ncausal"), fontsize=9)  # fmt: skip
        panel.grid(visible=False)
    for panel in panels[1]:
        panel.set_xlabel("key")
    for panel in panels[:, 0]:
        panel.set_ylabel("query")
    return figure


FIGURES = {f.__name__: f
           for f in (layer, parity, skipped, deterministic, wide, speed, sigmas, inputs, lengths,
                     training, warned, sparse, granularities, masks)}  # fmt: skip


def png(name, path, metadata_of):
    """Writes the figure. `metadata_of` gets the records that it shows, and gives its metadata."""
    READ.clear()
    figure = FIGURES[name]()
    figure.savefig(path, dpi=110, facecolor="white", metadata=metadata_of(READ))
    plt.close(figure)


def svg(name, said):
    """The figure as text for a page, and what screen readers say of it."""
    figure, text = FIGURES[name](), io.StringIO()
    figure.savefig(text, format="svg", transparent=True, bbox_inches="tight",
                   metadata={"Date": None, "Creator": None})  # fmt: skip
    plt.close(figure)
    body = text.getvalue()
    body = body[body.index("<svg") :].replace(INK, "currentColor")
    # Names inside one page's figures must differ.
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", body)
    body = re.sub(r"(<svg[^>]*?) height=\"[^\"]*\"", r"\1", body, count=1)
    body = re.sub(r"(<svg[^>]*?) width=\"[^\"]*\"", r"\1", body, count=1)
    body = body.replace("<svg", f'<svg role="img" aria-label="{said}"', 1)
    return '<div class="figure">' + re.sub(r"\n\s*", " ", body) + "</div>"
