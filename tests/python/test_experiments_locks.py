"""Two processes do not write the same files: the second one says who does."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from corpus_cases import corpus_of  # noqa: E402
from training_cases import TINY, TINY_CONFIG, attention  # noqa: E402

from experiments import capture, corpus, errors, lora, sparse_video, study, train, warning  # noqa: E402
from experiments.data import Corpus  # noqa: E402
from experiments.training import Trainer  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")
#: A process that takes a lock, says so, and would keep it for a minute.
HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two corpora, and base.pt, which was trained on the first; traced.pt has wider heads."""
    folder = tmp_path_factory.mktemp("place")
    corpus_of(folder)
    corpus_of(folder / "other", lines=80)
    traced = replace(TINY_CONFIG, model=replace(TINY_CONFIG.model, head_dim=32))
    for config, name in (TINY_CONFIG, "base.pt"), (traced, "traced.pt"):
        trainer = Trainer(config, attention("sdpa"), Corpus.open(folder / "c.bin"))
        trainer.run()
        trainer.save(folder / name)
    return folder


def words_of(name, place, out):
    given = {"train": ["--corpus", place / "c.bin", "--attention", "sdpa", *TINY, "--name", "a"],
             "warning": ["--corpus", place / "c.bin", *TINY[:-4], "--val-sequences", "4"],
             "study": ["toy", "--only", "sweep-*", "--corpus", place / "c.bin", "--device", "cpu"],
             "lora": [place / "base.pt", "--corpus", place / "other/c.bin", "--device", "cpu",
                      "--attention", "sdpa", "--seeds", "1", "--steps", "2", "--batch", "2",
                      "--val-sequences", "2"],
             "errors": [place / "traced.pt", "--corpus", place / "c.bin", "--device", "cpu",
                        "--sequences", "1"],
             "capture": ["--checkpoint", place / "traced.pt", "--corpus", place / "c.bin",
                         "--device", "cpu", "--sequences", "1"],
             "corpus": [place / "texts"],
             "sparse_video": ["--toy", "--device", "cpu"]}[name]  # fmt: skip
    return [*map(str, given), "--out", str(out / "a.bin" if name == "corpus" else out)]


COMMANDS = {"train": (train, "a"), "warning": (warning, "warning"), "study": (study, "study"),
            "lora": (lora, "study"), "sparse_video": (sparse_video, "sparse-video"),
            "errors": (errors, "errors"), "capture": (capture, "capture"),
            "corpus": (corpus, "a.bin")}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_files_that_another_process_writes_stay_its_own(name, place, tmp_path, capsys):
    module, stem = COMMANDS[name]
    with (tmp_path / f".{stem}.lock").open("w") as file:
        file.write("process 12 of here")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert module.main(words_of(name, place, tmp_path)) == 1
    assert capsys.readouterr().err == (
        f"{name}: process 12 of here writes {tmp_path / stem}.json now: wait for it, or name "
        "another --out\n")  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == [f".{stem}.lock"]


def test_a_corpus_that_another_process_has_just_made_stays(place, tmp_path, capsys, monkeypatch):
    words, ours = words_of("corpus", place, tmp_path), corpus.command.alone

    def late(*given):
        monkeypatch.setattr(corpus.command, "alone", ours)
        assert corpus.main([*words, "--seed", "1"]) == 0
        return ours(*given)

    monkeypatch.setattr(corpus.command, "alone", late)
    with pytest.raises(SystemExit):
        corpus.main(words)
    assert "is a corpus that was made with other options" in capsys.readouterr().err
    assert Corpus.open(tmp_path / "a.bin").header["seed"] == 1
    assert not list(tmp_path.glob(".*"))


def test_a_training_has_its_files_until_it_ends(place, tmp_path, capsys, monkeypatch):
    words, codes, written = words_of("train", place, tmp_path), [], train.Rows.__call__

    def two_at_once(self, row):
        if not codes:
            codes.extend((None, train.main(words)))
            assert f"process {os.getpid()} of " in capsys.readouterr().err
            assert train.main([*words, "--name", "b"]) == 0
        written(self, row)

    monkeypatch.setattr(train.Rows, "__call__", two_at_once)
    assert train.main(words) == 0 and codes == [None, 1]
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 3
    assert not list(tmp_path.glob(".*"))
    assert train.main(words) == 0


def test_a_process_that_was_killed_has_no_lock(place, tmp_path, capsys):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / ".a.lock")],
                               stdout=subprocess.PIPE)  # fmt: skip
    try:
        process.stdout.readline()
        assert train.main(words_of("train", place, tmp_path)) == 1
        assert "another process writes " in capsys.readouterr().err
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert train.main(words_of("train", place, tmp_path)) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("code, ends", [(errno.ENOLCK, 0), (errno.ENOTSUP, 0), (errno.EIO, 1)])
def test_file_systems_without_locks(place, tmp_path, capsys, monkeypatch, code, ends):
    def none(*given):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    assert train.main(words_of("train", place, tmp_path)) == ends
    said = f"train: {tmp_path}/.a.lock: {os.strerror(code)}\n"
    assert (capsys.readouterr().err == said) == bool(ends)


def test_a_lock_whose_file_went_while_it_was_opened(place, tmp_path, monkeypatch):
    """The process before removes it: a third one would make another, and lock that."""
    path, locked, calls = tmp_path / ".a.lock", fcntl.flock, []

    def late(file, how):
        calls.append(how)
        if len(calls) == 1:
            path.unlink()
        locked(file, how)
        if len(calls) == 2:
            assert path.exists()

    monkeypatch.setattr(fcntl, "flock", late)
    assert train.main(words_of("train", place, tmp_path)) == 0 and len(calls) == 2
