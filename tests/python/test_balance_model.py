"""bench/balance_model.py: arithmetic done by hand; and the tiles of another GPU."""

import pytest

pytest.importorskip("torch")

import balance
import balance_cards
import balance_model
import balance_runs
import tables_predicted
from gpus import named

from sagebwd import _core


# ---- arithmetic ----------------------------------------------------------------------------------


GEFORCE = named("RTX 4090")
CELL = balance.cell_of(64, 8192, False)
PLAN = {"precision": "six-of-seven", "deterministic": True, "dp_half_sums": False}


def test_operations_are_those_of_flash_attention_2():
    # 4 x 4 sequences x 32 heads x 8192^2 scores x 64 channels.
    assert balance_model.operations(CELL, "forward") == 4 * 4 * 32 * 67108864 * 64
    assert balance_model.operations(CELL, "forward+backward") == 3.5 * 2199023255552
    causal = balance.cell_of(64, 8192, True)
    assert balance_model.operations(causal, "backward") == 2.5 * 2199023255552 / 2


@pytest.mark.parametrize("gpu, kernels, precision, half, units", [
    # In units of 2 D / 2048 clocks, as in the tables of the design: an INT8 product is 1.
    ("RTX 4090", ["forward"], "six-of-seven", False, 2),
    ("RTX 4090", ["backward_dq", "backward_dkv"], "six-of-seven", False, 13),
    ("RTX 4090", ["backward_dq", "backward_dkv"], "six-of-seven", True, 9),
    ("RTX 4090", ["backward"], "six-of-seven", False, 8),
    ("RTX 4090", ["backward"], "six-of-seven", True, 6),
    ("RTX 4090", ["backward"], "gradients16", False, 17),
    ("L40S", ["forward"], "six-of-seven", False, 2),
    ("L40S", ["backward"], "six-of-seven", True, 6),
    ("L40S", ["backward_dq", "backward_dkv"], "six-of-seven", False, 9),
])  # fmt: skip
def test_tensor_bound_in_units_of_an_int8_product(gpu, kernels, precision, half, units):
    found = balance_model.tensor_clocks(named(gpu), kernels, precision, half)
    assert found * 2048 / 2 == pytest.approx(units)


def test_a_prediction_done_by_hand():
    # This GPU has 100 SMs at 2 GHz. A 4090 has 128 at 2.52 and 1008 GB/s, of which copies reach
    # 887.04: attention takes 200 / 322.56 / 1.125 = .551146 of the time. A tensor of the cell has
    # 2^26 elements, and there are 2^20 queries: K is read in .15131 ms, the forward's copies take
    # (9 x 2^26 + 4 x 2^20) / 887.04e6 = .68562 ms.
    here = balance_model.Here(100, 2.0, 2520.0)
    kernels = {"forward": {"key_mean": 0.1, "quantize": 0.3, "forward": 10.0},
               "backward": {"quantize": 0.4, "backward_dq": 20.0, "backward_dkv": 30.0}}
    found = balance_model.predicted(GEFORCE, here, 1.125, CELL, PLAN, kernels)
    forward, backward, both = found.values()
    assert (forward["attention_ms"], forward["around_ms"], forward["ms"]) == (
        5.5115, 0.83693, 6.3484)  # fmt: skip
    # (15 x 2^26 + 20 x 2^20) / 887.04e6
    assert (backward["attention_ms"], backward["around_ms"]) == (27.557, 1.1585)
    assert both["ms"] == pytest.approx(6.3484 + 28.716, rel=1e-4)
    # 2 units of 2 x 64 / 2048 clocks for 2^33 scores on 128 SMs at 2.52 GHz: 3.3288 ms.
    assert forward["bound_ms"] == 3.3288 and backward["bound_ms"] == 21.637
    assert forward["share_of_tensor_bound"] == pytest.approx(3.3288 / 5.5115, rel=1e-4)
    # 2.199 x 10^12 operations; FlashAttention-2: 512 x 128 x 2.52 = 165.15 TFLOPS, of which 93 %.
    assert forward["tflops"] == pytest.approx(2199.02 / 6.3484, rel=1e-4)
    assert forward["fa2_ms"] == pytest.approx(2199.02 / (0.93 * 165.15), rel=1e-4)
    assert both["ratio_to_fa2"] == pytest.approx(3.5 * 14.3175 / 35.0646, rel=1e-4)


