"""The commands of experiments where something is missing: one line, and no file."""

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from documents import ROOT

from experiments import corpus, plot
from experiments.command import check_outputs

BLOCKING = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
import runpy
sys.argv = ["-m", *sys.argv[1:]]
runpy.run_module("experiments." + {module!r}, run_name="__main__", alter_sys=True)
"""
COMMANDS = ("train", "study", "capture", "errors", "lora", "warning")
#: What a command needs beside --corpus.
GIVEN = {"capture": ["--checkpoint", "c.bin"], "errors": ["c.bin"], "lora": ["c.bin"]}


def run(module, *words, blocked=(), folder=None):
    """A command of a process of its own, in which some packages cannot be imported."""
    code = ["-c", BLOCKING.format(blocked=set(blocked), module=module), *map(str, words)]
    given = {"cwd": folder, "timeout": 1200, "env": os.environ | {
        "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}}  # fmt: skip
    if not blocked:
        return warm.run(code, **given)
    return subprocess.run([sys.executable, *code], capture_output=True, text=True, **given)


def says(done, code, *parts):
    """One line on standard error, with all `parts`."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert len(lines) == 1, done.stderr
    for part in parts:
        assert part in lines[-1], done.stderr
    return True


def make_corpus(folder):
    """c.bin of 3,601 tokens to train on and 401 held out."""
    texts = folder / "texts"
    texts.mkdir()
    for name, size in (("a", 50), ("b", 450)):
        (texts / f"{name}.txt").write_bytes((name * 7 + "\n").encode() * size)
    for seed in range(100):  # one that holds the short text out
        words = [str(texts), "--out", str(folder / "c.bin"), "--seed", str(seed), "--json"]
        assert corpus.main(words) == 0
        if json.loads((folder / "c.bin.json").read_text())["validation_tokens"] == 401:
            break
    shutil.rmtree(texts)


@pytest.fixture
def place(tmp_path, capsys):
    """A folder with a small corpus, which must stay alone in it."""
    make_corpus(tmp_path)
    capsys.readouterr()
    yield tmp_path
    assert sorted(os.listdir(tmp_path)) == ["c.bin", "c.bin.json"]


@pytest.mark.anywhere
@pytest.mark.parametrize("module", [*COMMANDS, "plot"])
def test_help_needs_neither_torch_nor_matplotlib(module, place):
    done = run(module, "--help", blocked=("torch", "matplotlib"), folder=place)
    assert done.returncode == 0 and done.stderr == ""
    assert f"python -m experiments.{module}" in done.stdout
    for option in {"plot": (), "train": ("--tokens N", "--lr X", "--no-qk-norm", "torchrun --np"),
                   "study": ("--gpus N", "--summary"), "capture": ("--layer N",),
                   "errors": ("run-*.pt", "--layer N", "--json"), "lora": ("--rank N",),
                   "warning": ("--remedy NAME", "--every N", "--lr X")}[module]:
        assert option in done.stdout
    assert module == "plot" or "--corpus FILE" in done.stdout


@pytest.mark.anywhere
def test_the_package_lists_its_commands():
    done = run("__main__", "--help", blocked=("torch", "matplotlib"))
    assert done.returncode == 0 and done.stderr == ""
    assert all(f"  {module} " in done.stdout for module in ("corpus", *COMMANDS, "plot"))
    wrong = run("__main__", "trian", blocked=("torch", "matplotlib"))
    assert says(wrong, 2, "experiments: 'trian' is no command; did you mean 'train'?")
    assert wrong.stdout == done.stdout


@pytest.mark.anywhere
def test_the_old_name_and_a_missing_package_say_what_to_do():
    """In one line."""
    def run_as_users_do(*words, **more):
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, **more)

    left = "sagebwd.experiments is no part of the package: in a checkout"
    for module in ("sagebwd.experiments", "sagebwd.experiments.train"):
        assert says(run_as_users_do("-m", module), 1, left)
    with pytest.raises(ImportError, match=left):
        importlib.import_module("sagebwd.experiments")
    for module in ("experiments", "experiments.train"):  # -S: without installed packages
        done = run_as_users_do("-S", "-m", module, cwd=ROOT, env=os.environ | {"PYTHONPATH": ""})
        assert says(done, 1, "the experiments need sagebwd", "PYTHONPATH=build/python")


def test_a_checkpoint_may_lie_in_the_folder_that_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def check(save):
        check_outputs(argparse.Namespace(out=Path("results"), save=Path(save)))

    check("results/x.pt")
    check(tmp_path / "results/x.pt")
    with pytest.raises(ValueError, match="name a file in a folder that is there, or in --out"):
        check("elsewhere/x.pt")
    assert list(tmp_path.iterdir()) == []


