"""The commands of experiments end at signals, and say how to go on."""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
import warm
from corpus_cases import corpus_of
from signals import hangups_as_in_a_terminal  # noqa: F401

from experiments import command

ENDS = signal.SIGTERM, signal.SIGHUP
PARSER = argparse.ArgumentParser(prog="python -m experiments.some")


@pytest.mark.parametrize(("sent", "code", "by"), [
    (signal.SIGINT, 130, ""), (signal.SIGTERM, 143, " by SIGTERM"),
    (signal.SIGHUP, 129, " by SIGHUP")
])  # fmt: skip
def test_interrupted(sent, code, by, tmp_path):
    """One line and the shell's exit code; what is written by then is whole, and goes on."""
    pytest.importorskip("torch", reason="needs PyTorch")
    corpus_of(tmp_path)
    size = ("--tokens 32 --batch 1 --dim 64 --head-dim 64 --layers 1 --hidden 64 --eval-every 1 "
            "--val-sequences 2 --steps 112")  # fmt: skip
    command = [sys.executable, "-m", "experiments.train", "--corpus", "c.bin",
               "--attention", "sdpa", *size.split(), "--device", "cpu", "--out", "results",
               "--save", "a.pt"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with warm.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE,
                    text=True, loaded="torch._dynamo") as process:  # fmt: skip
        while "/112 train" not in (line := process.stderr.readline()):
            assert line, "it ended by itself"
        process.send_signal(sent)
        lines = process.stderr.read().splitlines()
    assert process.returncode == code
    *shown, said, told = lines
    assert all("/112 train" in line for line in shown)
    step = len((tmp_path / "results/train-sdpa.jsonl").read_text().splitlines())
    assert said == (f"train: interrupted{by} at step {step} of 112; a.pt is the checkpoint of step "
                    f"{step}. To go on:")  # fmt: skip
    words = shlex.split(told)
    assert words == ["python", *command[1:], "--resume", "a.pt"]
    record, rows = (tmp_path / f"results/train-sdpa.{end}" for end in ("json", "jsonl"))
    assert sorted(os.listdir(tmp_path / "results")) == [record.name, rows.name]
    assert json.loads(record.read_text())["status"] == f"stopped: Interrupted: {sent.name}"
    steps = [json.loads(row)["step"] for row in rows.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) < 112
    if sent != signal.SIGINT:  # what goes on does not know of the signal
        return
    done = warm.run(words[1:], cwd=tmp_path, env=environment, loaded="torch._dynamo")
    assert done.returncode == 0, done.stderr
    assert f" {len(steps) + 1}/112 train" in done.stderr.splitlines()[0]
    assert len(rows.read_text().splitlines()) == 112


def test_an_interrupt_says_how_to_go_on(capsys):
    assert interrupted(capsys) == "the same command begins from the start"
    assert interrupted(capsys, again="it goes on") == "it goes on"


def interrupted(capsys, **more):
    def work(options):
        raise KeyboardInterrupt

    assert command.run(PARSER, [], work, needs_torch=False, **more) == 130
    return capsys.readouterr().err.strip().removeprefix("some: interrupted; ")


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_interrupt_every_command(first, capsys):
    def work(options):
        try:
            signal.raise_signal(first)
        finally:
            for number in ENDS:  # as Slurm, torchrun and a terminal that closes send more
                signal.raise_signal(number)

    before = {number: signal.signal(number, print) for number in ENDS}
    try:
        assert command.run(PARSER, [], work, needs_torch=False) == 128 + first
        for number in ENDS:
            signal.raise_signal(number)
    finally:
        for number in ENDS:
            signal.signal(number, before[number])
    said = capsys.readouterr()
    assert said.err == (f"some: interrupted by {first.name}; the same command begins from the "
                        "start\n")  # fmt: skip
    assert not said.out


def test_nohup_holds(capsys):
    def work(options):
        with command.Signals() as signals:
            signal.raise_signal(signal.SIGHUP)
        signals.check()
        signal.raise_signal(signal.SIGHUP)
        return 7

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert command.run(PARSER, [], work, needs_torch=False) == 7
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.anywhere
def test_of_two_interrupts_in_a_second_one_counts(capsys):
    def work(options):
        with command.Signals() as signals:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        try:
            signals.check()
        finally:
            signal.raise_signal(signal.SIGINT)
            done.append("what ends it")

    def impatient(options):
        with command.Signals() as signals:
            signal.raise_signal(signal.SIGINT)
            signals.interrupted_at -= command.SAME_SECONDS
            signal.raise_signal(signal.SIGINT)
            done.append("never")

    done = []
    for body, after in ((work, ["what ends it"]), (impatient, [])):
        done.clear()
        assert command.run(PARSER, [], body, needs_torch=False) == 130 and done == after
        assert capsys.readouterr().err.startswith("some: interrupted; the same command")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