def test_what_is_around_attention_takes_the_longer_of_bytes_and_clocks():
    here = balance_model.Here(132, 1.8, 4000.0)
    assert balance_model.around_ms(here, named("L4"), 0.1, 264e6) == pytest.approx(1.0)
    assert balance_model.around_ms(here, named("RTX 3090"), 1.0, 1.0) == pytest.approx(
        132 * 1.8 / (82 * 1.695))  # fmt: skip


@pytest.mark.parametrize("kernel, half, fused, moved", [
    ("key_mean", False, True, 2), ("round_dq", False, True, 6), ("quantize", False, False, 15),
    ("quantize", False, True, 19), ("quantize", True, True, 23),
])  # fmt: skip
def test_bytes_an_element_of_a_backward(kernel, half, fused, moved):
    found = balance_model.bytes_of(kernel, "backward", CELL, PLAN | {"dp_half_sums": half}, fused)
    assert found == moved * 2**26 + (20 * 2**20 if kernel == "quantize" else 0)


def test_peers():
    assert balance_model.peer_of(GEFORCE, True).backward == pytest.approx(0.93 * 165.15, rel=1e-4)
    assert balance_model.peer_of(named("A100"), True).backward == 95
    assert balance_model.peer_of(named("A100"), False).backward == 178
    assert balance_model.paper_of(GEFORCE, CELL) == {"paper": 260, "fa2": 151, "ratio_to_fa2": 1.72}
    assert balance_model.paper_of(GEFORCE, balance.cell_of(64, 1024, False)) is None
    assert balance_model.paper_of(GEFORCE, balance.cell_of(64, 8192, True)) is None
    assert balance_model.paper_of(named("L40S"), CELL) is None


def test_the_static_model_beside():
    bounds = [{"gpu": "RTX 4090", "head_dim": 64, "causal": "none", "precision": "six-of-seven",
               "pass": which, "bound_by": ["tensor"], "tflops": tflops}
              for which, tflops in (("forward", 660.0), ("backward", 254.0), ("fused", 400.0))]
    found = {"forward": {"attention_ms": 5.0}, "backward": {"attention_ms": 30.0}}
    model = balance_model.compared(found, CELL, PLAN, bounds, GEFORCE, fused=False)
    # 2199.02 / 660 = 3.3319 ms; 2.5 x 2199.02 / 254 = 21.644 ms.
    assert model["forward"] == {"ms": 3.3319, "bound_by": ["tensor"], "instrument_to_model": 1.501}
    assert model["backward"]["ms"] == 21.644 and model["backward"]["instrument_to_model"] == 1.386
    fused = balance_model.compared(found, CELL, PLAN, bounds, GEFORCE, fused=True)
    assert fused["backward"]["ms"] == 13.744
    assert balance_model.compared(found, CELL, PLAN, bounds[:1], GEFORCE, fused=False) is None


def test_blocks_on_an_sm_of_the_card():
    kernel = {"registers": 155, "threads": 128, "shared_bytes": 21504}
    assert balance_cards.blocks_of(kernel, GEFORCE) == 3  # 65536 / (160 x 128); memory: 4
    assert balance_cards.blocks_of(kernel | {"shared_bytes": 43008}, GEFORCE) == 2
    assert balance_cards.blocks_of(kernel | {"shared_bytes": 43008}, named("A100")) == 3


def test_norm_and_rope_by_hand():
    # 2^27 numbers of q and k, of which copies on a 4090 move 4 bytes each in .60524 ms and 6 in
    # .90786; clocks of the GPU above are .62004 of as many there, its bytes 2.84091.
    here, numbers = balance_model.Here(100, 2.0, 2520.0), 2**27
    times = {"forward": 0.2, "backward": 2.0}
    ours = balance_model.front_ms(here, GEFORCE, numbers, times, True)
    assert ours == pytest.approx((0.60524 + 1.24008,) * 2, rel=1e-5)
    others = balance_model.front_ms(here, GEFORCE, numbers, times, False)
    assert others == pytest.approx((0.60524 + 1.24008, 0.60524 + 5.68182), rel=1e-5)


