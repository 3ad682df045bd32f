"""What all figures share: colours, the records that they read, and axes."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parents[2] / "bench/results"
#: Stands for the text's colour, which the page decides.
INK = "#010203"
COLOURS = ["#00897b", "#d9822b", "#7a6fd1", "#c2456b", "#4a86c5", "#8a8a8a"]
plt.rcParams.update({
    "font.size": 11, "svg.fonttype": "none", "svg.hashsalt": "sagebwd",
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "legend.labelcolor": INK, "grid.color": INK,
    "grid.alpha": 0.15, "axes.grid": True, "axes.axisbelow": True, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
})  # fmt: skip


#: The records that were read.
READ = []


def text_of(name):
    READ.append(name)
    return (RESULTS / name).read_text()


def record(name):
    return json.loads(text_of(name))


def axes(width=7.4, height=3.6):
    figure, panel = plt.subplots(figsize=(width, height), layout="constrained")
    return figure, panel


#: Every cell of the grid that is shown has these.
PLAIN = {"dtype": "bf16", "layout": "bhsd", "heads_kv": 0}


def times_of(name, **wanted):
    """Median ms of forward and backward by attention, head dimension, mask and tokens."""
    return {(r["attention"], r["head_dim"], r["causal"], r["tokens"]):
            r["forward+backward"]["median_ms"] for r in record(name)["rows"]
            if "error" not in r and all(r[key] == value for key, value in wanted.items())
            }  # fmt: skip


def lengths_on(panel):
    panel.set_xscale("log", base=2)
    panel.set_xticks([512, 2048, 8192, 32768, 131072], ["512", "2K", "8K", "32K", "128K"])
    panel.set_xlabel("tokens")
