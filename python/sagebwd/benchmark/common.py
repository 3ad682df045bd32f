"""Commands share these parts: importing PyTorch, signals, and failures in one line."""

from __future__ import annotations

import argparse
import math
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from sagebwd import _core

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
    """A context in which the first of them is raised, and any SIGINT that is not the same. At its
    end it waits for the rest of the second in which the same SIGINT may come again."""

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


def interrupted_by(number: int) -> str:
    return "interrupted" + ("" if number == signal.SIGINT else f" by {signal.Signals(number).name}")


#: Failures whose message is enough. Only others get a traceback.
_EXPLAINED = (Failure, _core.CompileError, _core.DriverError, _core.LibraryError,
              _core.OfflineError, _core.PackError, _core.SpecError, _core.TuneError)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without a list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


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


def of_file(error: OSError) -> str:
    """Which file, and what is wrong with it."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


@contextmanager
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


def check_writable(folder: Path) -> None:
    """ValueError if no file can be made. Permissions do not tell: root may write, except in
    /proc."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"nothing can be written into {folder}: {error.strerror}") from None
