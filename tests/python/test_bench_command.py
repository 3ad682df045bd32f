"""`sagebwd bench` and `sagebwd.bench`: shapes, refusals, what they print, without a GPU."""

import argparse
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import kernels_on_the_cpu  # noqa: E402, F401

import sagebwd  # noqa: E402
from sagebwd.benchmark import (  # noqa: E402
    api,
    attentions,
    cases,
    command,
    command_line,
    picture,
)
from sagebwd.benchmark import common as shared  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")
SMALL = dict(heads=2, seq_len=48, head_dim=64, rounds=2)


# ---- shapes --------------------------------------------------------------------------------------

#: Heads, key/value heads, tokens, head dimension, causal, keys before the own one, sinks: of the
#: models' published configurations.
SHAPES = {
    "llama-3-8b": (32, 8, 8192, 128, True, None, False),
    "qwen3-8b": (32, 8, 32768, 128, True, None, False),
    "gemma-3-12b": (16, 8, 8192, 256, True, None, False),
    "gemma-3-12b-window": (16, 8, 8192, 256, True, 1024 - 1, False),
    "gpt-oss-20b": (64, 8, 8192, 64, True, None, True),
    "gpt-oss-20b-window": (64, 8, 8192, 64, True, 128 - 1, True),
    "wan-2.1-1.3b": (12, 12, (1 + 80 // 4) * (480 // 16) * (832 // 16), 128, False, None, False),
    "wan-2.1-14b": (40, 40, (1 + 80 // 4) * (720 // 16) * (1280 // 16), 128, False, None, False),
    "wan-2.2-5b": (24, 24, (1 + 120 // 4) * (704 // 32) * (1280 // 32), 128, False, None, False),
    "flux-1": (24, 24, (1024 // 16) ** 2 + 512, 128, False, None, False),
}


def test_models_have_their_published_shapes():
    found = {
        name: (c.heads, c.heads_kv, c.seq_len, c.head_dim, c.causal == "top-left", c.window_left,
               c.sinks)
        for name, c in cases.MODELS.items()
    }  # fmt: skip
    assert found == SHAPES
    for case in cases.MODELS.values():
        assert (case.batch, case.seq_kv, case.window_right) == (1, case.seq_len, None)
        sagebwd.Spec(head_dim=case.head_dim, **case.mask())


def chosen_case(models=None, sizes=None, sinks=False, layout="bhsd", **given):
    every = dict.fromkeys(cases.SIZES) | (sizes or {})
    chosen = sagebwd.core.options.defaults(sagebwd.core.options.Operation) | given
    return cases.cases_of(models, every, sinks, layout, chosen)


def test_sizes_that_are_left_out():
    (case,) = chosen_case()
    assert (case.batch, case.heads, case.heads_kv, case.seq_len, case.seq_kv) == (
        1, 16, 16, 8192, 8192)  # fmt: skip
    (case,) = chosen_case(sizes={"heads": 8, "seq_len": 100, "seq_kv": 300}, causal="bottom-right")
    assert (case.heads_kv, case.seq_kv, case.causal) == (8, 300, "bottom-right")
    assert str(case) == (
        "batch 1, 8 heads, 100 tokens on 300 keys, D128, bf16, causal bottom-right"
    )


def test_a_model_with_another_batch_and_length():
    llama, flux = chosen_case(["llama-3-8b", "flux-1"], {"batch": 4, "seq_len": 512}, dtype="fp16")
    assert (llama.batch, llama.seq_len, llama.seq_kv, llama.dtype) == (4, 512, 512, "fp16")
    assert (flux.heads, flux.seq_kv, flux.causal) == (24, 512, "none")


WRONG = [
    (dict(models="lama-3-8b"), "models='lama-3-8b' is not known (did you mean 'llama-3-8b'?)"),
    (dict(models="gpt-2"), "known are llama-3-8b, qwen3-8b, gemma-3-12b"),
    (dict(models=[]), "pass one name or several"),
    (dict(models=7), "models=7: pass one name"),
    (dict(models="flux-1", heads=8), "models and heads: a model says its heads itself"),
    (dict(models="flux-1", causal=True), "models and causal"),
    (dict(models="flux-1", sinks=True), "models and sinks"),
    (dict(backends="cudn"), "backends='cudn' is not known (did you mean 'cudnn'?): known are"),
    (dict(backends=["fa2", "xformers"]), "backends='xformers' is not known: known are cudnn, fa2"),
    (dict(precision="gradient16"), "did you mean 'gradients16'?"),
    (dict(heads=6, heads_kv=4), "heads=6 and heads_kv=4: heads must be a multiple of heads_kv"),
    (dict(seq_len=0), "seq_len=0: pass a whole number of at least 1"),
    (dict(batch=2.5), "batch=2.5: pass a whole number"),
    (dict(head_dim=73), "head dimension 73 is not built"),
    (dict(causal=True, seq_kv=9), "causal=True is ambiguous"),
    (dict(window_left=-2), "window_left=-2"),
    (dict(deterministic="yes"), "deterministic='yes': pass True or False"),
    (dict(sinks=1), "sinks=1: pass True or False"),
    (dict(layout="sbhd"), "layout='sbhd'"),
    (dict(dtype="fp8"), "dtype='fp8'"),
    (dict(rounds=0), "rounds=0: pass a whole number"),
    (dict(rounds=1001), "rounds=1001: pass a whole number from 1 to 1000"),
    (dict(seed=-1), "seed=-1"),
    (dict(progress=3), "progress=3: pass a function"),
    (dict(granularity="rows"), "'rows'"),
    (dict(smooth_q=True, precision="qk16"), "smooth_q"),
    (dict(intervals="document"), "intervals='document' is not known (did you mean 'documents'?)"),
    (dict(intervals=1), "intervals=1: pass one name, of documents, prefix, window"),
    (dict(intervals="prefix", causal=True), "intervals='prefix' and causal: the mask is for"),
    (dict(intervals="prefix", window_left=4), "Leave out window_left"),
    (dict(intervals="prefix", seq_kv=4), "Leave out seq_kv"),
    (dict(intervals="prefix", models="flux-1"), "Leave out models"),
    (dict(intervals="prefix", smooth_q=True), "smooth_q"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_use_is_refused_without_a_gpu(given, message):
    with pytest.raises(sagebwd.SpecError) as refused:
        sagebwd.bench(**given)
    assert message in str(refused.value)


def test_unknown_keywords_are_refused_with_the_nearest():
    with pytest.raises(TypeError, match=r"bench\(\).*'model'; did you mean 'models'"):
        sagebwd.bench(model="flux-1")


def test_without_a_gpu_it_says_what_is_needed():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(sagebwd.LibraryError, match="run this on a machine with an NVIDIA GPU"):
        sagebwd.bench()


def test_a_pytorch_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(api, "local_arch", lambda *given: "sm_90a")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(sagebwd.LibraryError, match=r"PyTorch .* sees no GPU, the driver sees one"):
        sagebwd.bench(device=0)


# ---- all of it, on the CPU -----------------------------------------------------------------------


@pytest.fixture
def on_the_cpu(monkeypatch, kernels_on_the_cpu):  # noqa: F811
    """PyTorch's attentions on the CPU and the stand-in for ours, as if that were a GPU."""
    monkeypatch.setattr(api, "gpu", lambda device: (torch.device("cpu"), "sm_90a"))


def test_a_comparison(on_the_cpu):
    steps = []
    result = sagebwd.bench(**SMALL, causal=True, precision=["six-of-seven", "gradients16"],
                           progress=lambda *step: steps.append(step))  # fmt: skip
    ((case, rows),) = result.cases
    assert (case.heads, case.seq_len, case.causal) == (2, 48, "top-left")
    found = {(row.attention, row.deterministic): row for row in rows}
    assert len(found) == len(rows) == 2 * 7
    fa2, ours = found["fa2", False], found["sagebwd six-of-seven", True]
    sixteen = found["sagebwd gradients16", False]
    assert fa2.speed == 1 and fa2.both.median_ms > 0 and fa2.forward.median_ms > 0
    assert max(fa2.errors.values()) < 0.005 < min(ours.errors.values())
    assert max(ours.errors.values()) < 0.05 and sixteen.errors["dQ"] < ours.errors["dQ"]
    for name in ("cudnn", "fa3", "fa4"):  # what a CPU lacks is said, not left out
        assert found[name, False].refusal and not found[name, False].both
    assert {done for _, done, total in steps if total == 14} == set(range(14))

    assert str(result) == result.text and max(map(len, result.text.splitlines())) <= 100
    for word in ("GPU ", "NVRTC", "flash_attn_interface is not installed", "sagebwd gradients16"):
        assert word in result.text
    read = json.loads(json.dumps(result.data, allow_nan=False))
    assert read["cases"][0]["seq_len"] == 48 and len(read["cases"][0]["rows"]) == 14
    row = next(r for r in read["cases"][0]["rows"] if r["attention"] == "fa2")
    assert row["forward+backward"]["samples"] == 2 and 0 < row["rel_l2"]["dV"] < 0.005
    assert read["machine"]["sagebwd"] == sagebwd.__version__


def test_some_backends_of_some_models(on_the_cpu, monkeypatch):
    monkeypatch.setattr(cases, "MODELS", {
        "a": cases.Case("a", heads=2, heads_kv=1, seq_len=32, seq_kv=32, head_dim=64),
        "b": cases.Case("b", heads=2, heads_kv=2, seq_len=32, seq_kv=32, head_dim=64, sinks=True),
    })  # fmt: skip
    result = sagebwd.bench(["b", "a"], backends=["sagebwd", "fa2"], precision="dv16", rounds=1,
                           deterministic=True)  # fmt: skip
    assert [case.name for case, _ in result.cases] == ["b", "a"]
    for case, rows in result.cases:
        assert [row.attention for row in rows] == ["sagebwd dv16", "fa2"]
        assert all(row.deterministic for row in rows) and max(rows[0].errors.values()) < 0.05
        assert bool(rows[1].refusal) == case.sinks
        assert (rows[0].speed is None) == case.sinks
    assert result.text.count("\n\na: batch 1") == 1


def test_a_precision_that_lacks_an_option_is_listed_with_the_reason(on_the_cpu):
    result = sagebwd.bench(**SMALL, smooth_q=True, precision=["qk16", "six-of-seven"],
                           backends="sagebwd", deterministic=True)  # fmt: skip
    ((_, (qk16, ours)),) = result.cases
    assert "smooth_q" in qk16.refusal and ours.both and not ours.refusal


def test_inputs_that_do_not_fit_are_refused(on_the_cpu, monkeypatch):
    def too_large(*given):
        raise torch.cuda.OutOfMemoryError("Tried to allocate 9 TiB")

    monkeypatch.setattr("sagebwd.benchmark.measuring.inputs_of", too_large)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 29, 1 << 34))
    with pytest.raises(sagebwd.SpecError, match=r"do not fit into the 1\.5 GiB .* smaller batch"):
        sagebwd.bench(**SMALL)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture(on_the_cpu, tmp_path, kind):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"times.{kind}"
    sagebwd.bench(**SMALL, backends="fa2", plot=path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") or b"<svg" in content[:1000]


def test_pictures_that_cannot_be_written_are_refused_first(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"'a\.txt' is no name of a picture.*\.png, \.svg or"):
        sagebwd.bench(plot=tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError, match="nowhere is no folder"):
        sagebwd.bench(plot=tmp_path / "nowhere/a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"a plot needs matplotlib .* pip install matplotlib"):
        picture.check("a.png")


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_prints_tables_or_json(on_the_cpu, capsys):
    words = ["--heads", "2", "--seq-len", "32", "--head-dim", "64", "--rounds", "1", "--heads-kv",
             "0", "--window-left", "-1", "--group-q", "0", "--deterministic", "yes", "--backends",
             "fa2,sagebwd", "--precision", "six-of-seven,qk16", "--causal", "top-left"]  # fmt: skip
    assert command.main(words) == 0
    out, err = capsys.readouterr()
    assert "sagebwd qk16" in out and "cudnn, deterministic" not in out
    assert "sagebwd bench --heads 2" in " ".join(out.split())
    assert "running fa2, deterministic (0/3)" in err and "\r" not in err
    assert command.main([*words, "--json"]) == 0
    ((case),) = json.loads(capsys.readouterr().out)["cases"]
    assert (case["heads_kv"], case["window_left"], case["causal"]) == (2, None, "top-left")
    assert [row["attention"] for row in case["rows"]] == [
        "fa2", "sagebwd six-of-seven", "sagebwd qk16"]  # fmt: skip


def test_the_command_lists_models(capsys):
    assert command.main(["--list-models"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(SHAPES)
    assert command.main(["--list-models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flux-1"]["seq_len"] == 4608


@pytest.mark.parametrize(("words", "message"), [
    (["--models", "lama-3-8b"],
     "--models 'lama-3-8b' is not known (did you mean 'llama-3-8b'?)"),
    (["--models", "all", "--heads", "3"],
     "--models and --heads: a model says its heads itself. Leave out one of them; batch and "
     "--seq-len may be given"),
    (["--heads", "6", "--heads-kv", "4"],
     "--heads 6 and --heads-kv 4: heads must be a multiple of --heads-kv. Pass a --heads-kv"),
    (["--backends", "fa5"], "--backends 'fa5' is not known"),
    (["--precision", "qk17"], "--precision 'qk17' is not known (did you mean 'qk16'?)"),
    (["--head-dim", "73"], "head dimension 73"),
    (["--smooth-q", "--precision", "qk16"], "--smooth-q is not supported under precision 'qk16'"),
    (["--seq-len", "x"], "--seq-len is 'x'; it takes a whole number"),
    (["--window-left", "x"], "--window-left is 'x'; it takes a whole number"),
    (["--window-left", "-2"], "--window-left -2: pass a whole number"),
    (["--deterministic", "maybe"], "--deterministic is 'maybe'; it takes "),
    (["--rounds", "1001"], "--rounds 1001: pass a whole number from 1 to 1000"),
    (["--models"], "--models needs a value"),
    (["--head", "8"], "unknown option '--head'"),
    (["--plot", "a.txt"], "'a.txt' is no name of a picture"),
])  # fmt: skip
def test_wrong_use_of_the_command(words, message, capsys):
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as left:
        command.main(words)
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.startswith(f"sagebwd: {message}"), said
    assert said.endswith("\nSee 'sagebwd bench --help'.\n") and said.count("\n") == 2


@pytest.mark.parametrize(("word", "meant"), [("true", "top-left"), ("False", "none"),
                                             ("bottom-right", "bottom-right")])  # fmt: skip
def test_the_command_takes_pythons_words_for_masks(word, meant):
    assert command._keywords(command.parser().parse_args(["--causal", word]))["causal"] == meant


def test_the_command_without_a_gpu_pytorch_or_matplotlib(capsys, monkeypatch):
    if not torch.cuda.is_available():
        assert command.main([]) == 1
        assert "run this on a machine with an NVIDIA GPU" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command.main(["--plot", "a.png"]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    monkeypatch.setattr(shared, "torch", None)
    monkeypatch.setattr(shared, "_why_no_torch", "No module named 'torch'", raising=False)
    assert command.main([]) == 1
    assert "bench: this needs PyTorch (No module named 'torch'): pip install torch" in (
        capsys.readouterr().err
    )


def test_progress_on_a_terminal_is_one_line_that_goes_away(capsys):
    class Terminal:
        text = ""

        def isatty(self):
            return True

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    terminal = Terminal()
    shown = command_line.Shown(terminal)
    shown("running fa2", 1, 9)
    shown("timed", 2, 2)
    shown.close()
    assert terminal.text == "\rrunning fa2 (1/9)\rtimed (2/2)      \r           \r"


def test_every_option_is_a_keyword_of_the_function():
    given = command._keywords(command.parser().parse_args([]))
    assert given.keys() <= inspect.signature(sagebwd.bench).parameters.keys()
    assert inspect.signature(sagebwd.bench).parameters.keys() - given.keys() == {"progress"}


def test_help_speaks_of_options_and_not_of_keywords():
    shown = " ".join(command.parser().format_help().split())
    assert "--no-smooth-k without subtracting the mean of the keys" in shown
    assert "--window-left N sliding window: keys before its own that a query sees; -1" in shown
    for word in ("None", "True", "False", "precision=", "deterministic=", "'top-left'"):
        assert word not in shown


def test_the_program_lists_the_same_options():
    """tools/bench.cpp has them for --help and completion."""
    binary = Path(__file__).resolve().parents[2] / "build/bin/sagebwd"
    if not binary.exists():
        pytest.skip("the command line is not built")
    shown = subprocess.run([binary, "bench", "--help"], capture_output=True, text=True, check=True)
    options = shown.stdout.partition("options:\n")[2]
    theirs = {line.split()[0] for line in options.splitlines() if line.startswith("  --")}
    ours = {action.option_strings[-1] for action in command.parser()._actions
            if not isinstance(action, argparse._HelpAction)}  # fmt: skip
    assert theirs == ours
    assert set(attentions.BACKENDS) <= set(options.replace(",", " ").split())
    flat = " ".join(options.split())
    for name, text in command_line.HELP.items():  # the help of fields in generator/spec.h
        assert f"-{name.replace('_', '-')} " in flat and text in flat
    for name, usual in (("heads", 16), ("seq-len", 8192), ("batch", 1)):
        assert f"(default {usual})" in flat.partition(f"--{name} N ")[2].partition("--")[0]
