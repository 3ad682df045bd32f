"""`python -m sagebwd.experiments`: which commands there are, or one of them."""

import importlib
import sys

COMMANDS = {
    "train": "train a small language model with one attention",
    "compare": "train it with several attentions and compare the curves",
    "capture": "capture what attention layers are handed and trace their errors",
    "plot": "draw the curves that compare wrote",
}

if sys.argv[1:] and sys.argv[1] in COMMANDS:
    sys.exit(importlib.import_module(f"sagebwd.experiments.{sys.argv[1]}").main(sys.argv[2:]))
print("usage: python -m sagebwd.experiments.COMMAND [--help]\n\ncommands:")
for name, does in COMMANDS.items():
    print(f"  {name:8} {does}")
sys.exit(0 if sys.argv[1:] in ([], ["-h"], ["--help"]) else 2)
