"""What the commands of this package share: PyTorch or its absence, and failures as one line."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import sagebwd

#: PyTorch, or None: the modules import without it, so that `--help` always works.
try:
    import torch
except (ImportError, OSError) as error:  # not installed, or not in working order
    torch = None
    _why_no_torch = str(error)


class Failure(RuntimeError):
    """What is missing or went wrong, and what to do about it: its message says all."""


#: Failures whose message is enough. A traceback is for what nobody foresaw.
_EXPLAINED = (Failure, sagebwd.CompileError, sagebwd.DriverError, sagebwd.LibraryError,
              sagebwd.OfflineError, sagebwd.PackError, sagebwd.SpecError,
              sagebwd.TuneError)  # fmt: skip


def parser(module: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"python -m sagebwd.experiments.{module}",
                                   description=description.splitlines()[0])  # fmt: skip


def run(
    parser: argparse.ArgumentParser, arguments: list[str] | None,
    work: Callable[[argparse.Namespace], int], needs_torch: bool = True,
) -> int:
    """The exit code: that of `work(options)`, 1 where it fails, 130 where it is interrupted; wrong
    use leaves with 2."""
    options = parser.parse_args(arguments)
    name = parser.prog.rpartition(".")[2]
    try:
        if needs_torch and torch is None:
            raise Failure(f"this needs PyTorch ({_why_no_torch}): pip install torch")
        return work(options)
    except _EXPLAINED as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        after_progress = "\n" if sys.stderr.isatty() else ""
        print(f"{after_progress}{name}: interrupted", file=sys.stderr)
        return 130


@contextlib.contextmanager
def wrong_use(parser: argparse.ArgumentParser):
    """What options mean cannot be had: the error of the parser, exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        parser.error(str(error))


def check_outputs(options: argparse.Namespace) -> None:
    """ValueError where files could not be written: better known before than after a training."""
    given = vars(options)
    for folder in filter(None, (given["out"], given.get("checkpoints"))):
        if (there := next(p for p in (folder, *folder.absolute().parents) if p.exists())).is_file():
            raise ValueError(f"{there} is a file: name a folder for what is written")
        _check_writable(there)
    if save := given.get("save"):
        of_out = save.parent.absolute() == options.out.absolute()  # which is made where it is not
        if (save.exists() and not save.is_file()) or not (of_out or save.parent.is_dir()):
            raise ValueError(f"--save {save}: name a file in a folder that is there, or in --out")
        if not of_out:
            _check_writable(save.parent)
    if (name := given.get("name")) and Path(name).name != name:
        raise ValueError(f"--name {name}: it is of files in --out, so no path")


def _check_writable(folder: Path) -> None:
    """ValueError where no file can be made; permissions do not say (root may all, but in /proc)."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"nothing can be written into {folder}: {error.strerror}") from None


def check_device(name: str) -> torch.device:
    """The device of a `--device`; ValueError for no device, Failure where it is not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: pass cuda, cuda:N or cpu") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Failure(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA GPUs "
                      "(python -m sagebwd.doctor says why); --device cpu runs sdpa and emulated")
    return device
