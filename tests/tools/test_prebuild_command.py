"""sagebwd prebuild: packs, resuming, lists of specs, and running from a pack alone."""

import hashlib
import json
import os
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from places import BINARY

SMALL = ["--arch", "sm_80", "--head-dim", "64", "--dtype", "bf16", "--causal", "none"]
OFFLINE = {"SAGEBWD_OFFLINE": "1"}


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def kept_in(folder):
    return len(list(folder.glob("*.kernel"))) if folder.exists() else 0


@pytest.fixture
def begun(stocked, tmp_path):
    """begun(pack): kernels of SMALL beside a pack that is to be made, as an interrupted prebuild
    leaves them, except those whose names begin with one of `without`."""

    def fill(pack, *words, without=("sagebwd_key_mean",)):
        work = tmp_path / f"{pack}.partial"
        for kernel in stocked(work, *(words or SMALL)):
            if kernel["name"].startswith(without):
                (work / f"{kernel['digest']}.kernel").unlink()
        (work / "prebuild.lock").touch()
        return tmp_path / pack

    return fill


def kernels_in_dry_run(result):
    assert result.code == 0, result.err
    return {(kernel["arch"], kernel["name"]) for kernel in result.json["kernels"]}


# --- packs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_pack(sagebwd, doctor, tmp_path_factory):
    if not doctor["can_compile"]:
        pytest.skip("no NVRTC: " + doctor["nvrtc"]["error"].splitlines()[0])
    path = tmp_path_factory.mktemp("packs") / "small.pack"
    result = sagebwd("prebuild", *SMALL, "--out", path, "--json")
    assert result.code == 0, result.err
    return path, result.json


def test_figures_of_a_pack(small_pack):
    path, figures = small_pack
    assert figures["bytes"] == path.stat().st_size
    assert figures["kernels"] == figures["compiled"] == sum(a["kernels"] for a in figures["archs"])
    assert figures["resumed"] == 0
    assert figures["lowest_driver"] >= 12000
    assert figures["compiler"].startswith("nvrtc ")
    assert path.stat().st_mode & 0o133 == 0
    assert not path.with_name("small.pack.partial").exists()


def test_another_order_gives_the_same_bytes(sagebwd, small_pack, tmp_path, begun):
    specs = tmp_path / "specs.json"
    entry = {"arch": "sm_80", "head_dim": 64, "dtype": "bf16", "causal": "none"}
    specs.write_text(json.dumps([{**entry, "pass": "backward"}, {**entry, "pass": "forward"}]))
    # A prebuild may compile: that is what it is for.
    result = sagebwd("prebuild", "--specs", specs, "--out", begun("b.pack"), **OFFLINE)
    assert result.code == 0, result.err
    assert "lowest driver" in result.out and "SAGEBWD_CACHE_PACKS=" in result.out
    assert sha(tmp_path / "b.pack") == sha(small_pack[0])


def test_killed_and_run_again_it_gives_the_same_bytes(sagebwd, small_pack, tmp_path, begun):
    all_but_two = ("sagebwd_key_mean", "sagebwd_quantize_forward", "sagebwd_forward",
                   "sagebwd_backward_dkv")  # fmt: skip
    out = begun("p.pack", without=all_but_two)
    work = tmp_path / "p.pack.partial"
    command = [BINARY, "prebuild", *SMALL, "--out", out]
    for kernels in (3, 4):  # killed when so many are kept
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        limit = time.monotonic() + 600
        while kept_in(work) < kernels and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it was done before it could be killed"
        assert not out.exists()
    kept = kept_in(work)
    assert kept >= 4
    figures = sagebwd("prebuild", *SMALL, "--out", out, "--json").json
    assert figures["resumed"] == kept
    assert figures["compiled"] == figures["kernels"] - kept
    assert sha(out) == sha(small_pack[0])
    assert not work.exists()


FORWARD = [*SMALL, "--pass", "forward"]


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_says_how_to_go_on(needs_nvrtc, tmp_path, ignored):
    out = tmp_path / "p.pack"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)
    process = subprocess.Popen([BINARY, "prebuild", *FORWARD, "--out", out], text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    signal.signal(signal.SIGINT, before)
    limit = time.monotonic() + 600
    while kept_in(tmp_path / "p.pack.partial") == 0 and time.monotonic() < limit:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=1200)[1]
    if ignored:  # as a shell's job in the background does
        assert process.returncode == 0 and out.exists() and said == ""
    else:
        assert process.returncode == -signal.SIGINT and not out.exists()
        assert said == "\nsagebwd prebuild: interrupted; run the same command to continue\n"


