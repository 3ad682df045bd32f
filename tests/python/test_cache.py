"""The cache as Python sees it: counters, packs, offline mode, SAGEBWD_STATS=1."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest

import sagebwd
from sagebwd import _core

pytestmark = pytest.mark.anywhere

needs_nvrtc = pytest.mark.skipif(bool(_core.nvrtc()["missing"]), reason="needs NVRTC")
COUNTERS = [
    "memory_hits", "hits", "pack_hits", "misses", "waits", "timeouts", "heals", "evictions",
    "publish_failures", "compiles", "compile_us",
]  # fmt: skip
BUILD = "sagebwd.build('sm_80', head_dim=64, backward=False)"


def python(code, cache, **environment):
    prelude = "import sys; sys.modules['torch'] = None\nimport json, sagebwd\n"
    # Whether a line says that compiling lasts depends on how busy the machine is.
    env = {**os.environ, "SAGEBWD_CACHE_DIR": str(cache), "SAGEBWD_LOG": "0", **environment}
    for name in ("SAGEBWD_CACHE_PACKS", "SAGEBWD_OFFLINE", "SAGEBWD_STATS"):
        if name not in environment:
            env.pop(name, None)
    env.setdefault("PYTHONIOENCODING", "utf-8:surrogateescape")  # a path may hold any bytes
    command = [sys.executable, "-c", prelude + code]
    return subprocess.run(command, capture_output=True, text=True, env=env, errors="replace")


def stats_after(code, cache, **environment):
    result = python(f"{code}\nprint(json.dumps(sagebwd.cache_stats()))", cache, **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_stats_of_this_process():
    stats = sagebwd.cache_stats()
    assert list(stats) == [
        "directory", "disabled_reason", "byte_limit", "packs", "offline", "counters",
    ]  # fmt: skip
    assert list(stats["counters"]) == COUNTERS
    for word in [*stats, *COUNTERS]:
        assert word in sagebwd.cache_stats.__doc__, word


def test_stats_with_paths_that_are_no_utf8(tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    code = "print(ascii(sagebwd.cache_stats())); print(ascii(sagebwd.doctor()['cache']))"
    result = python(code, odd, SAGEBWD_CACHE_PACKS=odd + ".pack")
    assert result.returncode == 0, result.stderr
    stats, cache = map(ast.literal_eval, result.stdout.splitlines())
    assert stats["directory"] == odd and stats["packs"] == [odd + ".pack"]
    in_json = odd.replace("\udce9", "\ufffd")  # which is UTF-8
    assert cache["directory"] == in_json and cache["packs"][0]["path"] == in_json + ".pack"
    assert raised("sagebwd.build('sm_80', head_dim=64)", odd, SAGEBWD_OFFLINE="1",
                  SAGEBWD_CACHE_PACKS=odd + ".pack")[0] == "PackError"  # fmt: skip


@needs_nvrtc
def test_counters_tell_cold_warm_and_memory_apart(tmp_path):
    cold = stats_after(BUILD, tmp_path / "cache")["counters"]
    count = cold["compiles"]
    assert count > 0 and cold["misses"] == count and cold["compile_us"] > 0
    assert cold["hits"] == cold["memory_hits"] == cold["publish_failures"] == 0
    warm = stats_after(f"{BUILD}; {BUILD}", tmp_path / "cache")["counters"]
    assert warm == {**dict.fromkeys(COUNTERS, 0), "hits": count, "memory_hits": count}


@needs_nvrtc
def test_stats_are_printed_at_exit(tmp_path, stocked):
    stocked(tmp_path / "cache", "--arch", "sm_80", "--head-dim", 64)
    code = f"{BUILD}\nprint(json.dumps(sagebwd.cache_stats()['counters']))"
    result = python(code, tmp_path / "cache", SAGEBWD_STATS="1")
    assert result.returncode == 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("sagebwd: ")]
    assert len(lines) == 1
    at_exit = dict(pair.split("=") for pair in lines[0].split()[1:])
    assert list(at_exit) == COUNTERS
    assert {name: int(value) for name, value in at_exit.items()} == json.loads(result.stdout)
    assert "sagebwd: " not in python(BUILD, tmp_path / "cache").stderr


LOGGED = f"""
import logging
records, handler = [], logging.Handler()
handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
logging.getLogger("sagebwd").addHandler(handler)
logging.getLogger("sagebwd").setLevel(logging.DEBUG)
{BUILD}; {BUILD}
print(json.dumps(records))
"""


@needs_nvrtc
def test_each_kernel_is_logged_with_its_source(tmp_path):
    def logged(log):
        result = python(LOGGED, tmp_path / "cache", SAGEBWD_LOG=log)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout), result.stderr

    def told(records):  # threads log in whatever order
        return sorted(f"sagebwd: {text}" for _, text in records)

    cold, nothing = logged(str(tmp_path / "log"))
    lines = (tmp_path / "log").read_text().splitlines()
    assert cold and nothing == "" and sorted(lines) == told(cold)
    for level, text in cold:
        assert level == "INFO" and re.fullmatch(r"compiled \w+ for sm_80 in \d+\.\d{3} s", text)
    warm, on_stderr = logged("1")
    assert len(warm) == len(cold)
    place = re.escape(str(tmp_path / "cache"))
    for level, text in warm:
        pattern = rf"loaded \w+ for sm_80 from {place} in .* s"
        assert level == "DEBUG" and re.fullmatch(pattern, text)
    assert sorted(on_stderr.splitlines()) == told(warm)
    assert logged("0")[1] == ""
    unwritable = logged(str(tmp_path / "no/log"))[1]
    assert unwritable.count("SAGEBWD_LOG") == 1 and "No such file" in unwritable


def test_variables_that_nobody_reads_are_named_once(tmp_path):
    code = "import sagebwd\nsagebwd.cache_stats()\nsagebwd.cache_stats()"
    said = python(code, tmp_path / "cache", SAGEBWD_OFLINE="1", SAGEBWD_TEST_X="1").stderr
    assert said == ("sagebwd: warning: nothing reads SAGEBWD_OFLINE; did you mean SAGEBWD_OFFLINE? "
                    "'sagebwd doctor --help' lists the variables\n")  # fmt: skip
    assert python(code, tmp_path / "cache", SAGEBWD_OFFLINE="1").stderr == ""
    assert python("import sagebwd; sagebwd.doctor()", tmp_path, SAGEBWD_OFLINE="1").stderr == ""


def raised(code, cache, **environment):
    """The type and text of what the code raises."""
    wrapped = f"try: {code}\nexcept Exception as e: print(type(e).__qualname__, e, sep='\\n')"
    result = python(wrapped, cache, **environment)
    assert result.returncode == 0 and result.stdout, result.stderr
    return result.stdout.split("\n", 1)


def test_offline_error(tmp_path):
    kind, text = raised(BUILD, tmp_path / "cache", SAGEBWD_OFFLINE="1")
    assert kind == "OfflineError"
    for part in ("SAGEBWD_OFFLINE=1 forbids compiling", "sm_80", str(tmp_path / "cache"),
                 "sagebwd prebuild --arch sm_80 --spec 'd64 ", "SAGEBWD_CACHE_PACKS"):  # fmt: skip
        assert part in text
    for error in (sagebwd.OfflineError, sagebwd.PackError):
        assert issubclass(error, RuntimeError) and error.__module__ == "sagebwd"


def test_a_pack_that_cannot_be_used_is_an_error(tmp_path):
    pack = tmp_path / "a.pack"
    environment = {"SAGEBWD_CACHE_PACKS": str(pack), "SAGEBWD_OFFLINE": "1"}
    assert raised(BUILD, tmp_path / "cache", **environment)[0] == "PackError"
    pack.write_text("no pack" * 100)
    kind, text = raised(BUILD, tmp_path / "cache", **environment)
    assert kind == "PackError" and str(pack) in text and "no pack of sagebwd" in text


@needs_nvrtc
def test_offline_from_a_pack_without_nvrtc(tmp_path):
    pack = tmp_path / "a.pack"
    made = python(
        f"sagebwd.prebuild({str(pack)!r}, arch='sm_80', head_dim=64, causal='none', dtype='bf16',"
        " backward=False)",
        tmp_path / "cache",
    )
    assert made.returncode == 0, made.stderr
    stats = stats_after(
        BUILD, tmp_path / "other", SAGEBWD_CACHE_PACKS=str(pack), SAGEBWD_OFFLINE="1",
        SAGEBWD_NVRTC="/nonexistent",
    )  # fmt: skip
    assert stats["offline"] and stats["packs"] == [str(pack)]
    assert stats["counters"]["pack_hits"] > 0 and stats["counters"]["compiles"] == 0
    assert not (tmp_path / "other").exists()


def test_doctor_shows_packs_limit_and_modes(tmp_path):
    result = python(
        "print(json.dumps(sagebwd.doctor()))", tmp_path / "cache", SAGEBWD_OFFLINE="1",
        SAGEBWD_CACHE_PACKS=str(tmp_path / "a.pack"), SAGEBWD_TUNE="maybe",
        SAGEBWD_CACHE_LIMIT="5M",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["cache"]["byte_limit"] == 5 << 20 and report["cache"]["offline"]
    (pack,) = report["cache"]["packs"]
    assert pack["path"] == str(tmp_path / "a.pack") and "cannot be opened" in pack["error"]
    assert any("maybe" in item["what"] for item in report["missing"])
    assert not report["can_compile"]
