"""Tests what emit, build and trace print."""

import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from places import BINARY, ROOT

TENSORS = {"delta", "P", "dP", "dS", "O", "dQ", "dK", "dV"}
ONE_OP = ["--arch", "sm_90a", "--head-dim", 128, "--dtype", "bf16", "--causal", "none"]


def test_emit_takes_a_fused_kernel_by_its_tile(sagebwd):
    words = ["emit", "--arch", "sm_90a", "--head-dim", "64", "--kernel", "backward"]
    for more, name in [
        (["--tile", "mma 64x128 w8 s1 b1"], "backward_d64_mma_64x128_w8_s1_b1"),
        (["--precision", "gradients16", "--tile", "ws 64x128w8s4"], "_ws_64x128_w8_s4_b1"),
    ]:  # fmt: skip
        result = sagebwd(*words, "--no-deterministic", *more)
        assert result.code == 0 and name in result.out, result.err
    result = sagebwd(*words)
    assert result.code == 2 and "--gradient-kernels fused" in result.err


@pytest.mark.parametrize("words, name", [
    ("--kernel backward --precision gradients16 --arch sm_90a", "_ws_64x128_w8_s2_b1"),
    ("--kernel backward_dq --arch sm_80 --tile 'mma 64x128 w4 s1 b2'", "backward_dq_d128"),
])
def test_emit_prints_the_default_backward_or_that_of_a_tile(sagebwd, words, name):
    result = sagebwd("emit", "--no-deterministic", *shlex.split(words))
    assert result.code == 0 and name in result.out.splitlines()[0], result.err


@pytest.mark.parametrize("words, advice", [
    ("--kernel backward --arch sm_90a", "is split: --gradient-kernels fused makes it fused"),
    ("--kernel backward --arch sm_89 --precision dv16", "is split and cannot be fused: "),
    ("--kernel backward_dq --arch sm_89", "is fused: --gradient-kernels split, or a --tile,"),
])
def test_emit_says_how_to_have_the_other_backward(sagebwd, words, advice):
    result = sagebwd("emit", "--no-deterministic", *shlex.split(words))
    assert result.code == 2 and advice in result.err, result.err


def test_emit_lists_forward_and_backward(sagebwd):
    kernels = sagebwd("emit", "--list", "--json").json["kernels"]
    kinds = {kernel["kernel"] for kernel in kernels}
    assert {"forward", "backward_dq", "backward_dkv", "quantize"} <= kinds
    assert {kernel["pass"] for kernel in kernels} == {"forward", "backward"}
    names = [kernel["name"] for kernel in kernels]
    assert len(set(names)) == len(names)
    for kernel in kernels:  # of a kernel without tiles the compiler says how much it shares
        assert bool(kernel["tile"]) == (kernel["shared_bytes"] is not None)
    assert re.search(r"^quantize .* - +\d+ +- ", sagebwd("emit", "--list").out, re.MULTILINE)


@pytest.mark.parametrize("arch, origin", [("sm_90a", "measured"), ("sm_89", "predicted"),
                                          ("sm_100", "not measured")])  # fmt: skip
def test_emit_says_how_default_tiles_were_found(sagebwd, arch, origin):
    assert sagebwd("emit", "--list", "--arch", arch, "--json").json["default_tiles"] == origin
    told = sagebwd("emit", "--list", "--arch", arch).out.splitlines()[-1]
    assert told.startswith(f"default tiles of {arch} are {origin}")
    assert ("sagebwd tune" in told) == (origin != "measured")


def test_emit_prints_source_without_headers(sagebwd):
    first = sagebwd("emit", "--kernel", "forward", "--arch", "sm_80", "--head-dim", 64)
    assert first.code == 0
    assert 'extern "C"' in first.out
    assert "#include" not in first.out
    again = sagebwd("emit", "--kernel", "forward", "--arch", "sm_80", "--head-dim", 64)
    assert again.out == first.out


def test_emit_says_with_which_options_the_source_is_compiled(sagebwd):
    def emitted(*words):
        return sagebwd("emit", "--arch", "sm_80", "--json", *words).json

    wide = emitted("--kernel", "backward_dkv")
    assert (wide["options"], wide["ptxas_row"]) == (["--ptxas-options=-O1"], "dkv-wide")
    narrow = emitted("--kernel", "backward_dkv", "--head-dim", "64")
    assert (narrow["options"], narrow["ptxas_row"]) == ([], None)


def test_emit_pass_chooses_between_kernels_of_both(sagebwd):
    sources = {
        p: sagebwd("emit", "--kernel", "quantize", "--pass", p).out
        for p in ("forward", "backward")
    }
    assert sources["forward"] != sources["backward"]


