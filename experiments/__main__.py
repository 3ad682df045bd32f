"""`python -m experiments`: which commands there are, or one of them."""

import difflib
import importlib
import sys

COMMANDS = {
    "corpus": "make a corpus of the text and source code in folders",
    "train": "train a language model with one attention",
    "study": "train it with several attentions and judge them by the noise",
    "lora": "fine-tune a trained model with several attentions",
    "capture": "capture what attention layers are handed and trace their errors",
    "errors": "trace those errors over the layers and checkpoints of a run",
    "warning": "show whether a Monitor warns before the loss does",
    "plot": "draw the curves that study wrote",
    "sparse_video": "train a video model with SLA2, its parts and its variants",
}

if not __package__:  # this folder's path was given to Python
    sys.exit("the experiments run as a module: in the root of the checkout, python -m experiments")
asked = sys.argv[1:] in ([], ["-h"], ["--help"])
if sys.argv[1:] and sys.argv[1] in COMMANDS:
    sys.exit(importlib.import_module(f"experiments.{sys.argv[1]}").main(sys.argv[2:]))
if not asked:
    near = difflib.get_close_matches(sys.argv[1], COMMANDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    print(f"experiments: {sys.argv[1]!r} is no command{hint}\n", file=sys.stderr)
print("usage: python -m experiments.COMMAND [--help]\n\ncommands:")
for name, does in COMMANDS.items():
    print(f"  {name:12} {does}")
sys.exit(0 if asked else 2)
