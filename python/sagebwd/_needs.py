"""Packages that only parts of sagebwd need, and the error where one is missing or too old."""

import importlib
import re

#: The least version of each, which an extra of pyproject.toml names as well.
LEAST = {"torch": "2.6", "transformers": "4.48", "diffusers": "0.35", "jax": "0.6",
         "pandas": "1.5"}  # fmt: skip


def need(package, part):
    """The package, which `part` of sagebwd needs. ImportError says which version to install."""
    least = LEAST[package]
    why = ""
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        missing = error.name == package
        why = "is not installed" if missing else f"does not import ({error})"
    except (ImportError, OSError) as error:
        why = f"does not import ({error})"
    else:
        version = getattr(module, "__version__", least)
        if _numbers(version) < _numbers(least):
            why = f"is here in version {version}"
    if why:
        raise ImportError(
            f"{part} needs {package} {least} or newer, which {why}: "
            f"pip install '{package}>={least}'", name=package,
        )  # fmt: skip
    return module


def _numbers(version):
    return [int(part) for part in re.findall(r"\d+", version)[:2]]
