"""`sagebwd tune` on a fake driver: everything but the kernels themselves is the real thing."""

import json
import re
import shutil

import pytest

ANY_CUBIN = "99000"  # a driver that takes every NVRTC's; else nothing comes from the cache
FAST = "mma 128x128 w8 s1 b1"  # of sm_80's forward at head dim 64
OTHERS = ["mma 128x128 w8 s2 b1", "mma 64x128 w4 s2 b2"]
FEW = ["--tile", ",".join([FAST, *OTHERS])]  # instead of all, which compile for long
SMALL = ["--kernel", "forward", "--head-dim", 64, "--seq-len", 1024, "--heads", 2, "--rounds", 5]


@pytest.fixture
def tune(sagebwd, fake_driver, tmp_path, cache_dir):
    """Runs `sagebwd tune` on a fake GPU, with records of this test's own."""
    records = tmp_path / "cache"
    # Kernels that other tests of this session compiled; their records stay behind.
    shutil.copytree(cache_dir, records, ignore=shutil.ignore_patterns("*.tuning"))
    records.chmod(0o700)

    def run(*arguments, **environment):
        result = sagebwd(
            "tune", *arguments,
            **{"SAGEBWD_CACHE_DIR": str(records), "LD_LIBRARY_PATH": str(fake_driver),
               "FAKE_VERSION": ANY_CUBIN, "FAKE_QUIET": "1", "FAKE_MAJOR": "8", "FAKE_MINOR": "0",
               "FAKE_SMS": "108", "FAKE_KERNELS": "128x128_w8_s1=0.9"} | environment,
        )  # fmt: skip
        for kernel in records.glob("*.kernel"):  # for the tests to come
            if not (cache_dir / kernel.name).exists():
                shutil.copy(kernel, cache_dir)
        return result

    return run


def only(result):
    assert result.code == 0, result.err
    (kernel,) = result.json["kernels"]
    return kernel


@pytest.mark.usefixtures("needs_nvrtc")
def test_the_fastest_wins_and_all_timings_are_kept(tune):
    kernel = only(tune(*SMALL, *FEW, "--json"))
    assert kernel["kernel"] == "forward"
    assert kernel["bucket"] == "q1024 kv1024 partial"
    assert kernel["gpu"] == "Fake GPU 10"
    assert kernel["tile"] == FAST
    assert kernel["default_ms"] == 1.5
    assert kernel["speedup"] == pytest.approx(1.5 / 0.9)
    assert kernel["fresh"] and kernel["kept"]
    timed = [c for c in kernel["candidates"] if c["outcome"] == "timed"]
    assert len(timed) == 4 and all(len(c["ms"]) == 5 for c in timed)
    again = only(tune(*SMALL, *FEW, "--json"))
    assert not again["fresh"]
    assert again["digest"] == kernel["digest"]
    assert only(tune(*SMALL, *FEW, "--json", "--force"))["fresh"]


@pytest.mark.usefixtures("needs_nvrtc")
def test_of_a_fused_backward_the_forward_alone_is_tuned(tune):
    small = [*SMALL[2:], "--precision", "gradients16", "--no-deterministic"]
    result = tune(*small, "--tile", "mma 128x128 w8 s1 b1", "--json")
    assert only(result)["kernel"] == "forward"
    assert result.json["left_out"] == ["backward_dq", "backward_dkv"]
    text = tune(*small, "--tile", "mma 128x128 w8 s1 b1").out
    assert "backward_dq, backward_dkv left out: the backward is one kernel here" in text
    none = tune(*small, "--kernel", "backward_dq")
    assert none.code == 2 and "nothing to tune: the backward of d64" in none.err
    assert "left_out" not in tune(*SMALL, "--tile", FAST).out


