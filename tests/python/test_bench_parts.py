"""Parts of `sagebwd bench` are tested: the measuring loop, FP64, one case's rows, its table."""

import math
import warnings

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from sagebwd.benchmark import attentions, measuring, table, timing, truth  # noqa: E402
from sagebwd.benchmark.attentions import Contender  # noqa: E402
from sagebwd.benchmark.cases import MODELS, Case  # noqa: E402
from sagebwd.benchmark.timing import Timing  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


# ---- the loop ------------------------------------------------------------------------------------


def test_candidates_take_turns_and_the_first_rounds_do_not_count():
    order = []
    found = timing.in_turn({"a": "A", "b": "B"}, lambda one: order.append(one) or len(order),
                           rounds=3, warmup=1)  # fmt: skip
    assert all(set(order[i : i + 2]) == {"A", "B"} for i in range(0, 8, 2)) and len(order) == 8
    counted = list(enumerate(order, 1))[2:]
    assert found == {name: [i for i, one in counted if one == name.upper()] for name in "ab"}


def test_who_went_before_does_not_decide():
    """One candidate slows down whatever comes next; the others are equal."""
    before = [""]

    def measure(name):
        slow, before[0] = before[0] == "hot", name
        return 2.0 if slow else 1.0

    found = timing.in_turn({name: name for name in ("a", "hot", "b", "c")}, measure, 15, 3)
    assert {name: timing.median(times) for name, times in found.items() if name != "hot"} == {
        "a": 1.0, "b": 1.0, "c": 1.0}  # fmt: skip


def test_a_figure_is_the_median_of_what_the_clock_says():
    says = {"a": iter([50.0, 1.0, 9.0, 2.0]), "b": iter([50.0, 7.0, 7.0, 8.0])}
    ran = []

    def clock(call):
        call()
        return next(says[ran[-1]])

    calls = {name: lambda name=name: ran.append(name) for name in says}
    found = timing.time_interleaved(calls, clock, rounds=3, warmup=1)
    assert found == {"a": Timing(2.0, 1.0, 3), "b": Timing(7.0, 0.0, 3)}
    assert sorted(ran) == list("aaaabbbb")


def test_the_clock_of_a_cpu_is_wall_time():
    ran = []
    assert timing.clock_of("cpu")(lambda: ran.append(1)) >= 0 and ran == [1]


def test_a_timing_is_robust_to_an_outlier():
    found = Timing.of([1.0, 2.0, 3.0, 4.0, 1000.0])
    assert (found.median_ms, found.mad_ms) == (3.0, 1.0)
    assert found.json() == {"median_ms": 3.0, "mad_ms": 1.0, "samples": 5}


@pytest.mark.parametrize(("rounds", "round_ms", "fewer"),
                         [(15, 1.0, 15), (15, 2000.0, 10), (15, 1e5, 3), (2, 1e5, 2), (15, 0, 15)])
def test_long_rounds_are_fewer(rounds, round_ms, fewer):
    assert measuring.rounds_within(rounds, round_ms) == fewer