def test_emit_tile_changes_the_kernel(sagebwd):
    default = sagebwd("emit", "--kernel", "forward", "--json").json
    other = sagebwd("emit", "--kernel", "forward", "--tile", "64x128w4s1", "--json").json
    assert other["threads"] == 128
    assert other["name"] != default["name"]
    for tile in ("mma 64x128 w4 s1 b1", "64x128 w4 s1", "mma 64x128w4s1"):
        assert sagebwd("emit", "--kernel", "forward", "--tile", tile, "--json").json == other, tile


def test_emit_writes_a_folder(sagebwd, tmp_path):
    result = sagebwd("emit", "-o", tmp_path / "deep", "--json")
    assert result.code == 0
    listed = sagebwd("emit", "--list", "--json").json["kernels"]
    written = {path.stem for path in (tmp_path / "deep").glob("*.cu")}
    assert written == {kernel["name"] for kernel in listed}


def test_emit_to_an_impossible_folder_fails(sagebwd, tmp_path):
    (tmp_path / "file").write_text("")
    result = sagebwd("emit", "-o", tmp_path / "file/below")
    assert result.code == 1
    assert str(tmp_path / "file/below") in result.err


@pytest.mark.usefixtures("needs_nvrtc")
def test_build_compiles_once_and_then_comes_from_the_cache(sagebwd, tmp_path):
    cache = {"SAGEBWD_CACHE_DIR": str(tmp_path / "cubins")}
    words = ["--arch", "sm_90a", "--head-dim", 64, "--json"]
    cold = sagebwd("build", *words, **cache).json["kernels"]
    warm = sagebwd("build", *words, **cache).json["kernels"]
    names = [kernel["name"] for kernel in cold]
    assert len(set(names)) == len(names) >= 6
    assert {kernel["pass"] for kernel in cold} == {"forward", "backward"}
    assert not any(kernel["cached"] for kernel in cold)
    assert all(kernel["cached"] for kernel in warm)
    assert [kernel["name"] for kernel in warm] == names
    for before, after in zip(cold, warm):
        assert before["compile_ms"] > 0
        assert 0 < before["registers"] <= 255
        assert before["spill_bytes"] == 0
        for key in ("registers", "spill_bytes", "shared_bytes"):
            assert after[key] == before[key]


@pytest.mark.usefixtures("needs_nvrtc")
def test_build_takes_lists(sagebwd, stocked, cache_dir):
    stocked(cache_dir, "--arch", "sm_80,sm_90a", "--head-dim", 64)
    result = sagebwd("build", "--arch", "sm_80,sm_90a,sm_80", "--head-dim", "64", "--json")
    kernels = result.json["kernels"]
    keys = [(kernel["arch"], kernel["name"]) for kernel in kernels]
    assert len(set(keys)) == len(keys)
    assert {arch for arch, _ in keys} == {"sm_80", "sm_90a"}


@pytest.mark.usefixtures("needs_nvrtc")
def test_build_as_a_table(sagebwd, stocked, cache_dir):
    stocked(cache_dir, "--arch", "sm_80", "--head-dim", 64)
    result = sagebwd("build", "--arch", "sm_80", "--head-dim", 64)
    assert result.code == 0
    assert re.search(r"^\d+ kernels, \d+ from the cache", result.out, re.MULTILINE)
    assert result.err == ""  # no progress bar where standard error is no terminal


def test_build_without_nvrtc_fails_and_says_where_it_looked(sagebwd, tmp_path):
    missing = str(tmp_path / "none.so")
    result = sagebwd("build", SAGEBWD_NVRTC=missing, SAGEBWD_CACHE_DIR=str(tmp_path / "empty"))
    assert result.code == 1
    assert missing in result.err


def test_a_build_of_nothing_prints_no_table(sagebwd, tmp_path):
    result = sagebwd("build", *ONE_OP, SAGEBWD_OFFLINE="1", SAGEBWD_CACHE_DIR=str(tmp_path / "new"))
    assert result.code == 1 and result.out == ""
    assert "--spec 'd128 bf16 causal=none " in result.err  # what would build it
    listed = sagebwd("cache", "ls", SAGEBWD_CACHE_DIR=str(tmp_path / "new"))
    assert listed.code == 0 and listed.out.startswith("0 kernels, 0 tuning records, ")