def test_help_says_the_defaults(place):
    shown = " ".join(run("train", "--help", folder=place).stdout.split())
    assert "--out OUT folder for the files that are written (default: results)" in shown
    for option in ("(default: 1000) --batch N", "--tied, --no-tied use one matrix", "(default: no)",
                   "--dim N width of the model (default: the --model's)"):  # fmt: skip
        assert option in shown


@pytest.mark.anywhere
@pytest.mark.parametrize("module", COMMANDS)
def test_without_torch(module, place):
    words = GIVEN.get(module, [])
    done = run(module, *words, "--corpus", "c.bin", blocked=("torch",), folder=place)
    assert says(done, 1, f"{module}: ", "PyTorch", "pip install torch")


@pytest.mark.anywhere
@pytest.mark.parametrize("module", COMMANDS)
def test_wrong_use_without_torch(module, place):
    assert says(run(module, blocked=("torch",), folder=place), 2, "--corpus")


@pytest.mark.anywhere
def test_plot_without_matplotlib(tmp_path):
    (tmp_path / "c.csv").write_text("step,a\n1,2\n")
    done = run("plot", "c.csv", blocked=("torch", "matplotlib"), folder=tmp_path)
    assert says(done, 1, "plot: ", "pip install matplotlib")
    assert os.listdir(tmp_path) == ["c.csv"]


@pytest.mark.anywhere
def test_plot_is_told_what_to_plot(place):
    assert says(run("plot", folder=place), 2, "CURVES.csv")


