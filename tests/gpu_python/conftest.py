"""Tests of the kernels through PyTorch. Without PyTorch and a CUDA GPU each is skipped by name."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests/python")]  # errors.py, packed_inputs.py
sys.path.append(str(ROOT))  # experiments


def pytest_ignore_collect():
    """Beside those of the simulator they are skipped by name, unless a GPU runs them elsewhere."""
    simulated = "/simulator" in os.environ.get("LD_LIBRARY_PATH", "")
    return simulated and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))) or None


def pytest_collection_modifyitems(items):
    missing = _missing()
    for item in items:  # of the whole session
        if missing and Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.skip(reason=missing))


def _missing():
    try:
        import torch
    except ImportError:
        return "needs PyTorch"
    return "" if torch.cuda.is_available() else "needs a CUDA GPU"


@pytest.fixture
def front_passes(monkeypatch):
    """The passes of norm and RoPE that kernels compute, whichever way calls take to them: "front"
    and "front_gradients"."""
    from sagebwd import _core

    passes = []
    for name in ("front", "front_gradients"):

        def counted(*given, name=name, launch=getattr(_core, name)):
            passes.append(name)
            return launch(*given)

        monkeypatch.setattr(_core, name, counted)
    return passes
