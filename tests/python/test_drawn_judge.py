"""tests/drawn/judge.py and rough.py: what is called wrong, and what INT8 explains."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import cases  # noqa: E402
import doors  # noqa: E402
import judge  # noqa: E402
import rough  # noqa: E402
from plain_cases import PLAIN, case_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


@pytest.fixture(scope="module")
def judged():
    """A case's inputs, its emulation, and the truth."""
    case = case_of({"causal": "top-left"}, seq_q=200, seq_kv=200)
    given = cases.inputs_of(case, "cpu")
    return case, given, *cases.expected_of(case, given)


def test_a_right_result_is_not_called_wrong(judged):
    case, given, expected, truth = judged
    assert judge.judge(expected, expected, truth)["wrong"] == []
    # Nor is one with other groups: as accurate, but of other roundings.
    other = doors.attend(doors.Emulated, replace(case, spec=case.spec | {"group_kv": 128}), given)
    assert judge.judge(other, expected, truth)["wrong"] == []


@pytest.mark.parametrize("name", ["O", "dQ", "dK", "dV"])
@pytest.mark.parametrize("damage", ["nan", "a row zero", "a row of the next head", "scaled"])
def test_damage_is_called_wrong(judged, name, damage):
    *_, expected, truth = judged
    x = expected[name].clone()
    row = x[0, 1, 40]
    if damage == "nan":
        row[3] = math.nan
    elif damage == "a row zero":
        row.zero_()
    elif damage == "a row of the next head":
        row.copy_(x[0, 0, 40])
    else:
        x *= 1.03
    verdict = judge.judge(expected | {name: x}, expected, truth)
    assert verdict["wrong"] and all(reason.startswith(name) for reason in verdict["wrong"])


def test_a_row_that_tips_over_is_no_distance_and_two_of_a_hundred_are(judged):
    *_, expected, truth = judged
    rows = expected["dQ"].shape[0] * expected["dQ"].shape[1] * expected["dQ"].shape[2]
    for count, tips in ((rows // 100, False), (rows // 40, True)):
        x = expected["dQ"].clone()
        x.flatten(0, 2)[:: rows // count][:count] *= 1.2
        apart = judge.distance(x.double() - expected["dQ"].double(), truth.scale["dQ"], 0)
        assert (apart > 0) == tips


def test_gradients_are_held_against_those_of_the_same_forward(monkeypatch):
    """A forward that rounds otherwise moves its gradients; they are right, and out is judged."""

    class Other(doors.Emulated):
        @staticmethod
        def forward(*arguments, **options):
            return doors.Emulated.forward(*arguments, **options | {"group_kv": 128})

    monkeypatch.setattr(cases, "doors_of", lambda device: Other)
    case = case_of(seq_q=200, seq_kv=200)
    figures = cases.run_case(case, "cpu")["figures"]
    assert figures["O"]["kernels_to_emulation"] > 0.001
    assert [figures[name]["kernels_to_emulation"] for name in ("dQ", "dK", "dV")] == [0, 0, 0]


def test_what_int8_explains_grows_with_the_grid():
    x = torch.randn(1, 1, 1, 64, 32, dtype=torch.float64)
    for rows, columns in ((1, 32), (64, 1), (64, 32), (48, 20)):
        grids = rough.all_grids()[0]
        tile = x.abs().amax((-2, -1), keepdim=True)
        off = (grids.on(x, rows, columns) - x).abs()
        assert 0 < off.max() <= 0.5 * tile.max() / 127 * (1 + 1e-9)
    assert not grids.on(x * 2.0**-130, 1, 32).any() and not grids.on(0 * x, 1, 32).any()
    errors = [(grids.on(x, n, 32) - x).norm() for n in (1, 8, 64)]
    assert errors == sorted(errors)


def test_a_wrong_lse_is_called_wrong(judged):
    *_, expected, truth = judged
    shifted = expected | {"lse": expected["lse"] + 0.05}
    assert judge.judge(shifted, expected, truth)["wrong"][0].startswith("lse: off")
    lse = expected["lse"].clone()
    lse[..., 7] = -math.inf
    hidden = judge.judge(expected | {"lse": lse}, expected, truth)
    assert "not -inf just where" in hidden["wrong"][0]


@pytest.mark.parametrize("name", ["O", "dQ", "dK", "dV", "lse"])
def test_an_emulation_that_is_as_wrong_as_the_kernels_is_called_wrong(judged, name):
    *_, expected, truth = judged
    both = expected | {name: 2.5 * expected[name]}
    assert [why.split(":")[0] for why in judge.judge(both, both, truth)["wrong"]] == [name]


def test_what_is_not_zero_where_nothing_is_seen_is_called_wrong():
    case = case_of({"causal": "bottom-right"}, seq_q=90)
    expected, truth = cases.expected_of(case, cases.inputs_of(case, "cpu"))
    assert judge.judge(expected, expected, truth)["wrong"] == []
    for name in ("O", "dQ"):
        x = expected[name].clone()
        x[0, 0, 5, 3] = 1e-5
        wrong = judge.judge(expected | {name: x}, expected, truth)["wrong"]
        assert wrong == [f"{name}: not zero where nothing is seen"]


def test_numbers_that_leave_the_type_are_not_compared():
    case = case_of({"dtype": "fp16"}, group=4, values=PLAIN | {"dout": ("common offset", 3.8e3)})
    expected, truth = cases.expected_of(case, cases.inputs_of(case, "cpu"))
    assert expected["dV"].isinf().any()
    assert judge.judge(expected, expected, truth)["wrong"] == []
    nan = expected["dV"].masked_fill(expected["dV"].isinf(), math.nan)
    assert judge.judge(expected | {"dV": nan}, expected, truth)["wrong"] == []
    held = expected["dV"].clone()
    held.view(-1)[held.abs().argmin()] = math.inf
    assert judge.judge(expected | {"dV": held}, expected, truth)["wrong"]


def test_operands_that_leave_the_type_are_not_compared_where_16_bit_attention_loses_them_too():
    spec = {"dtype": "fp16", "precision": "gradients16", "head_dim": 64}
    values = PLAIN | {"v": ("gaussian", 20.0), "dout": ("one huge token", 40.0)}
    case = case_of(spec, seq_q=2, seq_kv=2, head_dim=64, value_dim=64, values=values)
    expected, truth = cases.expected_of(case, cases.inputs_of(case, "cpu"))
    lost = ~expected["dQ"].isfinite()
    assert lost.any() and not lost.all() and truth.exact["dQ"].abs().max() < 65504
    assert judge.judge(expected, expected, truth)["wrong"] == []
    elsewhere = expected["dQ"].masked_fill(~lost, math.nan)
    assert judge.judge(expected | {"dQ": elsewhere}, expected, truth)["wrong"]
    finite = {name: x.nan_to_num(0, 0, 0) for name, x in truth.sixteen.items()}
    truth = replace(truth, sixteen=finite)
    assert judge.judge(expected, expected, truth)["wrong"]


def test_errors_by_design_are_listed_and_not_called_wrong():
    case = case_of(values=PLAIN | {"q": ("gaussian", 8.0), "k": ("gaussian", 8.0)})
    result = cases.outcome_of(case, "cpu")
    assert result["outcome"] == "right"
    assert {of["tensor"] for of in result["large"]} >= {"O", "dV"}
    assert all(of["error"] > 16 * of["sixteen_bit"] for of in result["large"])
    assert cases.outcome_of(case_of(), "cpu")["large"] == []
