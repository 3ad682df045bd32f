"""c/sagebwd.h in Python: the structs, and the functions of the libsagebwd.so beside this file.

NVRTC, which compiles the kernels, is looked for as the package sagebwd does: SAGEBWD_NVRTC, what
the process has loaded, pip's packages on sys.path, and then the other places of the library.
"""

import ctypes
import functools
import glob
import importlib.util
import os

_long, _int, _pointer, _size = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
#: The sagebwd_status that says that something is not supported.
_INVALID = 1
TABLES = 8


class SpecError(ValueError):
    """No kernel supports these tensors or options; the message says what is supported."""


def _struct(name, *fields):
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _longs(*names):
    return [(name, _long) for name in names]


Problem = _struct("Problem", *_longs("batch", "heads", "heads_kv", "seq_q", "seq_kv"))
Tensor = _struct("Tensor", ("data", _pointer), *_longs("stride_b", "stride_h", "stride_s"))
Packing = _struct(
    "Packing", *((name, _pointer) for name in ("first_queries", "first_keys", "lengths_q",
                                               "lengths_kv")), ("apart", _int),
)  # fmt: skip
Lists = _struct("Lists", ("row_bits", _pointer), *_longs("stride_b", "stride_h"))
Intervals = _struct("Intervals", ("numbers", _pointer), *_longs("stride_b", "stride_h"))
Table = _struct("Table", ("numbers", _pointer), *_longs("rows", "columns"))
Shares = _struct(
    "Shares", ("alpha", _pointer), *_longs("stride_b", "stride_h", "stride_s"),
    *((name, _int) for name in ("tokens", "of_rest", "keeps_sums")),
)  # fmt: skip
_FIRST = (("struct_size", _size), ("problem", Problem))
Forward = _struct(
    "Forward", *_FIRST, *((name, Tensor) for name in ("q", "k", "v", "out")), ("lse", _pointer),
    ("packing", Packing), ("value_dim", _int), ("k_mean", _pointer), ("lists", Lists),
    ("shares", Shares), ("sparse_out", Tensor), ("kept_sums", _pointer), ("intervals", Intervals),
    ("tables", Table * TABLES), ("max_logits", _pointer),
)  # fmt: skip
Backward = _struct(
    "Backward", *_FIRST, *((name, Tensor) for name in ("q", "k", "v", "out", "dout")),
    ("lse", _pointer), ("dlse", _pointer), *((name, Tensor) for name in ("dq", "dk", "dv")),
    ("packing", Packing), ("value_dim", _int), ("k_mean", _pointer), ("lists", Lists),
    ("shares", Shares), ("dalpha", _pointer), ("kept_sums", _pointer), ("intervals", Intervals),
    ("tables", Table * TABLES),
)  # fmt: skip


def nvrtc_of_wheels():
    """The newest libnvrtc of pip's packages on sys.path, or None."""
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for place in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.1[23]"):
            found = sorted(glob.glob(os.path.join(folder, place)))
            if found:
                return found[-1]
    return None


@functools.cache
def library():
    """The C library with the types of its functions; opened by the first call that needs it."""
    found = ctypes.CDLL(os.path.join(os.path.dirname(os.path.abspath(__file__)), "libsagebwd.so"))
    takes = {
        "suggest_nvrtc": [ctypes.c_char_p],
        "create": [ctypes.c_char_p, _int, ctypes.POINTER(_pointer)],
        "destroy": [_pointer],
        "workspace_bytes": [_pointer, ctypes.POINTER(Problem), *[ctypes.POINTER(_size)] * 2],
        "forward": [_pointer, ctypes.POINTER(Forward), ctypes.c_float, _pointer, _size, _pointer],
        "backward": [_pointer, ctypes.POINTER(Backward), ctypes.c_float, _pointer, _size, _pointer],
    }
    for name, types in takes.items():
        function = getattr(found, "sagebwd_" + name)
        function.argtypes, function.restype = types, None if name == "destroy" else _int
    for name in ("last_error", "version"):
        function = getattr(found, "sagebwd_" + name)
        function.argtypes, function.restype = [], ctypes.c_char_p
    wheels = nvrtc_of_wheels()
    if wheels is not None:
        found.sagebwd_suggest_nvrtc(os.fsencode(wheels))
    return found


def version():
    """The version of the library."""
    return library().sagebwd_version().decode()


def _check(status):
    if status:
        message = library().sagebwd_last_error().decode(errors="replace")
        raise SpecError(message) if status == _INVALID else RuntimeError(message)


class Operation:
    """One operation on one device: `words` are those of a spec (docs/use/cpp.md of sagebwd)."""

    def __init__(self, words, device):
        self._handle = _pointer()
        self._destroy = library().sagebwd_destroy
        _check(library().sagebwd_create(words.encode(), device, ctypes.byref(self._handle)))

    def __del__(self):
        if getattr(self, "_handle", None):
            self._destroy(self._handle)

    def workspace_bytes(self, problem):
        """The bytes that the forward and the backward need."""
        sizes = _size(), _size()
        _check(library().sagebwd_workspace_bytes(self._handle, problem, *map(ctypes.byref, sizes)))
        return tuple(size.value for size in sizes)

    def run(self, args, scale, workspace, size, stream):
        """Launches the pass whose struct `args` is."""
        name = "sagebwd_forward" if isinstance(args, Forward) else "sagebwd_backward"
        _check(getattr(library(), name)(self._handle, args, scale, workspace, size, stream))
