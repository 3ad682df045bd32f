"""Tests of the kernels through PyTorch. Without PyTorch and a CUDA GPU each is skipped by name."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items):
    missing = _missing()
    if missing:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=missing))


def _missing():
    if importlib.util.find_spec("torch") is None:
        return "needs PyTorch"
    import torch

    return "" if torch.cuda.is_available() else "needs a CUDA GPU"
