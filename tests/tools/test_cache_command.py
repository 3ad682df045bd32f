"""sagebwd cache: usage, ls, stat, verify, prune."""

import os
import re
import shutil
import subprocess
import time

import pytest
from cache_helpers import OPERATION, empty, truncate

SUBCOMMANDS = ["ls", "stat", "verify", "prune", "explain", "export", "import"]


# --- usage ----------------------------------------------------------------------------------------


def test_without_a_subcommand_they_are_listed(sagebwd):
    result = sagebwd("cache")
    assert result.code == 2 and result.out == ""
    assert all(f"cache {name} " in result.err for name in SUBCOMMANDS)
    assert sagebwd("cache", "--help").out == sagebwd("help", "cache").out == result.err


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_each_subcommand_has_help_with_examples_and_json(sagebwd, name):
    result = sagebwd("cache", name, "--help")
    assert result.code == 0
    assert f"\n  sagebwd cache {name}" in result.out and "--json" in result.out
    assert sagebwd("help", "cache", name).out == result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lst"], "unknown command 'cache lst'; did you mean 'ls'?"),
        (["--json"], "unknown option '--json'"),
        (["ls", "--jsn"], "did you mean '--json'?"),
        (["ls", "--arch", "sm_1"], "sm_1"),
        (["stat", "here"], "unexpected argument 'here'"),
        (["verify", "--pack", "a", "--remove"], "--remove is for the directory"),
        (["prune", "--unused-for", "30"], "--unused-for is '30'; it takes a whole number and s, m"),
        (["prune", "--unused-for", "3w"], "such as 30d"),
        (["prune", "--unused-for", "-1d"], "--unused-for is '-1d'"),
        (["prune", "--limit", "lots"], "--limit is 'lots'; it takes a number of bytes"),
        (["prune", "--limit", "99999999999G"], "--limit is"),
        (["prune", "--limit", "0"], "give --all"),
        (["prune", "--all", "--limit", "1M"], "--all removes everything"),
        (["explain", "--head-dim", "81"], "81"),
        (["explain", "--arch", "sm_1"], "sm_1"),
        (["export"], "--out FILE"),
        (["import"], "needs a FILE"),
        (["import", "a", "b"], "unexpected argument 'b'"),
    ],
)
def test_wrong_use_exits_2(sagebwd, arguments, message):
    result = sagebwd("cache", *arguments)
    assert result.code == 2, result.err
    assert message in result.err and "--help" in result.err and result.out == ""


@pytest.mark.parametrize("name", ["ls", "stat", "verify", "prune", "explain"])
def test_an_absent_directory_is_empty_and_stays_absent(sagebwd, tmp_path, name):
    result = sagebwd("cache", name, "--json", **empty(tmp_path))
    assert result.code == 0, result.err
    assert result.json and not (tmp_path / "empty").exists()


@pytest.mark.parametrize("name", ["ls", "verify", "prune", "export", "import"])
def test_a_directory_that_others_may_write_is_refused(sagebwd, tmp_path, name):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    more = {"export": ["--out", tmp_path / "p"], "import": [tmp_path / "p"]}.get(name, [])
    result = sagebwd("cache", name, *more, SAGEBWD_CACHE_DIR=str(shared))
    assert result.code == 1
    assert "may be written by other users; run: chmod go-w" in result.err
    stat = sagebwd("cache", "stat", "--json", SAGEBWD_CACHE_DIR=str(shared))
    assert stat.code == 0 and "chmod go-w" in stat.json["disabled_reason"]


# --- ls and stat ----------------------------------------------------------------------------------


