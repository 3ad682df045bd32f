"""One token that is much larger: the figures of docs/use/experiments.md are the emulation's."""

import numpy
import pytest
from documents import ROOT

from sagebwd import reference

ALL = ("q", "k", "v", "dout")
#: The page's table names inputs: sizes, the token, its factor, what it multiplies, the options.
INPUTS = {
    "no large token, causal": (777, 64, 0, 1, (), dict(causal=True)),
    "the last token, causal, D128": (777, 128, -1, 20, ALL, dict(causal=True)),
    "the last token, causal, fp16": (777, 64, -1, 20, ALL, dict(causal=True, dtype="fp16")),
    "key 300 alone, times -40, a window of 70": (
        777, 64, 300, -40, ("k",), dict(causal=True, window_left=69),
    ),
}  # fmt: skip


def draw(tokens, channels, large, factor, where):
    generator = numpy.random.default_rng(0)
    tensors = {
        name: generator.standard_normal((1, 8, tokens, channels)).astype("float32") for name in ALL
    }
    for name in where:
        tensors[name][:, :, large] *= factor
    return tensors


def norm(x):
    return numpy.sqrt((x**2).sum())


def figures(tensors, **chosen):
    """Relative errors of O, dQ, dK and dV, and the largest of a row of dV."""
    dtype = chosen.get("dtype", "bf16")
    tensors = {name: reference.round_to(x, dtype) for name, x in tensors.items()}
    mask = {name: chosen[name] for name in ("causal", "window_left") if name in chosen}
    exact = reference.exact(**tensors, **mask)
    got = reference.emulate(**tensors, **chosen)
    found = [norm(got[name] - exact[name]) / norm(exact[name])
             for name in ("out", "dq", "dk", "dv")]  # fmt: skip
    of_rows = numpy.linalg.norm(exact["dv"], axis=-1)
    seen = of_rows > of_rows.mean() / 1000  # a last key that nobody attends to has no gradient
    rows = numpy.linalg.norm(got["dv"] - exact["dv"], axis=-1)[seen] / of_rows[seen]
    return found + [rows.max()]


def rows_of_page():
    page = (ROOT / "docs/use/experiments.md").read_text()
    lines = page.split("## One token that is much larger")[1].split("\n## ")[0].splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    return {first: rest for first, *rest in cells}


@pytest.mark.parametrize("name", INPUTS)
def test_the_table_has_the_errors_of_the_emulation(name):
    *sizes, chosen = INPUTS[name]
    assert rows_of_page()[name] == [f"{x:.3f}" for x in figures(draw(*sizes), **chosen)]


@pytest.mark.parametrize("precision", ["six-of-seven", "gradients16", "qk16"])
def test_what_sums_of_dp_in_fp16_cost_with_a_large_token(precision):
    tensors = draw(325, 64, -1, 20, ALL)
    chosen = dict(causal=True, precision=precision, smooth_k=False)
    of = [figures(tensors, **chosen, dp_sums=sums)[1:3] for sums in ("fp32", "fp16")]
    row = rows_of_page()[f"`{precision}`"]
    assert row == [f"{of[sums][i]:.3f}" for i in (0, 1) for sums in (0, 1)]
