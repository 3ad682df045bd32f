"""`sagebwd bench`: other attentions and this one beside each other, on this GPU.

The program `sagebwd` starts this module in Python; `python -m sagebwd bench` is the same command.
tools/bench.cpp lists the same options, for help and completion where no Python is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import sys
from typing import NoReturn

from sagebwd.benchmark import cases, common
from sagebwd.core import options

#: Options of an operation that are spelled below instead, or that a benchmark does not have.
_NOT_HERE = ("precision", "deterministic", "packed", "sparse_q", "sparse_kv", "linear",
             "intervals", "mask", "score", "max_logits")  # fmt: skip
_KINDS = {"both": None, "yes": True, "no": False}
_SIZES = {"batch": "sequences", "heads": "query heads", "heads_kv": "key/value heads; 0: as many",
          "seq_len": "queries", "seq_kv": "keys; 0: as many as queries"}  # fmt: skip


#: These texts explain the options of an operation as the other commands do: Python's docstrings
#: have Python's words.
_HELP = {
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
_WORDS = {"causal": {"true": "top-left", "True": "top-left", "false": "none", "False": "none"}}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as the other commands do, without a list of all options."""

    def error(self, message: str) -> NoReturn:
        for pattern, words in _SAID:
            message = re.sub(f"^{pattern}$", words, message)
        self.exit(2, f"sagebwd: {message}\nSee 'sagebwd bench --help'.\n")


def in_options(message: str) -> str:
    """A message about keywords of `sagebwd.bench`, in words of the command line."""
    names = sorted(_keywords(parser().parse_args([])), key=len, reverse=True)
    message = re.sub(rf"(?<![\w-])({'|'.join(names)}) ?= ?(?=[^\s=])",
                     lambda found: _flag(found[1]) + " ", message)  # fmt: skip
    message = re.sub(r"^(models) and (\w+):", lambda found: f"--models and {_flag(found[2])}:",
                     message)  # fmt: skip
    of_two_words = "|".join(name for name in names if "_" in name)
    return re.sub(rf"(?<![\w'-])({of_two_words})(?![\w'])", lambda found: _flag(found[1]), message)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    said = __doc__ and __doc__.splitlines()[0]  # python -OO leaves none
    made = _Parser(prog="sagebwd bench", description=said, allow_abbrev=False)
    made.add_argument("--json", action="store_true", help="print JSON to standard output")
    made.add_argument("--models", metavar="NAME,..",
                      help="shapes of well-known models (see --list-models), or all")
    made.add_argument("--list-models", action="store_true", help="list the models and their shapes")
    for name, text in _SIZES.items():
        usual = cases.SIZES[name] or 0
        made.add_argument(_flag(name), type=int, metavar="N", help=f"{text} (default {usual})")
    for field in dataclasses.fields(options.Operation):
        if field.name not in _NOT_HERE:
            _add_option(made, field)
    made.add_argument("--precision", metavar="NAME,..", help="ours to measure (default all)")
    made.add_argument("--deterministic", choices=_KINDS, default="both",
                      help="only those that give the same bits in every run, or only the others")
    made.add_argument("--backends", metavar="NAME,..",
                      help="cudnn, fa2, efficient, flex, fa3, fa4, sagebwd (default all; flex only "
                      "with --intervals)")
    made.add_argument("--intervals", metavar="NAME",
                      help="a mask told by intervals, and then a causal one: documents, prefix, "
                      "window")
    made.add_argument("--sinks", action="store_true", help="add a logit per head to the softmax")
    made.add_argument("--layout", default="bhsd", metavar="KIND",
                      help="of tensors in memory: bhsd or bshd (default bhsd)")
    made.add_argument("--rounds", type=int, default=15, metavar="N",
                      help="timings of each, at most (default 15)")
    made.add_argument("--seed", type=int, default=0, metavar="N",
                      help="of the random inputs (default 0)")
    made.add_argument("--gpu", type=int, metavar="N", help="the GPU, numbered from 0 (default 0)")
    made.add_argument("--plot", metavar="FILE", help="write a picture of the times, by matplotlib")
    return made


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_option(made: argparse.ArgumentParser, field: dataclasses.Field) -> None:
    """The option of a field of an operation, spelled as in the other commands."""
    help = _HELP[field.name]
    if field.type is bool:
        flag = f"--no-{_flag(field.name)[2:]}" if field.default else _flag(field.name)
        made.add_argument(flag, dest=field.name, action="store_const", const=not field.default,
                          default=field.default, help=help)  # fmt: skip
    elif field.type is int:
        none = field.metadata["least"] - 1  # how the command line spells None
        usual = none if field.default is None else field.default
        made.add_argument(_flag(field.name), metavar="N", default=field.default,
                          help=f"{help} (default {usual})",
                          type=lambda text: _number_or_none(text, none, field.default))  # fmt: skip
    else:
        default = field.default or "none"
        made.add_argument(_flag(field.name), metavar="KIND", default=default,
                          help=f"{help} (default {default})")  # fmt: skip


def _number_or_none(text: str, none: int, default: int | None) -> int | None:
    number = int(text)
    return None if default is None and number == none else number


def _keywords(given: argparse.Namespace) -> dict:
    """Those of `sagebwd.bench` for a command line."""
    fields = [field.name for field in dataclasses.fields(options.Operation)]
    found = {name: getattr(given, name) for name in fields if name not in _NOT_HERE}
    same = "intervals", "sinks", "layout", "rounds", "seed", "plot"
    found |= {name: getattr(given, name) for name in same}
    for name in _SIZES:
        size = getattr(given, name)
        found[name] = None if size == 0 and cases.SIZES[name] is None else size
    for name, others in _WORDS.items():
        found[name] = others.get(found[name], found[name])
    for name in ("models", "precision", "backends"):
        words = getattr(given, name)
        found[name] = None if words is None else words.split(",")
    if found["models"] == ["all"]:
        found["models"] = list(cases.MODELS)
    return found | {"deterministic": _KINDS[given.deterministic], "device": given.gpu}


def list_models(as_json: bool) -> str:
    """The models and their shapes."""
    if as_json:
        return json.dumps({name: dataclasses.asdict(case) for name, case in cases.MODELS.items()},
                          indent=2)  # fmt: skip
    return "\n".join(str(case) for case in cases.MODELS.values())


def _print(text: str) -> None:
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


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 done, 1 failed, 2 wrong use."""
    arguments = sys.argv[1:] if arguments is None else arguments
    made = parser()

    def work(given) -> int:
        from sagebwd.benchmark.api import bench

        shown = Shown()
        try:
            result = bench(**_keywords(given), progress=shown)
        except (ValueError, OSError) as error:
            of_keywords = isinstance(error, options.SpecError)
            said = common.of_file(error) if isinstance(error, OSError) else str(error)
            made.error(in_options(said) if of_keywords else said)
        except ImportError as error:
            raise common.Failure(str(error)) from error
        finally:
            shown.close()
        result.machine["command"] = shlex.join(["sagebwd", "bench", *arguments])
        _print(json.dumps(result.data, indent=2) if given.json else result.text)
        return 0

    given = made.parse_args(arguments)
    if given.list_models:
        _print(list_models(given.json))
        return 0
    return common.run(made, arguments, work)
