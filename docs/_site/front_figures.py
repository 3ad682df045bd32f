"""The three figures of the front page: a layer, trained models, and masks."""

from __future__ import annotations

from figure_parts import COLOURS, INK, axes, record
from mask_examples import MASKS, TOKENS
from matplotlib.colors import ListedColormap


def layer():
    """Bars: a layer's norm, RoPE and causal attention take less time than under torch.compile with
    cuDNN's attention, and much less than by eager modules."""
    called = {("eager", "cudnn"): "eager modules, cuDNN",
              ("compiled", "cudnn"): "torch.compile, cuDNN",
              ("ours", "gradients16"): "sagebwd, gradients16"}  # fmt: skip
    rows = {(r["front"], r["attention"], r["head_dim"]): r["forward+backward"]["median_ms"]
            for r in record("layer.json")["rows"]
            if r["tokens"] == 8192 and r["heads"] == r["heads_kv"]}  # fmt: skip
    figure, panel = axes(4.7, 3.5)
    for i, (of, name) in enumerate(called.items()):
        times = [rows[(*of, head_dim)] for head_dim in (64, 128, 256)]
        bars = panel.bar([x + (i - 1) * 0.29 for x in range(3)], times, 0.27, label=name,
                         color=[COLOURS[-1], COLOURS[1], COLOURS[0]][i])  # fmt: skip
        panel.bar_label(bars, [f"{ms:.1f}" for ms in times], padding=2, fontsize=9)
    panel.set_xticks(range(3), ["D64", "D128", "D256"])
    panel.grid(axis="x", visible=False)
    panel.set_title("Norm, RoPE and attention of a layer", fontsize=11)
    panel.set_ylabel("ms, forward + backward")
    panel.set_ylim(0, 30)
    panel.legend(loc="upper center", ncols=1, fontsize=9)
    return figure


def parity():
    """Points with 95 % bands: the validation losses of models that six-of-seven trained end where
    those of bf16 attention do, and those of the paper's scales above."""
    regimes = record("study-full/study.json")["regimes"]
    shown = {"26 M, 64K": ("26m", 64, 3052), "110 M, 64K": ("110m", 64, 3052),
             "26 M, 512K": ("26m", 512, 382), "110 M, 512K": ("110m", 512, 382)}  # fmt: skip
    called = {"sagebwd": "six-of-seven (default)",
              "sagebwd:granularity=block,no-rotate": "the paper's scales"}  # fmt: skip
    figure, panel = axes(4.7, 3.5)
    for i, (attention, name) in enumerate(called.items()):
        arms = []
        for model, tokens, steps in shown.values():
            [regime] = (found["arms"] for key, found in regimes.items()
                        if key.startswith(f"{model},") and "no QK-norm" not in key
                        and f" {tokens}K a step, {steps} steps," in key)  # fmt: skip
            arms.append(regime[attention])
        panel.errorbar([arm["paired"] for arm in arms], [y + 0.25 * i - 0.12 for y in range(4)],
                       xerr=[arm["paired_half_width"] for arm in arms], fmt="o", capsize=3,
                       color=[COLOURS[0], COLOURS[1]][i], label=name)  # fmt: skip
    panel.axvline(0, color=INK, linewidth=1)
    panel.set_yticks(range(4), list(shown))
    panel.set_ylim(4.3, -0.5)
    panel.grid(axis="y", visible=False)
    panel.set_title("Trained models: parameters, tokens a step", fontsize=11)
    panel.set_xlabel("validation loss above bf16 attention's, nats")
    panel.legend(loc="lower right", ncols=2, fontsize=9, columnspacing=1, handletextpad=0.4)
    return figure


def skipped():
    """Bars, each under a drawing of its mask: attention with a window, documents, a prefix and
    image spans is faster than flex_attention."""
    seen = {"sliding window": "window_and_global(16, 3)",
            "documents": "documents(lengths=[6, 10])", "prefix": "prefix_lm(5, 16)",
            "image spans": "spans(16, [(2, 6), (9, 14)])"}  # fmt: skip
    times = {(r["mask"], r["tokens"]): r["forward+backward"]
             for r in record("intervals.json")["rows"]}  # fmt: skip
    shades = ListedColormap(["#80808026", COLOURS[0]])
    figure, panel = axes(4.7, 3.5)
    for i, tokens in enumerate((8192, 32768)):
        speeds = [times[mask, tokens]["flex"]["median_ms"]
                  / times[mask, tokens]["gradients16"]["median_ms"] for mask in seen]  # fmt: skip
        bars = panel.bar([x + (i - 0.5) * 0.4 for x in range(4)], speeds, 0.37, color=COLOURS[i],
                         label=f"{tokens // 1024}K tokens")  # fmt: skip
        panel.bar_label(bars, [f"{speed:.2f}" for speed in speeds], padding=2, fontsize=9)
    for x, call in enumerate(seen.values()):
        small = panel.inset_axes((x - 0.32, 1.78, 0.64, 0.62), transform=panel.transData)
        small.imshow([[bool(MASKS[call](q, k)) for k in range(TOKENS)] for q in range(TOKENS)],
                     cmap=shades, vmin=0, vmax=1, aspect="auto")  # fmt: skip
        small.set(xticks=[], yticks=[])
        small.grid(visible=False)
    panel.axhline(1, color=INK, linewidth=1)
    panel.set_xticks(range(4), [name.replace(" ", "\n") for name in seen])
    panel.set_yticks([0, 0.5, 1, 1.5])
    panel.grid(axis="x", visible=False)
    panel.set_title("Masks, head dimension 128", fontsize=11)
    panel.set_ylabel("speed, flex_attention = 1")
    panel.set_ylim(0, 2.9)
    panel.legend(loc="upper center", ncols=2, fontsize=9)
    return figure
