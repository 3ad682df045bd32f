"""sagebwd cache explain, export and import; build and doctor on what is kept."""

import hashlib
import json
from pathlib import Path

import pytest
from cache_helpers import OPERATION, empty, truncate

# --- explain --------------------------------------------------------------------------------------


def explained(cache, *arguments, **environment):
    result = cache("explain", "--json", *arguments, **environment)
    assert result.code == 0, result.err
    return result.json["kernels"]


def test_explain_present(cache, built):
    kernels = explained(cache, *OPERATION, SAGEBWD_NVRTC="/nonexistent")  # which it does not open
    assert len(kernels) == len(cache.kernels())
    assert all(k["verdict"] == "present" and k["layer"] == "directory" for k in kernels)
    text = cache("explain", *OPERATION).out
    assert f"{len(kernels)} of {len(kernels)} kernels are in the cache" in text


@pytest.mark.parametrize(
    ("option", "field"),
    [
        (["--head-dim", "128"], "head_dim"),
        (["--dtype", "fp16"], "dtype"),
        (["--causal", "top-left"], "causal"),
        (["--granularity", "block"], "granularity"),
        (["--precision", "qk16"], "precision"),
        (["--group-kv", "64"], "group_kv"),
        (["--no-smooth-k"], "smooth_k"),
        (["--no-rotate"], "rotate"),
        (["--arch", "sm_90a"], "arch"),
    ],
)
def test_explain_names_the_field_that_differs(cache, option, field):
    wanted = dict(zip(OPERATION[::2], OPERATION[1::2]))  # the option replaces its own
    wanted.update(zip(option[::2], option[1::2]))
    rest = option if len(option) == 1 else []
    arguments = [word for pair in wanted.items() for word in pair] + rest
    kernels = {k["name"]: k for k in explained(cache, *arguments)}
    forward = next(k for name, k in kernels.items() if name.startswith("sagebwd_forward"))
    assert forward["verdict"] == "absent"
    assert [difference["field"] for difference in forward["differs"]] == [field]
    assert f"whose {field} is" in forward["text"]
    for kernel in kernels.values():
        fields = {difference["field"] for difference in kernel["differs"]}
        assert field in fields or kernel["verdict"] == "present"


def test_explain_bad_entries_and_packs(cache, tmp_path):
    pack = tmp_path / "a.pack"
    assert cache("export", "--out", pack).code == 0
    bad = truncate(cache.kernels()[0])
    by_digest = {k["digest"]: k for k in explained(cache, *OPERATION)}
    assert by_digest[bad.stem]["verdict"] == "bad" and "checksum" in by_digest[bad.stem]["text"]
    with_pack = explained(cache, *OPERATION, SAGEBWD_CACHE_PACKS=str(pack))
    by_digest = {k["digest"]: k for k in with_pack}
    assert by_digest[bad.stem]["verdict"] == "present"
    assert by_digest[bad.stem]["place"] == str(pack)
    elsewhere = explained(cache, *OPERATION, SAGEBWD_CACHE_PACKS=str(pack), **empty(tmp_path))
    assert {k["layer"] for k in elsewhere} == {"pack"}


def test_explain_an_empty_cache(sagebwd, tmp_path):
    result = sagebwd("cache", "explain", **empty(tmp_path))
    assert result.code == 0 and "nor is any other kernel" in result.out


# --- export and import ----------------------------------------------------------------------------


