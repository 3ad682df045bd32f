"""bench/balance_lists.py, without a GPU: what is run, arithmetic done by hand, and whole runs with
stand-ins for the processes."""

import json

import pytest

torch = pytest.importorskip("torch")

import balance_lists  # noqa: E402
import balance_model  # noqa: E402
import balance_runs  # noqa: E402
import balance_told  # noqa: E402
import plot  # noqa: E402
import tables  # noqa: E402
from gpus import named  # noqa: E402
from slowed_cards import hopper  # noqa: E402, F401
from sparse_cases import Shape  # noqa: E402

from sagebwd import _core  # noqa: E402

GEFORCE = named("RTX 4090")
SHAPE = Shape(1, 2, 4096, 64)
CELL = balance_lists.cell_of(SHAPE)
WIDE, NARROW = (128, 128), (128, 64)


# ---- what is run ---------------------------------------------------------------------------------


def test_a_plan_has_words_of_a_spec_and_a_density():
    plan = balance_lists.listed_plan("gradients16", NARROW, 0.05)
    assert balance_told.density_of(plan) == 0.05 and balance_told.density_of("gradients16") is None
    spec = balance_runs.spec_of(CELL, plan)
    assert (spec.sparse_q, spec.sparse_kv, spec.precision) == (128, 64, "gradients16")
    # Lists of other densities have the same kernels, those of other blocks have others.
    plans = [balance_lists.listed_plan("gradients16", sizes, density)
             for sizes in (WIDE, NARROW) for density in (0.1, 0.03)]  # fmt: skip
    keys = balance_runs.distinct({"cells": [CELL], "plans": plans})
    assert [key[2] for key in keys] == ["gradients16 sparse_q=128 sparse_kv=128",
                                        "gradients16 sparse_q=128 sparse_kv=64"]  # fmt: skip


@pytest.mark.parametrize("sizes", [WIDE, NARROW])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_all_keys_are_seen_with_the_groups_of_the_lists(sizes, head_dim):
    cell = CELL | {"head_dim": head_dim}
    listed, dense = (balance_runs.spec_of(cell, plan) for plan in (
        balance_lists.listed_plan("six-of-seven", sizes, 0.1),
        balance_lists.dense_plan("six-of-seven", sizes)))  # fmt: skip
    assert dense.sparse_q == 0
    assert (dense.group_q, dense.group_kv) == (listed.group_q, listed.group_kv)


def test_plans_of_all_keys_come_once_and_split_where_they_are_fused():
    plans = balance_lists.plans_of([GEFORCE], [CELL], ["six-of-seven", "gradients16"],
                                   [WIDE, NARROW, (64, 64)], [0.1])  # fmt: skip
    assert [plan for plan in plans if "density" not in plan] == [
        "six-of-seven", "six-of-seven gradient_kernels=split", "six-of-seven x64", "gradients16",
        "gradients16 x64"]  # fmt: skip
    assert len(plans) == 5 + 6
    # On an A100 two kernels are the default.
    assert len(balance_lists.plans_of([named("A100")], [CELL], ["six-of-seven"], [WIDE],
                                      [0.1, 0.05])) == 3  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("sizes", [WIDE, NARROW])
def test_tiles_of_lists_are_the_defaults_of_the_card(head_dim, sizes):
    spec = balance_runs.spec_of(CELL | {"head_dim": head_dim},
                                balance_lists.listed_plan("six-of-seven", sizes, 0.1))
    tiles = balance_runs.tiles_of(spec, "sm_89", {})
    assert tiles.keys() == {"forward", "backward_dq", "backward_dkv"}
    assert all(tile.startswith("mma ") for tile in tiles.values())
    of_card = {s["name"] for s in _core.emit(spec, "sm_89", True)}
    assert {s["name"] for s in _core.emit(spec, "sm_90a", True, tiles)} == of_card
    assert {s["name"] for s in _core.emit(spec, "sm_90a", True)} != of_card


