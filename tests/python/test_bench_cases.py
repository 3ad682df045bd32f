"""bench/cases.py and judge.py: what is called wrong, without a GPU."""

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import cases  # noqa: E402
import doors  # noqa: E402
import draw  # noqa: E402
import judge  # noqa: E402
import rough  # noqa: E402
import specs  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401

from sagebwd import combining, numerics, sequences  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")

SPEC = dict(head_dim=64, dtype="bf16", causal="none", smooth_k=True, rotate=True, group_kv=64,
            family="", precision="six-of-seven", deterministic=True, dq_sums="fp32",
            granularity="row", window="", packed=False, sink_keys=0, smooth_q=False)  # fmt: skip
PLAIN = {name: ("gaussian", 1.0) for name in draw.TENSORS}


def read(path):
    return json.loads(path.read_text())


def case_of(spec=None, **what):
    """A plain case with what is said."""
    drawn = draw.draw_case(0, [SPEC | (spec or {})], 0)
    strides = dict.fromkeys((*draw.TENSORS, "dlse"), "heads first")
    plain = dict(seq_q=70, seq_kv=70, heads_kv=2, group=2, batch=1, value_dim=64,
                 window=(None, None), sequences=None, layout="bhsd", strides=strides,
                 values=PLAIN, key_offset=0.0, zeros=None, unused="nan", softmax_scale=None,
                 door="halves", ends_of_parts=(), told="", dlse="none", k_mean=None, sinks=None,
                 says_group_q=False, again=False)  # fmt: skip
    return replace(drawn, **plain | what)


def is_usual(case):
    """Whether magnitudes are those that models have, and no sink is off."""
    return case.sinks != "some off" and min(scale for _, scale in case.values.values()) > 1e-7


def packed(said_by="both", **what):
    where = draw.Sequences(said_by, used=((20, 30), (33, 17)), rooms=((25, 31), (40, 20)),
                           before=(3, 4), behind=(5, 6), beyond=0, without="")  # fmt: skip
    return dict(batch=2, sequences=where) | what


# ---- what is called wrong ------------------------------------------------------------------------


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
        apart = judge._apart(x.double() - expected["dQ"].double(), truth.scale["dQ"], 0)
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


def test_errors_by_design_are_listed_and_not_called_wrong():
    case = case_of(values=PLAIN | {"q": ("gaussian", 8.0), "k": ("gaussian", 8.0)})
    result = cases.outcome_of(case, "cpu")
    assert result["outcome"] == "right"
    assert {of["tensor"] for of in result["large"]} >= {"O", "dV"}
    assert all(of["error"] > 16 * of["sixteen_bit"] for of in result["large"])
    assert cases.outcome_of(case_of(), "cpu")["large"] == []


# ---- each kind of draw can fail ------------------------------------------------------------------


def wrong_of(case):
    result = cases.outcome_of(case, "cpu")
    assert result["outcome"] in ("right", "wrong")
    return result["wrong"]


@pytest.mark.parametrize("causal, window", [
    ("top-left", (1, None)), ("bottom-right", (30, None)), ("none", (None, 1)), ("none", (30, 30)),
    ("bottom-right", (None, None)), ("top-left", (None, 64))])  # fmt: skip
def test_a_mask_that_emulation_and_package_share_wrongly(monkeypatch, causal, window):
    case = case_of({"causal": causal}, window=window, seq_kv=60)
    assert wrong_of(case) == []
    right = numerics.visible_keys

    def shifted(mask, m, n, device):
        seen = right(mask, m, n, device)
        return seen.roll(1, 1)

    monkeypatch.setattr(numerics, "visible_keys", shifted)
    assert wrong_of(case)
    # A window on the right that counts under a causal mask.
    monkeypatch.setattr(numerics, "visible_keys", lambda mask, m, n, device: right(
        replace(mask, causal="none"), m, n, device))  # fmt: skip
    assert bool(wrong_of(case)) == (causal != "none")


def with_other(method, change):
    """The emulation as a subject, one of whose doors has its arguments changed."""
    right = getattr(doors.Emulated, method)

    def changed(*arguments, **options):
        return right(*change(arguments, options), **options)

    return type("Broken", (doors.Emulated,), {method: staticmethod(changed)})


def without(name, value=None):
    def change(arguments, options):
        if name in options:
            options[name] = value
        return arguments
    return change


