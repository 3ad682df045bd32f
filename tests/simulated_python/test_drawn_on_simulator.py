"""Some drawn cases with intervals (tests/drawn) on a simulated GPU; a real one runs a thousand."""

import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import simulator_needed  # noqa: E402, F401

from test_linear_branch import kernels_for_lists  # noqa: E402, F401
from test_mixed import on_the_simulator  # noqa: E402, F401

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder)
                for folder in ("bench", "tests/drawn")]  # fmt: skip
import cases  # noqa: E402
import doors  # noqa: E402
import draw  # noqa: E402
import specs  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_simulator")
#: Causal or not, and columns: those of every mask.
FORMS = specs.CHOICES_OF_INTERVALS[specs.MASK]


@pytest.mark.parametrize("form", FORMS[::2], ids=str)
def test_kernels_are_right(form, monkeypatch):
    monkeypatch.setattr(cases, "doors_of", lambda device: doors.Kernels)
    drawn_specs = specs.draw_specs(40, random.Random(3), fp16_sums=False, kind="intervals")
    spec = next(spec for spec in drawn_specs if spec["head_dim"] in (64, 128)
                and (spec["causal"], spec["intervals"]) == form)  # fmt: skip
    drawn = [draw.draw_case(i, [spec], 5, 60000) for i in range(4)]
    assert [cases.outcome_of(case, "cpu")["wrong"] for case in drawn] == [[]] * 4