def test_the_second_of_two_at_once_is_told(sagebwd, needs_nvrtc, tmp_path):
    out = tmp_path / "p.pack"
    process = subprocess.Popen([BINARY, "prebuild", *FORWARD, "--out", out],
                               stdout=subprocess.DEVNULL)  # fmt: skip
    limit = time.monotonic() + 600
    while kept_in(tmp_path / "p.pack.partial") == 0 and time.monotonic() < limit:
        time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)  # so that it is not done before the second begins
    second = sagebwd("prebuild", *FORWARD, "--out", out)
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 0
    assert second.code == 1
    assert "another process is building it" in second.err and str(out) in second.err
    assert out.exists()


def test_without_nvrtc_it_says_so(sagebwd, tmp_path):
    result = sagebwd("prebuild", *SMALL, "--out", tmp_path / "p.pack",
                     SAGEBWD_NVRTC=str(tmp_path / "libnvrtc.so.13"))  # fmt: skip
    assert result.code == 1
    assert "libnvrtc" in result.err and "SAGEBWD_NVRTC" in result.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["none/p.pack", "folder", "link/p.pack"])
def test_an_output_that_cannot_be_written(sagebwd, tmp_path, where):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for only_listed in ((), ("--dry-run",)):
        result = sagebwd("prebuild", *SMALL, "--out", tmp_path / where, *only_listed)
        assert result.code == 1 and str(tmp_path / where) in result.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "link"]


# --- tuning records -------------------------------------------------------------------------------


def manifest_of(pack):
    """As cache/pack.cpp lays it out."""
    data = pack.read_bytes()
    count, size = struct.unpack_from("<IQ", data, 44)
    start = 88 + 48 * count
    return json.loads(data[start : start + size])


def record_of(kernel, tile):
    """A tuning record for a kernel of a manifest, as cache/record.cpp writes it."""
    tile_fields = ("family", "block_q", "block_kv", "warps", "stages", "blocks_per_sm", "options")
    key = {k: v for k, v in kernel["fields"].items() if k not in tile_fields}
    key |= {"schema": "sagebwd tuning 1", "gpu": "NVIDIA X", "bucket": "q512 kv512 full"}
    hashed = hashlib.sha256()
    for text in (text for pair in sorted(key.items()) for text in pair):
        hashed.update(struct.pack("<Q", len(text)) + text.encode())
    record = {"schema": key["schema"], "digest": hashed.hexdigest(), "key": key, "tile": tile,
              "default_tile": tile, "compiler": "nvrtc", "candidates": []}  # fmt: skip
    compact = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return record | {"checksum": hashlib.sha256(compact.encode()).hexdigest()}


def test_records_go_in_with_the_kernels_of_their_tiles(sagebwd, small_pack, tmp_path, begun):
    manifest = manifest_of(small_pack[0])
    assert manifest["archs"] == ["sm_80"]
    assert manifest["lowest_driver"] == small_pack[1]["lowest_driver"]
    assert len(manifest["items"]) == small_pack[1]["kernels"]
    [forward] = [k for k in manifest["items"] if k["kernel"].startswith("sagebwd_forward_")]
    tuned = record_of(forward, "mma 128x128 w8 s2 b1")
    fields = forward["fields"]
    elsewhere = record_of({"fields": {**fields, "arch": "sm_120"}}, "mma 64x128 w4 s1 b2")
    path = tmp_path / "records.json"
    path.write_text(json.dumps({"schema": "sagebwd tuning 1", "records": [tuned, elsewhere]}))

    out = begun("tuned.pack")
    result = sagebwd("prebuild", *SMALL, "--records", path, "--out", out, "--json")
    assert result.code == 0, result.err
    assert result.json["records"] == result.json["records_left_out"] == 1
    assert result.json["kernels"] == small_pack[1]["kernels"] + 1
    items = manifest_of(out)["items"]
    assert any("mma_128x128_w8_s2_b1" in item.get("kernel", "") for item in items)
    assert [i["tile"] for i in items if i["kind"] == "tuning"] == [tuned["tile"]]

    path.write_text(json.dumps(elsewhere))
    none = sagebwd("prebuild", *SMALL, "--records", path, "--out", tmp_path / "x.pack")
    assert none.code == 2 and "none of the 1 tuning records" in none.err
    path.write_text(json.dumps({**tuned, "tile": "mma 64x64 w4 s1 b1"}))
    changed = sagebwd("prebuild", *SMALL, "--records", path, "--out", tmp_path / "x.pack")
    assert changed.code == 1 and "checksum" in changed.err
    path.write_text(json.dumps(record_of(forward, "mma 63x64 w4 s1 b1")))
    impossible = sagebwd("prebuild", *SMALL, "--records", path, "--out", tmp_path / "x.pack")
    assert impossible.code == 1 and "63" in impossible.err
    assert not (tmp_path / "x.pack").exists()


# --- running from a pack --------------------------------------------------------------------------