def test_relative_l2():
    assert truth.relative_l2(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == 0.2
    assert truth.relative_l2(torch.zeros(2), torch.zeros(2)) == 0
    assert truth.relative_l2(torch.ones(2), torch.zeros(2)) == math.inf


# ---- FP64 ----------------------------------------------------------------------------------------

SEEN = {  # by causal, left, right, queries, keys: the keys that each query sees
    ("none", None, None, 2, 3): [[0, 1, 2], [0, 1, 2]],
    ("top-left", None, None, 3, 3): [[0], [0, 1], [0, 1, 2]],
    ("top-left", None, None, 2, 4): [[0], [0, 1]],
    ("bottom-right", None, None, 2, 4): [[0, 1, 2], [0, 1, 2, 3]],
    ("bottom-right", None, None, 3, 1): [[], [], [0]],
    ("top-left", 1, None, 4, 4): [[0], [0, 1], [1, 2], [2, 3]],
    ("none", 1, 0, 2, 4): [[1, 2], [2, 3]],
    ("none", None, 1, 3, 3): [[0, 1], [0, 1, 2], [0, 1, 2]],
    ("bottom-right", 0, None, 2, 3): [[1], [2]],
}  # fmt: skip


def case_of(causal="none", left=None, right=None, queries=4, keys=4, **more):
    sizes = dict(batch=1, heads=2, heads_kv=1, head_dim=64) | more
    return Case("", seq_len=queries, seq_kv=keys, causal=causal, window_left=left,
                window_right=right, **sizes)  # fmt: skip


@pytest.mark.parametrize("mask", SEEN, ids=str)
def test_what_a_query_sees(mask):
    case = case_of(*mask)
    found = truth.visible(case, 0, case.seq_len, "cpu")
    assert [row.nonzero().flatten().tolist() for row in found] == SEEN[mask]
    assert torch.equal(truth.visible(case, 1, case.seq_len, "cpu"), found[1:])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", SEEN, ids=str)
def test_fp64_in_parts_is_attention_by_autograd(monkeypatch, mask, sinks):
    """Each element by loops and PyTorch's own differentiation."""
    torch.manual_seed(1)
    queries, keys = mask[3:]
    q, dout = (torch.randn(2, queries, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(keys, 8, dtype=torch.float64) for _ in range(2))
    sink = torch.tensor([0.5, -1.0], dtype=torch.float64)
    monkeypatch.setattr(truth, "SCORES", 2 * 2 * keys)  # two queries at a time
    found = truth.exact(case_of(*mask, head_dim=8), q, k, v, dout, sink if sinks else None)

    for x in (q, k, v):
        x.requires_grad_()
    rows = []
    for head in range(2):
        for i, seen in enumerate(SEEN[mask]):
            weights = [(q[head, i] @ k[j] / 8**0.5).exp() for j in seen]
            total = sum(weights) + (sink[head].exp() if sinks else 0)
            mixed = [w / total * v[j] for w, j in zip(weights, seen)]
            rows.append(sum(mixed) if mixed else torch.zeros(8, dtype=torch.float64) * q.sum())
    out = torch.stack(rows).view(2, queries, 8)
    expected = out.detach(), *torch.autograd.grad(out, (q, k, v), dout)
    for name, x in zip(truth.TENSORS, expected):
        torch.testing.assert_close(found[name], x, msg=name)


def test_a_slice_is_the_last_key_head_of_the_last_sequence():
    case = case_of("top-left", queries=6, keys=6, batch=2, heads=6, heads_kv=2)
    *tensors, sink = measuring.inputs_of(case, 3, "cpu")
    assert sink is None and all(x.abs().min() > 0 for x in tensors)
    part = truth.Slice(case, *tensors)
    assert part.exact["O"].shape == (3, 6, 64) and part.exact["dV"].shape == (6, 64)
    q, k, v, dout = (x.double().detach() for x in tensors)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    results = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
    assert all(error < 1e-12 for error in part.errors(results).values())
    results[2] = results[2].clone()
    results[2][-1, -1, 0] += 1
    wrong = part.errors(results)
    assert wrong["dK"] > 1e-2 and max(wrong["O"], wrong["dQ"], wrong["dV"]) < 1e-12
    results[2][-1, -1, 0] -= 1
    results[2][0] += 1  # nobody looks there
    assert part.errors(results)["dK"] < 1e-12


# ---- one case ------------------------------------------------------------------------------------


def stands_in(factor=1.0):
    def attend(q, k, v):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out * factor

    return attend


def refuses(q, k, v):
    warnings.warn("cuDNN attention kernel not used because: (Triggered internally at x)",
                  stacklevel=1)  # fmt: skip
    warnings.warn("cuDNN SDPA is not deterministic. (Triggered internally at /a/b.cpp:1.)",
                  stacklevel=1)  # fmt: skip
    raise RuntimeError("No available kernel. Aborting execution.")


def measured(contenders, milliseconds):
    """Rows on the CPU; the clock says what `milliseconds` holds of each call, in its order."""
    case = case_of(queries=16, keys=16)
    order, steps = iter(milliseconds), []

    def clock(call):
        call()
        return next(order)

    rows = measuring.measure(case, contenders, measuring.inputs_of(case, 0, "cpu"), rounds=3,
                             device="cpu", clock=clock,
                             progress=lambda *step: steps.append(step))  # fmt: skip
    assert next(order, None) is None
    return case, rows, steps


def test_a_case_has_a_row_for_each_contender_in_their_order(monkeypatch):
    monkeypatch.setattr(timing.random.Random, "shuffle", lambda self, order: order.sort())
    contenders = [
        Contender("cudnn", True, refuses),
        Contender("fa3", False, refusal="flash_attn_interface is not installed"),
        Contender("fa2", True, stands_in()), Contender("sagebwd dv16", True, stands_in(1.01)),
        Contender("sagebwd dv16", False, same_as="sagebwd dv16"),
    ]  # fmt: skip
    # Each pass has a trial of two rounds, two rounds that warm up, and three that count.
    forward = [9, 9, 9, 9, 9, 9, 9, 9, 2, 4, 1, 5, 3, 6]
    _, rows, steps = measured(contenders, [*forward, *(10 * x for x in forward)])
    assert [(row.attention, row.deterministic) for row in rows] == [
        (one.name, one.deterministic) for one in contenders]  # fmt: skip
    cudnn, fa3, fa2, ours, same = rows
    assert cudnn.refusal == "cuDNN SDPA is not deterministic."
    assert fa3.refusal == "flash_attn_interface is not installed"
    assert fa2.forward == Timing(2, 1, 3) and fa2.both == Timing(20, 10, 3) and fa2.speed == 1
    assert ours.forward == Timing(5, 1, 3) and ours.both.median_ms == 50
    assert ours.speed == 20 / 50 and ours.memory_mib is None
    assert 0 < fa2.errors["dQ"] < 0.005 and 0.005 < ours.errors["O"] < 0.015
    assert same.both == ours.both and same.speed is None  # nothing of PyTorch's without the promise
    assert same.json()["same_kernels_as"] == "sagebwd dv16, deterministic"
    assert ("running fa2, deterministic", 2, 5) in steps and steps[-1] == ("timed", 2, 2)


def test_speeds_are_relative_to_the_fastest_of_pytorch_in_the_same_part():
    def row(name, deterministic, ms):
        errors = dict.fromkeys(truth.TENSORS, 0.01)
        return measuring.Row(name, deterministic, both=Timing(ms, 0, 3), errors=errors)

    rows = [row("fa2", False, 10), row("cudnn", False, 5), row("fa4", False, 4),
            row("sagebwd dv16", False, 10), row("fa2", True, 20),
            row("sagebwd dv16", True, 10)]  # fmt: skip
    assert [one.speed for one in measuring.completed(rows)] == [0.5, 1, 1.25, 0.5, 1, 2]


def test_a_wrong_result_is_marked():
    case, rows, _ = measured([Contender("fa2", False, stands_in(1.5))], [1.0] * 14)
    shown = table.table(case, rows).splitlines()[-1]
    assert rows[0].is_wrong and rows[0].json()["is_wrong"] and rows[0].speed is None
    assert 0.49 < rows[0].errors["dV"] < 0.51 and shown.endswith("!")
    assert "'!' marks" in table.legend(rows)
    _, (nan,), _ = measured([Contender("fa2", False, stands_in(math.nan))], [1.0] * 14)
    assert nan.is_wrong and nan.json()["rel_l2"]["O"] is None


def test_both_passes_run_in_their_context():
    seen = []

    def attend(q, k, v):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return stands_in()(q, k, v)

    before = torch.are_deterministic_algorithms_enabled()
    measured([Contender("fa2", True, attend, attentions.deterministic_algorithms)], [1.0] * 14)
    assert seen and all(seen) and torch.are_deterministic_algorithms_enabled() == before


def test_deterministic_algorithms_are_put_back():
    torch.use_deterministic_algorithms(True, warn_only=True)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with attentions.deterministic_algorithms():
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == filled


def test_reasons():
    assert "memory is too small" in attentions.reason(torch.cuda.OutOfMemoryError("Tried to"))
    told = attentions.reason(ValueError("no"), ["a warning that is about something else"])
    assert told == "ValueError: no"


# ---- contenders ----------------------------------------------------------------------------------


def contenders(case, backends=("cudnn", "fa2", "efficient", "fa3", "fa4"), **more):
    sink = torch.zeros(case.heads) if case.sinks else None
    given = dict(precisions=["six-of-seven", "gradients16"], deterministic=[False, True], more={},
                 arch="sm_90a", device="cpu", sink=sink)  # fmt: skip
    return attentions.contenders_of(case, list(backends), **given | more)


def test_every_backend_has_a_contender_or_a_reason():
    found = contenders(case_of("top-left"), attentions.BACKENDS)
    names = ["cudnn", "fa2", "efficient", "flex", "fa3", "fa4", "sagebwd six-of-seven",
             "sagebwd gradients16"]  # fmt: skip
    assert [one.name for one in found] == 2 * names
    assert [one.deterministic for one in found] == 8 * [False] + 8 * [True]
    for one in found:
        assert (one.attend is not None) + bool(one.refusal) + bool(one.same_as) == 1, one
    by_name = {(one.name, one.deterministic): one for one in found}
    assert by_name["fa3", True].refusal == "flash_attn_interface is not installed"
    assert by_name["fa4", False].refusal == "flash_attn.cute is not installed"
    assert by_name["cudnn", True].context is attentions.deterministic_algorithms


def test_the_same_kernels_are_not_measured_twice():
    found = contenders(MODELS["llama-3-8b"], ["sagebwd"])
    same = {one.name: one.same_as for one in found if not one.deterministic}
    assert same["sagebwd six-of-seven"] == "sagebwd six-of-seven"  # on sm_90a it has no other ones
    assert same["sagebwd gradients16"] == ""
    alone = contenders(MODELS["llama-3-8b"], ["sagebwd"], deterministic=[False])
    assert all(one.attend and not one.same_as for one in alone)


def test_what_an_attention_lacks_is_its_reason():
    def refusals(case, **more):
        return {one.name: one.refusal for one in contenders(case, deterministic=[False], **more)}

    of_sinks = refusals(MODELS["gpt-oss-20b"])
    told = {of_sinks[name] for name in attentions.OF_PYTORCH}
    assert told == {"PyTorch's attention has no sinks"}
    unequal = refusals(case_of("top-left", queries=4, keys=8))
    assert "bottom right: pass causal='bottom-right'" in unequal["fa2"] and not unequal["cudnn"]
    assert not refusals(case_of("bottom-right", queries=4, keys=8))["fa2"]
    ours = contenders(case_of(), ["sagebwd"], more={"smooth_q": True}, precisions=["qk16"])
    assert all("smooth_q" in one.refusal for one in ours)


def test_flash_attention_3_and_4_get_the_case(monkeypatch):
    seen = []

    def flash_attn_func(q, k, v, **keywords):
        seen.append((q.shape, keywords))
        return stands_in()(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), "lse"

    def module(name):
        return type("module", (), {"flash_attn_func": staticmethod(flash_attn_func)})

    monkeypatch.setattr(attentions, "module", module)
    case = case_of("top-left", 2, None, 8, 8, sinks=True)
    q, k, v, _, _ = measuring.inputs_of(case, 0, "cpu")
    fa3, fa4 = contenders(case, ["fa3", "fa4"], deterministic=[True])
    assert fa3.refusal == "FlashAttention-3 has no sinks"
    assert fa4.attend(q, k, v).shape == q.shape
    shape, keywords = seen.pop()
    assert shape == (1, 8, 2, 64) and keywords.pop("learnable_sink").dtype == torch.bfloat16
    assert keywords == {"causal": True, "window_size": (2, None), "deterministic": True}
    (fa3,) = contenders(case_of("none", 2, None, 8, 8), ["fa3"], deterministic=[False])
    fa3.attend(q, k, v)
    assert seen.pop()[1] == {"causal": False, "window_size": (2, -1), "deterministic": False}


def test_a_module_that_cannot_be_imported_says_why(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_attention.py").write_text("raise OSError('undefined symbol: x')")
    with pytest.raises(attentions.Unavailable, match="cannot be imported: undefined symbol"):
        attentions.module("broken_attention")
    with pytest.raises(attentions.Unavailable, match=r"^no\.such is not installed$"):
        attentions.module("no.such")
    (tmp_path / "needing").mkdir()
    (tmp_path / "needing/__init__.py").write_text("import no_such_thing")
    with pytest.raises(attentions.Unavailable, match="cannot be imported: No module named 'no_su"):
        attentions.module("needing.cute")


@pytest.mark.parametrize("name", ["cudnn", "efficient"])
def test_a_mask_says_windows_to_pytorch(monkeypatch, name):
    given = []
    monkeypatch.setattr(attentions, "sdpa", lambda *words: given.append(words) or stands_in())
    contenders(case_of("top-left", 1, None, 3, 3), [name], deterministic=[False])
    ((backend, causal, mask),) = given
    assert backend.lower().startswith(name) and causal is False
    assert mask.tolist() == [[True, False, False], [True, True, False], [False, True, True]]
    given.clear()
    contenders(case_of("top-left"), [name], deterministic=[False])
    assert given[0][1:] == (True, None)


# ---- the table -----------------------------------------------------------------------------------

FIGURES = dict(forward=Timing(3.8123, 0.0152, 15), both=Timing(12.583, 0.04, 15), memory_mib=772.25,
               errors={"O": 0.0023, "dQ": 0.0024, "dK": 0.0024, "dV": 0.0023})  # fmt: skip


def rows_of():
    long = Timing(123456.7, 1234.5, 3)
    return [
        measuring.Row("cudnn", False, **FIGURES, speed=1.0),
        measuring.Row("sagebwd six-of-seven", False, same_as="sagebwd six-of-seven",
                      **FIGURES | {"memory_mib": 81920.0, "both": long, "forward": long},
                      speed=0.84),
        measuring.Row("fa4", True, refusal="why " * 50),
        measuring.Row("sagebwd six-of-seven", True, **FIGURES),
    ]  # fmt: skip


def test_a_table_fits_100_columns_and_says_what_was_measured():
    shown = table.table(MODELS["gemma-3-12b-window"], rows_of())
    assert max(map(len, f"{shown}\n{table.legend(rows_of())}".splitlines())) <= 100
    lines = shown.splitlines()
    assert lines[0].startswith("gemma-3-12b-window: batch 1, 16 heads, 8 key/value heads, 8192")
    for number in ("3.812 ± 0.4%", "12.583 ± 0.3%", "1.00x", "772", "0.0023"):
        assert number in next(line for line in lines if line.startswith("cudnn"))
    copied, own = (line for line in lines if line.startswith("sagebwd six-of-seven "))
    assert copied.endswith("=") and "123456.7" in copied and not own.endswith("=")
    assert " - " in own  # no speed: nothing to compare with
    assert shown.count("why") == 50 and "3 to 15 rounds" in table.legend(rows_of())
