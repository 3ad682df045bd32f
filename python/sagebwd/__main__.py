"""`python -m sagebwd COMMAND`: doctor, and what the program `sagebwd` starts."""

import sys

_COMMANDS = """The command line is a program of its own, which pip installs beside python:
  sagebwd --help

In this Python there are
  python -m sagebwd bench --help                   attentions beside each other, on this GPU
  python -m sagebwd tune --help                    tiles for some lengths, beside PyTorch
  python -m sagebwd doctor                         what this machine has and lacks
In a checkout of the sources, not in the package, there is also
  python -m experiments                            trainings that compare attentions
"""


def main(arguments):
    """The exit code of a command line."""
    if arguments[:1] == ["bench"]:
        from sagebwd.benchmark.command import main as bench

        return bench(arguments[1:])
    if arguments[:1] == ["tune"]:
        from sagebwd.benchmark.tune_command import main as tune

        return tune(arguments[1:])
    if arguments[:1] == ["doctor"]:
        from sagebwd._doctor import main as doctor

        return doctor(arguments[1:], prog="python -m sagebwd doctor")
    if arguments == ["--version"]:
        import sagebwd

        print(f"sagebwd {sagebwd.__version__}")
        return 0
    asked = arguments in (["--help"], ["-h"])
    if arguments and not asked:
        print(f"sagebwd: {arguments[0]!r} is no command of this module\n", file=sys.stderr)
    print(_COMMANDS, end="", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
