"""The process in which the tuner runs candidates; the tuner starts it by itself.

Also run as a plain file, for importing the package would import PyTorch: seconds for nothing.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path


def load_core():
    """The package's extension module, without the package."""
    folder = Path(__file__).parent.parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_core{suffix}"
        if path.exists():
            spec = importlib.util.spec_from_file_location("sagebwd._core", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    from sagebwd import _core  # in an editable install it is elsewhere

    return _core


if __name__ == "__main__":
    sys.exit(load_core().tune_worker_main())