def test_random_lists_are_those_of_the_plan():
    class Inputs:
        q = k = torch.zeros(1, 2, 4096, 64)

    plan = balance_lists.listed_plan("six-of-seven", NARROW, 0.05)
    spec = balance_runs.spec_of(CELL, plan)
    told = [balance_told.told_of(spec, CELL, plan, Inputs, seed) for seed in (0, 0, 1)]
    lists, again, other = (one.lists for one in told)
    # Each of 32 blocks of queries lists 3 of 64 blocks of keys; its bits are in 3 words.
    assert lists.mask.shape == (1, 2, 32, 64) and lists.bits.shape == (1, 2, 32, 3)
    assert set(lists.mask.sum(-1).flatten().tolist()) == {3} and lists.share == 3 / 64
    assert torch.equal(lists.bits, again.bits) and not torch.equal(lists.bits, other.bits)
    bits = lists.bits[..., None] >> torch.arange(32) & 1
    assert torch.equal(bits.flatten(-2)[..., :64].bool(), lists.mask)
    assert told[0].about == {"share": 3 / 64} and told[0].tensors == (lists.bits,)
    assert balance_told.told_of(spec, CELL, "six-of-seven", Inputs, 0) is None


# ---- arithmetic ----------------------------------------------------------------------------------


def test_executed_operations_are_those_of_listed_blocks():
    # 4 x 2 heads x 4096^2 scores x 64 channels, of which a tenth.
    counted = CELL | {"share": 0.1}
    assert balance_model.operations(counted, "forward") == pytest.approx(858993459.2)
    assert balance_model.operations(CELL, "backward") == 2.5 * 4 * 2 * 4096**2 * 64


def test_the_share_of_the_rate_on_all_keys():
    # A tenth of the blocks would take 1.0 and 4.0 ms at the rate on all keys.
    found = balance_model.of_dense({"forward": 1.25, "backward": 8.0}, {"forward": 10.0,
                                   "backward": 40.0}, 0.1)  # fmt: skip
    assert found == {"forward": 0.8, "backward": 0.5}
    passes = {"forward": {"quantize": 5.0, "forward": 1.25},
              "backward": {"key_mean": 1.0, "transpose_bits": 2.0, "backward_dq": 3.0,
                           "backward_dkv": 5.0}}  # fmt: skip
    assert balance_model.attention_ms(passes) == {"forward": 1.25, "backward": 8.0,
                                                  "forward+backward": 9.25}


def test_bytes_of_transposed_lists():
    # Two heads: 32 lists of 3 words for 64 blocks of keys, and 64 lists of a word.
    found = balance_model.bytes_of("transpose_bits", "backward", CELL | {"block_size": NARROW},
                                   {}, False)  # fmt: skip
    assert found == 2 * 4 * (32 * 3 + 64 * 1)
    # And the length and the place of each of the 64.
    found = balance_model.bytes_of("order_lists", "backward", CELL | {"block_size": NARROW}, {},
                                   False)  # fmt: skip
    assert found == 2 * 64 * (4 + 16)


def test_figures_of_executed_operations_done_by_hand():
    # A tenth of 2 x 4096^2 x 64 x 4 operations is .858993 x 10^9; in .5 ms that is 1.718 TFLOPS.
    found = {"forward": {"attention_ms": 0.5, "around_ms": 0.1, "ms": 0.6, "tflops": 1.4317,
                         "share_of_tensor_bound": 0.7, "bound_ms": 0.35, "ratio_to_fa2": 3.0}}
    assert balance_model.executed(found, CELL | {"share": 0.1}) == {"forward": {
        "attention_ms": 0.5, "around_ms": 0.1, "ms": 0.6, "share_of_tensor_bound": 0.7,
        "executed_tflops": 1.718, "executed_tflops_with_around": 1.4317}}  # fmt: skip


def test_what_is_demanded():
    assert [balance_lists.least_of(d) for d in (1.0, 0.1, 0.05, 0.03)] == [0.8, 0.8, 0.8, 0.7]


# ---- a run, with processes that only say numbers -------------------------------------------------

