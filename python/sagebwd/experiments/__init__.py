"""Experiments with trainable INT8 attention: train, compare and capture.

Each module is a command: ``python -m sagebwd.experiments.train --help``.
"""
