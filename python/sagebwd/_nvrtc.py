"""Finds NVRTC in pip's NVIDIA wheels wherever this Python imports from.

The C++ library looks beside itself, beside the executable and in CUDA's places; only Python knows
sys.path (user site, --target folders, virtual environments entered without `activate`).
"""

import glob
import importlib.util
import os

from sagebwd import _core


def in_wheels():
    """The newest libnvrtc of pip's wheels, or None."""
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package else ():
        for place in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.1[23]"):
            if found := sorted(glob.glob(os.path.join(folder, place))):
                return found[-1]
    return None


def point_to_wheels():
    """Tells the library where the wheels' NVRTC is. A loaded one, or one that the user names, has
    priority. No variable is set, because child processes may use another environment."""
    if path := in_wheels():
        _core.suggest_nvrtc(path)