@pytest.mark.usefixtures("needs_nvrtc")
def test_candidates_that_fault_or_are_wrong_lose_only_themselves(tune):
    behaviour = "128x128_w8_s2=fault 64x128_w4_s2=wrong 128x128_w8_s1=0.9"
    kernel = only(tune(*SMALL, *FEW, "--json", FAKE_KERNELS=behaviour))
    outcomes = {c["tile"]: c for c in kernel["candidates"]}
    assert outcomes["mma 128x128 w8 s2 b1"]["outcome"] == "failed"
    assert "ILLEGAL_ADDRESS" in outcomes["mma 128x128 w8 s2 b1"]["detail"]
    assert outcomes["mma 64x128 w4 s2 b2"]["outcome"] == "wrong"
    assert kernel["tile"] == FAST


@pytest.mark.usefixtures("needs_nvrtc")
def test_a_default_that_faults_is_a_failure(tune):
    result = tune(*SMALL, *FEW, FAKE_KERNELS="64x128_w4_s1_b2=fault")
    assert result.code == 1
    assert "ILLEGAL_ADDRESS" in result.err
    assert tune("--list", "--json").json["records"] == []


def test_the_list_says_how_default_tiles_were_found(tune):
    found = tune("--list", "--json").json["default_tiles"]
    assert found and set(found.values()) <= {"measured", "predicted", "not measured"}
    for arch, origin in found.items():
        assert f"default tiles of {arch} are {origin}" in tune("--list").out


@pytest.mark.usefixtures("needs_nvrtc")
def test_the_table_marks_the_winner(tune):
    result = tune(*SMALL, "--tile", FAST)
    assert result.code == 0, result.err
    assert re.search(rf"^\* +{FAST} +timed +0\.9000 +0\.0000 +1\.667$", result.out, re.MULTILINE)
    assert result.err == ""  # no bar where standard error is no terminal


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize(("major", "minor"), [("12", "5"), ("8", "8")])
def test_a_gpu_nobody_has_seen_can_be_tuned(tune, major, minor):
    result = tune(
        *SMALL, "--json", "--tile", FAST, FAKE_MAJOR=major, FAKE_MINOR=minor, FAKE_SMS="400",
        FAKE_NAME="NVIDIA Future 9000",
    )  # fmt: skip
    kernel = only(result)
    assert kernel["gpu"] == "NVIDIA Future 9000"
    assert kernel["tile"] == FAST


@pytest.mark.usefixtures("needs_nvrtc")
def test_records_are_listed_exported_and_imported(tune, tmp_path):
    only(tune(*SMALL, "--json", "--tile", FAST))
    file, there = tmp_path / "records.json", {"SAGEBWD_CACHE_DIR": str(tmp_path / "there")}
    (listed,) = tune("--list", "--json").json["records"]
    assert listed["tile"] == FAST
    assert FAST in tune("--list").out
    assert tune("--export", file, "--json").json == {"file": str(file), "exported": 1}
    assert json.loads(file.read_text())["schema"] == "sagebwd tuning 1"

    def imported(*more):
        report = tune("--import", file, *more, "--json", **there).json
        return report["added"], report["kept"], report["replaced"]

    assert imported() == (1, 0, 0)
    assert imported() == (0, 1, 0)
    assert imported("--overwrite") == (0, 0, 1)
    assert tune("--list", "--json", **there).json["records"] == [listed]


@pytest.mark.usefixtures("needs_nvrtc")
def test_a_tuning_of_named_tiles_is_not_taken_for_a_full_one(tune):
    assert only(tune(*SMALL, "--json", "--tile", FAST))["fresh"]
    full = only(tune(*SMALL, "--json"))  # of all tiles
    assert full["fresh"] and len(full["candidates"]) > 4
    assert {FAST, *OTHERS} < {c["tile"] for c in full["candidates"]}
    assert not only(tune(*SMALL, "--json", "--tile", FAST))["fresh"]


def test_nothing_to_export_is_a_failure_and_leaves_the_file(tune, tmp_path):
    (tmp_path / "records.json").write_text("mine")
    result = tune("--export", tmp_path / "records.json")
    assert result.code == 1
    assert "no tuning record" in result.err
    assert (tmp_path / "records.json").read_text() == "mine"