FAR = dict(k_mean="far", key_offset=2.0)
PARTS = dict(door="parts", ends_of_parts=(20, 20, 70), key_offset=2.0)


IGNORED = {
    "sinks dropped": ("attention", without("sink_logits"), lambda: case_of(
        door="autograd", sinks="logits")),
    "a gradient of lse dropped": ("backward", without("dlse"), lambda: case_of(dlse="alone")),
    "a mean of keys ignored": ("forward", without("k_mean"), lambda: case_of(**FAR)),
    "a part not known as one": ("backward", without("part"), lambda: case_of(told="part", **PARTS)),
    "a part with a mean of its own": ("backward", without("k_mean"), lambda: case_of(
        told="mean", k_mean="own", **PARTS)),
    "keys that do not count": ("forward", without("seqused_k"), lambda: case_of(
        {"packed": True}, **packed())),
    "keys that do not count, in numbers": ("forward", without("seqused_k"), lambda: case_of(
        {"packed": True}, **packed("seqused", unused="numbers"))),
    "queries that do not count": ("backward", without("seqused_q"), lambda: case_of(
        {"packed": True}, **packed())),
    "queries that do not count, by autograd": ("attention", without("seqused_q"), lambda: case_of(
        {"packed": True}, **packed(unused="numbers", door="autograd"))),
    "a window": ("forward", without("window_left"), lambda: case_of(window=(40, None))),
    "a scale": ("forward", without("softmax_scale"), lambda: case_of(softmax_scale=0.05)),
    "channels of dO that lie apart": (
        "backward", lambda given, options: (
            given[0].as_strided(given[0].shape, (*given[0].stride()[:3], 1)), *given[1:]),
        lambda: case_of(strides=case_of().strides | {"dout": "channels apart"})),
    "one head for all": (
        "forward", lambda given, options: (given[0], given[1].roll(1, 2), given[2]),
        lambda: case_of(strides=case_of().strides | {"k": "one head for all"})),
}  # fmt: skip


@pytest.mark.parametrize("what", IGNORED)
def test_what_a_subject_ignores(monkeypatch, what):
    method, change, case = IGNORED[what]
    case = case()
    assert wrong_of(case) == []
    broken = with_other(method, change)
    monkeypatch.setattr(cases, "doors_of", lambda device: broken)
    assert wrong_of(case)


@pytest.mark.parametrize("said_by", ["both", "cu_seqlens", "seqused"])
@pytest.mark.parametrize("tensor", range(3))
def test_gradients_of_gaps_that_are_left_unwritten(monkeypatch, said_by, tensor):
    case = case_of({"packed": True}, **packed(said_by))
    assert wrong_of(case) == []

    class Broken(doors.Emulated):
        @staticmethod
        def backward(*arguments, **options):
            found = [x.clone() for x in doors.Emulated.backward(*arguments, **options)]
            x = found[tensor]
            x[(-1,) if x.dim() == 3 else (0, 0, -1)] = 1e-3
            return found

    monkeypatch.setattr(cases, "doors_of", lambda device: Broken)
    assert any("not zero where nothing is seen" in why for why in wrong_of(case))


def test_a_token_more_than_counts(monkeypatch):
    case = case_of({"packed": True}, **packed("seqused"))
    right = sequences.spans
    monkeypatch.setattr(sequences, "spans", lambda problem, packing: [
        (b, q, slice(k.start, k.stop + 1)) for b, q, k in right(problem, packing)])  # fmt: skip
    assert wrong_of(case)


def test_sinks_that_emulation_and_package_share_wrongly(monkeypatch):
    case = case_of(door="autograd", sinks="logits", dlse="with dout")
    right = combining.with_sink
    monkeypatch.setattr(combining, "with_sink", lambda out, lse, sink, layout: (
        right(out, lse, sink + 6, layout=layout)))  # fmt: skip
    assert {why.split(":")[0] for why in wrong_of(case)} >= {"O", "lse", "dSink"}


def test_other_bits_in_a_second_call(monkeypatch):
    calls = iter(range(100))

    class Broken(doors.Emulated):
        @staticmethod
        def backward(*arguments, **options):
            dq, dk, dv = doors.Emulated.backward(*arguments, **options)
            return dq * (1 + next(calls) * 2**-8), dk, dv

    monkeypatch.setattr(cases, "doors_of", lambda device: Broken)
    assert wrong_of(case_of(again=True)) == ["dQ: a second call gives other bits"]
    calls = iter(range(100))
    assert wrong_of(case_of({"deterministic": False}, again=True)) == []