def test_the_table_of_a_predicted_layer():
    """Norm and RoPE add 0.2 and 2.0 ms to both heads' calls, as above."""
    balance_record = {
        "gpus": [{"name": "RTX 4090", "here": {"sms": 100, "clock_ghz": 2.0, "memory_gbs": 2520}}],
        "rows": [{"gpu": "RTX 4090", "plan": "six-of-seven", "head_dim": d, "causal": True,
                  "tokens": 8192, "correct": True, "predicted": {"forward+backward": {
                      "ms": 18.15468, "fa2_ms": 28.15468}}} for d in (64, 128)]}  # fmt: skip
    layer = {"rows": [
        {"front": front, "attention": "six-of-seven", "heads": 2048 // d, "heads_kv": 2048 // d,
         "head_dim": d, "tokens": 8192, "batch": 4, "correct": True,
         "forward": {"median_ms": 1.0 + forward}, "forward+backward": {"median_ms": 5.0 + both}}
        for d in (64, 128)
        for front, forward, both in (("none", 0, 0), ("ours", 0.2, 2.2), ("compiled", 0.2, 2.2))]}
    found = tables_predicted.predicted_layers(balance_record, layer)
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in found[2:]] == [
        ["ours", "20.0 ms", "20.0 ms"],
        ["compiled norm and RoPE, `six-of-seven`", *["1.00 to 1.22 times as long"] * 2],
        ["compiled norm and RoPE, FlashAttention-2", *["1.50 to 1.72 times as long"] * 2]]
    layer["rows"][-1]["correct"] = False
    with pytest.raises(SystemExit, match="its results are wrong"):
        tables_predicted.predicted_layers(balance_record, layer)


# ---- tiles of another architecture ---------------------------------------------------------------


def test_tiles_are_the_defaults_of_the_card():
    cell = balance.cell_of(128, 8192, False)
    spec = balance_runs.spec_of(cell, "six-of-seven")
    for arch in ("sm_80", "sm_89"):
        tiles = balance_runs.tiles_of(spec, arch, {})
        split = {"forward", "backward_dq", "backward_dkv"}
        assert tiles.keys() == (split if arch == "sm_80" else {"forward", "backward"})
        of_card = {s["kind"]: s["tile"] for s in _core.emit(spec, arch, True)}
        assert tiles == {kind: of_card[kind] for kind in tiles}
        here = {s["name"] for s in _core.emit(spec, "sm_90a", True, tiles)}
        # With their tiles told, the kernels of short calls are not among them.
        assert here == {s["name"] for s in _core.emit(spec, arch, True, tiles)}
    # sm_90a's own kernels are of another family.
    assert here != {s["name"] for s in _core.emit(spec, "sm_90a", True)}


def test_fused_or_split_is_decided_by_the_card():
    spec = balance_runs.spec_of(balance.cell_of(64, 8192, True), "six-of-seven no-deterministic")
    tiles = balance_runs.tiles_of(spec, "sm_89", {})
    assert tiles.keys() == {"forward", "backward"}
    kinds = {s["kind"] for s in _core.emit(spec, "sm_90a", True, tiles)}
    assert "backward" in kinds and not kinds & {"backward_dq", "backward_dkv"}
    own = balance_runs.tiles_of(spec, "sm_89", {"backward_dkv": "mma 64x64 w4 s1 b2"})
    assert own.keys() == {"forward", "backward_dq", "backward_dkv"}
    assert own["backward_dkv"] == "mma 64x64 w4 s1 b2"


def test_tiles_must_fit_the_card():
    spec = balance_runs.spec_of(balance.cell_of(128, 8192, False), "qk16")
    large = {"backward": "mma 64x128 w8 s1 b1"}  # 130 KB
    assert balance_runs.tiles_of(spec, "sm_80", large)["backward"] == large["backward"]
    with pytest.raises(_core.SpecError, match="shared memory"):
        balance_runs.tiles_of(spec, "sm_89", large)


@pytest.mark.parametrize("bytes_, other, own, padded", [
    # 43008 + 1024 live twice in 100 KiB. Three do not fit into 233472 if each takes above 77824.
    (43008, 102400, 233472, 76928),
    # 21504 + 1024 live four times; five times 46720 would be 233600.
    (21504, 102400, 233472, 45696),
    # A block that fills 100 KiB: two must not live in 228 KiB.
    (101376, 102400, 233472, 115840),
    (43008, 233472, 233472, 43008),  # on its own GPU nothing changes
])  # fmt: skip
def test_as_many_blocks_live_on_an_sm(bytes_, other, own, padded):
    found = _core.padded_shared_bytes(bytes_, other, own)
    assert found == padded
    taken = -(-found // 128) * 128 + 1024
    assert own // taken == other // (-(-bytes_ // 128) * 128 + 1024)
    with pytest.raises(_core.SpecError, match="do not fit an SM with 102400"):
        _core.padded_shared_bytes(102000, 102400, 233472)
