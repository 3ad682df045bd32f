"""Tests what `sagebwd cache` refuses, and what it says where it cannot do its work."""

import os
import shutil
import subprocess

import pytest
from cache_helpers import OPERATION, truncate
from places import BINARY
from test_cache_exchange import write_record

UNSHARE = shutil.which("unshare")


def read_only(cache, *arguments):
    """Runs `sagebwd cache` with its directory mounted read-only."""
    if not UNSHARE or subprocess.run([UNSHARE, "-rm", "true"], check=False).returncode:
        pytest.skip("no user namespaces here")
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    return subprocess.run(
        [UNSHARE, "-rm", "sh", "-c", script, cache.directory, BINARY, "cache", *arguments],
        env={"SAGEBWD_CACHE_DIR": str(cache.directory)},
        capture_output=True, text=True, timeout=600, check=False,
    )


def test_prune_says_why_nothing_is_removed(cache):
    result = read_only(cache, "prune", "--all", "--yes")
    assert result.returncode == 1, result.stdout
    assert "could not be removed" in result.stderr and "Read-only" in result.stderr
    assert cache.kernels()


def test_verify_says_why_nothing_is_removed(cache):
    truncate(cache.kernels()[0])
    result = read_only(cache, "verify", "--remove")
    assert result.returncode == 1
    assert "1 bad file could not be removed" in result.stderr and "Read-only" in result.stderr
    assert "--remove removes" not in result.stdout


def test_import_honours_the_limit(cache, sagebwd, tmp_path):
    pack = tmp_path / "a.pack"
    assert cache("export", "--out", pack).code == 0
    other = {"SAGEBWD_CACHE_DIR": str(tmp_path / "other"), "SAGEBWD_CACHE_LIMIT": "10K"}
    result = sagebwd("cache", "import", pack, **other)
    assert result.code == 1 and "raise SAGEBWD_CACHE_LIMIT" in result.err
    assert not list((tmp_path / "other").glob("*.kernel"))
    assert sagebwd("cache", "import", pack, **{**other, "SAGEBWD_CACHE_LIMIT": "0"}).code == 0


def test_a_directory_that_is_for_everybody_is_not_to_be_changed(sagebwd, tmp_path):
    tmp_path.chmod(0o1777)  # as /tmp is
    stat = sagebwd("cache", "stat", "--json", SAGEBWD_CACHE_DIR=str(tmp_path)).json
    assert "chmod" not in stat["disabled_reason"]
    own = tmp_path / f"sagebwd-{os.geteuid()}"
    assert f"name a directory of your own instead, such as '{own}'" in stat["disabled_reason"]
    stat = sagebwd("cache", "stat", "--json", SAGEBWD_CACHE_DIR=str(own)).json
    assert stat["disabled_reason"] == ""


def test_a_pack_is_not_written_where_the_environment_could_not_name_it(cache, tmp_path):
    result = cache("export", "--out", tmp_path / "a:b.pack")
    assert result.code == 1 and "give the pack a name without one" in result.err
    assert not list(tmp_path.glob("*.pack"))


@pytest.mark.parametrize("variable", ["SAGEBWD_OFFLINE", "SAGEBWD_STATS"])
def test_a_switch_that_is_none_is_wrong_use(cache, variable):
    result = cache("stat", **{variable: "true"})
    assert result.code == 2 and f"{variable} is 'true'" in result.err


@pytest.mark.parametrize("arguments", [("cache", "ls"), ("tune", "--list")])
def test_a_record_does_not_steer_the_terminal(sagebwd, tmp_path, arguments):
    tmp_path.chmod(0o700)
    write_record(tmp_path, gpu="A100\x1b[2J")
    result = sagebwd(*arguments, SAGEBWD_CACHE_DIR=str(tmp_path))
    assert result.code == 0 and "A100?[2J" in result.out and "\x1b" not in result.out


def test_offline_an_entry_that_others_may_write_stays_and_is_named(cache, sagebwd):
    for kernel in cache.kernels():
        kernel.chmod(0o660)
    before = cache.kernels()
    result = sagebwd(
        "build", *OPERATION, SAGEBWD_CACHE_DIR=str(cache.directory), SAGEBWD_OFFLINE="1"
    )
    assert result.code == 1 and "run: chmod go-w" in result.err, result.err
    assert cache.kernels() == before
