"""Tests what doctor says, and what it calls a fault."""

import json
import os
import re
import shutil
import subprocess

import pytest
from cache_helpers import OPERATION, empty
from places import BINARY, ROOT


def test_doctor_names_what_is_missing_for_what(doctor):
    assert {"nvrtc", "driver", "gpus", "cache", "architectures", "missing"} <= doctor.keys()
    for item in doctor["missing"]:
        assert item["what"] and item["needed_for"] and item["remedy"]
    notes = {arch["name"]: arch.get("note", "") for arch in doctor["architectures"]}
    assert "emulates s8 mma" in notes["sm_103"]
    assert doctor["can_run"] <= bool(doctor["gpus"])


def test_doctor_without_nvrtc_and_cache(sagebwd, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)  # a cubin is code: others must not be able to write it
    result = sagebwd(
        "doctor", "--json", SAGEBWD_NVRTC=str(tmp_path / "none.so"), SAGEBWD_CACHE_DIR=str(shared)
    )
    assert result.code == 1  # what is set is not usable
    report = result.json
    assert not report["can_compile"] and not report["cache"]["usable"]
    assert str(tmp_path / "none.so") in report["nvrtc"]["error"]
    assert any("compiling" in item["needed_for"] for item in report["missing"])


def test_doctor_says_of_the_cache_what_build_would(sagebwd, tmp_path):
    (tmp_path / "file").write_text("")
    places = {
        str(tmp_path / "file"): "cannot be opened as a directory",
        str(tmp_path / "file/cache"): "cannot be opened as a directory",
        "/proc/nowhere": "cannot be created",  # not even by root
        "": "none of SAGEBWD_CACHE_DIR, XDG_CACHE_HOME and HOME names a directory",
    }
    for place, reason in places.items():
        variables = {"SAGEBWD_CACHE_DIR": place, "XDG_CACHE_HOME": "", "HOME": ""}
        result = sagebwd("doctor", "--json", **variables)
        assert result.code == 1 and not result.json["cache"]["usable"], place
        assert reason in result.json["cache"]["error"]
        needs = [m["needed_for"] for m in result.json["missing"] if reason in m["what"]]
        assert needs == ["keeping compiled kernels between processes"]
        assert (
            f"cache   not used: {result.json['cache']['error']}"
            in sagebwd("doctor", **variables).out
        )


def test_doctor_tries_the_cache_and_leaves_nothing(sagebwd, tmp_path):
    fresh = tmp_path / "a/b/cache"
    assert sagebwd("doctor", "--json", SAGEBWD_CACHE_DIR=str(fresh)).json["cache"]["usable"]
    assert list(tmp_path.iterdir()) == []
    fresh.mkdir(mode=0o700, parents=True)
    assert sagebwd("doctor", SAGEBWD_CACHE_DIR=str(fresh)).code == 0
    assert list(fresh.iterdir()) == []


def test_doctor_says_which_variables_lead_nowhere(sagebwd, tmp_path):
    file, nowhere = tmp_path / "file", tmp_path / "nowhere"
    file.write_text("")
    assert sagebwd("doctor").code == 0
    paths = {"SAGEBWD_NVRTC": nowhere, "SAGEBWD_TUNE_WORKER": file, "SAGEBWD_TEMPLATE_DIR": file}
    for name, path in paths.items():
        result = sagebwd("doctor", "--json", **{name: str(path)})
        assert result.code == 1, name
        [item] = [m for m in result.json["missing"] if f"{name} is '{path}'" in m["what"]]
        assert item["remedy"] == "correct it, or unset it"
    for place in (tmp_path, nowhere / "file"):  # a folder, and a file in a missing one
        unwritable = sagebwd("doctor", SAGEBWD_LOG=str(place))
        said = f"SAGEBWD_LOG is '{place}', which is no file that can be written"
        assert unwritable.code == 1 and said in unwritable.out
    for written in (file, tmp_path / "fresh"):
        assert sagebwd("doctor", SAGEBWD_LOG=str(written)).code == 0
    assert not (tmp_path / "fresh").exists()  # doctor only looks
    sound = {"SAGEBWD_TUNE_WORKER": str(BINARY), "SAGEBWD_TEMPLATE_DIR": str(ROOT / "templates")}
    assert sagebwd("doctor", **sound).code == 0
    bare = sagebwd("doctor", SAGEBWD_TEMPLATE_DIR=str(tmp_path))  # as a build would find it
    assert bare.code == 1 and "no folder of templates" in bare.out


