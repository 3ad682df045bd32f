"""bench/balance.py, without a GPU: results that are compared, and whole runs with stand-ins."""

import argparse
import json

import pytest

torch = pytest.importorskip("torch")

import balance  # noqa: E402
import balance_cards  # noqa: E402
import balance_runs  # noqa: E402
import plot  # noqa: E402
import stretch  # noqa: E402
import tables  # noqa: E402
from gpus import GPUS, named  # noqa: E402
from slowed_cards import hopper  # noqa: E402, F401

GEFORCE = named("RTX 4090")
CELL = balance.cell_of(64, 8192, False)


# ---- results -------------------------------------------------------------------------------------


def test_a_fingerprint_sees_every_bit():
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    seen = {balance_runs.fingerprint(x)}
    for at in (0, 17, 959):
        for bit in (0, 9, 15):
            other = x.clone()
            other.view(torch.int16).view(-1)[at] ^= 1 << bit if bit < 15 else -32768
            seen.add(balance_runs.fingerprint(other))
    seen.add(balance_runs.fingerprint(x.flip(0)))
    assert len(seen) == 11 and balance_runs.fingerprint(x.clone()) in seen


class Outputs(balance_runs.Tensors):
    def __init__(self, tokens=256):
        generator = torch.Generator().manual_seed(0)
        self.out, self.dq, self.dk, self.dv = (
            torch.randn(1, 2, tokens, 64, generator=generator).to(torch.bfloat16)
            for _ in range(4))  # fmt: skip
        self.lse = torch.randn(1, 2, tokens, generator=generator)


def test_results_are_those_of_the_plain_kernels():
    plain = balance_runs.results_of(Outputs(), any_order=False)
    assert balance_runs.difference(balance_runs.results_of(Outputs(), False), plain) == ""
    other = Outputs()
    other.dk[0, 1, 200, 3] += 0.5
    assert balance_runs.difference(balance_runs.results_of(other, False), plain).startswith("dK is")
    assert balance_runs.difference(plain, {}) != ""


def test_sums_in_any_order_may_differ_a_little():
    plain, near, far = Outputs(), Outputs(), Outputs()
    near.dq[0, 0, 64, 0] *= 1 + 2**-7
    far.dq[0, 0, 64] = 0
    of_plain, of_near, of_far = (balance_runs.results_of(x, True) for x in (plain, near, far))
    assert of_near["dQ"] != of_plain["dQ"]
    assert balance_runs.difference(of_near, of_plain) == ""
    assert "dQ differs from that of the plain kernels by 0." in balance_runs.difference(
        of_far, of_plain)  # fmt: skip
    assert "dQ is not" in balance_runs.difference(balance_runs.results_of(plain, False), of_plain)


def test_what_no_kernel_has_written_is_seen():
    outputs = Outputs()
    balance_runs.filled(outputs.dv[:, :, 255:])
    with pytest.raises(RuntimeError, match="dV has NaN, or elements that no kernel has written"):
        balance_runs.results_of(outputs, False)
    assert bool(balance_runs.filled(torch.zeros(3)).isnan().all())


def test_the_measured_balance_counts():
    plain = {name: {"per_clock": 6000.0} for name in balance_cards.MEASURED}
    slowed = {"mma_s8": {"per_clock": 2000.0}, "mma_u8": {"per_clock": 2010.0},
              "mma_bf16": {"per_clock": 1000.0}}
    planned = stretch.Balance({"int8": 3, "bits16": 6, "bits16_half": 3}, 1.125, 0.0)
    times = balance_cards.measured_rates(plain, slowed)
    assert times == {"mma_s8": 3.0, "mma_u8": 2.985, "mma_bf16": 6.0}
    found = balance_cards.measured_balance(planned, times)
    assert found.clocks_a_clock == pytest.approx(1.125, rel=0.003)
    dearer = balance_cards.measured_balance(planned, {name: 1.08 * t for name, t in times.items()})
    assert dearer.clocks_a_clock == pytest.approx(1.08 * found.clocks_a_clock)
    assert dearer.factors == planned.factors
    for wrong in ({**times, "mma_bf16": 3.0}, {name: 1.4 * t for name, t in times.items()},
                  {name: 0.9 * t for name, t in times.items()}):  # fmt: skip
        with pytest.raises(RuntimeError, match="mma_bf16 .* for 6.* this GPU is not balanced"):
            balance_cards.measured_balance(planned, wrong)


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize("words, message", [
    (["--gpu", "RTX 2080"], "no GPU 'RTX 2080' is known: there are A100, RTX 3090"),
    (["--gpu", "B200"], "an H100 can only be slowed. It stands for A100"),
    (["--only", "d32"], "--only d32: there are causal, d128, d64, deterministic"),
    (["--only", "d64", "d128"], "no cell has all these words"),
    (["--tiles", "backward_dx=mma 64x64 w4 s1 b1"], "expected KERNEL=TILE with a kernel of"),
    (["--quick"], "only a record of everything goes to balance.json: with --quick"),
    (["--gpu", "L4"], "with --gpu name another file with --out"),
])  # fmt: skip
def test_wrong_use_is_said(capsys, words, message):
    with pytest.raises(SystemExit) as left:
        balance.main(words)
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_only_hopper_can_be_slowed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        balance.main([])
    assert left.value.code == 2 and "no CUDA GPU here" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "RTX 4090")
    with pytest.raises(SystemExit) as left:
        balance.main([])
    assert left.value.code == 2 and "RTX 4090 is no H100 or H200" in capsys.readouterr().err