def test_a_pack_carries_everything_to_another_directory(cache, sagebwd, tmp_path):
    pack, other = tmp_path / "a.pack", empty(tmp_path, "other")
    exported = cache("export", "--out", pack, "--json").json
    assert exported["kernels"] == len(cache.kernels()) and exported["records"] == 0
    again = tmp_path / "b.pack"
    assert cache("export", "--out", again).code == 0
    assert again.read_bytes() == pack.read_bytes()

    first = sagebwd("cache", "import", pack, "--json", **other).json
    assert (first["imported"], first["present"]) == (exported["kernels"], 0)
    second = sagebwd("cache", "import", pack, "--json", **other).json
    assert (second["imported"], second["present"]) == (0, exported["kernels"])
    for path in cache.kernels():
        assert (tmp_path / "other" / path.name).read_bytes() == path.read_bytes()
    use = {"SAGEBWD_OFFLINE": "1", "SAGEBWD_NVRTC": "/nonexistent"}
    for source in (other, {**empty(tmp_path, "third"), "SAGEBWD_CACHE_PACKS": str(pack)}):
        result = sagebwd("build", *OPERATION, "--json", **use, **source)
        assert result.code == 0, result.err
        assert all(kernel["cached"] for kernel in result.json["kernels"])


def test_export_filters_and_leaves_out_what_is_bad(cache, tmp_path):
    pack = tmp_path / "a.pack"
    assert cache("export", "--out", pack, "--kernel", "backward", "--json").json["kernels"] > 0
    nothing = cache("export", "--out", tmp_path / "b.pack", "--arch", "sm_120")
    assert nothing.code == 1 and "let through" in nothing.err
    assert not (tmp_path / "b.pack").exists()

    bad = truncate(cache.kernels()[0])
    result = cache("export", "--out", pack, "--json")
    assert result.code == 1 and f"left out, bad: {bad}: " in result.err
    assert result.json["kernels"] == len(cache.kernels()) - 1
    assert cache("verify", "--pack", pack).code == 0


def test_export_to_where_nothing_can_be_written(cache, tmp_path):
    result = cache("export", "--out", tmp_path / "none" / "a.pack")
    assert result.code == 1 and str(tmp_path / "none" / "a.pack") in result.err


def test_import_takes_the_good_and_lists_the_bad(cache, sagebwd, tmp_path):
    pack, other = tmp_path / "a.pack", empty(tmp_path, "other")
    assert cache("export", "--out", pack).code == 0
    data = bytearray(pack.read_bytes())
    data[-100] ^= 1
    pack.write_bytes(data)
    result = sagebwd("cache", "import", pack, "--json", **other)
    assert result.code == 1 and f"{pack}, item " in result.err and "is bad" in result.err
    assert result.json["imported"] == len(cache.kernels()) - 1
    assert len(result.json["failures"]) == 1
    assert sagebwd("cache", "verify", **other).code == 0


def test_import_replaces_a_bad_file_and_keeps_a_good_one(cache, tmp_path):
    pack = tmp_path / "a.pack"
    assert cache("export", "--out", pack).code == 0
    truncate(cache.kernels()[0])
    result = cache("import", pack, "--json").json
    assert (result["imported"], result["present"]) == (1, len(cache.kernels()) - 1)
    assert cache("verify").code == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot be opened"),
        (lambda path: path.write_text("x" * 500), "no pack of sagebwd"),
        (lambda path: path.write_bytes(b"SAGEBWDP" + b"\x63\0\0\0" + bytes(500)), "newer version"),
        (lambda path: path.mkdir(), "there is no pack in this folder"),
        (lambda path: (path.write_text("x"), path.chmod(0o666)), "other users may write it"),
    ],
)
def test_import_of_no_pack(sagebwd, tmp_path, make, message):
    path = tmp_path / "a.pack"
    make(path)
    result = sagebwd("cache", "import", path, **empty(tmp_path))
    assert result.code == 1 and message in result.err and str(path) in result.err
    assert not Path(empty(tmp_path)["SAGEBWD_CACHE_DIR"]).exists()


# --- build and SAGEBWD_STATS ----------------------------------------------------------------------


