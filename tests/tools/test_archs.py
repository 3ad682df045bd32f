"""Architectures by word, what some of them cannot have, and what their NVRTC must be."""

import shutil
import subprocess

import pytest
from cache_helpers import empty

D256 = ["--head-dim", "64,256", "--dtype", "bf16", "--causal", "none",
        "--precision", "dv16"]  # fmt: skip
IMPOSSIBLE = "no tile of backward_dkv fits d256"


def kernels_of(result):
    return {(k["arch"], k["pass"], "d256" in k["name"]) for k in result.json["kernels"]}


@pytest.fixture(params=["options", "file"])
def listed(request, sagebwd, tmp_path):
    if request.param == "options":
        return sagebwd("prebuild", "--arch", "sm_80,sm_89", *D256, "--dry-run", "--json")
    path = tmp_path / "specs.yaml"
    path.write_text("- {arch: [sm_80, sm_89], head_dim: [64, 256], dtype: bf16, causal: none, "
                    "precision: dv16}\n")
    return sagebwd("prebuild", "--specs", path, "--dry-run", "--json")


def test_a_pack_has_what_can_be_built_and_the_rest_is_listed(listed):
    assert listed.code == 1 and listed.err.count(IMPOSSIBLE) == 1 and "sm_89" in listed.err
    assert len(listed.json["failures"]) == 1 and IMPOSSIBLE in listed.json["failures"][0]
    found = kernels_of(listed)
    for arch in ("sm_80", "sm_89"):
        assert (arch, "forward", True) in found and (arch, "backward", False) in found
    assert ("sm_80", "backward", True) in found and ("sm_89", "backward", True) not in found


def test_a_build_goes_on_past_what_an_architecture_cannot_have(sagebwd, tmp_path):
    result = sagebwd("build", "--arch", "sm_89,sm_80", *D256, SAGEBWD_OFFLINE="1",
                     **empty(tmp_path))  # fmt: skip
    assert result.code == 1 and result.err.count(IMPOSSIBLE) == 1
    assert result.err.count("sagebwd prebuild --arch sm_") == 4  # each operation was tried


def test_one_operation_that_is_impossible_is_wrong_use(sagebwd):
    alone = [*D256[:1], "256", *D256[2:]]
    for words in (["build"], ["prebuild", "--dry-run"]):
        result = sagebwd(*words, "--arch", "sm_89", *alone)
        assert result.code == 2 and IMPOSSIBLE in result.err


def test_one_impossible_entry_of_a_list_stops_none_of_the_others(sagebwd, tmp_path):
    path = tmp_path / "specs.yaml"
    path.write_text("- {arch: sm_89, head_dim: 256, dtype: bf16, causal: none, precision: dv16, "
                    "pass: backward}\n")
    alone = sagebwd("prebuild", "--specs", path, "--dry-run")
    assert alone.code == 2 and IMPOSSIBLE in alone.err and "in a list pass: forward;" in alone.err
    path.write_text(path.read_text() + "- {arch: sm_80, head_dim: 64, dtype: bf16, causal: none}\n")
    for words in (["prebuild", "--dry-run"], ["build", "--dry-run"]):
        result = sagebwd(*words, "--specs", path, "--json")
        assert result.code == 1 and result.err.count(IMPOSSIBLE) == 1
        assert {arch for arch, _, _ in kernels_of(result)} == {"sm_80"}


NO_BACKWARD = ["--arch", "sm_89", *D256[:1], "256", *D256[2:]]


def test_a_forward_needs_no_backward(sagebwd, tmp_path):
    emitted = sagebwd("emit", "--kernel", "forward", *NO_BACKWARD)
    named = sagebwd("emit", "--kernel", "forward", "--pass", "forward", *NO_BACKWARD)
    assert emitted.code == 0 and emitted.out == named.out and "forward_d256" in emitted.out
    quantize = sagebwd("emit", "--kernel", "quantize", *NO_BACKWARD)
    assert quantize.code == 0 and "quantize_forward" in quantize.out.splitlines()[0]
    written = sagebwd("emit", "--kernel", "forward", "-o", tmp_path, *NO_BACKWARD)
    assert written.code == 0 and len(list(tmp_path.iterdir())) == 1
    # A command is an error if a part of what it asks for is lacking.
    for words in (["--list"], ["--kernel", "quantize", "--list"], ["--kernel", "backward_dq"]):
        refused = sagebwd("emit", *words, *NO_BACKWARD)
        assert refused.code == 2 and IMPOSSIBLE in refused.err
        assert "--pass forward" in refused.err
    listed = sagebwd("emit", "--list", "--pass", "forward", "--json", *NO_BACKWARD)
    assert {kernel["kernel"] for kernel in listed.json["kernels"]} >= {"quantize", "forward"}
    wrong = sagebwd("emit", "--kernel", "forwrd", *NO_BACKWARD)
    assert wrong.code == 2 and "did you mean 'forward'?" in wrong.err


def names_in(result):
    assert result.code == 0, result.err
    return [kernel["name"] for kernel in result.json["kernels"]]


