"""The commands of sagebwd.experiments where something is missing: one line, and no file."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sagebwd.experiments.command import check_outputs

BLOCKING = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
import runpy
sys.argv = ["-m", *sys.argv[1:]]
runpy.run_module("sagebwd.experiments." + {module!r}, run_name="__main__", alter_sys=True)
"""
COMMANDS = ("train", "compare", "capture")


def run(module, *words, blocked=(), folder=None):
    """A command of a process of its own, in which some packages cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKING.format(blocked=set(blocked), module=module), *words],
        capture_output=True, text=True, timeout=1200, cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def says(done, code, *parts):
    """One line on standard error, with all `parts`."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert len(lines) == 1, done.stderr
    for part in parts:
        assert part in lines[-1], done.stderr
    return True


@pytest.fixture
def place(tmp_path):
    """A folder with a text of 4,000 bytes, which must stay alone in it."""
    (tmp_path / "a.txt").write_bytes(b"abcdefgh" * 500)
    yield tmp_path
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("module", [*COMMANDS, "plot"])
def test_help_needs_neither_torch_nor_matplotlib(module, place):
    done = run(module, "--help", blocked=("torch", "matplotlib"), folder=place)
    assert done.returncode == 0 and done.stderr == ""
    assert f"python -m sagebwd.experiments.{module}" in done.stdout
    for option in () if module == "plot" else ("--text", "--tokens N", "--lr X", "--no-qk-norm"):
        assert option in done.stdout


def test_the_package_lists_its_commands():
    done = run("__main__", "--help", blocked=("torch", "matplotlib"))
    assert done.returncode == 0 and done.stderr == ""
    assert all(f"  {module} " in done.stdout for module in (*COMMANDS, "plot"))
    wrong = run("__main__", "trian", blocked=("torch", "matplotlib"))
    assert says(wrong, 2, "sagebwd.experiments: 'trian' is no command; did you mean 'train'?")
    assert wrong.stdout == done.stdout


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
    for option in ("(default: 1000) --batch N", "--tied, --no-tied use one matrix", "(default: no)"):
        assert option in shown


@pytest.mark.parametrize("module", COMMANDS)
def test_without_torch(module, place):
    done = run(module, "--text", "a.txt", blocked=("torch",), folder=place)
    assert says(done, 1, f"{module}: ", "PyTorch", "pip install torch")


@pytest.mark.parametrize("module", COMMANDS)
def test_wrong_use_without_torch(module, place):
    assert says(run(module, blocked=("torch",), folder=place), 2, "--text")


def test_plot_without_matplotlib(tmp_path):
    (tmp_path / "c.csv").write_text("step,a\n1,2\n")
    done = run("plot", "c.csv", blocked=("torch", "matplotlib"), folder=tmp_path)
    assert says(done, 1, "plot: ", "pip install matplotlib")
    assert os.listdir(tmp_path) == ["c.csv"]


def test_plot_is_told_what_to_plot(place):
    assert says(run("plot", folder=place), 2, "CURVES.csv")


def test_plot_of_no_curves(place):
    pytest.importorskip("matplotlib")
    assert says(run("plot", "a.txt", folder=place), 2, "no validation curves")
    assert says(run("plot", "absent.csv", folder=place), 2, "absent.csv")
    (place / "long.txt").write_text("x" * 200_000)
    assert says(run("plot", "long.txt", folder=place), 2, "no file of comma-separated values")
    (place / "long.txt").unlink()


@pytest.mark.parametrize(
    "module, words",
    [("train", ["--attention", "sdpa"]), ("compare", ["--runs", "sdpa"]), ("capture", [])],
)
def test_interrupted(module, words, tmp_path):
    """One line and the shell's exit code; what is written by then is whole."""
    pytest.importorskip("torch", reason="needs PyTorch")
    (tmp_path / "a.txt").write_bytes(b"abcdefgh" * 500)
    size = "--tokens 32 --batch 1 --dim 64 --layers 1 --hidden 64 --eval-every 1 --steps 2000"
    command = [sys.executable, "-m", f"sagebwd.experiments.{module}", "--text", "a.txt",
               *words, *size.split(), "--device", "cpu", "--out", "results"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE,
                          text=True) as process:  # fmt: skip
        before = []
        while "/2000 train" not in (line := process.stderr.readline()):
            assert line, "it ended by itself"
            before.append(line)
        process.send_signal(signal.SIGINT)
        lines = process.stderr.read().splitlines()
    assert ("training 2000 steps first" in "".join(before)) == (module == "capture")
    assert process.returncode == 130
    assert lines[-1] == f"{module}: interrupted"
    assert all("/2000 train" in line for line in lines[:-1])
    records, curves = (list((tmp_path / "results").glob(f"*.{kind}")) for kind in ("json", "csv"))
    assert sorted(os.listdir(tmp_path / "results")) == sorted(p.name for p in records + curves)
    (record,), (curve,) = records, curves
    assert json.loads(record.read_text())["status"].startswith("stopped: KeyboardInterrupt")
    rows = curve.read_text().splitlines()
    assert len(rows) > 1 and {row.count(",") for row in rows} == {rows[0].count(",")}


# ---- in this process, with PyTorch and without a GPU ---------------------------------------------


