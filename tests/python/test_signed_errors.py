"""Errors of one sign: the figures of docs/algorithm.md are the emulation's."""

from pathlib import Path

import numpy as np
import pytest

import sagebwd
from sagebwd import reference

ROOT = Path(__file__).resolve().parents[2]
PRECISIONS = {"row": {}, "block": {"granularity": "block"}, "16 bits": {"precision": "none"}}
NAMES = {"0": (0, False), "1": (1, False), "2": (2, False), "2, `smooth_v=True`": (2, True)}


def figures(mean, smooth_v):
    """By precision and tensor, the mean bias and the mean error of three seeds."""
    found = {}
    for name, chosen in PRECISIONS.items():
        tables = []
        for seed in range(3):
            q, k, v, dout = reference.random_inputs(512, head_dim=64, heads=1, seed=seed)
            smoothed = {"smooth_v": True} if smooth_v and "precision" not in chosen else {}
            tables.append(sagebwd.trace(q, 2 * k, v + mean, dout + mean / 4, causal=True,
                                        **smoothed, **chosen))  # fmt: skip
        found[name] = {tensor: [np.mean([t[tensor][figure] for t in tables])
                                for figure in ("bias", "rel_l2")] for tensor in tables[0]}
    return found


def rows_of_page():
    page = (ROOT / "docs/algorithm.md").read_text()
    lines = page.split("### Errors of one sign")[1].split("\n### ")[0].splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    return {first: rest for first, *rest in cells[2:]}


@pytest.fixture(scope="module")
def all_figures():
    return {name: figures(*how) for name, how in NAMES.items()}


def test_the_table_has_the_figures_of_the_emulation(all_figures):
    page = rows_of_page()
    assert page.keys() == NAMES.keys()

    def shown(x):
        return f"{x:.3f}".replace("-0.000", "0.000")

    for name, of in all_figures.items():
        errors = ", ".join(shown(of[p]["dQ"][1]) for p in PRECISIONS)
        biases = ", ".join(shown(of[p]["dV"][0]) for p in ("row", "block"))
        assert page[name] == [shown(of["row"]["O"][0]), errors, biases], name


def test_a_mean_of_v_makes_errors_of_one_sign_and_16_bits_do_not(all_figures):
    assert all_figures["2"]["row"]["O"][0] < -0.003
    assert abs(all_figures["2"]["16 bits"]["O"][0]) < 1e-4
    assert all_figures["2"]["row"]["dQ"][1] > 4 * all_figures["0"]["row"]["dQ"][1]


def test_smoothed_values_mend_it(all_figures):
    smoothed, without = all_figures["2, `smooth_v=True`"], all_figures["0"]
    assert abs(smoothed["row"]["O"][0]) < 5e-4
    assert smoothed["row"]["dQ"][1] < 1.02 * without["row"]["dQ"][1]
