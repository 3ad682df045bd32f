"""What this machine has for sagebwd, and what is missing for what."""

import argparse
import importlib.util
import json
import platform
import sys

from sagebwd import _core


def doctor():
    """A dict of everything the library depends on, for people and for bug reports.

    Keys: sagebwd, python, torch, driver, nvrtc, cache, and `can`: for each use of the package an
    empty string where it works here, else what it lacks. Never raises for a missing part.
    """
    driver, nvrtc = _core.driver(), _core.nvrtc()
    torch = _torch()
    no_gpu = driver["missing"] or ("" if driver["devices"] else "the driver lists no GPU")
    return {
        "sagebwd": _version(),
        "python": f"{platform.python_version()} at {sys.executable}",
        "torch": torch,
        "driver": driver,
        "nvrtc": nvrtc,
        "cache": _core.cache(),
        "archs": _core.archs(),
        "can": {
            "emit sources and compute the NumPy reference": "",
            "build kernels": nvrtc["missing"],
            "run cached kernels": no_gpu,
            "sagebwd.attention": torch["missing"] or no_gpu or nvrtc["missing"],
        },
    }


def _version():
    import sagebwd  # complete only after this module

    return sagebwd.__version__


def _torch():
    if importlib.util.find_spec("torch") is None:
        return {"version": None, "missing": "PyTorch is not installed: pip install torch"}
    try:
        import torch
    except Exception as error:  # a broken install must not break the report about it
        return {"version": None, "missing": f"PyTorch does not import: {error}"}
    missing = "" if torch.cuda.is_available() else "PyTorch sees no CUDA device"
    return {"version": torch.__version__, "cuda": torch.version.cuda, "missing": missing}


def _lines(report):
    driver, nvrtc, cache = report["driver"], report["nvrtc"], report["cache"]
    yield f"sagebwd  {report['sagebwd']}, Python {report['python']}"
    yield f"torch    {report['torch']['version'] or report['torch']['missing']}"
    version = driver["version"] or 0  # e.g. 13000 for CUDA 13.0
    yield f"driver   {driver['missing'] or f'CUDA {version // 1000}.{version % 1000 // 10}'}"
    for device in driver["devices"]:
        yield (
            f"  GPU    {device['name']}, compute capability {device['major']}.{device['minor']}, "
            f"{device['sm_count']} SMs, {device['memory_bytes'] >> 20} MiB"
        )
    yield f"NVRTC    {nvrtc['missing'] or '{identity} at {path}'.format(**nvrtc)}"
    yield f"cache    {cache['disabled_reason'] or cache['directory'] or 'none'}"
    for use, lacks in report["can"].items():
        yield f"{'no ' if lacks else 'yes'}      {use}" + (f": {lacks}" if lacks else "")


def main(arguments=None):
    """`python -m sagebwd.doctor [--json]`; exits 0 whatever is missing."""
    parser = argparse.ArgumentParser(prog="python -m sagebwd.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args(arguments).json
    report = doctor()
    print(json.dumps(report, indent=2) if as_json else "\n".join(_lines(report)))
    return 0