def test_templates_come_from_the_folder_that_is_named(sagebwd, tmp_path):
    def emitted(folder):
        result = sagebwd("emit", "--kernel", "forward", SAGEBWD_TEMPLATE_DIR=str(folder))
        assert result.code == 0, result.err
        return result.out

    embedded = emitted("")
    assert embedded == sagebwd("emit", "--kernel", "forward").out
    mine = tmp_path / "templates"
    shutil.copytree(ROOT / "templates", mine)
    assert emitted(mine) == embedded
    with (mine / "kernels/forward.cuh").open("a") as forward:
        forward.write("// mine, all mine\n")
    assert "// mine, all mine" in emitted(mine)
    missing = sagebwd("emit", "--kernel", "forward", SAGEBWD_TEMPLATE_DIR=str(tmp_path / "none"))
    assert missing.code != 0 and f"SAGEBWD_TEMPLATE_DIR = '{tmp_path / 'none'}'" in missing.err


def trace(sagebwd, *arguments):
    result = sagebwd("trace", "--device", "cpu", "--json", *arguments)
    assert result.code == 0, result.err
    return result.json["tensors"]


def test_trace_gives_every_tensor(sagebwd):
    result = sagebwd(
        "trace",
        "--device",
        "cpu",
        "--head-dim",
        128,
        "--seq-len",
        1024,
        "--heads",
        8,
        "--sigma",
        1,
        "--granularity",
        "row",
        "--json",
    )
    tensors = result.json["tensors"]
    assert set(tensors) == TENSORS
    for name, figures in tensors.items():
        assert figures.keys() == {"cosine", "rel_l2", "bias"} and abs(figures["bias"]) < 0.01
        assert 0.99 < figures["cosine"] <= 1 + 1e-9, name
    # Looser than the targets at N 4096, tight enough that one product more in INT8 exceeds them.
    assert 0.005 < tensors["O"]["rel_l2"] < 0.016
    assert 0.005 < tensors["dQ"]["rel_l2"] < 0.025
    assert 0.005 < tensors["dK"]["rel_l2"] < 0.025
    assert 0.005 < tensors["dV"]["rel_l2"] < 0.016


SMALL = ["--heads", 2, "--seq-len", 256, "--head-dim", 64]


def test_trace_is_reproducible_and_seeded(sagebwd):
    assert trace(sagebwd, *SMALL) == trace(sagebwd, *SMALL)
    assert trace(sagebwd, *SMALL) != trace(sagebwd, *SMALL, "--seed", 1)


