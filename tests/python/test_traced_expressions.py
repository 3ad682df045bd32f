"""sagebwd.trace under masks and with score functions that are expressions."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from test_emulated_expressions import EITHER, LISTS, WRONG, X, arrays, given_of, naive  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import masks, reference  # noqa: E402
from sagebwd.numerics.tracing import TENSORS, _figures, _trace_torch  # noqa: E402

RESULTS = {"O": "out", "dQ": "dq", "dK": "dk", "dV": "dv"}


@pytest.mark.parametrize("name", ["flamingo", "jagged", "alibi", "both", "a causal mask too"])
def test_figures_are_those_of_fp64_and_of_both_emulations(name):
    given, more, seen, change = given_of(name)
    inputs = arrays(seen)
    table = sagebwd.trace(*inputs, **given, **more)
    exact, emulated = naive(*inputs, seen, change), reference.emulate(*inputs, **given, **more)
    for tensor, key in RESULTS.items():
        right = exact[key].numpy()
        error = np.linalg.norm(emulated[key] - right) / np.linalg.norm(right)
        assert table[tensor]["rel_l2"] == pytest.approx(error, rel=1e-3), tensor
    options = sagebwd.Spec(head_dim=64, **more)
    chosen = {name: getattr(options, name) for name in ("causal", "granularity", "smooth_k",
                                                        "rotate", "precision")}  # fmt: skip
    of_torch = _trace_torch([torch.from_numpy(x) for x in inputs], "cpu", "bf16", None, chosen, {},
                            None, given.get("mask"), given.get("score"))  # fmt: skip
    for name in TENSORS:
        assert of_torch[name]["rel_l2"] == pytest.approx(table[name]["rel_l2"], rel=5e-3), name


def test_errors_of_what_is_exactly_zero():
    """Queries that see one key have P = 1 and dS = 0. Without a gradient dV is 0, too."""
    q, k, v, dout = arrays(torch.eye(50, dtype=torch.bool)[None, None])
    chosen = dict(causal="none", granularity="row", smooth_k=True, rotate=True,
                  precision="six-of-seven")  # fmt: skip
    for gradient in (dout, 0 * dout):
        inputs = q, k, v, gradient
        of_torch = _trace_torch([torch.from_numpy(x) for x in inputs], "cpu", "bf16", None, chosen,
                                {}, None, "q == k", None)  # fmt: skip
        for table in (sagebwd.trace(*inputs, mask="q == k"), of_torch):
            none = json.loads(json.dumps(table.to_dict()))["dS"]
            expected = (1.0, 0.0, 0.0) if gradient is not dout else (None, None, None)
            assert none == dict(zip(("cosine", "rel_l2", "bias"), expected))
            assert ("exact 0" in str(table)) == (gradient is dout)
            assert 0 < table["O"]["rel_l2"] < 0.02


@pytest.mark.parametrize("sums, found", [
    ((0, 0, 0, 0, 0, 0), (1, 0, 0)), ((0, 2, 0, 4, 0, 4), (None, None, None)),
    ((0, -2, 2, 0, 4, 4), (0, 1, -1)),
    ((math.nan, math.nan, 0, math.nan, 0, math.nan), (math.nan, math.nan, math.nan)),
])  # fmt: skip
def test_figures_of_zeros(sums, found):
    """`sums`: of products, of differences and of magnitudes; of the squares of ours, of the exact
    tensor, and of differences."""
    assert list(_figures(*sums).values()) == pytest.approx(list(found), nan_ok=True)


def test_named_inputs_and_tensors_that_train():
    """A trace needs no gradient of what a score indexes."""
    slope = torch.tensor([0.1, 0.01], requires_grad=True)
    score = masks.trace_score("s - slope[h] * abs(q - k)", {"slope": slope})
    inputs = dict(name="gaussian", seq_q=100, heads=2, head_dim=64)
    table = sagebwd.trace(inputs=inputs, mask="q >= k", score=score)
    assert all(0.003 < table[name]["rel_l2"] < 0.03 for name in ("dS", *RESULTS))
    assert table != sagebwd.trace(inputs=inputs, mask="q >= k")


@pytest.mark.parametrize("message", WRONG)
def test_wrong_expressions(message):
    with pytest.raises((sagebwd.SpecError, TypeError), match=message):
        sagebwd.trace(X, X, X, X, **WRONG[message])


@pytest.mark.parametrize("name", EITHER)
def test_lists_of_blocks_have_neither(name):
    with pytest.raises(sagebwd.SpecError, match=f"block_mask and {name} are given together"):
        sagebwd.trace(X, X, X, X, block_mask=LISTS, **{name: EITHER[name]})


def test_texts_without_pytorch():
    code = """
import sys; sys.modules["torch"] = None
import sagebwd
inputs = dict(name="gaussian", seq_q=40, heads=2, head_dim=64)
both = [sagebwd.trace(inputs=inputs, mask=mask, score="s - float(q - k) / 9.0")
        for mask in ("q >= k", "q >= k & q - k < 40")]
print(both[0] == both[1] != sagebwd.trace(inputs=inputs, mask="q >= k"))
try: sagebwd.trace(inputs=inputs, mask="doc[q] == 1")
except sagebwd.SpecError as error: print(error)
"""
    lines = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert lines[0] == "True" and "process has no PyTorch: install it, or pass a text" in lines[1]