def test_words_select_cells_and_plans():
    cells, plans = balance.selected(balance.CELLS, list(balance.PLANS), [])
    assert (len(cells), len(plans)) == (8, 4)
    cells, plans = balance.selected(balance.CELLS, list(balance.PLANS),
                                    ["D128", "n1024", "dp_sums=fp16", "gradient_kernels=split"])
    assert [cell["label"] for cell in cells] == ["d128 n1024 full", "d128 n1024 causal"]
    assert plans == ["six-of-seven dp_sums=fp16 gradient_kernels=split"]
    assert all(c["batch"] * c["tokens"] * c["heads"] * c["head_dim"] == 32768 * 2048
               for c in balance.CELLS)  # fmt: skip


# ---- a run, with processes that only say numbers -------------------------------------------------


SCRIPT = balance
STAND_IN = '''
print("a line of a library")
for cell in job["cells"]:
    for plan in job["plans"]:
        say(event="compiled", done=1, total=1, plan=plan, head_dim=cell["head_dim"],
            causal=cell["causal"],
            about=dict(precision=plan.split()[0], deterministic="no-" not in plan,
                       dp_half_sums=False),
            kernels=dict(forward=kernel, backward_dq=kernel, backward_dkv=kernel))
plain = measured()
for cell in job["cells"]:
    for plan in job["plans"]:
        one = dict(cell=cell["label"], plan=plan)
        if not stretched:
            say(event="result", results=dict(O="0"), **one)
        elif plan == "gradients16" or plain[cell["label"]][plan] != dict(O="0"):
            say(event="result", error="RuntimeError: dQ is not that of the plain kernels", **one)
        else:
            say(event="result", passes=dict(
                forward=dict(quantize=timing(0.4), forward=timing(10.0)),
                backward=dict(quantize=timing(0.4), backward_dkv=timing(30.0),
                              backward_dq=timing(20.0))), **one)
'''


def test_a_whole_run_and_its_table_and_picture(hopper, capsys, tmp_path):  # noqa: F811
    out = hopper()
    assert balance.main(["--gpu", "RTX 4090", "--out", str(out), "--no-model", "--plans",
                         "six-of-seven", "six-of-seven dp_sums=fp16"]) == 0  # fmt: skip
    record = json.loads(out.read_text())
    assert record["status"] == "finished" and record["passed"]
    (gpu,) = record["gpus"]
    assert gpu["factors"] == {"int8": 3, "bits16": 6, "bits16_half": 3}
    assert gpu["stretched_rates"] == {"mma_s8": 3.0, "mma_u8": 3.0, "mma_bf16": 6.0}
    assert gpu["here"] == {"sms": 100, "clock_ghz": 2.0, "memory_gbs": 2520.0,
                           "clock_ghz_after": 2.0, "steady": True}
    assert len(record["rows"]) == 8 * 2
    row = record["rows"][0]
    assert (row["head_dim"], row["tokens"], row["plan"]) == (64, 8192, "six-of-seven")
    assert row["predicted"]["forward"]["attention_ms"] == 5.5115  # as done by hand above
    assert row["published"]["paper"] == 260 and row["kernels"]["forward"]["blocks_of_sm"] == 3
    assert "RTX 4090      D64  N8192" in capsys.readouterr().out
    lines = tables.predicted(record)
    assert lines[0] == "| predicted | D64 | D64 causal | D128 | D128 causal |"
    # 3.5 x 2199.02 / (0.93 x 165.15) = 50.11 ms; ours 5.5115 + 27.557 + .6856 + 1.1585.
    # A causal mask halves what FlashAttention-2 needs, and the stand-in says the same times.
    assert lines[2] == "| RTX 4090 | 1.44x | 0.72x | 1.44x | 0.72x |"
    assert lines[3] == "| RTX 4090, `dp_sums='fp16'` | 1.44x | 0.72x | 1.44x | 0.72x |"
    assert len(lines) == 4
    pytest.importorskip("matplotlib")
    assert plot.plot_balance(out).read_bytes().startswith(b"\x89PNG")


def test_wrong_results_fail_the_record_and_have_no_times(hopper, capsys):  # noqa: F811
    out = hopper()
    assert balance.main(["--gpu", "RTX 4090", "--out", str(out), "--no-model", "--plans",
                         "six-of-seven", "gradients16"]) == 1  # fmt: skip
    record = json.loads(out.read_text())
    wrong = [row for row in record["rows"] if not row["correct"]]
    assert not record["passed"] and {row["plan"] for row in wrong} == {"gradients16"}
    assert all("predicted" not in row and "dQ is not" in row["error"] for row in wrong)
    record["rows"] = [row for row in record["rows"] if row["plan"] != "six-of-seven"]
    for row in wrong:
        row["plan"] = "six-of-seven"
    with pytest.raises(SystemExit, match="dQ is not that of the plain kernels"):
        tables.predicted(record)


def test_a_process_that_dies_says_why(hopper, capsys):  # noqa: F811
    out = hopper("dies")
    assert balance.main(["--gpu", "RTX 4090", "--out", str(out), "--no-model", "--quick"]) == 1
    assert "ended with 1: out of memory" in capsys.readouterr().err
    assert json.loads(out.read_text())["failures"][0]["gpu"] == "RTX 4090"


def test_why_there_is_no_static_model_is_recorded(tmp_path):
    options = argparse.Namespace(model=True, nvdisasm=tmp_path, program=tmp_path / "none")
    assert balance.model_of(GEFORCE, [CELL], ["dv16"], options) == (
        [], "no none: build it (./run build), or name it with --tool")  # fmt: skip
    options.nvdisasm = None
    assert balance.model_of(GEFORCE, [CELL], ["dv16"], options)[1].startswith("no nvdisasm")
    options.model = False
    assert balance.model_of(GEFORCE, [CELL], ["dv16"], options) == ([], "not asked for")
    assert GPUS[0] is named("a100")
