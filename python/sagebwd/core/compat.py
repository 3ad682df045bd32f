"""Packages that only parts of sagebwd need, with the error where one is missing or too old, and
functions that torch.compile leaves out of its graphs."""

import functools
import importlib
import re
import sys

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


def not_compiled(name, instead=""):
    """Decorates a function that torch.compile leaves out of its graphs. The error under
    fullgraph=True calls it `name`, and ends with what to use `instead`.

    Importing torch._dynamo to say so would take longer than most of what these functions do, so the
    first call after its import does.
    """

    def decorate(function):
        disabled = None

        @functools.wraps(function)
        def front(*given, **named):
            nonlocal disabled
            if disabled is None and "torch._dynamo" in sys.modules:
                disabled = sys.modules["torch._dynamo"].disable(function)
            return (disabled or function)(*given, **named)

        front._torchdynamo_disable = True  # as torch._dynamo.disable marks functions
        front._torchdynamo_disable_msg = (
            f"{name} is not compiled: compile without fullgraph=True, which leaves it out of the "
            f"graph{instead}"
        )
        return front

    return decorate


def called_by_the_compiler(function):
    """PyTorch's compiler calls the function and takes its result for a constant. This is what
    torch.compiler.assume_constant_result does, which imports the compiler."""
    function._dynamo_marked_constant = True
    return function