def test_ls_lists_what_build_built(cache, sagebwd):
    listed = cache("ls", "--json").json["items"]
    built = sagebwd("build", *OPERATION, "--json", SAGEBWD_CACHE_DIR=str(cache.directory)).json
    assert sorted(item["name"] for item in listed) == sorted(k["name"] for k in built["kernels"])
    for item in listed:
        assert item["kind"] == "kernel" and item["layer"] == "directory"
        assert item["arch"] == "sm_80" and item["compiler"].startswith("nvrtc ")
        assert item["lowest_driver"] >= 12000 and item["fields"]["head_dim"] == "64"
        file = cache.directory / f"{item['digest']}.kernel"
        assert file.stat().st_size == item["bytes"]
    text = cache("ls").out
    assert all(item["name"] in text for item in listed)
    assert f"{len(listed)} kernels, 0 tuning records, 0 bad" in text


def test_ls_filters(cache):
    def names(*arguments):
        return [item["name"] for item in cache("ls", "--json", *arguments).json["items"]]

    every = names()
    assert names("--kernel", "backward_dq") == [n for n in every if "backward_dq" in n] != []
    assert names("--arch", "sm_80") == every and names("--arch", "sm_90a") == []


def test_looking_is_no_use_and_heals_nothing(cache):
    truncate(cache.kernels()[0])
    for path in cache.kernels():
        os.utime(path, (1e9, 1e9))
    before = {path: path.read_bytes() for path in cache.kernels()}
    for name in ("ls", "stat", "verify", "explain"):
        cache(name)
    assert {path: path.read_bytes() for path in cache.kernels()} == before
    assert all(path.stat().st_mtime == 1e9 for path in before)


def test_bad_files_are_listed_as_such(cache):
    bad = truncate(cache.kernels()[0])
    items = {item["digest"]: item for item in cache("ls", "--json").json["items"]}
    assert "checksum" in items[bad.stem]["bad"] and "name" not in items[bad.stem]
    assert re.search(rf"^bad: {bad.stem[:12]}.kernel", cache("ls").out, re.MULTILINE)


def test_stat(cache):
    stat = cache("stat", "--json", SAGEBWD_CACHE_LIMIT="1M").json
    files = cache.kernels()
    assert stat["directory"] == str(cache.directory)
    assert stat["kernels"] == len(files)
    assert stat["bytes"] == sum(path.stat().st_size for path in files)
    assert stat["byte_limit"] == 1 << 20 and stat["records"] == 0 and stat["leftovers"] == 0
    share = 100 * stat["bytes"] / (1 << 20)
    assert f"] {share:.1f} % of 1.0 MiB" in cache("stat", SAGEBWD_CACHE_LIMIT="1M").out
    assert "no limit" in cache("stat", SAGEBWD_CACHE_LIMIT="0").out
    (cache.directory / ".tmp-123-4d").write_bytes(b"half")
    assert cache("stat", "--json").json["leftovers"] == 1


def test_stat_shows_packs_and_what_is_wrong_with_them(cache, tmp_path):
    pack, none = tmp_path / "a.pack", tmp_path / "none.pack"
    assert cache("export", "--out", pack).code == 0
    result = cache("stat", "--json", SAGEBWD_CACHE_PACKS=f"{pack}:{none}")
    good, bad = result.json["packs"]
    assert good["kernels"] == len(cache.kernels()) and good["archs"] == ["sm_80"]
    assert good["bytes"] == pack.stat().st_size and good["lowest_driver"] >= 12000
    assert not bad["usable"] and str(none) in bad["error"]
    assert cache("ls", SAGEBWD_CACHE_PACKS=str(none)).code == 1


# --- verify ---------------------------------------------------------------------------------------