def test_doctor_counts_the_cache_and_nothing_else(sagebwd, tmp_path):
    (tmp_path / "below").mkdir()
    for name in ("thesis.txt", "below/more.txt", "0" * 64 + ".kernel"):
        (tmp_path / name).write_text("x" * 1000)
    state = sagebwd("doctor", "--json", SAGEBWD_CACHE_DIR=str(tmp_path)).json["cache"]
    assert state["files"] == 1 and state["bytes"] == 1000


def test_doctor_names_variables_that_nobody_reads(sagebwd):
    result = sagebwd("doctor", "--json", SAGEBWD_CACH_DIR="/tmp", SAGEBWD_STATS="0")
    assert result.code == 1
    missing = [item["what"] for item in result.json["missing"]]
    assert "a known variable: nothing reads SAGEBWD_CACH_DIR; did you mean SAGEBWD_CACHE_DIR?" in (
        missing)  # fmt: skip
    for far in ("SAGEBWD_XYZZY", "SAGEBWD_"):
        what = sagebwd("doctor", "--json", **{far: "1"}).json["missing"][0]["what"]
        assert what == f"a known variable: nothing reads {far}"
    assert not any("SAGEBWD_STATS" in what for what in missing)


def test_doctor_knows_what_a_checkout_reads(sagebwd):
    read = re.compile(r"""(?:environ\b.*?["']|getenv\("|^  |\{)(SAGEBWD_[A-Z0-9_]+)""", re.M)
    files = [ROOT / "run", *(ROOT / "tools/run").glob("*.*"), *(ROOT / "bench").glob("*.*"),
             *(ROOT / "tests").rglob("*.py"), *(ROOT / "tests").rglob("*.cpp")]  # fmt: skip
    found = {name for file in files for name in read.findall(file.read_text())}
    assert found >= {"SAGEBWD_PYTHON_EXE", "SAGEBWD_BIN", "SAGEBWD_UPDATE_GOLDEN"}
    named = found | {"SAGEBWD_COMMIT", "SAGEBWD_TREE"}  # of records, experiments
    missing = sagebwd("doctor", "--json", **dict.fromkeys(named, "")).json["missing"]
    assert not [item["what"] for item in missing if "nothing reads" in item["what"]]


def test_doctor_offline_looks_for_kernels_and_not_for_nvrtc(sagebwd, tmp_path):
    offline = {"SAGEBWD_OFFLINE": "1", "SAGEBWD_CACHE_DIR": str(tmp_path / "cache"),
               "SAGEBWD_NVRTC": str(tmp_path / "none.so")}  # fmt: skip
    result = sagebwd("doctor", "--json", **offline)
    assert result.code == 1 and not result.json["can_compile"]  # nothing can run
    assert result.json["nvrtc"]["error"] == "not looked for: SAGEBWD_OFFLINE=1 forbids compiling"
    assert not any(arch["kept"] for arch in result.json["architectures"])
    what = [item["what"] for item in result.json["missing"]]
    assert not any("NVRTC" in text for text in what)
    assert "kernels for any GPU: neither the directory nor a pack has one of this version" in what
    [remedy] = [m["remedy"] for m in result.json["missing"] if m["what"].startswith("kernels for")]
    assert "SAGEBWD_CACHE_PACKS" in remedy and "SAGEBWD_CACHE_DIR" in remedy
    text = sagebwd("doctor", **offline).out
    assert "\nkernels none\n" in text and "(no)" not in text and str(tmp_path / "none") not in text


def test_doctor_names_variables_and_their_wrong_values(sagebwd):
    result = sagebwd("doctor", "--json", SAGEBWD_TUNE="maybe", SAGEBWD_OFFLINE="yes",
                     SAGEBWD_STATS="1")  # fmt: skip
    assert result.code == 1
    wrong = [m["what"] for m in result.json["missing"] if m["what"].startswith("a usable value")]
    assert len(wrong) == 2 and "'yes'" in wrong[0] and "'maybe'" in wrong[1]
    assert result.json["variables"]["SAGEBWD_STATS"] == "1"
    help_text = sagebwd("doctor", "--help").out
    assert all(name in help_text for name in result.json["variables"])


def test_doctor_as_text(sagebwd):
    result = sagebwd("doctor")
    assert result.code == 0
    for word in ("nvrtc", "driver", "cache", "archs"):
        assert re.search(f"^{word} ", result.out, re.MULTILINE)


