"""`sagebwd.bench` on a GPU, at sizes that take seconds."""


import json
import time

import pytest
from inputs import torch

import sagebwd
from sagebwd.benchmark import attentions, timing

#: These bound errors of bf16 attention on standard normal inputs, and of ours in any precision
#: under 'row'.
SIXTEEN_BIT, INT8 = 0.006, 0.06


def rows_of(*names, **given):
    """The rows by name and kind, once each of them has figures or a reason."""
    result = sagebwd.bench(*names, rounds=3, **given)
    ((_, rows),) = result.cases
    found = {(row.attention, row.deterministic): row for row in rows}
    assert len(found) == len(rows)
    for row in rows:
        assert bool(row.refusal) != (row.both is not None), row
        if not row.refusal:
            ours = row.attention.startswith("sagebwd")
            assert all(0 < e < (INT8 if ours else SIXTEEN_BIT) for e in row.errors.values()), row
            assert row.both.median_ms > row.forward.median_ms > 0, row
            assert row.memory_mib > 0 and row.both.samples == 3, row
    assert max(map(len, result.text.splitlines())) <= 100
    assert json.loads(json.dumps(result.data, allow_nan=False))["cases"]
    return result, found


def test_every_backend_has_figures_or_a_reason():
    steps = []
    result, found = rows_of(heads=8, heads_kv=4, seq_len=1024, head_dim=64, causal=True,
                            progress=lambda *step: steps.append(step))  # fmt: skip
    names = [*(name for name in attentions.BACKENDS if name not in ("sagebwd", "flex")),
             *(f"sagebwd {name}" for name in sagebwd.core.options.PRECISIONS)]  # fmt: skip
    assert found.keys() == {(name, kind) for name in names for kind in (False, True)}
    assert all(found["fa2", kind].both for kind in (False, True))
    assert all(found[f"sagebwd {p}", True].both for p in sagebwd.core.options.PRECISIONS)
    if found["cudnn", False].both:  # which has no deterministic backward in PyTorch
        assert "deterministic" in found["cudnn", True].refusal
    for kind in (False, True):
        best = min(row.both.median_ms for (name, of), row in found.items()
                   if of == kind and name in attentions.OF_PYTORCH and row.both)  # fmt: skip
        ours = found["sagebwd gradients16", kind]
        assert ours.speed == pytest.approx(best / ours.both.median_ms)
    assert torch.cuda.get_device_name() in result.text
    assert result.machine["nvrtc"] and result.machine["driver"]
    assert result.machine["before"].keys() == result.machine["after"].keys()
    told = {what for what, *_ in steps}
    assert {"compiling", "timing forward", "timing forward+backward"} <= told


@pytest.mark.parametrize("name", ["documents", "prefix", "window"])
def test_masks_told_by_intervals(name):
    result = sagebwd.bench(heads=4, heads_kv=2, seq_len=1024, head_dim=64, intervals=name, rounds=3,
                           backends=["flex", "fa2", "sagebwd"], deterministic=True,
                           precision=["six-of-seven", "gradients16"])  # fmt: skip
    (masked, rows), (plain, others) = result.cases
    assert (masked.intervals, plain.intervals, plain.causal) == (name, "", "top-left")
    for of in (rows, others):
        assert {row.attention for row in of if row.both} >= {
            "flex", "sagebwd six-of-seven", "sagebwd gradients16"}  # fmt: skip
        for row in of:
            limit = INT8 if row.attention.startswith("sagebwd") else SIXTEEN_BIT
            assert row.refusal or all(0 < e < limit for e in row.errors.values()), row
    assert [row.attention for row in rows if row.refusal] == ["fa2"]


def test_windows_by_operators_and_by_masks():
    _, found = rows_of(heads=4, seq_len=1024, head_dim=64, causal=True, window_left=100,
                       precision="six-of-seven", deterministic=False,
                       backends=["cudnn", "fa2", "efficient", "sagebwd"])  # fmt: skip
    assert found["fa2", False].both and found["efficient", False].both


def test_more_keys_than_queries():
    _, found = rows_of(heads=4, seq_len=512, seq_kv=1024, head_dim=64, causal="bottom-right",
                       precision="six-of-seven", deterministic=True,
                       backends=["fa2", "efficient", "sagebwd"])  # fmt: skip
    assert found["fa2", True].both and found["sagebwd six-of-seven", True].both


def test_sinks_of_a_model():
    _, found = rows_of("gpt-oss-20b-window", seq_len=512, precision=["six-of-seven", "gradients16"],
                       deterministic=True)  # fmt: skip
    assert found["fa2", True].refusal == "PyTorch's attention has no sinks"
    assert found["sagebwd gradients16", True].both


def test_the_layout_in_memory_does_not_matter_for_the_errors():
    errors = [rows_of(heads=4, seq_len=512, head_dim=64, layout=layout, deterministic=True,
                      precision="dv16", backends=["fa2", "sagebwd"])[1]
              for layout in ("bhsd", "bshd")]  # fmt: skip
    for name in ("fa2", "sagebwd dv16"):
        first, second = (found[name, True].errors for found in errors)
        assert first["dQ"] == pytest.approx(second["dQ"], rel=0.2)


def test_what_does_not_fit_is_refused_or_has_a_reason():
    with pytest.raises(sagebwd.SpecError, match=r"do not fit into the .* GiB that are free"):
        sagebwd.bench(seq_len=1 << 24, batch=64)
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_clock_counts_the_gpus_time():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    clock = timing.clock_of("cuda")

    def products(count):
        def call():
            for _ in range(count):
                x @ x

        return call

    found = timing.time_interleaved({"one": products(4), "two": products(8)}, clock, rounds=5)
    assert 1.5 < found["two"].median_ms / found["one"].median_ms < 2.5
    peak = timing.peak_mib(lambda: torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
    assert 64 <= peak < 66


def test_a_clock_whose_host_is_ahead_does_not_count_the_host():
    x = torch.zeros(1024, device="cuda")

    def slow():
        for _ in range(10):
            time.sleep(1e-3)
            x.add_(1)

    for ahead, least, most in ((False, 9.0, 1000.0), (True, 0.0, 2.0)):
        clock = timing.clock_of("cuda", host_ahead=ahead)
        found = timing.time_interleaved({"slow": slow}, clock, rounds=5, warmup=2)
        assert least < found["slow"].median_ms < most
    assert clock.host_ms[slow] > 9