def test_verify_finds_what_is_bad_and_removes_it(cache):
    assert cache("verify").code == 0
    files = cache.kernels()
    truncate(files[0])
    flipped = bytearray(files[1].read_bytes())
    flipped[len(flipped) // 2] ^= 1
    files[1].write_bytes(flipped)
    files[2].write_bytes(b"")
    files[3].unlink()
    files[3].symlink_to("/etc/passwd")
    files[4].unlink()
    files[4].mkdir()
    misplaced = cache.directory / ("f" * 64 + ".kernel")
    shutil.copy(files[5], misplaced)
    (cache.directory / ("0" * 64 + ".tuning")).write_text("{}")

    result = cache("verify", "--json")
    assert result.code == 1
    bad = {item["digest"]: item["bad"] for item in result.json["bad"]}
    assert set(bad) == {path.stem for path in [*files[:5], misplaced]} | {"0" * 64}
    assert "symbolic link" in bad[files[3].stem] and "directory" in bad[files[4].stem]
    assert "another key" in bad[misplaced.stem]
    text = cache("verify").out
    assert "compiles it again" in text and str(files[0]) in text

    removed = cache("verify", "--remove", "--json")
    assert removed.code == 1 and removed.json["removed"] == 7
    assert cache("verify").code == 0
    assert set(files[5:]) == set(cache.kernels())


def test_verify_reads_packs(cache, tmp_path):
    pack = tmp_path / "a.pack"
    assert cache("export", "--out", pack).code == 0
    assert cache("verify", "--pack", pack).code == 0
    assert cache("verify", "--json", SAGEBWD_CACHE_PACKS=str(pack)).json["read"] == 2 * len(
        cache.kernels()
    )
    data = bytearray(pack.read_bytes())
    data[-100] ^= 1  # within the last item
    pack.write_bytes(data)
    result = cache("verify", "--pack", pack, "--json")
    assert result.code == 1 and len(result.json["bad"]) == 1
    assert result.json["bad"][0]["place"] == str(pack)
    pack.write_bytes(data[:-1])
    result = cache("verify", "--pack", pack)
    assert result.code == 1 and str(pack) in result.err


# --- prune ----------------------------------------------------------------------------------------


def test_prune_by_age(cache):
    files = cache.kernels()
    for path in files[:3]:
        os.utime(path, (time.time() - 3 * 86400,) * 2)
    dry = cache("prune", "--unused-for", "2d", "--dry-run", "--json").json
    assert dry["evicted"] == 3 and dry["dry_run"] and len(cache.kernels()) == len(files)
    wet = cache("prune", "--unused-for", "2d", "--json").json
    assert wet == {**dry, "dry_run": False}
    assert cache.kernels() == files[3:]


def test_prune_by_bytes_takes_the_least_recently_used_first(cache):
    files = cache.kernels()
    for age, path in enumerate(files):
        os.utime(path, (time.time() - 60 * age,) * 2)
    limit = sum(path.stat().st_size for path in files[:2])
    result = cache("prune", "--limit", limit, "--json").json
    assert result["kept"] == 2 and result["kept_bytes"] == limit
    assert cache.kernels() == files[:2]


def test_prune_obeys_the_environments_limit_and_sweeps(cache):
    (cache.directory / ".tmp-123-4d").write_bytes(b"half")
    assert "0 kernels" in cache("prune", SAGEBWD_CACHE_LIMIT="0").out
    assert not list(cache.directory.glob(".tmp-*"))
    before = len(cache.kernels())
    result = cache("prune", "--json", SAGEBWD_CACHE_LIMIT="1K").json
    assert result["evicted"] == before and cache.kernels() == []


def test_prune_all(cache):
    record = cache.directory / ("0" * 64 + ".tuning")
    record.write_text("{}")
    assert "would be removed" in cache("prune", "--all", "--dry-run").out
    assert cache("prune", "--all", "--yes").code == 0
    assert cache.kernels() == [] and record.exists()


def test_prune_spares_what_a_running_process_uses(cache):
    # The way the library marks it: a read lock on the key's byte of the file 'users'.
    held = cache.kernels()[0]
    code = (
        "import fcntl, struct, sys\n"
        "byte = int(sys.argv[2][:15], 16)\n"
        "f = open(sys.argv[1], 'a+b')\n"
        "fcntl.fcntl(f, 37, struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, byte, 1, 0))\n"
        "print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        ["python3", "-c", code, cache.directory / "users", held.stem],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as holder:  # fmt: skip
        assert holder.stdout.readline() == "held\n"
        result = cache("prune", "--all", "--json").json
        holder.stdin.close()
    assert result["in_use"] == 1 and cache.kernels() == [held]
    assert cache("prune", "--all", "--json").json["evicted"] == 1
