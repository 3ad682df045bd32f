"""The commands of experiments share this code beside `sagebwd.benchmark.common`."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import platform
import signal
import sys
from pathlib import Path

from sagebwd.benchmark.common import (  # noqa: F401
    SAME_SECONDS,
    Failure,
    Interrupted,
    Parser,
    Signals,
    check_writable,
    interrupted_by,
    of_file,
    run,
    torch,
    wrong_use,
)


@contextlib.contextmanager
def signals_blocked():
    """A process that is started in this context gets none of these signals, which a terminal and
    Slurm send to all processes, before it calls `ignore_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, Signals.numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """A process calls this if it ends when the one that started it says so, or has gone."""
    for number in Signals.numbers:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, Signals.numbers)


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A description's lines that are indented are its examples."""
    lines = (description or "").splitlines()  # python -OO leaves none
    examples = [line for line in lines if line.startswith("    ")]
    return Parser(prog=f"python -m experiments.{module}",
                  description=lines[0] if lines else None,
                  epilog="\n".join(("examples:", *examples)) if examples else None,
                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip


def progress(title: str, done: int, total: int) -> None:
    """One line of a terminal, which is written again; nothing elsewhere."""
    if sys.stderr.isatty():
        bar = "#" * (20 * done // max(1, total))
        end = "\n" if done >= total else ""
        print(f"\r{title} [{bar:<20}] {100 * done // max(1, total)} %", end=end,
              file=sys.stderr, flush=True)  # fmt: skip


def check_outputs(options: argparse.Namespace) -> None:
    """ValueError if files could not be written, which is better known before a training."""
    given = vars(options)
    for folder in filter(None, (given["out"], given.get("checkpoints"))):
        check_folder(folder)
    if save := given.get("save"):
        of_out = save.parent.absolute() == options.out.absolute()  # which is made if it is missing
        if (save.exists() and not save.is_file()) or not (of_out or save.parent.is_dir()):
            raise ValueError(f"--save {save}: name a file in a folder that is there, or in --out")
        if not of_out:
            check_writable(save.parent)
    if (name := given.get("name")) and Path(name).name != name:
        raise ValueError(f"--name {name}: pass a name without folders; --out is the folder")


def check_folder(folder: Path) -> None:
    """ValueError if no file can be written into this folder, which is made if it is missing."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is a file: name a folder for what is written")
    check_writable(there)


@contextlib.contextmanager
def alone(folder: Path, stem: str):
    """A context in which no other process writes these files of the folder, which is made if it is
    missing and goes again if it stays empty; Failure if one does. The system ends the lock with the
    process, however that ends."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{stem}.lock"
    with _locked(path, f"writes {folder / stem}.json now: wait for it, or name another --out"):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
                if made:
                    folder.rmdir()


def _locked(path: Path, said: str):
    """The file, which is locked as long as it is open."""
    while True:
        file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().decode() or "another process"
            file.close()
            raise Failure(f"{holder} {said}") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # without locks
                raise OSError(error.errno, error.strerror, str(path)) from None
        with contextlib.suppress(OSError):  # a full disk
            file.truncate(0)
            file.write(f"process {os.getpid()} of {platform.node()}".encode())
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()  # the process before has removed it since it was opened


def check_device(name: str, advice: str = "--device cpu runs sdpa and emulated") -> torch.device:
    """The device that `--device` names; ValueError for other words and kinds, Failure if it does
    not exist."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise ValueError(f"--device {name}: pass cuda, cuda:N or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Failure(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA GPUs "
                      f"(python -m sagebwd doctor says why); {advice}")
    return device
