"""Experiments with trainable INT8 attention: train, compare and capture.

``python -m experiments``, in the root of a checkout, lists the commands. The package sagebwd has
none of this.
"""

from importlib.util import find_spec

if find_spec("sagebwd") is None:
    raise ImportError("the experiments need sagebwd, which this Python does not have: pip install "
                      ". here, or ./run build and PYTHONPATH=build/python", name=__name__)