def test_offline_a_pack_is_enough(sagebwd, small_pack, tmp_path):
    environment = {
        "SAGEBWD_CACHE_DIR": str(tmp_path / "cache"),
        "SAGEBWD_CACHE_PACKS": str(small_pack[0]),
        "SAGEBWD_NVRTC": str(tmp_path / "no-such-libnvrtc.so"),
    }
    result = sagebwd("build", *SMALL, "--json", **OFFLINE, **environment)
    assert result.code == 0, result.err
    assert all(kernel["cached"] for kernel in result.json["kernels"])
    assert not (tmp_path / "cache").exists() or kept_in(tmp_path / "cache") == 0


def test_offline_a_missing_kernel_names_the_command_that_builds_it(sagebwd, small_pack, tmp_path,
                                                                   begun):
    environment = {
        "SAGEBWD_CACHE_DIR": str(tmp_path / "cache"),
        "SAGEBWD_CACHE_PACKS": str(small_pack[0]),
    }

    def command_for(*wanted):
        result = sagebwd("build", *wanted, **OFFLINE, **environment)
        assert result.code == 1
        assert f"{small_pack[0]} (a pack for sm_80)" in result.err
        start = result.err.index("sagebwd prebuild ")
        return shlex.split(result.err[start : result.err.index(" --out FILE", start)])

    wanted = ["--arch", "sm_90a", "--head-dim", "64"]
    other = command_for(*wanted, "--dtype", "fp16", "--no-smooth-k")
    assert other[-1].startswith("d64 fp16 causal=none ") and "smooth_k" not in other[-1]
    command = command_for(*wanted)
    assert command[1:-1] == ["prebuild", "--arch", "sm_90a", "--spec"]
    assert command[-1].startswith("d64 bf16 causal=none ")
    made = sagebwd(*command[1:], "--out", begun("more.pack", *wanted))
    assert made.code == 0, made.err
    environment["SAGEBWD_CACHE_PACKS"] += f":{tmp_path / 'more.pack'}"
    assert sagebwd("build", *wanted, **OFFLINE, **environment).code == 0


@pytest.mark.parametrize("damage", ["missing", "open", "truncated", "text", "newer"])
def test_a_named_pack_that_cannot_be_used_is_an_error(sagebwd, small_pack, tmp_path, damage):
    path = tmp_path / "p.pack"
    data = bytearray(small_pack[0].read_bytes())
    if damage == "truncated":
        del data[-1:]
    if damage == "newer":
        data[8] = 99
    if damage != "missing":
        path.write_bytes(b"words" * 100 if damage == "text" else data)
        path.chmod(0o666 if damage == "open" else 0o644)
    result = sagebwd("build", *SMALL, SAGEBWD_CACHE_PACKS=str(path),
                     SAGEBWD_CACHE_DIR=str(tmp_path / "cache"))  # fmt: skip
    assert result.code == 1
    assert str(path) in result.err
    remedy = {"missing": "prebuild", "open": "chmod go-w", "truncated": "copy it again",
              "text": "no pack of sagebwd", "newer": "a newer version"}  # fmt: skip
    assert remedy[damage] in result.err


# --- what is built --------------------------------------------------------------------------------


def test_defaults_are_both_dims_dtypes_and_masks(sagebwd):
    names = {name for _, name in kernels_in_dry_run(
        sagebwd("prebuild", "--arch", "sm_80", "--dry-run", "--json"))}  # fmt: skip
    for part in ("_d64_", "_d128_", "_fp16", "_causal_", "forward_", "backward_dkv_"):
        assert any(part in name for name in names), part
    assert any("fp16" not in name for name in names)  # a name leaves out what is the default
    assert any("sagebwd_forward_" in name and "causal" not in name for name in names)


def test_it_builds_what_build_builds(sagebwd, stocked, cache_dir):
    options = ["--arch", "sm_80,sm_90a", "--head-dim", "64", "--dtype", "bf16", "--causal", "none"]
    stocked(cache_dir, *options)
    built = sagebwd("build", *options, "--json").json["kernels"]
    assert kernels_in_dry_run(sagebwd("prebuild", *options, "--dry-run", "--json")) == {
        (kernel["arch"], kernel["name"]) for kernel in built
    }


def test_lists_of_specs_and_options_agree(sagebwd, tmp_path):
    (tmp_path / "specs.yaml").write_text(
        "# what we train\n"
        "- arch: [sm_80, sm_90a]\n"
        "  head_dim: [64, 128]\n"
        "  dtype: bf16\n"
        "  causal:\n"
        "    - none\n"
        "    - 'top-left'\n"
        "- {arch: sm_120, smooth_k: false, group_kv: 64, precision: qk16, pass: forward}\n"
    )
    listed = kernels_in_dry_run(
        sagebwd("prebuild", "--specs", tmp_path / "specs.yaml", "--dry-run", "--json")
    )
    first = sagebwd("prebuild", "--arch", "sm_90a,sm_80", "--dtype", "bf16", "--dry-run", "--json")
    second = sagebwd("prebuild", "--arch", "sm_120", "--no-smooth-k", "--group-kv", "64",
                     "--precision", "qk16", "--pass", "forward", "--dry-run", "--json")  # fmt: skip
    assert listed == kernels_in_dry_run(first) | kernels_in_dry_run(second)


