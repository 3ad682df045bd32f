"""sagebwd.tune on a fake driver: everything but the kernels themselves is the real thing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import warm

import sagebwd
from sagebwd import _core

ROOT = Path(__file__).resolve().parents[2]
FAST = "mma 128x128 w8 s1 b1"  # of sm_80's forward at head dim 64
needs_nvrtc = pytest.mark.skipif(bool(_core.nvrtc()["missing"]), reason="needs NVRTC")

try:
    import torch.distributed

    has_gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
except (ImportError, AttributeError):
    has_gloo = False
needs_gloo = pytest.mark.skipif(not has_gloo, reason="needs PyTorch with gloo")

PREAMBLE = """
import json, os, sys
import sagebwd
SMALL = dict(seq_len=1024, head_dim=64, heads=2, kernels="forward", rounds=5,
             tiles=["mma 128x128 w8 s1 b1"])
def show(value):
    print("result:" + json.dumps(value), flush=True)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Kernels that tests of this file compiled."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def start(fake_driver, tmp_path, compiled):
    """Starts Python code on a fake GPU; `finish` gives what it shows. The code's cache begins
    with the kernels that another test compiled, without records."""
    cache = tmp_path / "cache"
    shutil.copytree(compiled, cache)
    cache.chmod(0o700)

    def run(code, **environment):
        variables = {
            "LD_LIBRARY_PATH": str(fake_driver), "SAGEBWD_CACHE_DIR": str(tmp_path / "cache"),
            "FAKE_VERSION": "99000",  # takes every NVRTC's cubins, so that they come from the cache
            "FAKE_QUIET": "1", "FAKE_MAJOR": "8", "FAKE_MINOR": "0", "FAKE_SMS": "108",
            "FAKE_KERNELS": "128x128_w8_s1=0.9",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }  # fmt: skip
        return warm.Popen(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
            env=os.environ | variables | environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    yield run
    for kernel in cache.glob("*.kernel"):
        shutil.copy(kernel, compiled)


def finish(process):
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, out + err
    return [json.loads(line[7:]) for line in out.splitlines() if line.startswith("result:")]


@pytest.mark.anywhere
@needs_nvrtc
def test_the_winner_is_found_kept_and_moved(start, tmp_path):
    first, second, calls, moved, again = finish(
        start(
            """
            calls = []
            def tuned(**more):
                (kernel,) = sagebwd.tune(**SMALL, **more)
                return kernel
            for kernel in tuned(progress=lambda *call: calls.append(call)), tuned():
                show([kernel.tile, kernel.fresh, kernel.kept, round(kernel.speedup, 3),
                      kernel.record["key"]["gpu"]])
            show(calls)
            show(sagebwd.export_records(os.environ["FILE"]))
            show(sagebwd.import_records(os.environ["FILE"], overwrite=True))
            """,
            FILE=str(tmp_path / "records.json"),
        )
    )
    assert first == [FAST, True, True, 1.667, "Fake GPU 10"]
    assert second == [FAST, False, True, 1.667, "Fake GPU 10"]
    assert calls[0] == ["forward", "vetting", "mma 64x128 w4 s1 b2", 1, 2]
    assert calls[-1] == ["forward", "timing", FAST, 10, 10]
    assert moved == 1
    assert again == {"added": 0, "kept": 0, "replaced": 1}
    assert json.loads((tmp_path / "records.json").read_text())["records"][0]["tile"] == FAST


@pytest.mark.anywhere
@needs_nvrtc
def test_ctrl_c_ends_it(start):
    # The callback raises what a signal would.
    (result,) = finish(
        start(
            """
            def interrupt(*call):
                raise KeyboardInterrupt
            try:
                sagebwd.tune(**SMALL, progress=interrupt)
            except KeyboardInterrupt:
                show("ended")
            """
        )
    )
    assert result == "ended"


@pytest.mark.anywhere
def test_wrong_use_is_refused_without_a_gpu():
    with pytest.raises(sagebwd.SpecError, match="rounds=1"):
        sagebwd.tune(rounds=1)
    with pytest.raises(sagebwd.SpecError, match="head dimension 63"):
        sagebwd.tune(head_dim=63)
    with pytest.raises(TypeError, match="did you mean 'kernels'"):
        sagebwd.tune(kernel="forward")


@pytest.mark.anywhere
def test_plans_that_cannot_be_compared_are_refused_without_a_gpu():
    for options, message in [
        (dict(rounds=0), "rounds=0"),
        (dict(rounds=1001), "rounds=1001.*1 to 1000"),
        (dict(head_dim=63), "head dimension 63"),
        (dict(granularity="block", sink_keys=1), "sink_keys = 1.*'block'"),
    ]:
        with pytest.raises(sagebwd.SpecError, match=message):
            sagebwd.compare_plans(**options)
    with pytest.raises(TypeError, match="did you mean 'rounds'"):
        sagebwd.compare_plans(round=3)


@pytest.mark.anywhere
@pytest.mark.skipif(not _core.driver()["missing"], reason="needs a machine without a driver")
def test_without_a_gpu_it_says_what_helps():
    with pytest.raises(sagebwd.LibraryError, match="export_records and import_records") as raised:
        sagebwd.tune()
    assert "arch=" not in str(raised.value)


def end_by_signal(process):
    """Ctrl-C, once it says that it is at work; gives the seconds until it has ended."""
    while "at work" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    out, err = process.communicate(timeout=1200)
    assert process.returncode != 0 and "KeyboardInterrupt" in err, out + err
    return time.monotonic() - start


@pytest.mark.anywhere
@needs_nvrtc
def test_a_signal_ends_it_while_it_compiles(start, tmp_path, compiled):
    process = start("print('at work', flush=True); sagebwd.tune(granularity='block')")
    end_by_signal(process)
    before = {kernel.name for kernel in compiled.iterdir()}
    kept = {kernel.name for kernel in tmp_path.glob("cache/*.kernel")}
    assert len(kept - before) < 10  # of some thirty
    assert not list(tmp_path.glob("cache/*.tuning"))


@pytest.mark.anywhere
@needs_nvrtc
def test_a_signal_ends_it_while_a_kernel_hangs(start):
    code = """
        sagebwd.build("sm_80", head_dim=64, backward=False)
        print("at work", flush=True)
        sagebwd.tune(**SMALL)
    """
    # The default; its launch is waited for a minute.
    process = start(code, FAKE_KERNELS="64x128_w4_s1_b2=hang")
    assert end_by_signal(process) < 50


@pytest.mark.anywhere
@needs_nvrtc
def test_the_worker_takes_the_same_gpu_or_says_that_it_cannot(start):
    tuned, refused = finish(
        start(
            """
            sagebwd.doctor()  # opens the driver
            os.environ["FAKE_FIRST"] = "1"  # as CUDA_VISIBLE_DEVICES: read when a process begins
            show(sagebwd.tune(**SMALL, device=1)[0].tile)
            try:
                show(sagebwd.tune(**SMALL, device=0, force=True)[0].tile)
            except sagebwd.TuneError as error:
                show(str(error))
            """
        )
    )
    assert tuned == FAST
    assert "GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a00a, is not seen by its worker" in refused
    assert "CUDA_VISIBLE_DEVICES" in refused


@pytest.mark.anywhere
def test_sizes_that_no_gpu_holds_are_refused_at_once(start):
    (message,) = finish(
        start(
            """
            try:
                sagebwd.tune(batch=1000, heads=128, seq_len=1 << 20)
            except sagebwd.SpecError as error:
                show(str(error))
            """
        )
    )
    assert "GiB of GPU memory, and Fake GPU 10 has 20.0" in message


@pytest.mark.anywhere
def test_refusals_on_a_gpu(start):
    assert finish(
        start(
            """
            for options in (dict(kernels="quantize"), dict(tiles="nonsense"), dict(heads=0),
                            dict(tiles="wgmma 64x128 w4 s1 b2"), dict(device=9)):
                try:
                    sagebwd.tune(**(SMALL | options))
                    show("done")
                except sagebwd.SpecError as error:
                    show(str(error).splitlines()[0][:30])
            """
        )
    ) == [
        "'quantize' is no kernel with t",
        "cannot read tile 'nonsense': e",
        "heads=0: pass a whole number o",
        "there is no candidate: ",
        "device 9: there are 2 GPUs her",
    ]


@pytest.mark.anywhere
def test_nothing_to_export_is_an_error_and_leaves_the_file(start, tmp_path):
    (tmp_path / "records.json").write_text("mine")
    (result,) = finish(
        start(
            """
            try:
                show(sagebwd.export_records(os.environ["FILE"]))
            except sagebwd.TuneError as error:
                show(str(error))
            """,
            FILE=str(tmp_path / "records.json"),
        )
    )
    assert "there is no tuning record in" in result and "run 'sagebwd tune' first" in result
    assert (tmp_path / "records.json").read_text() == "mine"


@pytest.mark.anywhere
def test_files_that_are_none_are_refused(tmp_path):
    (tmp_path / "newer.json").write_text('{"schema": "sagebwd tuning 2", "records": []}')
    with pytest.raises(sagebwd.SpecError, match="newer version"):
        sagebwd.import_records(tmp_path / "newer.json")
    (tmp_path / "binary").write_bytes(b"\xff\x00\xfe")
    with pytest.raises(sagebwd.SpecError, match="no JSON"):
        sagebwd.import_records(tmp_path / "binary")
    with pytest.raises(FileNotFoundError):
        sagebwd.import_records(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        sagebwd.export_records(tmp_path / "none" / "records.json")


@pytest.mark.anywhere
def test_the_worker_is_started_by_the_tuner_alone():
    for command in (["-m", "sagebwd.core.tune_worker"],
                    [ROOT / "python/sagebwd/core/tune_worker.py"]):  # fmt: skip
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert "the tuner starts this by itself" in done.stderr


GROUP = """
import torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["RENDEZVOUS"], rank=rank,
                        world_size=2)
try:
    (kernel,) = sagebwd.tune(**SMALL, group=dist.group.WORLD)
    show([kernel.tile, len(list(__import__("pathlib").Path(
        os.environ["SAGEBWD_CACHE_DIR"]).glob("*.tuning")))])
except (sagebwd.TuneError, sagebwd.LibraryError) as error:
    show(type(error).__name__ + ": " + str(error))
dist.destroy_process_group()
"""


@pytest.fixture
def group(start, tmp_path):
    """Runs two ranks, each with a cache of its own; what each shows."""

    def run(*differing):
        processes = [
            start(
                GROUP, RANK=str(rank), RENDEZVOUS=str(tmp_path / "rendezvous"),
                SAGEBWD_CACHE_DIR=str(tmp_path / f"cache{rank}"), GLOO_SOCKET_IFNAME="lo",
                **environment,
            )
            for rank, environment in enumerate(differing)
        ]  # fmt: skip
        return [finish(process)[0] for process in processes]

    return run


@needs_nvrtc
@needs_gloo
def test_rank_0_tunes_and_the_others_take_its_records(group):
    # Rank 1 could not tune: it has no NVRTC.
    assert group({}, {"SAGEBWD_NVRTC": "/nowhere/libnvrtc.so"}) == [[FAST, 1], [FAST, 1]]


@needs_nvrtc
@needs_gloo
def test_ranks_that_would_differ_raise_everywhere(group):
    zero, one = group({}, {"FAKE_SMS": "109"})
    for result in (zero, one):
        assert result.startswith("TuneError: ranks [1] of the group do not run with rank 0's tiles")


@needs_gloo
def test_what_ends_rank_0_ends_the_others(group):
    zero, one = group({"FAKE_DEVICES": "0"}, {})
    assert zero.startswith("LibraryError: ")
    assert one.startswith("TuneError: rank 0 could not tune: LibraryError: ")


@needs_nvrtc
@needs_gloo
def test_what_ends_another_rank_ends_rank_0(group):
    zero, one = group({}, {"FAKE_DEVICES": "0"})
    for result in (zero, one):
        assert result.startswith("TuneError: ranks [1]"), result
        assert "LibraryError" in result
