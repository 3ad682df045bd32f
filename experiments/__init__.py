"""Experiments with trainable INT8 attention: train, compare and capture.

Each module is a command, from the root of a checkout: ``python -m experiments.train --help``. The
package sagebwd has none of this.
"""

from importlib.util import find_spec

if find_spec("sagebwd") is None:
    raise ImportError("the experiments need sagebwd, which this Python does not have: pip install "
                      ". here, or ./run build and PYTHONPATH=build/python", name=__name__)
