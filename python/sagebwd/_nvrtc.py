"""Finds NVRTC in pip's NVIDIA wheels wherever this Python imports from.

The C++ library looks beside itself, beside the executable and in CUDA's places; only Python knows
sys.path (user site, --target folders, virtual environments entered without `activate`).
"""

import glob
import importlib.util
import os


def in_wheels():
    """The newest libnvrtc of pip's wheels, or None."""
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package else ():
        for place in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.1[23]"):
            if found := sorted(glob.glob(os.path.join(folder, place))):
                return found[-1]
    return None


def _loaded():
    try:
        with open("/proc/self/maps") as maps:
            return any("/libnvrtc.so" in line for line in maps)
    except OSError:
        return False


def point_to_wheels():
    """Names the wheels' NVRTC to the library, unless the user named one or one is loaded."""
    if not os.environ.get("SAGEBWD_NVRTC") and not _loaded() and (path := in_wheels()):
        os.environ["SAGEBWD_NVRTC"] = path