def test_plot_of_no_curves(place, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    (place / "a.txt").write_text("abcdefgh")
    assert says(run("plot", "a.txt", folder=place), 2, "no validation curves")
    (place / "a.txt").unlink()
    (place / "long.txt").write_text("x" * 200_000)
    (place / "latin.txt").write_bytes(b"\xff\n" * 9)
    monkeypatch.chdir(place)
    for name, part in (("absent.csv", "absent.csv"),
                       ("long.txt", "no file of comma-separated values"),
                       ("latin.txt", "no file of comma-separated values")):  # fmt: skip
        with pytest.raises(SystemExit) as left:
            plot.main([name])
        said = capsys.readouterr().err.strip()
        assert left.value.code == 2 and part in said and len(said.splitlines()) == 1
    (place / "long.txt").unlink()
    (place / "latin.txt").unlink()


def test_a_reader_that_leaves_is_no_error(place):
    command = [sys.executable, "-m", "experiments.study", "full", "--show"]
    reader, writer = os.pipe()
    os.close(reader)
    shown = warm.Popen(command, stdout=writer, stderr=subprocess.PIPE, cwd=place,
                       env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    os.close(writer)
    assert (shown.stderr.read(), shown.wait()) == (b"", 128 + signal.SIGPIPE)


# ---- in this process, with PyTorch and without a GPU ---------------------------------------------


@pytest.fixture
def command(place, monkeypatch, capsys):
    """Runs a command on the corpus, without a GPU: its exit code, and its errors' last line."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(place)

    def called(module, *words):
        try:
            main = importlib.import_module(f"experiments.{module}").main
            code = main(["--corpus", "c.bin", *words])
        except SystemExit as left:
            code = left.code
        errors = capsys.readouterr().err.strip().splitlines()
        assert code == 2 or len(errors) == 1
        return code, errors[-1]

    return called


@pytest.mark.parametrize(
    "module, words, parts",
    [("train", [], ["train: ", "'sagebwd'", "CUDA GPU", "sdpa and emulated"]),
     ("train", ["--device", "cuda", "--attention", "sdpa"], ["--device cuda", "0 CUDA GPUs"])],
)  # fmt: skip
def test_without_a_gpu(command, module, words, parts):
    code, line = command(module, "--tokens", "32", "--steps", "2", "--val-sequences", "2", *words)
    assert code == 1 and all(part in line for part in parts)


@pytest.mark.parametrize(
    "words, part",
    [(["--device", "banana"], "--device banana: pass cuda"),
     (["--steps", "0"], "steps 0: it must be at least 1"),
     (["--head-dim", "0"], "head_dim 0"),
     (["--lr", "nan"], "lr nan: it must be at least 0 and finite"),
     (["--lr", "-1"], "lr -1.0"),
     (["--clip", "-1"], "clip -1.0"),
     (["--warmup", "-1"], "warmup -1: it must be at least 0"),
     (["--name", "../x"], "--name ../x"),
     (["--out", "c.bin"], "c.bin is a file"),
     (["--out", "c.bin/results"], "c.bin is a file"),
     (["--save", "absent/model.pt"], "--save absent/model.pt"),
     (["--save", "."], "--save ."),
     (["--save", "/dev/null"], "--save /dev/null"),
     (["--save", "/proc/model.pt"], "nothing can be written into /proc"),
     (["--out", "/proc/x"], "nothing can be written into /proc"),
     (["--corpus", "c.bin.json"], "c.bin.json is no corpus: c.bin.json.json is not there"),
     (["--corpus", "absent"], "absent: there is no such file; python -m experiments.c"),
     (["--corpus", "."], ". is no file: pass a corpus"),
     (["--tokens", "1024"], "32,768 tokens (32 sequences of 1024), of which none is seen twice, "
      "and the corpus has 3,601 (3 sequences): take more text, or run fewer steps"),
     (["--diverged-at", "0"], "diverged_at 0.0: it must be above 0"),
     (["--save", "c.bin"], "c.bin is there, and no checkpoint of these commands: name another"),
     (["--val-sequences", "13"], "--val-sequences 13: the corpus has 12 held-out sequences of 32"),
     (["--dim", "64", "--head-dim", "33"], "head_dim 33: it must be even"),
     (["--graph"], "--graph needs a CUDA GPU, and --device is cpu: leave it out"),
     (["--attention", "emulated:granularity=tensor"], "tensor")],
)  # fmt: skip
def test_wrong_use_of_train(command, words, part):
    given = ["--attention", "sdpa", "--tokens", "32", "--steps", "2", "--val-sequences", "2"]
    code, line = command("train", *given, *words)
    assert code == 2 and part in line


@pytest.fixture
def checkpoint(place, tmp_path_factory):
    """A model of one layer, after no step."""
    pytest.importorskip("torch", reason="needs PyTorch")
    from experiments.attentions import AttentionChoice
    from experiments.config import ModelConfig, TrainConfig
    from experiments.data import Corpus
    from experiments.training import Trainer

    model = ModelConfig(dim=64, layers=1, head_dim=16, hidden=64)
    config = TrainConfig(model=model, steps=1, batch=1, tokens=32, val_sequences=1, device="cpu",
                         deterministic=False)  # fmt: skip
    path = tmp_path_factory.mktemp("trained") / "a.pt"
    Trainer(config, AttentionChoice.parse("sdpa"), Corpus.open(place / "c.bin")).save(path)
    return path


@pytest.mark.parametrize(
    "words, code, part",
    [([], 2, "head dimension 16"),  # which cannot be traced
     (["--sequences", "0"], 2, "sequences 0: it must be"),
     (["--save", "absent/tensors.pt"], 2, "--save absent"),
     (["--attention", "sagebwd"], 1, "CUDA GPU"),
     (["--attention", "flash"], 2, "unknown attention 'flash'"),
     (["--layer", "8"], 2, "no layer 8: the model has 1")],
)  # fmt: skip
def test_wrong_use_of_capture(command, checkpoint, words, code, part):
    given = ["--checkpoint", str(checkpoint), "--device", "cpu"]
    found, line = command("capture", *given, *words)
    assert found == code and part in line


def test_a_checkpoint_of_another_kind(command, tmp_path_factory):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from dataclasses import asdict

    from experiments.config import TrainConfig

    config = asdict(TrainConfig())
    whole = {"config": config, "attention": "sdpa", "model": {}, "optimiser": {}, "step": 0,
             "rows": [], "pending": [], "corpus": "0", "processes": 1}  # fmt: skip
    path = tmp_path_factory.mktemp("other") / "a.pt"
    for saved in ([1], {}, {"config": config}, whole | {"attention": 5}, whole | {"config": {}},
                  whole, whole | {"model": [5]}):  # fmt: skip
        torch.save(saved, path)
        code, line = command("capture", "--checkpoint", str(path), "--device", "cpu")
        assert code == 2 and "is no checkpoint of these commands" in line, saved


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    from sagebwd.benchmark.environment import replacing

    path, link = tmp_path / "a.pt", tmp_path / "link.pt"
    path.write_text("before")
    link.symlink_to("a.pt")
    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before"
    with replacing(link) as partial:
        partial.write_text("whole")
    assert path.read_text() == "whole" and link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "link.pt"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a folder, a device or a pipe: name a file"):
        with replacing(tmp_path / "pipe") as partial:
            partial.touch()
    assert (tmp_path / "pipe").is_fifo()
