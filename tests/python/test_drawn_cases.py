"""tests/drawn/cases.py: that each kind of draw can fail, and the command, without a GPU."""

import json
import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import cases  # noqa: E402
import doors  # noqa: E402
import draw  # noqa: E402
import specs  # noqa: E402
from plain_cases import case_of, is_usual, packed, wrong_of  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401

from sagebwd.core import combining, sequences  # noqa: E402
from sagebwd.numerics import numerics  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


def read(path):
    return json.loads(path.read_text())


# ---- each kind of draw can fail ------------------------------------------------------------------


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