def test_build_counts(cache, sagebwd):
    here = {"SAGEBWD_CACHE_DIR": str(cache.directory)}
    cache.kernels()[0].unlink()
    truncate(cache.kernels()[0])
    count = len(cache.kernels()) + 1
    result = sagebwd("build", *OPERATION, "--json", SAGEBWD_STATS="1", **here)
    counters = result.json["counters"]
    assert counters["hits"] == count - 2 and counters["compiles"] == 2
    assert counters["heals"] == 1 and counters["misses"] == 2 and counters["compile_us"] > 0
    line = next(line for line in result.err.splitlines() if line.startswith("sagebwd: memory_hits"))
    assert dict(pair.split("=") for pair in line.split()[1:]) == {
        name: str(value) for name, value in counters.items()
    }


def test_build_recompile_asks_for_this_nvrtc(cache, sagebwd, tmp_path):
    here = {"SAGEBWD_CACHE_DIR": str(cache.directory)}
    same = sagebwd("build", *OPERATION, "--recompile", "--json", **here)
    assert all(kernel["cached"] for kernel in same.json["kernels"])
    refused = sagebwd("build", *OPERATION, "--recompile", SAGEBWD_OFFLINE="1", **here)
    assert refused.code == 2 and "SAGEBWD_OFFLINE=1 forbids" in refused.err


def test_build_offline_says_what_is_missing(sagebwd, tmp_path):
    result = sagebwd("build", "--arch", "sm_80,sm_90a", SAGEBWD_OFFLINE="1", **empty(tmp_path))
    assert result.code == 1
    assert result.err.count("sagebwd prebuild --arch sm_") == 2


def compiled_by(path, compiler):
    """Makes an entry one of another compiler: JSON after 48 bytes, checksum at 12."""
    data = path.read_bytes()
    size = int.from_bytes(data[44:48], "little")
    facts = {**json.loads(data[48 : 48 + size]), "compiler": compiler}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    body = len(text).to_bytes(4, "little") + text + data[48 + size :]
    path.write_bytes(data[:12] + hashlib.sha256(body).digest() + body)


def test_another_compilers_entry_counts_unless_recompiling_is_asked_for(cache, sagebwd):
    here = {"SAGEBWD_CACHE_DIR": str(cache.directory)}
    changed = cache.kernels()[0]
    compiled_by(changed, "nvrtc 12.8 build 7")
    items = {item["digest"]: item for item in cache("ls", "--json").json["items"]}
    assert items[changed.stem]["compiler"] == "nvrtc 12.8 build 7"
    assert all(k["verdict"] == "present" for k in explained(cache, *OPERATION))

    verdicts = explained(cache, *OPERATION, SAGEBWD_RECOMPILE="1")
    others = [k for k in verdicts if k["verdict"] != "present"]
    assert [k["digest"] for k in others] == [changed.stem]
    assert [d["field"] for d in others[0]["differs"]] == ["compiler"]
    assert "SAGEBWD_RECOMPILE=1" in others[0]["text"]

    def compiles(*arguments, **environment):
        result = sagebwd("build", *OPERATION, "--json", *arguments, **here, **environment)
        assert result.code == 0, result.err
        return result.json["counters"]["compiles"]

    assert compiles() == 0
    assert compiles("--recompile") == 1
    compiled_by(changed, "nvrtc 12.8 build 7")
    assert compiles(SAGEBWD_RECOMPILE="1") == 1
    assert compiles("--recompile") == 0


def write_record(directory, gpu="A100"):
    """A tuning record without candidates, as the library serializes it."""
    fields = {
        "schema": "sagebwd tuning 1",
        "kind": "forward",
        "arch": "sm_80",
        "gpu": gpu,
        "head_dim": "64",
        "dtype": "bf16",
        "causal": "none",
        "bucket": "q512 kv512 full",
    }
    digest = hashlib.sha256()
    for label, value in sorted(fields.items()):
        for text in (label.encode(), value.encode()):
            digest.update(len(text).to_bytes(8, "little") + text)
    record = {
        "schema": "sagebwd tuning 1",
        "digest": digest.hexdigest(),
        "key": fields,
        "tile": "mma 64x64 w4 s1 b2",
        "default_tile": "mma 64x64 w4 s1 b2",
        "compiler": "nvrtc 13.0 build 1",
        "candidates": [],
    }
    compact = json.dumps(record, sort_keys=True, separators=(",", ":"))
    record["checksum"] = hashlib.sha256(compact.encode()).hexdigest()
    path = directory / f"{digest.hexdigest()}.tuning"
    path.write_text(json.dumps(record, sort_keys=True))
    return path


