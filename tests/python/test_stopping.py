"""Commands with several processes end at signals: nothing is lost, and no process stays."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch")

import warm
from corpus_cases import corpus_of
from signals import hangups_as_in_a_terminal  # noqa: F401

#: Before a program: its processes do not import PyTorch first.
FORKED = """
import forked
from experiments import runner
forked.spawn_no_more(runner)
"""
#: One arm of a minute and a second process without work; each row is told.
STUDY = """
import sys
from dataclasses import replace
from experiments import study
arm = replace(study.PLANS["toy"]()[0], name="long", steps=5000)
study.PLANS["toy"] = lambda: [arm]
shown = lambda _, workers: any(w.row for w in workers) and print("at work", file=sys.stderr)
study._show = shown
sys.exit(study.main(["toy", "--device", "cpu", "--gpus", "2", *sys.argv[1:]]))
"""
#: Signals that come twice, as from timeout, torchrun and a closed terminal, and what a command
#: makes of them. One list of signals (Signals.numbers) is for all processes and all of their life,
#: so that each is tried at one time.
INTERRUPT = [signal.SIGINT] * 2, 130, ""
TERMINATE = [signal.SIGTERM] * 2, 143, " by SIGTERM"
HANG_UP = [signal.SIGHUP, signal.SIGTERM], 129, " by SIGHUP"
SPARSE_VIDEO = """
import sys
from experiments import sparse_video
sys.exit(sparse_video.main(sys.argv[1:]))
"""
SPARSE = ["-c", FORKED + SPARSE_VIDEO, *(
    "--toy --device cpu --densities 0.25 --seeds 1 --steps 100000 --gpus 2 --out".split())]


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory):
    return corpus_of(tmp_path_factory.mktemp("corpus"), lines=3000)


def ended(words, until, *sent, alone=False):
    """The exit code and what is on standard error after a line with `until`. Signals are `sent` to
    all processes of the program, or to the first `alone`; all have ended within some seconds."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1",
                                "PYTHONWARNINGS": "ignore"}  # of semaphores, after SIGKILL
    process = warm.Popen([sys.executable, *map(str, words)], loaded="torch._dynamo", text=True,
                         env=environment, stderr=subprocess.PIPE,
                         start_new_session=True)  # fmt: skip
    try:
        while until not in (line := process.stderr.readline()):
            assert line, "it ended by itself"
        for number in sent:
            (os.kill if alone else os.killpg)(process.pid, number)
            time.sleep(0.2)
        _, said = process.communicate(timeout=300)  # which waits for every process that has it
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    assert "Traceback" not in said or signal.SIGKILL in sent
    return process.returncode, [line for line in said.splitlines() if line != "at work"]


@pytest.mark.parametrize("until, sent, code, by", [
    ("starts, lr", *HANG_UP), ("at work", *INTERRUPT)])  # fmt: skip
def test_a_study_cuts_its_arms(corpus_file, tmp_path, until, sent, code, by):
    # At first they still import PyTorch, and later they work.
    before = "" if until == "starts, lr" else FORKED
    words = "-c", before + STUDY, "--corpus", corpus_file, "--out", tmp_path
    found, said = ended(words, until, *sent)
    assert found == code and said == [
        "long: cut" + said[0].removeprefix("long: cut"),
        f"study: interrupted{by}; the same command goes on from what --out has"]  # fmt: skip
    was_cut(tmp_path, at_least=1 if until == "starts, lr" else 10)


def was_cut(out, at_least):
    record = json.loads((out / "long.json").read_text())
    assert record["status"] == "cut" and at_least <= record["steps_done"] < 5000
    assert (out / "checkpoints/long.pt").exists()


def test_processes_of_a_study_that_was_killed_cut_their_arms(corpus_file, tmp_path):
    words = "-c", FORKED + STUDY, "--corpus", corpus_file, "--out", tmp_path
    assert ended(words, "at work", signal.SIGKILL, alone=True) == (-signal.SIGKILL, [])
    was_cut(tmp_path, at_least=10)


@pytest.mark.parametrize("until, sent, code, by", [
    ("dense [", *TERMINATE), ("stage 1 [", *INTERRUPT)])  # fmt: skip
def test_sparse_video_ends_all_its_processes(tmp_path, until, sent, code, by):
    found, said = ended([*SPARSE, tmp_path], until, *sent)
    assert found == code and [line for line in said if "[" not in line] == [
        f"sparse_video: interrupted{by}; the same command goes on, and repeats no run that --out "
        "has"]  # fmt: skip


def test_processes_of_sparse_video_that_was_killed_end(tmp_path):
    """What they say is not asked: Python has a traceback for one that had just been started."""
    found, _ = ended([*SPARSE, tmp_path], "stage 1 [", signal.SIGKILL, alone=True)
    assert found == -signal.SIGKILL
