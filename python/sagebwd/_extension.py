"""Says why the extension module cannot be imported; Python only reports a circular import."""

import importlib.machinery
import pathlib
import sys


def reason(error, folder=pathlib.Path(__file__).parent):
    """The message for an ImportError of sagebwd._core."""
    built = sorted(path.name for path in folder.glob("_core.*") if path.suffix in (".so", ".pyd"))
    mine = importlib.machinery.EXTENSION_SUFFIXES
    if any(f"_core{suffix}" in built for suffix in mine):
        return f"sagebwd's extension module cannot be loaded: {error}"
    here = f"this is Python {sys.version_info.major}.{sys.version_info.minor} ({sys.executable})"
    if built:
        return (
            f"sagebwd's extension module is built for another Python ({', '.join(built)} in "
            f"{folder}), and {here}, which loads _core{mine[0]}: install sagebwd with this Python"
        )
    return f"sagebwd's extension module is not built, and {here}: install sagebwd with pip"