@pytest.mark.parametrize("command", [["build"], ["prebuild"]])
def test_builds_take_the_same_options(sagebwd, tmp_path, command):
    one = [*command, "--dry-run", "--json"]
    forward = names_in(sagebwd(*one, "--pass", "forward", *NO_BACKWARD))
    assert forward and not any("backward" in name for name in forward)
    assert any("forward_d256" in name for name in forward)
    specs = tmp_path / "specs.yaml"
    specs.write_text("{arch: sm_89, head_dim: 256, dtype: bf16, causal: none, precision: dv16, "
                     "pass: forward}\n")
    assert names_in(sagebwd(*one, "--specs", specs)) == forward
    both = sagebwd(*one, "--specs", specs, "--pass", "forward")
    assert both.code == 2 and "--specs and --pass contradict each other" in both.err
    empty_cache = tmp_path / "cache"
    sagebwd(*one, "--arch", "sm_80", *D256, SAGEBWD_CACHE_DIR=str(empty_cache))
    assert not empty_cache.exists()


def test_what_is_built_by_default(sagebwd, fake_driver):
    gpu = {"LD_LIBRARY_PATH": str(fake_driver), "FAKE_QUIET": "1", "FAKE_MAJOR": "8",
           "FAKE_MINOR": "9"}  # fmt: skip
    no_gpu = {**gpu, "FAKE_DEVICES": "0"}

    def kernels(command, *words, **environment):
        result = sagebwd(command, *words, "--dry-run", "--json", **environment)
        assert result.out, result.err
        return {(k["arch"], k["name"]) for k in result.json["kernels"]}

    here, without = kernels("build", **gpu), kernels("build", **no_gpu)
    assert {arch for arch, _ in here} == {"sm_89"} and {arch for arch, _ in without} == {"sm_80"}
    fleet = kernels("prebuild", **gpu)
    assert here < fleet and {arch for arch, _ in fleet} == {"sm_89"}
    asked = sagebwd("prebuild", "--dry-run", **no_gpu)
    assert asked.code == 2 and "name architectures with --arch" in asked.err
    assert "there is no GPU here" in asked.err
    build, prebuild = (" ".join(sagebwd(command, "--help").out.split())
                       for command in ("build", "prebuild"))  # fmt: skip
    assert "(default native; without a GPU sm_80)" in build
    assert "(default native; without a GPU it must be given)" in prebuild
    assert "'prebuild' takes the same options" in build
    assert "'build' takes the same options" in prebuild


def archs_of(sagebwd, word, **environment):
    result = sagebwd("prebuild", "--arch", word, "--head-dim", 64, "--pass", "forward",
                     "--dry-run", "--json", **environment)  # fmt: skip
    assert result.code == 0, result.err
    return {kernel["arch"] for kernel in result.json["kernels"]}


def test_architectures_by_word(sagebwd, doctor, fake_driver, tmp_path):
    every = {arch["name"] for arch in doctor["architectures"]}
    assert archs_of(sagebwd, "all") == archs_of(sagebwd, "sm_80,all") == every
    major = {"sm_80", "sm_90a", "sm_100", "sm_110", "sm_120"}
    assert archs_of(sagebwd, "major") == major < every
    for words in ("all", "[sm_80, major]"):
        (tmp_path / "specs.yaml").write_text(f"- {{arch: {words}, head_dim: 64, pass: forward}}")
        listed = sagebwd("prebuild", "--specs", tmp_path / "specs.yaml", "--dry-run", "--json").json
        found = {kernel["arch"] for kernel in listed["kernels"]}
        assert found == (every if words == "all" else major)
    here = {"LD_LIBRARY_PATH": str(fake_driver), "FAKE_QUIET": "1"}
    assert archs_of(sagebwd, "native", FAKE_MAJOR="8", FAKE_MINOR="9", **here) == {"sm_89"}
    emitted = sagebwd("emit", "--kernel", "forward", "--arch", "native", "--head-dim", 64,
                      FAKE_MAJOR="9", FAKE_MINOR="0", **here)  # fmt: skip
    named = sagebwd("emit", "--kernel", "forward", "--arch", "sm_90a", "--head-dim", 64)
    assert emitted.code == 0 and emitted.out == named.out
    none = sagebwd("build", "--arch", "native", FAKE_DEVICES="0", **here)
    assert none.code == 1 and "--arch native means the GPUs of this machine" in none.err
    assert "--arch sm_80" in none.err