@pytest.fixture
def command(place, monkeypatch, capsys):
    """Runs a command on the text, without a GPU: its exit code and the last line of its errors."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(place)

    def called(module, *words):
        from importlib import import_module

        try:
            code = import_module(f"sagebwd.experiments.{module}").main(["--text", "a.txt", *words])
        except SystemExit as left:
            code = left.code
        errors = capsys.readouterr().err.strip().splitlines()
        assert code == 2 or len(errors) == 1
        return code, errors[-1]

    return called


@pytest.mark.parametrize(
    "module, words, parts",
    [("train", [], ["train: ", "'sagebwd'", "CUDA GPU", "sdpa and emulated"]),
     ("compare", [], ["compare: ", "'sagebwd'", "CUDA GPU"]),
     ("capture", ["--attention", "sagebwd"], ["capture: ", "CUDA GPU"]),
     ("train", ["--device", "cuda", "--attention", "sdpa"], ["--device cuda", "0 CUDA GPUs"])],
)  # fmt: skip
def test_without_a_gpu(command, module, words, parts):
    code, line = command(module, "--tokens", "32", *words)
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
     (["--out", "a.txt"], "a.txt is a file"),
     (["--out", "a.txt/results"], "a.txt is a file"),
     (["--save", "absent/model.pt"], "--save absent/model.pt"),
     (["--save", "."], "--save ."),
     (["--save", "/dev/null"], "--save /dev/null"),
     (["--save", "/proc/model.pt"], "nothing can be written into /proc"),
     (["--out", "/proc/x"], "nothing can be written into /proc"),
     (["--text", "/dev/null"], "no text in /dev/null"),
     (["--text", ""], "Is a directory"),
     (["--tokens", "1024"], "a sequence of 1024 tokens takes 1025 bytes, and the part of the text "
      "that is held out has 400: give more text"),
     (["--dim", "64", "--head-dim", "33"], "head_dim 33: it must be even"),
     (["--text", "absent"], "absent: No such file or directory"),
     (["--text", "absent"], "absent"), (["--held-out-fraction", "1.5"], "must be less than 1"),
     (["--attention", "emulated:granularity=tensor"], "tensor")],
)  # fmt: skip
def test_wrong_use_of_train(command, words, part):
    code, line = command("train", "--attention", "sdpa", "--tokens", "32", *words)
    assert code == 2 and part in line


@pytest.mark.parametrize(
    "words, part",
    [(["--head-dim", "16"], "head dimension 16"), (["--sequences", "0"], "sequences 0"),
     (["--save", "absent/tensors.pt"], "--save absent"),
     (["--layer", "8"], "no layer 8")],
)  # fmt: skip
def test_wrong_use_of_capture(command, words, part):
    code, line = command("capture", "--tokens", "32", *words)
    assert code == 2 and part in line


@pytest.mark.parametrize(
    "words, part",
    [([], "a.txt is no checkpoint"), (["--dim", "64"], "--dim: the checkpoint decides that"),
     (["--tokens", "1024"], "--tokens: the"), (["--no-qk-norm"], "--qk-norm: the"),
     (["--lr", "1", "--steps", "5"], "--lr, --steps: the checkpoint decides that")],
)  # fmt: skip
def test_options_that_a_checkpoint_decides(command, words, part):
    """Whether or not they are the defaults."""
    code, line = command("capture", "--checkpoint", "a.txt", *words)
    assert code == 2 and part in line


@pytest.mark.usefixtures("tiny_tensors")  # which puts PyTorch back to what it was
def test_a_checkpoint_decides_how_long_sequences_are(command, tmp_path_factory):
    """Of its 32 tokens the text has enough, and not of the 1024 that are the default."""
    pytest.importorskip("torch", reason="needs PyTorch")
    from sagebwd.experiments import capture, train

    folder = tmp_path_factory.mktemp("trained")
    size = "--tokens 32 --batch 1 --dim 64 --layers 1 --hidden 64 --steps 1 --device cpu"
    given = ["--text", "a.txt", "--out", str(folder)]
    save = ["--save", str(folder / "a.pt"), "--attention", "emulated:precision=dv16"]
    assert train.main([*given, *size.split(), *save]) == 0
    assert capture.main([*given, "--checkpoint", str(folder / "a.pt"), "--device", "cpu"]) == 0
    record = json.loads((folder / "capture.json").read_text())
    assert record["config"]["tokens"] == record["shape"]["tokens"] == 32
    assert record["attention"] == "emulated:precision=dv16"


def test_a_checkpoint_of_another_kind(command, tmp_path_factory):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from dataclasses import asdict

    from sagebwd.experiments.config import TrainConfig

    config = asdict(TrainConfig())
    path = tmp_path_factory.mktemp("other") / "a.pt"
    for saved in ([1], {}, {"config": config}, {"config": config, "attention": 5},
                  {"config": config, "attention": "sdpa"},
                  {"config": config, "attention": "sdpa", "model": {}},
                  {"config": config, "attention": "sdpa", "model": [5]}):  # fmt: skip
        torch.save(saved, path)
        code, line = command("capture", "--checkpoint", str(path))
        assert code == 2 and "is no checkpoint of these commands" in line, saved


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    from sagebwd.experiments.environment import replacing

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


@pytest.mark.parametrize(
    "words, part",
    [(["--runs", "sdpa:steps=2000"], "1 to 1000"), (["--checkpoints", "a.txt"], "a.txt is a file")],
)
def test_wrong_use_of_compare(command, words, part):
    code, line = command("compare", "--tokens", "32", *words)
    assert code == 2 and part in line
