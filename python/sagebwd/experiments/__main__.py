"""`python -m sagebwd.experiments`: which commands there are."""

import sys

print(
    """usage: python -m sagebwd.experiments.COMMAND [--help]

commands:
  train    train a small language model with one attention
  compare  train it with several attentions and compare the curves
  capture  capture what attention layers are handed and trace their errors
  plot     draw the curves that compare wrote"""
)
sys.exit(0 if sys.argv[1:] in ([], ["-h"], ["--help"]) else 2)