STUB = r"""
#include <stddef.h>
#include <string.h>
static const char text[] = "// Compiler Build ID: UNKNOWN\n"
                           "// Cuda compilation tools, release 12.1, V12.1.105\n";
int nvrtcVersion(int* major, int* minor) { *major = 12; *minor = MINOR; return 0; }
int nvrtcGetNumSupportedArchs(int* count) { *count = 4; return 0; }
int nvrtcGetSupportedArchs(int* archs) {
  archs[0] = 80; archs[1] = 86; archs[2] = 89; archs[3] = 90; return 0;
}
int nvrtcCreateProgram(void** program) { *program = (void*)text; return 0; }
int nvrtcDestroyProgram(void** program) { *program = 0; return 0; }
int nvrtcCompileProgram(void* program) { return 0; }
int nvrtcGetCUBINSize(void* program, size_t* size) { *size = 0; return 0; }
int nvrtcGetCUBIN(void* program, char* cubin) { return 0; }
int nvrtcGetPTXSize(void* program, size_t* size) { *size = sizeof(text); return 0; }
int nvrtcGetPTX(void* program, char* ptx) { memcpy(ptx, text, sizeof(text)); return 0; }
int nvrtcGetProgramLogSize(void* program, size_t* size) { *size = 0; return 0; }
int nvrtcGetProgramLog(void* program, char* log) { return 0; }
const char* nvrtcGetErrorString(int result) { return "none"; }
"""


@pytest.fixture(scope="module")
def old_nvrtc(tmp_path_factory):
    """Makes one of CUDA 12.MINOR, which knows sm_80 to sm_90."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvrtc")
    (folder / "nvrtc.c").write_text(STUB)

    def make(minor):
        library = folder / f"libnvrtc-{minor}.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-w", f"-DMINOR={minor}", folder / "nvrtc.c",
                        "-o", library], check=True)  # fmt: skip
        return str(library)

    return make


def test_doctor_says_what_an_architecture_needs(sagebwd, old_nvrtc):
    library = old_nvrtc(3)
    text = sagebwd("doctor", SAGEBWD_NVRTC=library).out
    assert "\narchs   sm_80 sm_86 sm_87" not in text  # this one does not know sm_87
    assert "\narchs   sm_80 sm_86 sm_89\n" in text and "(no)" not in text
    assert "nvrtc 12.3 build V12.1.105" in text
    for needed in ("sm_90a needs NVRTC 12.4", "sm_100 needs NVRTC 12.8", "sm_110 needs NVRTC 13.0"):
        assert needed in text
    assert "emulates" not in text  # of an architecture that nobody has here
    assert "sm_90a" in sagebwd("doctor", SAGEBWD_NVRTC=old_nvrtc(4)).out.split("not compiled")[0]
    report = {a["name"]: a for a in sagebwd("doctor", "--json", SAGEBWD_NVRTC=library).json[
        "architectures"]}  # fmt: skip
    assert report["sm_80"]["compiles"] and "error" not in report["sm_80"]
    assert report["sm_90a"]["first_nvrtc"] == 12040 and not report["sm_90a"]["compiles"]
    assert "needs NVRTC 12.4 or newer" in report["sm_90a"]["error"]


def test_doctor_without_nvrtc_names_no_architecture(sagebwd):
    text = sagebwd("doctor", SAGEBWD_OFFLINE="yes").out
    assert "\narchs   none without NVRTC\n" in text and "(no)" not in text


def test_an_nvrtc_that_is_too_old_costs_its_architectures_alone(sagebwd, old_nvrtc, tmp_path):
    result = sagebwd("prebuild", "--arch", "sm_90a,sm_100", "--head-dim", 64, "--out",
                     tmp_path / "a.pack", SAGEBWD_NVRTC=old_nvrtc(3))  # fmt: skip
    assert result.code == 1 and "needs NVRTC 12.8 or newer" in result.err
    assert "pip install nvidia-cuda-nvrtc" in result.err
    result = sagebwd("build", "--arch", "sm_90a,sm_100", "--head-dim", "64,128",
                     SAGEBWD_NVRTC=old_nvrtc(3), **empty(tmp_path))  # fmt: skip
    assert result.code == 1
    assert result.err.count("needs NVRTC 12.4 or newer") == 1
    assert result.err.count("needs NVRTC 12.8 or newer") == 1


GPUS = {
    "sm_80": ["A100", "NVIDIA A100-SXM4-80GB", "8.0", "compute_80"],
    "sm_86": ["a10", "A40", "RTX 3090", "GeForce RTX 3060"],
    "sm_87": ["Orin", "Jetson AGX Orin"],
    "sm_89": ["L4", "L40", "L40S", "rtx4090", "RTX_4060"],
    "sm_90a": ["H100", "h200", "GH200", "NVIDIA H100 PCIe", "sm_90"],
    "sm_100": ["B200", "100"],
    "sm_103": ["B300"],
    "sm_110": ["Thor"],
    "sm_120": ["RTX 5090", "RTX PRO 6000"],
    "sm_121": ["DGX Spark", "GB10"],
}


def test_a_gpus_name_hints_at_its_architecture(sagebwd, doctor):
    assert set(GPUS) == {arch["name"] for arch in doctor["architectures"]}
    for arch, names in GPUS.items():
        for name in names:
            refused = sagebwd("build", "--arch", name)
            assert refused.code == 2 and f"did you mean '{arch}'?" in refused.err, name
    for unknown in ("H1000", "V100", "X80", "L45", "RTX 2080", "GTX 1080", "a"):
        refused = sagebwd("build", "--arch", unknown)
        assert refused.code == 2 and "did you mean" not in refused.err, unknown
