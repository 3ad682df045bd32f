"""Command lines of this package, in the words of the program `sagebwd`, which starts them."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from sagebwd.benchmark import common
from sagebwd.core.options import SpecError

#: These texts explain the options of an operation as the other commands do: Python's docstrings
#: have Python's words.
HELP = {
    "head_dim": "head dimension: a multiple of 8, 32 to 512",
    "dtype": "type of q, k, v and their gradients: bf16, fp16",
    "causal": "which keys a query sees: none, top-left, bottom-right",
    "granularity": "what shares a quantisation scale: row, block",
    "group_q": "queries per quantisation group; 0 means the granularity's default",
    "group_kv": "keys per quantisation group; 0 means the granularity's default",
    "sink_keys": "first keys computed separately in FP32, 0 or 1; -1 means 1 where 1 is supported",
    "smooth_k": "without subtracting the mean of the keys",
    "smooth_q": "with subtracting the mean of every 256 queries",
    "smooth_v": "with subtracting a mean of the values, which O gets back",
    "rotate": "without the Hadamard rotation of Q and K for S",
    "dq_sums": "format in which one kernel for all gradients sums dQ: fp32, fp16",
    "dp_sums": "format in which tensor cores sum dP: fp32, fp16",
    "gradient_kernels": "which kernels form the gradients: any, split, fused",
    "window_left": "sliding window: keys before its own that a query sees; -1 means all",
    "window_right": "sliding window: keys after its own that a query sees; -1 means all",
}
#: Each pair has what argparse says of wrong words, and how the other commands say it.
_SAID = (
    (r"argument (--\S+): invalid \S+ value: (.*)", r"\1 is \2; it takes a whole number"),
    (r"argument (--\S+): invalid choice: ('.*') \(choose from (.*)\)", r"\1 is \2; it takes \3"),
    (r"argument (--\S+): expected one argument", r"\1 needs a value"),
    (r"unrecognized arguments: (\S+).*", r"unknown option '\1'"),
)
#: The command line's words for values, as tools/spec_options.cpp takes them.
WORDS = {"causal": {"true": "top-left", "True": "top-left", "false": "none", "False": "none"}}


class Parser(argparse.ArgumentParser):
    """Says what is wrong as the other commands do, without a list of all options."""

    def error(self, message: str) -> NoReturn:
        for pattern, words in _SAID:
            message = re.sub(f"^{pattern}$", words, message)
        self.exit(2, f"sagebwd: {message}\nSee '{self.prog} --help'.\n")


def in_options(message: str, keywords) -> str:
    """A message about keywords of a function, in words of the command line."""
    names = sorted(keywords, key=len, reverse=True)
    message = re.sub(rf"(?<![\w-])({'|'.join(names)}) ?= ?(?=[^\s=])",
                     lambda found: flag(found[1]) + " ", message)  # fmt: skip
    message = re.sub(r"^(models) and (\w+):", lambda found: f"--models and {flag(found[2])}:",
                     message)  # fmt: skip
    of_two_words = "|".join(name for name in names if "_" in name)
    return re.sub(rf"(?<![\w'-])({of_two_words})(?![\w'])", lambda found: flag(found[1]), message)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_option(made: argparse.ArgumentParser, field: dataclasses.Field) -> None:
    """The option of a field of an operation, spelled as in the other commands."""
    help = HELP[field.name]
    if field.type is bool:
        spelled = f"--no-{flag(field.name)[2:]}" if field.default else flag(field.name)
        made.add_argument(spelled, dest=field.name, action="store_const", const=not field.default,
                          default=field.default, help=help)  # fmt: skip
    elif field.type is int:
        none = field.metadata["least"] - 1  # how the command line spells None
        usual = none if field.default is None else field.default
        made.add_argument(flag(field.name), metavar="N", default=field.default,
                          help=f"{help} (default {usual})",
                          type=lambda text: _number_or_none(text, none, field.default))  # fmt: skip
    else:
        default = field.default or "none"
        made.add_argument(flag(field.name), metavar="KIND", default=default,
                          help=f"{help} (default {default})")  # fmt: skip


def _number_or_none(text: str, none: int, default: int | None) -> int | None:
    number = int(text)
    return None if default is None and number == none else number


def print_text(text: str) -> None:
    """To standard output. A reader that has left, such as `head`, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Shown:
    """Progress on standard error: one line that changes on a terminal, otherwise one for each
    step."""

    def __init__(self, file=None) -> None:
        self.file = sys.stderr if file is None else file
        self.last = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        line = f"{what} ({done}/{total})"
        if self.file.isatty():
            print(f"\r{line:{self.last}}", end="", file=self.file, flush=True)
            self.last = len(line)
        else:
            print(line, file=self.file, flush=True)

    def close(self) -> None:
        """Leaves the terminal's line empty."""
        if self.last:
            print(f"\r{'':{self.last}}\r", end="", file=self.file, flush=True)


def run(made: Parser, function: Callable, keywords: dict) -> Any:
    """What a function of this package returns for these keywords, with its progress shown. Errors
    become the parser's, in words of the command line, or common.Failure."""
    shown = Shown()
    try:
        return function(**keywords, progress=shown)
    except (ValueError, OSError) as error:
        said = common.of_file(error) if isinstance(error, OSError) else str(error)
        made.error(in_options(said, keywords) if isinstance(error, SpecError) else said)
    except ImportError as error:
        raise common.Failure(str(error)) from error
    finally:
        shown.close()
