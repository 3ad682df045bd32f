"""`python -m sagebwd.experiments`: which commands there are, or one of them."""

import difflib
import importlib
import sys

COMMANDS = {
    "train": "train a small language model with one attention",
    "compare": "train it with several attentions and compare the curves",
    "capture": "capture what attention layers are handed and trace their errors",
    "plot": "draw the curves that compare wrote",
    "sparse_video": "train a video model with SLA2, its parts and its variants",
}

asked = sys.argv[1:] in ([], ["-h"], ["--help"])
if sys.argv[1:] and sys.argv[1] in COMMANDS:
    sys.exit(importlib.import_module(f"sagebwd.experiments.{sys.argv[1]}").main(sys.argv[2:]))
if not asked:
    near = difflib.get_close_matches(sys.argv[1], COMMANDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    print(f"sagebwd.experiments: {sys.argv[1]!r} is no command{hint}\n", file=sys.stderr)
print("usage: python -m sagebwd.experiments.COMMAND [--help]\n\ncommands:")
for name, does in COMMANDS.items():
    print(f"  {name:12} {does}")
sys.exit(0 if asked else 2)
