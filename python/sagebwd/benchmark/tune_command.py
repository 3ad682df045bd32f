"""`sagebwd tune --lengths`: tiles for some lengths, and from which on PyTorch is slower.

The program `sagebwd` starts this module in Python; `python -m sagebwd tune` is the same command.
tools/tune.cpp lists the same options.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from sagebwd.benchmark import command_line, common
from sagebwd.core import options

#: Options of an operation that a crossover distinguishes, and its type.
OF_OPERATION = ("head_dim", "dtype", "causal", "dp_sums")


def parser() -> command_line.Parser:
    """The options of the command."""
    said = __doc__ and __doc__.splitlines()[0]  # python -OO leaves none
    made = command_line.Parser(prog="sagebwd tune", description=said, allow_abbrev=False)
    made.add_argument("--lengths", metavar="N,..", required=True, action="append",
                      help="tokens of a sequence, such as 512,1024,2048,4096,8192")
    made.add_argument("--json", action="store_true", help="print JSON to standard output")
    made.add_argument("--batch", type=int, metavar="N",
                      help="sequences (default: as many as make about 32768 tokens)")
    made.add_argument("--heads", type=int, default=16, metavar="N", help="query heads (default 16)")
    made.add_argument("--heads-kv", type=int, default=0, metavar="N",
                      help="key/value heads; 0: as many (default 0)")
    for field in dataclasses.fields(options.Operation):
        if field.name in OF_OPERATION:
            command_line.add_option(made, field)
    made.add_argument("--precision", default="six-of-seven", metavar="NAME",
                      help="which of the seven products are INT8 (default six-of-seven)")
    made.add_argument("--rounds", type=int, default=15, metavar="N",
                      help="timings of each, at most (default 15)")
    made.add_argument("--force", action="store_true", help="tune again even if there is a record")
    made.add_argument("--gpu", type=int, metavar="N", help="the GPU, numbered from 0 (default 0)")
    return made


def _keywords(made: command_line.Parser, given) -> dict:
    """Those of `sagebwd.tune_lengths` for a command line."""
    found = {name: getattr(given, name)
             for name in (*OF_OPERATION, "precision", "batch", "heads", "rounds", "force")}
    for name, others in command_line.WORDS.items():
        found[name] = others.get(found[name], found[name])
    try:
        lengths = [int(word) for word in ",".join(given.lengths).split(",")]
    except ValueError:
        made.error(f"--lengths is {','.join(given.lengths)!r}; it takes numbers, such as "
                   "512,1024,2048")
    return found | {"lengths": lengths, "heads_kv": given.heads_kv or None, "device": given.gpu}


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 done, 1 failed, 2 wrong use."""
    arguments = sys.argv[1:] if arguments is None else arguments
    made = parser()

    def work(given) -> int:
        from sagebwd.benchmark.lengths import tune_lengths

        found = command_line.run(made, tune_lengths, _keywords(made, given))
        command_line.print_text(json.dumps(found.data, indent=2) if given.json else str(found))
        if not found.kept:
            raise common.Failure("the crossovers could not be kept; no later run will know them. "
                                 "'sagebwd doctor' says what is wrong with the cache")
        return 0

    return common.run(made, arguments, work)