# On all keys 10 ms, and 40 ms by one kernel or 60 ms by two. Lists of 128 x 128 blocks take .1 of
# 12.5 and 75 ms; those of 128 x 64 blocks .1 of 15 and 62 ms.
SCRIPT = balance_lists
STAND_IN = '''
def words(plan): return " ".join(w for w in plan.split() if "density" not in w)
def fused(plan): return plan == "six-of-seven"
for cell in job["cells"]:
    for plan in dict.fromkeys(map(words, job["plans"])):
        names = ("backward",) if fused(plan) else ("backward_dkv", "backward_dq")
        say(event="compiled", done=1, total=1, plan=plan, head_dim=cell["head_dim"],
            causal=cell["causal"],
            about=dict(precision=plan.split()[0], deterministic=True, dp_half_sums=False),
            kernels=dict((name, kernel) for name in ("forward", *names)))
measured()
for cell in job["cells"]:
    for plan in job["plans"]:
        one = dict(cell=cell["label"], plan=plan)
        listed = "density" in plan
        if listed: one["share"] = 0.1
        if not stretched:
            errors = dict(O=0.01, dQ=float("nan") if wrong == "nan" else 0.02)
            if wrong == "dense" and plan == "six-of-seven":
                say(event="result", error="RuntimeError: O has NaN", **one)
            else:
                say(event="result", results=dict(O="0"), rel_l2=errors if listed else None, **one)
            continue
        if wrong == "lists" and "sparse_kv=64" in plan:
            say(event="result", error="RuntimeError: dK is not that of the plain kernels", **one)
            continue
        if not listed: forward, backward = 10.0, 40.0 if fused(plan) else 60.0
        elif "sparse_kv=64" in plan: forward, backward = 1.5, 6.2
        else: forward, backward = 1.25, 7.5
        last = dict(backward=timing(backward)) if fused(plan) else dict(
            backward_dkv=timing(backward - 1), backward_dq=timing(1.0))
        if listed: last["transpose_bits"] = last["order_lists"] = timing(0.005)
        say(event="result", passes=dict(
            forward=dict(quantize=timing(0.4), forward=timing(forward)),
            backward=dict(quantize=timing(0.4), **last)), **one)
'''


WORDS = ["--shape", str(SHAPE), "--density", "0.1", "0.03", "--precision", "six-of-seven"]


def run(out, *words):
    code = balance_lists.main([*WORDS, *words, "--out", str(out)])
    record = json.loads(out.read_text())
    return code, record, {row["plan"]: row for row in record["rows"]}


def test_a_whole_run_and_its_table(hopper, capsys):  # noqa: F811
    code, record, rows = run(hopper())
    assert code == 1 and not record["passed"] and record["status"] == "finished"
    assert len(rows) == len(record["rows"]) == 2 + 2 + 1 + 2
    assert all(row["correct"] for row in rows.values())
    wide = rows["six-of-seven sparse_q=128 sparse_kv=128 density=0.1"]
    assert (wide["block_size"], wide["density"], wide["share"]) == ("128x128", 0.1, 0.1)
    assert wide["rel_l2"] == {"O": 0.01, "dQ": 0.02} and not wide["fused"]
    # .1 x 10 / 1.25; .1 x 40 / 7.5; .1 x 50 / 8.75. With two kernels .1 x 60 / 7.5; .1 x 70 / 8.75.
    assert wide["of_dense"] == {"forward": 0.8, "backward": 0.5333, "forward+backward": 0.5714}
    assert wide["of_split"] == {"forward": 0.8, "backward": 0.8, "forward+backward": 0.8}
    assert wide["must"] == 0.8 and not wide["reached"]
    # This GPU's 200 clocks stand for 322.56 x 1.125 of the card: 1.25 ms become .68893. A tenth
    # of 8.58993 x 10^9 operations.
    forward = wide["predicted"]["forward"]
    assert forward["attention_ms"] == pytest.approx(1.25 * 200 / 322.56 / 1.125, rel=1e-4)
    assert forward["executed_tflops"] == pytest.approx(0.858993 / 0.68893, rel=1e-4)
    # Around it, .4 ms x 200 / 322.56, which is longer than its bytes take.
    assert forward["around_ms"] == pytest.approx(0.4 * 200 / 322.56, rel=1e-4)
    dense = (10 / 1.125 + 0.4) * 0.1 / (1.25 / 1.125 + 0.4)
    assert wide["of_dense_with_around"]["forward"] == pytest.approx(dense, abs=2e-4)
    narrow = rows["six-of-seven sparse_q=128 sparse_kv=64 density=0.03"]
    # .1 x 10 / 1.5; .1 x 70 / 7.7. All keys in groups of 64 have two kernels anyway.
    assert narrow["of_dense"] == {"forward": 0.6667, "backward": 0.9677, "forward+backward": 0.9091}
    assert narrow["of_split"] is None and narrow["must"] == 0.7 and not narrow["reached"]
    shown = capsys.readouterr().out
    assert "0.80, 0.57 (0.80)  below 0.8" in shown and "0.67, 0.91  below 0.7" in shown
    assert tables.held(record) == [
        "| of the rate on all keys | 10% of blocks | 3% of blocks |", "|---|---|---|",
        "| RTX 4090, D64, 128x128, `six-of-seven` | 0.80, 0.57 (0.80) | 0.80, 0.57 (0.80) |",
        "| RTX 4090, D64, 128x64, `six-of-seven` | 0.67, 0.91 | 0.67, 0.91 |"]  # fmt: skip