@pytest.mark.usefixtures("needs_nvrtc")
def test_an_export_that_cannot_be_written_fails(tune, tmp_path):
    only(tune(*SMALL, "--json", "--tile", FAST))
    result = tune("--export", tmp_path / "none/records.json")
    assert result.code == 1
    assert "cannot be written" in result.err
    assert not [path for path in tmp_path.iterdir() if "records.json" in path.name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no JSON"),
        ("[]", "no JSON object"),
        ("{}", "no tuning record"),
        ('{"schema": "sagebwd tuning 2", "records": []}', "newer version"),
        ('{"schema": "sagebwd tuning 1", "records": [{}]}', "record 1"),
        ("[" * 100000, "nested"),
    ],
)
def test_an_import_of_something_else_changes_nothing(tune, tmp_path, content, message):
    (tmp_path / "records.json").write_text(content)
    result = tune("--import", tmp_path / "records.json")
    assert result.code == 1
    assert message in result.err
    assert "nothing has changed" in result.err
    assert tune("--list", "--json").json["records"] == []


def test_an_import_of_no_file_fails(tune, tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        result = tune("--import", path)
        assert result.code == 1
        assert str(path) in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tile", "wgmma 64x128 w4 s1 b2"], "there is no candidate"),
        (["--tile", "nonsense"], "cannot read tile 'nonsense'"),
        (["--kernel", "quantize"], "'quantize' is no kernel with tiles"),
        (["--rounds", 1], "--rounds is '1'"),
        (["--list", "--export", "x"], "give one of them"),
        (["--overwrite"], "--overwrite belongs to --import"),
        (["--list", "--head-dim", 64], "--head-dim is for tuning, which --list does not do"),
        (["--export", "x", "--force"], "--force is for tuning, which --export does not do"),
        (["--import", "x", "--overwrite", "--gpu", 1], "--gpu is for tuning"),
        (["--batch", 1000, "--heads", 128, "--seq-len", 1 << 20], "and Fake GPU 10 has 20.0"),
        (["--head-dim", 63], "head dimension 63"),
        (["--heads", 6, "--heads-kv", 4], "not a multiple"),
        (["--force=yes"], "--force takes no value"),
        (["--compare-precisions", "--list"], "give one of them"),
        (["--compare-precisions", "--precision", "dv16"], "--precision is for tuning"),
        (["--plans", "--tile", "mma 64x128 w4 s1 b2"], "--tile is for tuning; --compare-prec"),
        (["--plans", "--force"], "--force is for tuning; --compare-precisions compares"),
        (["--plans", "--head-dim", 63], "head dimension 63"),
        (["--plans", "--heads", 6, "--heads-kv", 4], "not a multiple"),
        (["--plans", "--granularity", "block", "--sink-keys", 1], "sink_keys = 1"),
    ],
)
def test_wrong_use_of_tune(tune, arguments, message):
    result = tune(*arguments)
    assert result.code == 2
    assert message in result.err
    assert result.out == ""


def test_without_such_a_gpu(tune, tmp_path):
    result = tune("--gpu", 7)
    assert result.code == 1
    assert "--gpu is 7, this machine has 2" in result.err
    result = tune(FAKE_DEVICES="0")
    assert result.code == 1
    assert "sees no GPU" in result.err
    result = tune("--plans", FAKE_DEVICES="0")
    assert result.code == 1
    assert "sees no GPU" in result.err
    result = tune(*SMALL, *FEW, SAGEBWD_TUNE_WORKER=str(tmp_path / "none"), FAKE_KERNELS="")
    assert result.code == 1


def test_a_worker_is_not_for_people(sagebwd):
    result = sagebwd("tune-worker")
    assert result.code == 2
    assert "run 'sagebwd tune'" in result.err
    assert "tune-worker" not in sagebwd("--help").out
