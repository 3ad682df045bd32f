"""`sagebwd doctor --measure` without a GPU and on a fake one, which runs no kernel."""

import pytest


@pytest.fixture
def fake_gpu(fake_driver):
    return {"LD_LIBRARY_PATH": str(fake_driver), "FAKE_QUIET": "1", "FAKE_MAJOR": "8",
            "FAKE_MINOR": "9", "FAKE_SMS": "128", "FAKE_NAME": "Some GPU"}  # fmt: skip


def test_every_rate_is_named_with_its_unit(sagebwd, needs_nvrtc, fake_gpu):
    result = sagebwd("doctor", "--measure", "--json", **fake_gpu)
    assert result.code == 0, result.err
    report = result.json
    assert (report["gpu"], report["sm_count"]) == ("Some GPU", 128)
    rates = {rate["name"]: rate for rate in report["rates"]}
    assert list(rates) == ["mma_s8", "mma_u8", "mma_bf16", "mma_half_sums", "ffma",
                           "mma_s8_ffma", "mma_mixed", "int_to_float", "pack_s8", "ex2", "ldmatrix"]  # fmt: skip
    # The fake driver takes 1.5 ms: 2 x 16 x 8 x 32 operations a product, 64 a turn, 1024 turns, 16
    # warps on each of 128 SMs.
    assert rates["mma_s8"]["tera_per_second"] == pytest.approx(
        2 * 16 * 8 * 32 * 64 * 1024 * 16 * 128 / 1.5e-3 / 1e12)
    for of_16_bits in ("mma_bf16", "mma_half_sums"):
        assert rates[of_16_bits]["tera_per_second"] == pytest.approx(
            rates["mma_s8"]["tera_per_second"] / 2)
    assert {rate["unit"] for rate in rates.values()} == {"operations", "results", "bytes"}
    # All take the same time there, by its events and by its clocks: 2/3 and 1/3 of it in turn.
    assert report["mixed_time_of_in_turn"] == pytest.approx(1)


def test_rates_as_a_table(sagebwd, needs_nvrtc, fake_gpu):
    result = sagebwd("doctor", "--measure", **fake_gpu)
    assert result.code == 0, result.err
    assert result.out.startswith("Some GPU, 128 SMs\n")
    assert "ldmatrix x4" in result.out and "per clock and SM" in result.out


def test_without_a_gpu_it_says_so(sagebwd, fake_gpu):
    result = sagebwd("doctor", "--measure", **fake_gpu, FAKE_DEVICES="0")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("sagebwd doctor: --measure runs kernels on a GPU")


def test_a_gpu_that_is_not_there_and_one_that_is_too_old(sagebwd, fake_gpu):
    result = sagebwd("doctor", "--measure", "--gpu", "7", **fake_gpu)
    assert result.code == 1 and "--gpu is 7, this machine has 2" in result.err
    old = sagebwd("doctor", "--measure", **{**fake_gpu, "FAKE_MAJOR": "7", "FAKE_MINOR": "5"})
    assert old.code == 2 and "7.5" in old.err


def test_a_gpu_is_named_only_for_measuring(sagebwd):
    result = sagebwd("doctor", "--gpu", "0")
    assert result.code == 2 and "--measure" in result.err
