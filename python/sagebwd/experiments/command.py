"""The common part of the commands: importing PyTorch, and reporting failures in one line."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import math
import os
import platform
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import sagebwd

#: PyTorch, or None: the modules import without it, so that `--help` always works.
try:
    import torch
except (ImportError, OSError) as error:  # not installed, or broken
    torch = None
    _why_no_torch = str(error)


class Failure(RuntimeError):
    """A failure whose message says what is missing or wrong, and what to do."""


class Interrupted(KeyboardInterrupt):
    """An interrupt by a signal, and what to say of it: nothing if that is empty, and None for what
    the command says of every interrupt."""

    def __init__(self, number: int, said: str | None = None) -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.said = number, said


#: In which a SIGINT after another is the same one: timeout sends two, and of a terminal's Ctrl-C a
#: process of torchrun gets one from each.
SAME_SECONDS = 1.0


class Signals:
    """A context in which SIGINT, SIGTERM and SIGHUP are only noted. A later SIGINT is raised; after
    one of the others both do nothing, after the context, too, as Slurm, torchrun and a terminal
    that closes send them more than once."""

    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    here = 0  #: the first that came to this process, 0 for none
    interrupted_at = -math.inf  #: when the last SIGINT came

    def __enter__(self):
        main = threading.current_thread() is threading.main_thread()  # no other may ask for them
        self.before = {n: signal.signal(n, self._handle)
                       for n in self.numbers if main and self._takes(n, signal.getsignal(n))}
        return self

    def _takes(self, number, handler) -> bool:
        return number != signal.SIGHUP or handler is not signal.SIG_IGN  # as nohup ignores it

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            if isinstance(around := getattr(handler, "__self__", None), Signals):
                around.interrupted_at = self.interrupted_at
            if signal.getsignal(number) == self._handle:
                ended = signal.SIGINT not in (number, self.here or signal.SIGINT)
                signal.signal(number, signal.SIG_IGN if ended else handler)

    def _handle(self, number, frame) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            if now - self.interrupted_at < SAME_SECONDS:
                return
            self.interrupted_at = now
        self._note(number)

    def _note(self, number) -> None:
        if self.here and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.here = self.here or number

    def check(self) -> None:
        if self.here:
            raise Interrupted(self.here)


class _Raised(Signals):
    """A context in which the first of them is raised, and any SIGINT that is not the same. What
    follows one has the rest of its second."""

    def _takes(self, number, handler) -> bool:
        if number == signal.SIGINT:  # a shell ignores it for what runs in the background
            return handler is signal.default_int_handler
        return super()._takes(number, handler)

    def __exit__(self, *_) -> None:
        self._note = lambda number: None  # the command has ended
        time.sleep(max(0.0, self.interrupted_at + SAME_SECONDS - time.monotonic()))
        super().__exit__()

    def _note(self, number) -> None:
        first, self.here = not self.here, self.here or number
        if first or number == signal.SIGINT:
            raise Interrupted(number)


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
    """Of a process that ends when the one that started it says so, or has gone."""
    for number in Signals.numbers:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, Signals.numbers)


def interrupted_by(number: int) -> str:
    return "interrupted" + ("" if number == signal.SIGINT else f" by {signal.Signals(number).name}")


#: Failures whose message is enough. Only others get a traceback.
_EXPLAINED = (Failure, sagebwd.CompileError, sagebwd.DriverError, sagebwd.LibraryError,
              sagebwd.OfflineError, sagebwd.PackError, sagebwd.SpecError,
              sagebwd.TuneError)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without a list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A description's lines that are indented are its examples."""
    lines = (description or "").splitlines()  # python -OO leaves none
    examples = [line for line in lines if line.startswith("    ")]
    return Parser(prog=f"python -m sagebwd.experiments.{module}",
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


def run(
    parser: argparse.ArgumentParser, arguments: list[str] | None,
    work: Callable[[argparse.Namespace], int], needs_torch: bool = True,
    again: str = "the same command begins from the start",
) -> int:
    """The exit code: that of `work(options)`, 1 if it fails, 128 and the number of a signal that
    interrupts it. Wrong use exits with 2. `again`: what the same command does after an
    interrupt."""
    options = parser.parse_args(arguments)
    name = parser.prog.rpartition(".")[2]
    with _Raised() as signals:
        try:
            if needs_torch and torch is None:
                raise Failure(f"this needs PyTorch ({_why_no_torch}): pip install torch, for the "
                              f"Python {sys.executable}")  # fmt: skip
            done = work(options)
            sys.stdout.flush()
            return done
        except _EXPLAINED as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        except OSError as error:  # such as a disk that is full
            if isinstance(error, BrokenPipeError) and _reader_has_left():
                return 128 + signal.SIGPIPE
            print(f"{name}: {of_file(error)}", file=sys.stderr)
            return 1
        except KeyboardInterrupt as stopped:
            signals.here = number = getattr(stopped, "number", signal.SIGINT)
            if (said := getattr(stopped, "said", None)) is None:
                said = f"{interrupted_by(number)}; {again}"
            if said:
                after_progress = "\n" if sys.stderr.isatty() else ""
                print(f"{after_progress}{name}: {said}", file=sys.stderr)
            return 128 + number


def _reader_has_left() -> bool:
    """Whether nothing can be printed, such as into `head`, and then drops what was."""
    reader = select.poll()
    reader.register(sys.stdout, select.POLLOUT)
    if not any(event & select.POLLERR for _, event in reader.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


@contextlib.contextmanager
def wrong_use(parser: argparse.ArgumentParser):
    """Turns errors into the parser's, with exit code 2: the options ask for something
    impossible."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        parser.error(of_file(error))
    except ValueError as error:
        parser.error(str(error))


def of_file(error: OSError) -> str:
    """Which file, and what is wrong with it."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


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


def check_writable(folder: Path) -> None:
    """ValueError if no file can be made. Permissions do not tell: root may write, except in
    /proc."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"nothing can be written into {folder}: {error.strerror}") from None


def check_device(name: str) -> torch.device:
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
                      "(python -m sagebwd doctor says why); --device cpu runs sdpa and emulated")
    return device
