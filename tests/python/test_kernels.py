"""sagebwd.emit and sagebwd.build: sources, machine code and the cache."""

import json
import os
import subprocess
import sys

import pytest

import sagebwd
from sagebwd import _core

pytestmark = pytest.mark.anywhere

NVRTC = _core.nvrtc()
needs_nvrtc = pytest.mark.skipif(bool(NVRTC["missing"]), reason="needs NVRTC")
FIGURES = ["name", "pass", "cached", "compile_ms", "registers", "spill_bytes", "shared_bytes"]


def test_sources_are_complete_and_repeat():
    sources = sagebwd.emit("sm_90a", head_dim=64)
    assert [s.text for s in sources] == [s.text for s in sagebwd.emit("sm_90a", head_dim=64)]
    assert {s.pass_ for s in sources} == {"forward", "backward"}
    assert len({s.name for s in sources}) == len(sources)
    for source in sources:
        assert source.name in source.text and str(source) == source.text
        assert "#include" not in source.text
        assert source.threads % 32 == 0


def test_forward_alone():
    assert {s.pass_ for s in sagebwd.emit("sm_80", backward=False)} == {"forward"}


def test_specs_have_different_sources():
    def texts(**options):
        return [s.text for s in sagebwd.emit("sm_90a", **options)]

    base = texts()
    for options in (dict(head_dim=64), dict(dtype="fp16"), dict(causal=True),
                    dict(granularity="block"), dict(smooth_k=False), dict(rotate=False),
                    dict(precision="qk16"), dict(group_kv=64)):  # fmt: skip
        assert texts(**options) != base, options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(arch="sm_70"), "sm_70.*sm_80"),
        (dict(arch="hopper"), "hopper.*sm_90a"),
        (dict(head_dim=81), "81"),
        (dict(dtype="fp32"), "fp32.*'bf16' or 'fp16'"),
        (dict(causal="up"), "up"),
        (dict(group_q=-1), "group_q=-1"),
        (dict(group_q="64"), "group_q='64'"),
    ],
)
@pytest.mark.parametrize("function", [sagebwd.emit, sagebwd.build])
def test_kernels_that_are_refused(function, options, message):
    with pytest.raises(sagebwd.SpecError, match=message):
        function(**{"arch": "sm_90a", **options})


def test_unknown_keywords_of_kernels():
    with pytest.raises(TypeError, match="did you mean 'head_dim'"):
        sagebwd.build("sm_90a", headdim=64)


@pytest.mark.skipif(not _core.driver()["missing"], reason="needs a machine without a driver")
def test_without_a_gpu_the_architecture_must_be_named():
    with pytest.raises(sagebwd.LibraryError, match=r"name the architecture.*sm_90a"):
        sagebwd.emit()


def build_in_new_process(cache):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import json, sagebwd; print(json.dumps(sagebwd.build('sm_80', head_dim=64)))\n"
    )
    env = {**os.environ, "SAGEBWD_CACHE_DIR": str(cache)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@needs_nvrtc
def test_a_second_process_compiles_nothing(tmp_path):
    first, second = (build_in_new_process(tmp_path / "cache") for _ in range(2))
    assert [list(kernel) for kernel in first] == [FIGURES] * len(first)
    assert not any(kernel["cached"] for kernel in first)
    assert all(kernel["cached"] for kernel in second)
    changes = {"cached": True, "compile_ms": 0}  # what this process did
    assert [{**k, **changes} for k in first] == [{**k, **changes} for k in second]
    assert len({kernel["name"] for kernel in first}) == len(first)
    for kernel in first:
        assert kernel["compile_ms"] > 0 and 0 < kernel["registers"] <= 255
        assert kernel["spill_bytes"] == 0
    expected = [source.name for source in sagebwd.emit("sm_80", head_dim=64)]
    assert [kernel["name"] for kernel in first] == expected


@needs_nvrtc
def test_a_truncated_cache_file_is_compiled_again(tmp_path, stocked):
    stocked(tmp_path / "cache", "--arch", "sm_80", "--head-dim", 64)
    assert all(kernel["cached"] for kernel in build_in_new_process(tmp_path / "cache"))
    files = [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    victim = max(files, key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-7])
    again = build_in_new_process(tmp_path / "cache")
    assert sum(not kernel["cached"] for kernel in again) == 1
