"""`sagebwd.tune_lengths`: crossovers that are measured here, kept, and used, without a GPU."""

import argparse
import inspect
import json
import math
import os
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import kernels_on_the_cpu  # noqa: E402, F401

import sagebwd  # noqa: E402
from sagebwd import _core  # noqa: E402
from sagebwd.benchmark import api, lengths, tune_command  # noqa: E402
from sagebwd.core import crossover, fastest, measured_crossovers, tuning  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")
GPU = "NVIDIA A100-SXM4-80GB"  # of which no table knows
CELL = 64, True, "six-of-seven"


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The directory of a cache, on a machine with an A100."""
    told = {"directory": str(tmp_path / "kernels"), "disabled_reason": ""}
    monkeypatch.setattr(_core, "cache", lambda: told)
    monkeypatch.setattr(_core, "driver", lambda: {
        "missing": "", "devices": [(8, 0)], "names": [GPU.encode()]})  # fmt: skip
    for remembered in (fastest.gpu_of, crossover.measured_here):
        remembered.cache_clear()
    yield told
    for remembered in (fastest.gpu_of, crossover.measured_here):
        remembered.cache_clear()


def least(**given):
    return sagebwd.crossover_tokens(0, head_dim=64, causal=True, **given)


def file_of(cache):
    (path,) = Path(cache["directory"]).glob("*.crossover")
    return path


def test_a_crossover_is_kept_and_found(cache):
    with pytest.raises(sagebwd.SpecError, match="nothing is known of the crossover on NVIDIA A100"):
        least()
    before = crossover.generation
    assert crossover.keep(GPU, *CELL, 700, math.inf, [])
    assert crossover.generation == before + 1
    assert least() == math.inf and least(training=False) == 700
    for other in ({"precision": "qk16"}, {"dp_sums": "fp16"}):
        with pytest.raises(sagebwd.SpecError, match="nothing is known"):
            least(**other)
    with pytest.raises(sagebwd.SpecError, match="nothing is known"):
        sagebwd.crossover_tokens(0, head_dim=56, causal=True)
    with pytest.raises(sagebwd.SpecError, match="nothing is known"):
        sagebwd.crossover_tokens(0, head_dim=64)
    assert Path(cache["directory"]).stat().st_mode & 0o777 == 0o700


def test_what_is_measured_comes_before_the_tables(cache):
    gpu = (8, 9, "NVIDIA GeForce RTX 4090")
    assert crossover.lookup(gpu, 64, True, True, "six-of-seven", "fp32") == 2911
    crossover.keep(gpu[2], *CELL, 1500.0, 1234, [])
    assert crossover.lookup(gpu, 64, True, True, "six-of-seven", "fp32") == 1234
    assert crossover.lookup(gpu, 64, False, True, "six-of-seven", "fp32") == 1204


def test_one_of_another_version_is_not_used(cache, monkeypatch):
    crossover.keep(GPU, *CELL, 700, 800, [])
    monkeypatch.setattr(_core, "__version__", "99.0")
    crossover.measured_here.cache_clear()
    with pytest.raises(sagebwd.SpecError, match="nothing is known"):
        least()


@pytest.mark.parametrize(("change", "why"), [
    (lambda kept: "{", "Expecting"),
    (lambda kept: "[1]", "indices"),
    (lambda kept: "[" * 100000, "recursion"),
    (lambda kept: json.dumps({**kept, "key": {}}), "another key"),
    (lambda kept: json.dumps({**kept, "tokens": {"forward": 1}}), "training"),
    (lambda kept: json.dumps({**kept, "tokens": {"forward": "9", "training": 9}}), "no number"),
    (lambda kept: json.dumps({**kept, "tokens": {"forward": 9, "training": True}}), "no number"),
    (lambda kept: json.dumps({**kept, "tokens": {"forward": 0, "training": 9}}), "no number"),
    (lambda kept: json.dumps({**kept, "figures": "x" * (1 << 20)}), "Unterminated"),
])  # fmt: skip
def test_a_damaged_file_is_said_and_not_used(cache, change, why):
    crossover.keep(GPU, *CELL, 700, 800, [])
    path = file_of(cache)
    path.write_text(change(json.loads(path.read_text())))
    with pytest.warns(UserWarning, match=f"{path.name} is not used .*{why}.*tune --help"):
        found = measured_crossovers.find(crossover.key_of(GPU, *CELL))
    assert found is None


def test_without_a_directory_nothing_is_kept(cache):
    cache["disabled_reason"] = "it is full"
    assert not crossover.keep(GPU, *CELL, 700, 800, [])
    assert not os.path.exists(cache["directory"])
    cache |= {"directory": "/proc/self/nowhere/kernels", "disabled_reason": ""}
    assert not crossover.keep(GPU, *CELL, 700, 800, [])


@pytest.mark.parametrize(("speeds", "expected"), [
    ({1024: 1.0, 2048: 1.5}, 1024),
    ({1024: 0.5, 2048: 0.9}, math.inf),
    ({2048: 2.0, 1024: 0.5}, 1536),
    ({1024: 0.5, 2048: 2.0, 4096: 0.8, 8192: 4 / 3}, 1 / (0.5 / 4096 + 0.5 / 8192)),
])  # fmt: skip
def test_where_the_speed_becomes_1_for_good(speeds, expected):
    """Halfway between inverse speeds of 1.25 and .75 is 1. Those of 2 and .5 are 1 after two thirds
    of the way in 1 / tokens: 1/1024 - 2/3 (1/1024 - 1/2048) is 1/1536."""
    found = crossover.crossing(speeds)
    assert found == expected or abs(found - expected) <= 0.5


# ---- all of it, on the CPU -----------------------------------------------------------------------


@pytest.fixture
def on_the_cpu(cache, monkeypatch, kernels_on_the_cpu):  # noqa: F811
    """PyTorch's attentions on the CPU and the stand-in for ours, as if that were an A100; the calls
    that were tuned."""
    tuned = []

    def tune(**given):
        tuned.append(given)
        return [tuning.TunedKernel("forward", "mma 64x64", "mma 64x64", 2.0, 1.0, True, True, {})]

    monkeypatch.setattr(api, "gpu", lambda device: (torch.device("cpu"), "sm_80"))
    monkeypatch.setattr(lengths, "_name_of", lambda device: GPU)
    monkeypatch.setattr(tuning, "tune", tune)
    return tuned


SMALL = dict(batch=1, heads=2, head_dim=64, causal=True, rounds=5)


def test_lengths_are_tuned_and_timed_and_their_crossover_is_used(on_the_cpu):
    steps = []
    found = sagebwd.tune_lengths([48, 32], **SMALL, progress=lambda *step: steps.append(step))
    assert [one["seq_len"] for one in on_the_cpu] == [32, 48]
    assert all(one["batch"] == 1 and one["heads"] == 2 and one["head_dim"] == 64 and one["causal"]
               and not one["force"] for one in on_the_cpu)  # fmt: skip
    assert [(length, one.speedup) for length, one in found.kernels] == [(32, 2.0), (48, 2.0)]
    # PyTorch on the CPU is faster than the emulation.
    assert [one.seq_len for one in found.lengths] == [32, 48]
    assert all(0 < one.both_speed < 1 and 0 < one.forward_speed < 1 and one.forward_ms
               < one.both_ms and one.pytorch_both in ("fa2", "efficient") for one in found.lengths)
    assert found.forward == found.training == math.inf and found.kept
    assert least() == math.inf
    data = json.loads(json.dumps(found.data, allow_nan=False))
    assert data["crossover"] == {"forward": None, "training": None}
    assert data["tiles"][1] == {"seq_len": 48, "kernel": "forward", "tile": "mma 64x64",
                                "speedup": 2.0, "fresh": True, "kept": True}  # fmt: skip
    text = str(found)
    assert max(map(len, text.splitlines())) <= 100 and GPU in text
    assert "training: PyTorch's attention is faster at 48 tokens, the longest here" in text
    assert [step[1:] for step in steps] == [(done, 4) for done in range(5)]


def test_a_crossover_between_two_lengths(on_the_cpu, monkeypatch):
    def measured(case, more, device, arch, rounds):
        both = {1024: 2.0, 2048: 0.5}[case.seq_len]
        return lengths.LengthFigures(case.seq_len, case.batch, 1.0, both, "fa2", 3.0, "cudnn", 1.0)

    monkeypatch.setattr(lengths, "measured", measured)
    found = sagebwd.tune_lengths((1024, 2048), head_dim=64, causal="top-left")
    assert (found.forward, found.training) == (1024, 1536)
    assert [one.batch for one in found.lengths] == [32, 16]
    assert "a forward: sagebwd is faster from 1024 tokens on, the shortest here" in str(found)
    assert "training: sagebwd is faster from 1536 tokens on\n" in str(found)
    assert least() == 1536 and least(training=False) == 1024


def test_ours_that_cannot_be_measured_is_an_error(on_the_cpu, monkeypatch):
    def broken(*given, **more):
        raise RuntimeError("no kernel today")

    monkeypatch.setattr("sagebwd.core.functional.attention", broken)
    with pytest.raises(sagebwd.TuneError, match="sagebwd six-of-seven cannot be .*no kernel today"):
        sagebwd.tune_lengths((32, 48), **SMALL)


@pytest.mark.parametrize(("given", "message"), [
    (dict(lengths=512), "lengths=512: pass two numbers of tokens or more"),
    (dict(lengths=[512]), "pass two numbers"),
    (dict(lengths=[512, 512]), "pass two numbers"),
    (dict(lengths=[0, 512]), "lengths=0"),
    (dict(lengths=["a", "b"]), "lengths=['a', 'b']: pass two numbers"),
    (dict(batch=0), "batch=0"),
    (dict(heads=3, heads_kv=2), "heads must be a multiple"),
    (dict(rounds=4), "rounds=4"),
    (dict(force=1), "force=1"),
    (dict(head_dim=73), "head dimension 73"),
    (dict(precision="int4"), "int4"),
    (dict(progress=3), "progress=3"),
])  # fmt: skip
def test_wrong_use_is_refused_without_a_gpu(given, message):
    with pytest.raises(sagebwd.SpecError) as refused:
        sagebwd.tune_lengths(**given)
    assert message in str(refused.value)


def test_options_that_a_crossover_does_not_know_are_refused():
    with pytest.raises(TypeError, match=r"tune_lengths\(\).*window_left"):
        sagebwd.tune_lengths(window_left=5)


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_prints_a_table_or_json(on_the_cpu, capsys):
    words = ["--lengths", "32,48", "--heads", "2", "--batch", "1", "--head-dim", "64", "--rounds",
             "5", "--causal", "true"]  # fmt: skip
    assert tune_command.main(words) == 0
    out, err = capsys.readouterr()
    assert "causal, on NVIDIA A100" in out and "tuning for 32 tokens (0/4)" in err
    assert tune_command.main(["--lengths", "16", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kept"] and [row["seq_len"] for row in found["lengths"]] == [16, 32, 48]


def test_the_command_fails_where_nothing_is_kept(on_the_cpu, cache, capsys):
    cache["disabled_reason"] = "it is full"
    words = ["--lengths", "32,48", "--heads", "2", "--batch", "1", "--head-dim", "64"]
    assert tune_command.main(words) == 1
    assert "tune: the crossovers could not be kept" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    (["--lengths", "512,x"], "--lengths is '512,x'; it takes numbers"),
    (["--lengths", "512"], "--lengths [512]: pass two numbers"),
    (["--lengths", "32,48", "--heads", "3", "--heads-kv", "2"], "--heads 3 and --heads-kv 2"),
    (["--lengths", "32,48", "--dp-sums", "fp8"], "fp8"),
    (["--lengths", "32,48", "--seq-len", "8"], "unknown option '--seq-len'"),
])  # fmt: skip
def test_wrong_use_of_the_command(words, message, capsys):
    with pytest.raises(SystemExit) as left:
        tune_command.main(words)
    said = capsys.readouterr().err
    assert left.value.code == 2 and message in said
    assert said.endswith("\nSee 'sagebwd tune --help'.\n") and said.count("\n") == 2


def test_every_option_is_a_keyword_of_the_function():
    made = tune_command.parser()
    given = tune_command._keywords(made, made.parse_args(["--lengths", "1,2"]))
    assert inspect.signature(sagebwd.tune_lengths).parameters.keys() - given.keys() == {"progress"}
    assert given.keys() <= inspect.signature(sagebwd.tune_lengths).parameters.keys()


def test_the_program_takes_the_same_options():
    """tools/tune.cpp has them among those of other tunings."""
    binary = Path(__file__).resolve().parents[2] / "build/bin/sagebwd"
    if not binary.exists():
        pytest.skip("the command line is not built")
    ours = {action.option_strings[-1] for action in tune_command.parser()._actions
            if not isinstance(action, argparse._HelpAction)}  # fmt: skip
    shown = subprocess.run([binary, "tune", "--help"], capture_output=True, text=True, check=True)
    theirs = {line.split()[0] for line in shown.stdout.splitlines() if line.startswith("  --")}
    assert ours <= theirs
    for option in sorted(theirs - ours - {"--help", "--compare-precisions", "--list", "--export",
                                          "--import", "--overwrite"}):  # fmt: skip
        flag = option.startswith("--no-") or option in ("--smooth-q", "--smooth-v", "--packed")
        words = [option] if flag else [f"{option}=1"]
        refused = subprocess.run([binary, "tune", "--lengths", "1,2", *words],
                                 capture_output=True, text=True, check=False)  # fmt: skip
        assert refused.returncode == 2, option
