"""`sagebwd bench`: other attentions and this one beside each other, on this GPU.

The program `sagebwd` starts this module in Python; `python -m sagebwd bench` is the same command.
tools/bench.cpp lists the same options, for help and completion where no Python is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys

from sagebwd.benchmark import cases, command_line, common
from sagebwd.benchmark.command_line import flag
from sagebwd.core import options

#: Options of an operation that are spelled below instead, or that a benchmark does not have.
_NOT_HERE = ("precision", "deterministic", "packed", "sparse_q", "sparse_kv", "linear",
             "intervals", "mask", "score", "max_logits")  # fmt: skip
_KINDS = {"both": None, "yes": True, "no": False}
_SIZES = {"batch": "sequences", "heads": "query heads", "heads_kv": "key/value heads; 0: as many",
          "seq_len": "queries", "seq_kv": "keys; 0: as many as queries"}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    said = __doc__ and __doc__.splitlines()[0]  # python -OO leaves none
    made = command_line.Parser(prog="sagebwd bench", description=said, allow_abbrev=False)
    made.add_argument("--json", action="store_true", help="print JSON to standard output")
    made.add_argument("--models", metavar="NAME,..",
                      help="shapes of well-known models (see --list-models), or all")
    made.add_argument("--list-models", action="store_true", help="list the models and their shapes")
    for name, text in _SIZES.items():
        usual = cases.SIZES[name] or 0
        made.add_argument(flag(name), type=int, metavar="N", help=f"{text} (default {usual})")
    for field in dataclasses.fields(options.Operation):
        if field.name not in _NOT_HERE:
            command_line.add_option(made, field)
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


def _keywords(given: argparse.Namespace) -> dict:
    """Those of `sagebwd.bench` for a command line."""
    fields = [field.name for field in dataclasses.fields(options.Operation)]
    found = {name: getattr(given, name) for name in fields if name not in _NOT_HERE}
    same = "intervals", "sinks", "layout", "rounds", "seed", "plot"
    found |= {name: getattr(given, name) for name in same}
    for name in _SIZES:
        size = getattr(given, name)
        found[name] = None if size == 0 and cases.SIZES[name] is None else size
    for name, others in command_line.WORDS.items():
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


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 done, 1 failed, 2 wrong use."""
    arguments = sys.argv[1:] if arguments is None else arguments
    made = parser()

    def work(given) -> int:
        from sagebwd.benchmark.api import bench

        keywords = _keywords(given)
        result = command_line.run(made, bench, keywords)
        result.machine["command"] = shlex.join(["sagebwd", "bench", *arguments])
        command_line.print_text(json.dumps(result.data, indent=2) if given.json else result.text)
        return 0

    given = made.parse_args(arguments)
    if given.list_models:
        command_line.print_text(list_models(given.json))
        return 0
    return common.run(made, arguments, work)