def test_a_list_builds_plain_and_packed_kernels_in_one_pack(sagebwd, tmp_path):
    specs = tmp_path / "specs.yaml"
    specs.write_text("{arch: sm_80, head_dim: 64, dtype: bf16, causal: none, packed: [no, yes]}\n")
    plain, packed = (kernels_in_dry_run(sagebwd("prebuild", *SMALL, *more, "--dry-run", "--json"))
                     for more in ([], ["--packed"]))  # fmt: skip
    assert plain - packed and packed - plain
    both = sagebwd("prebuild", "--specs", specs, "--dry-run", "--json")
    assert kernels_in_dry_run(both) == plain | packed


def test_one_set_of_kernels_serves_what_the_page_says(sagebwd):
    def kernels(*words):
        return kernels_in_dry_run(sagebwd("prebuild", *SMALL[:2], *words, "--dry-run", "--json"))

    sets = [(32, 40, 48, 56), (64,), (72, 96, 120), (128,), (136, 248), (256,)]
    shared = [[kernels("--head-dim", d) for d in dims] for dims in sets]
    assert all(each == same[0] for same in shared for each in same)
    assert not any(a[0] & b[0] for a in shared for b in shared if a is not b)
    masks = ["--causal=top-left"], ["--causal=bottom-right"], ["--causal=none"]
    assert kernels(*masks[0]) == kernels(*masks[1]) != kernels(*masks[2])
    window = [kernels("--window-left", n, *mask) for n in (0, 200) for mask in masks]
    assert all(each == window[0] for each in window) and window[0] != kernels(*masks[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--arch"),
        (["--arch", "sm_80"], "--out FILE"),
        (["--arch", "sm_91", "--dry-run"], "'sm_91'"),
        (["--arch", "sm_80", "--head-dim", "73", "--dry-run"], "73"),
        (["--arch", "sm_80", "--pass", "both", "--dry-run"], "unknown pass 'both'"),
        (["--arch", "sm_80", "--granularity", "row,block", "--group-kv", "128", "--dry-run"],
         "group_kv = 128 is not supported under 'block'"),
        (["--arch", "sm_80", "--granularity", "block", "--sink-keys", "1", "--dry-run"],
         "sink_keys = 1 is not supported under 'block'"),
        (["--specs", "x.yaml", "--head-dim", "64"], "--specs and --head-dim contradict"),
        (["--specs", "x.yaml", "--arch", "sm_80"], "--specs and --arch contradict"),
    ],
)  # fmt: skip
def test_wrong_use_of_prebuild(sagebwd, arguments, message):
    result = sagebwd("prebuild", *arguments)
    assert result.code == 2, result.err
    assert message in result.err


def test_files_that_cannot_be_read(sagebwd, tmp_path):
    missing = sagebwd("prebuild", "--specs", tmp_path / "none.yaml", "--dry-run")
    assert missing.code == 1 and "none.yaml cannot be read: No such file" in missing.err
    piped = sagebwd("prebuild", *SMALL, "--out", "-")
    assert piped.code == 1 and "not to standard output: name a file" in piped.err
    folder = sagebwd("prebuild", "--specs", tmp_path, "--dry-run")
    assert folder.code == 1 and "cannot be read" in folder.err
    (tmp_path / "records.json").write_text('{"schema": "sagebwd tuning 99"}')
    newer = sagebwd("prebuild", *SMALL, "--records", tmp_path / "records.json", "--dry-run")
    assert newer.code == 1 and "records.json" in newer.err and "newer" in newer.err


def test_a_reader_of_another_user_loads_a_root_owned_pack(small_pack):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    nobody = 65534
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        folder.chmod(0o755)
        shutil.copy(small_pack[0], folder / "root.pack")
        (folder / "root.pack").chmod(0o444)
        shutil.copy(BINARY, folder / "sagebwd")
        environment = {
            "SAGEBWD_CACHE_DIR": "/nonexistent/cache",
            "SAGEBWD_CACHE_PACKS": str(folder / "root.pack"),
            **OFFLINE,
        }
        result = subprocess.run([folder / "sagebwd", "build", *SMALL, "--json"], env=environment,
                                user=nobody, capture_output=True, text=True)  # fmt: skip
    assert all(kernel["cached"] for kernel in json.loads(result.stdout)["kernels"]), result.stderr