def test_what_is_reached_passes(monkeypatch, hopper):  # noqa: F811
    monkeypatch.setattr(balance_lists, "RATES", ((0.0, 0.55),))
    code, record, rows = run(hopper())
    assert code == 0 and record["passed"]
    assert all(row["reached"] for row in rows.values() if row["block_size"])


@pytest.mark.parametrize("wrong, plan, why", [
    ("lists", "sparse_kv=64", "dK is not that of the plain kernels"),
    ("nan", "density", "not near FP64"),
])  # fmt: skip
def test_wrong_results_have_no_figures(hopper, wrong, plan, why, monkeypatch):  # noqa: F811
    monkeypatch.setattr(balance_lists, "RATES", ((0.0, 0.0),))
    code, record, rows = run(hopper(wrong))
    assert code == 1 and not record["passed"]
    for name, row in rows.items():
        assert row["correct"] == (plan not in name) == ("predicted" in row), name
        assert row["correct"] or why in row["error"]
    with pytest.raises(SystemExit, match=why):
        tables.held(record)


def test_without_attention_to_all_keys_nothing_is_reached(hopper, monkeypatch):  # noqa: F811
    monkeypatch.setattr(balance_lists, "RATES", ((0.0, 0.0),))
    code, record, rows = run(hopper("dense"))
    assert code == 1 and rows["six-of-seven"]["error"] == "RuntimeError: O has NaN"
    wide = rows["six-of-seven sparse_q=128 sparse_kv=128 density=0.1"]
    assert wide["of_dense"] is None and wide["of_dense_with_around"] is None
    assert not wide["reached"] and wide["of_split"]["forward"] == 0.8
    assert rows["six-of-seven sparse_q=128 sparse_kv=64 density=0.1"]["reached"]
    with pytest.raises(SystemExit, match="attention to all keys failed"):
        tables.held(record)


def test_the_script_can_be_tried_without_a_gpu(hopper):  # noqa: F811
    _, record, rows = run(hopper(), "--device", "cpu")
    (gpu,) = record["gpus"]
    assert gpu["stretched_rates"] == {"mma_s8": 3, "mma_u8": 3, "mma_bf16": 6}
    assert gpu["here"]["steady"] and gpu["clocks_a_clock"] == 1.125 and len(rows) == 7


@pytest.mark.parametrize("words, message", [
    (["--gpu", "B200"], "an H100 can only be slowed"),
    (["--precision", "fp8"], "invalid choice: 'fp8'"),
    (["--block-size", "128x32"], "block_size=(128, 32): kernels have 64 and 128 queries"),
    (["--density", "1.5"], "density=1.5: pass the share"),
    (["--shape", "1x2x3"], "1x2x3"),
    (["--density", "0.1"], "only a record of everything goes to balance-lists.json: with --den"),
])  # fmt: skip
def test_wrong_use_is_said(capsys, words, message):
    with pytest.raises(SystemExit) as left:
        balance_lists.main(words)
    assert left.value.code == 2 and message in capsys.readouterr().err


# ---- tables and pictures -------------------------------------------------------------------------


def test_a_table_whose_record_is_missing_stays(tmp_path, monkeypatch):
    text = "<!-- balance-lists.json -->\nNot yet.\n<!-- end -->\n"
    monkeypatch.setitem(tables.TABLES, "some.md", {"balance-lists.json": lambda record: ["a"]})
    assert tables.with_tables("some.md", text, tmp_path) == text
    (tmp_path / "balance-lists.json").write_text('{"status": "finished"}')
    assert tables.with_tables("some.md", text, tmp_path) == text.replace("Not yet.", "a")
    monkeypatch.setitem(tables.TABLES, "some.md", {"other.json": lambda record: ["a"]})
    with pytest.raises(FileNotFoundError):
        tables.with_tables("some.md", text, tmp_path)


def test_no_picture_is_of_lists_or_masks(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(plot, "plot_balance", lambda path: drawn.append(path.name) or path)
    for name in ("balance.json", "balance-lists.json", "balance-masks.json"):
        (tmp_path / name).write_text("{}")
    assert plot.main([str(tmp_path)]) == 0 and drawn == ["balance.json"]
