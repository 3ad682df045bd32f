"""sagebwd.prebuild: packs from Python."""

import hashlib
import os
import re
import subprocess
import sys

import pytest
from signals import interrupted

import sagebwd
from sagebwd import _core

pytestmark = pytest.mark.anywhere

NVRTC = _core.nvrtc()
needs_nvrtc = pytest.mark.skipif(bool(NVRTC["missing"]), reason="needs NVRTC")
SMALL = dict(arch="sm_80", head_dim=64, dtype="bf16", causal="none", backward=False)


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def small_pack(tmp_path_factory):
    path = tmp_path_factory.mktemp("packs") / "small.pack"
    calls = []
    figures = sagebwd.prebuild(path, **SMALL, progress=lambda *call: calls.append(call))
    return path, figures, calls


@needs_nvrtc
def test_figures_and_progress(small_pack):
    path, figures, calls = small_pack
    names = [kernel.name for kernel in sagebwd.emit("sm_80", head_dim=64, backward=False)]
    assert figures["out"] == str(path)
    assert figures["bytes"] == path.stat().st_size
    assert figures["kernels"] == figures["compiled"] == len(names)
    assert figures["resumed"] == figures["records"] == 0
    assert figures["compiler"] == NVRTC["identity"]
    assert sorted(name for name, _, _, _ in calls) == sorted(names)
    assert [done for _, _, done, _ in calls] == list(range(1, len(names) + 1))
    assert {(arch, total) for _, arch, _, total in calls} == {("sm_80", len(names))}


@needs_nvrtc
def test_an_interrupted_call_goes_on_and_gives_the_same_bytes(small_pack, tmp_path):
    def interrupt(name, arch, done, total):
        if done == 2:
            raise KeyboardInterrupt

    out = tmp_path / "p.pack"
    with pytest.raises(KeyboardInterrupt):
        sagebwd.prebuild(out, **SMALL, progress=interrupt)
    assert not out.exists()
    figures = sagebwd.prebuild(out, **SMALL)
    assert figures["resumed"] >= 2
    assert figures["resumed"] + figures["compiled"] == figures["kernels"]
    assert sha(out) == sha(small_pack[0])
    assert [p.name for p in tmp_path.iterdir()] == ["p.pack"]


@needs_nvrtc
def test_a_signal_ends_it_while_it_compiles(tmp_path):
    out = tmp_path / "p.pack"
    code = (
        "import sagebwd\n"
        "print('at work', flush=True)\n"
        f"sagebwd.prebuild({str(out)!r}, arch=['sm_80', 'sm_90a'], head_dim=128)\n"
    )
    exit_code, _, err = interrupted(code)
    assert exit_code != 0 and "KeyboardInterrupt" in err
    assert not out.exists()
    kept = [path for path in tmp_path.rglob("*.kernel") if path.is_file()]
    assert len(kept) < 24  # of thirty-six: those that were under way are left undone


@needs_nvrtc
def test_a_new_process_runs_from_the_pack_alone(small_pack, tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import sagebwd\n"
        "print(all(k['cached'] for k in sagebwd.build('sm_80', head_dim=64, backward=False)))\n"
        "print('libnvrtc' in open('/proc/self/maps').read())\n"
        "try: sagebwd.build('sm_90a', head_dim=64, causal=True)\n"
        "except sagebwd.OfflineError as error: print(error)\n"
    )
    environment = {
        **os.environ,
        "SAGEBWD_CACHE_DIR": str(tmp_path / "cache"),
        "SAGEBWD_CACHE_PACKS": str(small_pack[0]),
        "SAGEBWD_OFFLINE": "1",
    }
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                            env=environment)  # fmt: skip
    assert result.returncode == 0, result.stderr
    cached, nvrtc, error = result.stdout.splitlines()
    assert (cached, nvrtc) == ("True", "False")
    assert str(small_pack[0]) in error
    assert "sagebwd prebuild --arch sm_90a --spec 'd64 bf16 causal=top-left " in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(arch="sm_91"), "sm_91.*sm_90a"),
        (dict(arch=None), "name the architectures"),
        (dict(arch=[]), "empty list"),
        (dict(head_dim=[64, 98]), "98"),
        (dict(dtype="fp32"), "fp32.*'bf16' or 'fp16'"),
        (dict(granularity=["row", "block"], group_kv=128), "group_kv = 128.*'block'"),
        (dict(granularity="block", sink_keys=1), "sink_keys = 1.*'block'"),
    ],
)
def test_what_prebuild_refuses(tmp_path, options, message):
    with pytest.raises(sagebwd.SpecError, match=message):
        sagebwd.prebuild(tmp_path / "p.pack", **{**SMALL, **options})
    assert not list(tmp_path.iterdir())


@needs_nvrtc
def test_a_fused_backward_goes_into_the_pack_where_it_is_the_default(tmp_path):
    built = []
    options = {**SMALL, "precision": "gradients16", "deterministic": False, "backward": True}
    sagebwd.prebuild(tmp_path / "p.pack", **options, progress=lambda name, *_: built.append(name))
    kinds = {re.match("sagebwd_([a-z_]*)_d64", name)[1] for name in built}
    assert {"backward", "round_dq", "quantize_backward"} < kinds
    assert not {"backward_dq", "backward_dkv"} & kinds


def test_unknown_keywords_of_prebuild(tmp_path):
    with pytest.raises(TypeError, match="did you mean 'arch'"):
        sagebwd.prebuild(tmp_path / "p.pack", archs=["sm_80"])


def test_an_output_that_cannot_be_written(tmp_path):
    for path in (tmp_path, tmp_path / "none/p.pack"):
        with pytest.raises(sagebwd.PackError, match=str(path)):
            sagebwd.prebuild(path, **SMALL)
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_no_utf_8(tmp_path):
    with pytest.raises(sagebwd.PackError, match="none"):
        sagebwd.prebuild(f"{tmp_path}/none\udcff/p.pack", **SMALL)


def test_records_that_are_none(tmp_path):
    records = tmp_path / "records.json"
    records.write_text("{}")
    with pytest.raises(sagebwd.SpecError, match="no tuning records"):
        sagebwd.prebuild(tmp_path / "p.pack", **SMALL, records=records)
    with pytest.raises(FileNotFoundError):
        sagebwd.prebuild(tmp_path / "p.pack", **SMALL, records=[tmp_path / "none.json"])