def test_tuning_records_travel_too(cache, sagebwd, tmp_path):
    record = write_record(cache.directory)
    item = next(i for i in cache("ls", "--json").json["items"] if i["kind"] == "tuning")
    assert item["name"] == ("forward d64 bf16 causal=none q512 kv512 full on A100: "
                            "mma 64x64 w4 s1 b2")  # fmt: skip
    assert cache("stat", "--json").json["records"] == 1
    assert cache("verify").code == 0
    pack, other = tmp_path / "a.pack", empty(tmp_path, "other")
    assert cache("export", "--out", pack, "--json").json["records"] == 1
    stat = cache("stat", "--json", SAGEBWD_CACHE_PACKS=str(pack)).json
    assert stat["packs"][0]["records"] == 1
    assert sagebwd("cache", "import", pack, **other).code == 0
    there = json.loads((tmp_path / "other" / record.name).read_text())
    assert there == json.loads(record.read_text())
    truncate(record)
    assert cache("verify").code == 1
    assert cache("import", pack, "--json").json["imported"] == 1
    assert cache("verify").code == 0


def test_a_record_of_a_newer_version_is_neither_bad_nor_lost(cache, tmp_path):
    record = write_record(cache.directory)
    record.write_text(record.read_text().replace("sagebwd tuning 1", "sagebwd tuning 2"))
    assert cache("verify", "--remove").code == 0 and record.exists()
    assert "tuning by a newer version" in cache("ls").out
    assert cache("export", "--out", tmp_path / "a.pack", "--json").json["records"] == 0


@pytest.fixture
def old_driver(fake_driver):
    """Variables of a fake driver for CUDA 12.4 and a GPU of sm_80."""
    return {"LD_LIBRARY_PATH": str(fake_driver), "FAKE_QUIET": "1", "FAKE_MAJOR": "8",
            "FAKE_MINOR": "0"}  # fmt: skip


def test_doctor_warns_of_kernels_too_new_for_the_driver(cache, sagebwd, old_driver, tmp_path):
    here = {"SAGEBWD_CACHE_DIR": str(cache.directory), **old_driver}
    pack = tmp_path / "a.pack"
    assert cache("export", "--out", pack).code == 0
    report = sagebwd("doctor", "--json", SAGEBWD_CACHE_PACKS=str(pack), **here).json
    driver, needs = report["driver"]["cuda_version"], report["cache"]["packs"][0]["lowest_driver"]
    assert report["gpus"][0]["arch"] == "sm_80"
    warnings = [m["what"] for m in report["missing"] if "need a driver for CUDA" in m["what"]]
    assert len(warnings) == (2 if needs > driver else 0)  # NVRTC 12 suits it
    if warnings:
        assert str(pack) in warnings[0] and str(cache.directory) in warnings[1]
        assert all(f"{len(cache.kernels())} kernels" in warning for warning in warnings)
    # Those of other GPUs are no concern of this machine's.
    other = {**here, "FAKE_MAJOR": "9", "FAKE_MINOR": "0"}
    what = [m["what"] for m in sagebwd("doctor", "--json", **other).json["missing"]]
    assert not any("need a driver" in text for text in what)


def test_build_refuses_a_pack_that_it_would_not_need(cache, sagebwd, tmp_path):
    none = str(tmp_path / "none.pack")
    for directory in (cache.directory, tmp_path / "empty"):
        result = sagebwd("build", *OPERATION, SAGEBWD_CACHE_DIR=str(directory),
                         SAGEBWD_CACHE_PACKS=none)  # fmt: skip
        assert result.code == 1 and none in result.err and result.out == ""
