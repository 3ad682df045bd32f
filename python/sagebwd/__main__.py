"""`python -m sagebwd`: says which commands there are."""

import sys

_COMMANDS = """The command line is a program of its own, which pip installs beside python:
  sagebwd --help

In this Python there are
  python -m sagebwd.doctor                         what this machine has and lacks
  python -m sagebwd.experiments.COMMAND --help     train, compare, capture and plot
"""

if __name__ == "__main__":
    asked = sys.argv[1:] in (["--help"], ["-h"])
    print(_COMMANDS, end="", file=sys.stdout if asked else sys.stderr)
    sys.exit(0 if asked else 2)