def test_an_interrupt_is_said():
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs ignore it
    process = subprocess.Popen([BINARY, "trace", "--seq-len", "16384"], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    signal.signal(signal.SIGINT, before)
    limit = time.monotonic() + 60
    caught = 0
    while not caught >> (signal.SIGINT - 1) & 1 and time.monotonic() < limit:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    process.send_signal(signal.SIGINT)  # it would take minutes
    out, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT  # which shells show as 130
    assert (out, said) == ("", "\nsagebwd trace: interrupted\n")


def test_emit_without_an_architecture_is_for_the_gpu_that_is_there(sagebwd):
    usual = sagebwd("emit", "--list", "--head-dim", 64)
    assert usual.code == 0
    gpus = [gpu.get("arch") for gpu in sagebwd("doctor", "--json").json["gpus"]]
    arch = (gpus or ["sm_80"])[0]
    assert usual.out == sagebwd("emit", "--list", "--head-dim", 64, "--arch", arch).out
    assert "(default: native, or sm_80 where there is no GPU)" in " ".join(
        sagebwd("emit", "--help").out.split())  # fmt: skip


def test_trace_refuses_what_memory_does_not_hold(sagebwd):
    result = sagebwd("trace", "--seq-len", 64, "--seq-kv", 16_000_000)
    assert result.code == 2 and "GiB of memory" in result.err and "shorten" in result.err


def test_trace_plan_quantises_only_what_it_names(sagebwd):
    exact = trace(sagebwd, *SMALL, "--plan", "none")
    only_pv = trace(sagebwd, *SMALL, "--plan", "pv")
    assert exact["O"]["rel_l2"] < 0.004  # bf16 alone
    assert only_pv["O"]["rel_l2"] > 2 * exact["O"]["rel_l2"]
    assert only_pv["P"]["rel_l2"] < 1e-5  # P as it leaves the softmax


def test_trace_prints_the_plan_that_it_follows_and_no_other(sagebwd):
    def header(*words):
        return sagebwd("trace", *SMALL, *words).out.splitlines()[0]

    assert " six-of-seven " in header() and ", INT8 products s,pv,dv,dq,dk, " in header()
    none = header("--plan", "none")
    assert " sink_keys=1 smooth_k " in none and ", INT8 products none, " in none


def test_trace_shows_what_dp_in_int8_costs(sagebwd):
    six = trace(sagebwd, *SMALL)
    seven = trace(sagebwd, *SMALL, "--plan", "s,pv,dv,dp,dq,dk")
    assert six == trace(sagebwd, *SMALL, "--plan", "s,pv,dv,dq,dk")
    assert seven["dP"]["rel_l2"] > 0.003 > six["dP"]["rel_l2"]
    assert seven["dQ"]["rel_l2"] > six["dQ"]["rel_l2"]


def test_trace_shows_what_smoothing_is_for(sagebwd):
    offset = [*SMALL, "--key-offset", 20]
    assert (
        trace(sagebwd, *offset, "--no-smooth-k")["dQ"]["rel_l2"]
        > 1.5 * trace(sagebwd, *offset)["dQ"]["rel_l2"]
    )


@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
def test_trace_takes_gqa_and_unequal_lengths(sagebwd, causal):
    tensors = trace(
        sagebwd,
        "--batch",
        2,
        "--heads",
        4,
        "--heads-kv",
        2,
        "--seq-len",
        65,
        "--seq-kv",
        130,
        "--head-dim",
        64,
        "--dtype",
        "fp16",
        "--causal",
        causal,
    )
    assert all(figures["cosine"] > 0.99 for figures in tensors.values())


def test_trace_as_a_table(sagebwd):
    result = sagebwd("trace", *SMALL)
    assert result.code == 0
    for tensor in TENSORS:
        line = rf"^{tensor} +\d\.\d+ +\d\.\d+ +-?\d\.\d+$"
        assert re.search(line, result.out, re.MULTILINE)


def test_trace_is_the_same_whatever_gpu_is_here(sagebwd, fake_driver):
    def printed(folder, **environment):
        result = sagebwd("trace", *SMALL[:4], LD_LIBRARY_PATH=str(folder), FAKE_QUIET="1",
                         **environment)  # fmt: skip
        assert result.code == 0, result.err
        return result.out

    hopper = printed(fake_driver, FAKE_MAJOR="9", FAKE_MINOR="0")
    assert hopper.splitlines()[0].endswith(", emulated on the CPU")
    assert hopper == printed(fake_driver, FAKE_MAJOR="8", FAKE_MINOR="9")
    assert hopper == printed(fake_driver, FAKE_DEVICES="0")


def test_trace_takes_inputs_by_name(sagebwd):
    help_text = sagebwd("trace", "--help").out
    for name in ("gaussian", "outlier-channels", "sink-last", "massive-tokens"):
        assert re.search(rf"^  {name} +\w+", help_text, re.MULTILINE)
    causal = [*SMALL, "--causal", "top-left"]
    sink = sagebwd("trace", *causal, "--inputs", "sink", "--json").json
    assert sink["inputs"] == "sink" and sink["tensors"] != trace(sagebwd, *causal)
    header = sagebwd("trace", *causal, "--inputs", "sink", "--seed", 3).out.splitlines()[0]
    assert ", inputs sink, seed 3, " in header
    gaussian = sagebwd("trace", *SMALL, "--inputs", "gaussian", "--sigma", 2)
    assert ", inputs gaussian of sigma 2, " in gaussian.out.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--inputs", "banana"], "--inputs: unknown inputs 'banana': supported are gaussian, "),
        (["--inputs", "sink,local"], "--inputs is 'sink,local'; it takes one name"),
        (["--inputs", "sink", "--sigma", 3], "'sink' has none; leave them out"),
        (["--inputs", "sink", "--key-offset", 3], "'sink' has none; leave them out"),
        (["--max-logits"], "--max-logits: trace prints no largest scores"),
        (["--smooth-v", "--precision", "s,dv"], "--smooth-v with --precision s,dv, which "
         "quantises no values: leave it out, or add pv to the products"),
        (["--smooth-q", "--precision", "none"], "which quantises no queries"),
        (["--granularity", "rows"], "supported are row, block; did you mean 'row'?"),
    ],
)
def test_trace_refuses(sagebwd, words, message):
    result = sagebwd("trace", *SMALL, *words)
    assert result.code == 2 and message in result.err


HEAVY = "--inputs heavy-channels --causal top-left"


@pytest.mark.parametrize(
    ("with_it", "without", "tensor", "factor"),
    [
        ("--plan none", "", "O", 5),
        ("--sigma 5 --precision qk16", "--sigma 5", "dQ", 3),
        ("", "--plan s,pv,dv,dp,dq,dk", "dS", 1.25),
        ("--key-offset 20", "--key-offset 20 --no-smooth-k", "dQ", 10),
        (HEAVY, f"{HEAVY} --no-rotate", "dQ", 1.3),
        ("", "--granularity block", "dQ", 2),
    ],
)
def test_what_the_readme_shows_is_visible(sagebwd, with_it, without, tensor, factor):
    def error(options):
        command = ["trace", "--seq-len", "256", "--heads", "2", "--json", *options.split()]
        return sagebwd(*command).json["tensors"][tensor]["rel_l2"]

    assert error(without) > factor * error(with_it)