def test_the_package_takes_every_drawn_call(kernels_on_the_cpu, monkeypatch):
    """By its own doors, with kernels that know fewer options than are drawn: so that none is wrong
    but a few that round otherwise, and none is refused."""
    monkeypatch.setattr(cases, "doors_of", lambda device: doors.Kernels)
    drawn_specs = specs.draw_specs(32, random.Random(1))
    drawn = (draw.draw_case(i, drawn_specs, 1, 2000) for i in range(40))
    found = [cases.outcome_of(case, "cpu")["outcome"] for case in drawn if is_usual(case)]
    assert len(found) > 20 and found.count("right") >= 0.9 * len(found)
    assert "refused" not in found


# ---- the command ---------------------------------------------------------------------------------


def run(tmp_path, *words):
    out = tmp_path / "cases.json"
    code = cases.main(["--device", "cpu", "--out", str(out), "--scores", "4000", *words])
    return code, read(out)


def _few():
    drawn_specs = specs.draw_specs(12, random.Random(0))
    drawn = (draw.draw_case(i, drawn_specs, 0, 4000) for i in range(100))
    drawn = [case.index for case in drawn if is_usual(case)]
    return ("--specs", "12", "--only", *map(str, drawn[:12]))


FEW = _few()


def test_cases_command(tmp_path):
    code, record = run(tmp_path, *FEW)
    assert code == 0 and record["passed"]
    assert [record[key] for key in ("ran", "right", "wrong", "refused")] == [12, 12, 0, 0]
    assert record["parameters"]["subject"] == "Emulated"
    assert len(record["parameters"]["specs"]) == 12
    assert record["distribution"]["dQ kernels"].keys() == {"p50", "p90", "p99", "p100"}


def test_cases_command_counts_what_is_wrong(tmp_path, monkeypatch):
    class Broken(doors.Emulated):
        @staticmethod
        def backward(*arguments, **options):
            dq, dk, dv = doors.Emulated.backward(*arguments, **options)
            return dq, 1.5 * dk, dv

    monkeypatch.setattr(cases, "doors_of", lambda device: Broken)
    code, record = run(tmp_path, *FEW)
    assert code == 1 and not record["passed"] and record["wrong"] >= 3
    assert record["wrong"] + record["right"] == 12
    assert record["wrong_cases"][0]["wrong"][0].startswith("dK")


def test_cases_command_tells_of_refused_kernels_and_fails(tmp_path, monkeypatch):
    refused = []

    def warm_up(given, device, record):
        refused.append(given[0])
        return [0]

    monkeypatch.setattr(cases, "warm_up", warm_up)
    code, record = run(tmp_path, *FEW)
    assert len(refused) == 2  # one of each family
    assert code == 1 and not record["passed"] and not record["wrong"]
    assert record["refused"] >= 1 and record["refused"] + record["right"] == 12


def test_a_case_that_no_kernel_takes_is_refused(monkeypatch):
    def refuse(*arguments, **options):
        raise cases.sagebwd.SpecError("no")

    broken = type("Broken", (doors.Emulated,), {"forward": staticmethod(refuse)})
    monkeypatch.setattr(cases, "doors_of", lambda device: broken)
    assert cases.outcome_of(case_of(says_group_q=True), "cpu")["outcome"] == "refused"


def test_several_processes_give_the_cases_in_order(monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(cases, "ProcessPoolExecutor", lambda jobs, *how: ThreadPoolExecutor(jobs))
    drawn = [draw.draw_case(i, specs.draw_specs(6, random.Random(0)), 0) for i in range(8)]
    monkeypatch.setattr(cases, "outcome_of", lambda case, device: {"index": case.index})
    found = list(cases.outcomes(drawn, [drawn[2].spec], "cpu", jobs=2))
    assert [result.get("index") for result in found] == [0, 1, None, 3, 4, 5, 6, 7]
    assert found[2]["outcome"] == "refused"


def test_fresh_memory_is_poisoned_and_only_there():
    before = torch.utils.deterministic.fill_uninitialized_memory
    with cases.poisoned_allocations():
        assert torch.isnan(torch.empty(1000)).all()
        assert (torch.empty(1000, dtype=torch.uint8) == 255).all()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == before