def test_doctor_shows_limit_packs_and_modes(sagebwd, tmp_path):
    none = tmp_path / "none.pack"
    result = sagebwd("doctor", "--json", SAGEBWD_CACHE_LIMIT="5M", SAGEBWD_OFFLINE="1",
                     SAGEBWD_TUNE="frozen", SAGEBWD_CACHE_PACKS=str(none))  # fmt: skip
    assert result.code == 1  # no kernel can be had with such a pack
    report = result.json
    assert report["cache"]["byte_limit"] == 5 << 20 and report["cache"]["offline"]
    assert report["tuning"] == "frozen"
    assert not report["cache"]["packs"][0]["usable"]
    assert any(str(none) in item["what"] for item in report["missing"])
    text = sagebwd("doctor", SAGEBWD_TUNE="maybe").out
    assert "at most 1024 MiB" in text and "'maybe'" in text
    assert "at most 1000 bytes of" in sagebwd("doctor", SAGEBWD_CACHE_LIMIT="1000").out


def test_doctor_reads_every_kernel_of_a_pack(cache, sagebwd, tmp_path):
    pack = tmp_path / "a.pack"
    assert cache("export", "--out", pack).code == 0
    here = {"SAGEBWD_OFFLINE": "1", "SAGEBWD_CACHE_PACKS": str(pack), **empty(tmp_path)}
    sound = sagebwd("doctor", "--json", **here)
    assert sound.code == 0 and sound.json["cache"]["packs"][0]["usable"]
    assert [a["name"] for a in sound.json["architectures"] if a["kept"]] == ["sm_80"]
    assert "\nkernels of sm_80\n" in sagebwd("doctor", **here).out
    wrong = sagebwd("doctor", SAGEBWD_TUNE="foo", **here)
    assert "SAGEBWD_TUNE is 'foo'" in wrong.out and "another version" not in wrong.out
    data = bytearray(pack.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    pack.write_bytes(data)
    corrupt = sagebwd("doctor", "--json", **here)
    assert corrupt.code == 1 and not corrupt.json["cache"]["packs"][0]["usable"]
    assert "its checksum does not match" in corrupt.json["cache"]["packs"][0]["error"]
    listed = cache("ls", SAGEBWD_CACHE_PACKS=str(pack))  # a list is no judgement
    assert listed.code == 0 and ", 1 bad, " in listed.out


@pytest.fixture
def on_gpu(sagebwd, fake_driver, tmp_path):
    """Runs doctor, offline, on a machine with a GPU; returns its exit code and its report."""

    def run(major, driver, **variables):
        gpu = {"LD_LIBRARY_PATH": str(fake_driver), "FAKE_QUIET": "1", "FAKE_DEVICES": "1",
               "FAKE_MAJOR": str(major), "FAKE_MINOR": "0",
               "FAKE_VERSION": str(driver)}  # fmt: skip
        usual = {**empty(tmp_path), "SAGEBWD_OFFLINE": "1"}
        result = sagebwd("doctor", "--json", **{**usual, **gpu, **variables})
        return result.code, result.json

    return run


@pytest.mark.parametrize(("major", "minor", "name", "words", "evidence"), [
    (8, 9, "NVIDIA GeForce RTX 4090", "six-of-seven with dp_sums=fp16",
     "predicted for an RTX 4090"),
    (9, 0, "NVIDIA H100 80GB HBM3", "gradients16", "measured on H100 and H200"),
    (8, 0, "NVIDIA A100-SXM4-80GB", "six-of-seven", "predicted for an A100"),
    (8, 7, "Orin", "six-of-seven", ""),
])  # fmt: skip
def test_doctor_says_what_the_fastest_precision_is(
    sagebwd, on_gpu, fake_driver, major, minor, name, words, evidence
):
    gpu = {"FAKE_NAME": name, "FAKE_MAJOR": str(major), "FAKE_MINOR": str(minor)}
    [told] = on_gpu(major, 13000, **gpu)[1]["gpus"]
    precision, _, dp_sums = words.partition(" with dp_sums=")
    assert told["fastest_precision"] == {
        "precision": precision, "dp_sums": dp_sums or "fp32", "evidence": evidence}  # fmt: skip
    here = {"LD_LIBRARY_PATH": str(fake_driver), "FAKE_QUIET": "1", "FAKE_DEVICES": "2", **gpu}
    why = evidence or "the default: nobody has measured this GPU"
    line = f"\n        precision='fastest' stands for {words}, {why}\n"
    assert sagebwd("doctor", SAGEBWD_OFFLINE="1", **here).out.count(line) == 2


def test_doctor_says_that_a_gpu_is_not_supported(on_gpu, needs_nvrtc):
    code, report = on_gpu(7, 13000, SAGEBWD_OFFLINE="0")
    [item] = report["missing"]
    assert code == 1 and not report["can_run"]
    assert item["what"].startswith("a supported GPU in place of gpu 0, Fake GPU 10: compute "
                                   "capability 7.0 is not supported")  # fmt: skip
    assert on_gpu(8, 13000, SAGEBWD_OFFLINE="0")[1]["can_run"]


def test_doctor_fails_where_no_attention_can_run(on_gpu, sagebwd, cache, built, tmp_path):
    assert cache("export", "--out", tmp_path / "a.pack").code == 0
    packed = sagebwd("doctor", "--json", SAGEBWD_CACHE_PACKS=str(tmp_path / "a.pack")).json
    lowest = packed["cache"]["packs"][0]["lowest_driver"]
    here = {"SAGEBWD_CACHE_DIR": str(built)}  # kernels for sm_80
    code, report = on_gpu(8, lowest, **here)
    assert code == 0 and report["can_run"] and not report["missing"]
    for major, driver, why in [(9, lowest, "kernels for sm_90a: neither"),
                               (8, lowest - 1000, "a newer driver: ")]:  # fmt: skip
        code, report = on_gpu(major, driver, **here)
        assert code == 1 and not report["can_run"]
        assert any(item["what"].startswith(why) for item in report["missing"]), report["missing"]
    assert on_gpu(8, lowest)[0] == 1  # an empty cache


def test_doctor_recommends_no_nvrtc_that_the_library_refuses(on_gpu, needs_nvrtc):
    for offline in "01":
        code, report = on_gpu(8, 11080, SAGEBWD_OFFLINE=offline)
        [item] = [m for m in report["missing"] if m["what"].startswith("a driver for CUDA")]
        assert code == 1 and not report["can_run"]
        assert "CUDA 12 or newer (this one is for CUDA 11.8)" in item["what"]
        assert item["remedy"] == "update the driver: no kernel is built for CUDA 11"
        assert "cu11" not in str(report["missing"])


def test_a_missing_nvrtc_names_the_packages_of_both_drivers(tmp_path):
    program = tmp_path / "alone/bin/sagebwd"  # beside which there is no Python
    program.parent.mkdir(parents=True)
    shutil.copy(BINARY, program)
    leading = ("SAGEBWD_", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_", "LD_LIBRARY_PATH")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(leading)} | empty(tmp_path)

    def run(*words):
        command = [program, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, env=kept, check=False)

    report = json.loads(run("doctor", "--json").stdout)
    if report["nvrtc"]["found"]:
        pytest.skip("NVRTC is found here without any path, so it cannot be missing")
    [item] = [m for m in report["missing"] if m["what"].startswith("NVRTC")]
    last = run("build", *OPERATION).stderr.splitlines()[-1]
    for told in (item["remedy"], last):
        assert "pip install nvidia-cuda-nvrtc" in told and "SAGEBWD_NVRTC" in told
        packages = r"nvrtc`? \(for drivers of CUDA 13\).* nvidia-cuda-nvrtc-cu12`? \(for CUDA 12\)"
        assert re.search(packages, told)


def test_a_wrong_path_of_nvrtc_is_corrected_or_unset(sagebwd, tmp_path):
    wrong = {"SAGEBWD_NVRTC": "/nope", **empty(tmp_path)}
    report = sagebwd("doctor", "--json", **wrong).json
    remedies = [m["remedy"] for m in report["missing"] if "NVRTC" in m["what"]]
    assert len(remedies) == 2 and all("correct" in r and "unset" in r for r in remedies)
    refused = sagebwd("build", *OPERATION, **wrong)
    assert refused.code == 1 and "correct SAGEBWD_NVRTC, or unset it" in refused.err
    assert "pip install" not in refused.err and "/nope (SAGEBWD_NVRTC): no such" in refused.err
    assert refused.err.endswith("\nRemedy: correct SAGEBWD_NVRTC, or unset it.\n")
