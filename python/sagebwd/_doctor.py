"""What this machine has for sagebwd, and what is missing for what."""

import argparse
import importlib.util
import json
import os
import platform
import sys

from sagebwd import _core


def doctor():
    """A dict of everything the library depends on, for people and for bug reports.

    Keys: sagebwd, python, torch, driver, nvrtc, cache, packs, tuning (SAGEBWD_TUNE's mode),
    warnings (kernels that this driver is too old for, and the like), and `can`: for each use of the
    package an empty string where it works here, else what it lacks. Never raises for a missing
    part.
    """
    driver, nvrtc = _core.driver(), _core.nvrtc()
    torch = _torch()
    cache = _core.cache()
    packs = [_pack(path) for path in cache["packs"]]
    tuning, warnings = _tuning()
    no_gpu = driver["missing"] or ("" if driver["devices"] else "the driver lists no GPU")
    return {
        "sagebwd": _version(),
        "python": f"{platform.python_version()} at {sys.executable}",
        "torch": torch,
        "driver": driver,
        "nvrtc": nvrtc,
        "cache": cache,
        "packs": packs,
        "tuning": tuning,
        "warnings": warnings + _driver_warnings(driver),
        "archs": _core.archs(),
        "can": {
            "emit sources and compute the NumPy reference": "",
            "build kernels": nvrtc["missing"]
            or ("SAGEBWD_OFFLINE=1 forbids compiling" if cache["offline"] else ""),
            "run cached kernels": no_gpu,
            "sagebwd.attention": torch["missing"] or no_gpu or nvrtc["missing"],
        },
    }


def _version():
    import sagebwd  # complete only after this module

    return sagebwd.__version__


def _pack(path):
    try:
        return {"path": path, "missing": "", **_core.pack(os.fsencode(path))}
    except _core.PackError as error:
        return {"path": path, "missing": str(error)}


def _tuning():
    """The mode, and what is wrong with it."""
    try:
        return _core.tune_mode(), []
    except _core.SpecError as error:
        return None, [str(error)]


def _driver_warnings(driver):
    """Kernels kept for this machine's GPUs that its driver is too old for."""
    archs = []
    for device in driver["devices"]:
        try:
            archs.append(_core.arch_for_capability(device["major"], device["minor"]))
        except _core.SpecError:  # `can` does not speak of GPUs nobody has seen
            continue
    return _core.driver_warnings(archs, driver["version"]) if archs else []


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
    limit = f"at most {cache['byte_limit'] >> 20} MiB" if cache["byte_limit"] else "without a limit"
    yield f"cache    {cache['disabled_reason'] or '{}, {}'.format(cache['directory'], limit)}"
    for pack in report["packs"]:
        version = pack.get("lowest_driver", 0)
        yield "pack     " + (
            pack["missing"]
            or f"{pack['path']}: {pack['kernels']} kernels, {pack['records']} tuning records, "
            f"CUDA {version // 1000}.{version % 1000 // 10} or newer"
        )
    if cache["offline"]:
        yield "offline  SAGEBWD_OFFLINE=1: nothing is compiled"
    yield f"tuning   {report['tuning'] or 'not a mode'}"
    for warning in report["warnings"]:
        yield f"warning  {warning}"
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
