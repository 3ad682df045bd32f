"""Both passes on arrays of any library with DLPack or the CUDA array interface.

    out, lse = sagebwd.arrays.attention_forward(q, k, v, causal=True)            # CuPy's
    dq, dk, dv = sagebwd.arrays.attention_backward(dout, q, k, v, out, lse, causal=True)

No array is copied. The library of the arrays allocates results and workspaces: CuPy by itself, and
others by the function `empty`. For JAX use `sagebwd.integrations.jax`, for PyTorch
`sagebwd.attention`.
"""

import ctypes
import functools
import importlib

from sagebwd import _core
from sagebwd.core import fastest, options
from sagebwd.core.arguments.shapes import (
    check_equal,
    check_rank,
    problem_of_shapes,
    required_operand,
)

_CUDA = 2  # DLPack's kDLCUDA


# ---- views of others' memory ---------------------------------------------------------------------


class _Tensor(ctypes.Structure):
    """DLTensor (DLPack's dlpack.h), the first field of the structure that a capsule points to."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]  # fmt: skip


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _no_array(name, x):
    return options.SpecError(
        f"{name} is {options.a_kind(x)}; pass an array on a CUDA GPU that has __dlpack__ or "
        "__cuda_array_interface__, as CuPy's and Numba's have"
    )


def _check_place(name, x):
    """SpecError for what is no array on a CUDA GPU. The interface without DLPack means a GPU."""
    if not hasattr(x, "__dlpack__"):
        if not hasattr(x, "__cuda_array_interface__"):
            raise _no_array(name, x)
        return
    kind = int(x.__dlpack_device__()[0])
    if kind != _CUDA:
        places = {1: "on the CPU", 3: "in pinned memory of the CPU", 10: "on an AMD GPU"}
        place = places.get(kind, f"on a device of DLPack's kind {kind}")
        raise options.SpecError(
            f"{name} is {options.a_kind(x)} {place}; the kernels take arrays on a CUDA GPU, as "
            "CuPy's are. For NumPy arrays on the CPU there are sagebwd.reference and sagebwd.trace"
        )


class View:
    """Memory on a GPU: address, shape, strides in elements, name of the dtype, number of the
    device.

    `owner` keeps the memory alive.
    """

    def __init__(self, owner, address, shape, strides, dtype, device):
        self.owner, self.shape, self.dtype, self.device = owner, tuple(shape), dtype, device
        self._address = address
        dense, step = [], 1
        for size in reversed(self.shape):
            dense.insert(0, step)
            step *= size
        self._dense = tuple(dense)
        self._strides = self._dense if strides is None else tuple(strides)

    def data_ptr(self):
        return self._address

    def stride(self):
        return self._strides

    def is_contiguous(self):
        return self._strides == self._dense

    @classmethod
    def of(cls, name, x, stream):
        """A view of `x`, whose memory is ready for the stream. SpecError if `x` offers none."""
        if hasattr(x, "__dlpack__"):
            return cls._by_dlpack(name, x, stream)
        if hasattr(x, "__cuda_array_interface__"):
            return cls._by_interface(name, x, stream)
        raise _no_array(name, x)

    @classmethod
    def _by_dlpack(cls, name, x, stream):
        _check_place(name, x)
        capsule = x.__dlpack__(stream=stream or 1)  # 1 is the legacy default stream, our 0
        t = ctypes.cast(_pointer_of(capsule, b"dltensor"), ctypes.POINTER(_Tensor)).contents
        codes = {0: "int", 1: "uint", 2: "float", 4: "bfloat"}
        dtype = f"{codes.get(t.code, f'DLPack code {t.code} of ')}{t.bits}"
        return cls((x, capsule), (t.data or 0) + t.byte_offset, t.shape[: t.ndim],
                   t.strides[: t.ndim] if t.strides else None, dtype, t.device_id)  # fmt: skip

    @classmethod
    def _by_interface(cls, name, x, stream):
        given = x.__cuda_array_interface__
        theirs = given.get("stream")
        if theirs is not None and theirs != (stream or 1):
            raise options.SpecError(
                f"{name} is being written on stream {theirs:#x}, and the call is on {stream:#x}: "
                f"pass stream={theirs:#x}, or an array whose work is done"
            )
        kind, size = given["typestr"][1:2], int(given["typestr"][2:])
        names = {"f": "float", "i": "int", "u": "uint"}
        dtype = f"{names.get(kind, kind)}{8 * size}"
        strides = given.get("strides")
        if strides is not None:
            strides = [stride // size for stride in strides]
        return cls(x, given["data"][0], given["shape"], strides, dtype, None)


# ---- whose arrays they are -----------------------------------------------------------------------


def _cupy_of(x):
    """The module CuPy if `x` is one of its arrays, or None."""
    return importlib.import_module("cupy") if type(x).__module__.split(".")[0] == "cupy" else None


def _stream_of(x, stream):
    """The address of the stream of a call."""
    if stream is not None:
        return options.whole_number("stream", getattr(stream, "ptr", stream), 0,
                                    "the address of a CUstream, 0 for the default one")  # fmt: skip
    if cupy := _cupy_of(x):
        return cupy.cuda.get_current_stream().ptr
    raise _needs_more("stream", x)


def _maker_of(x, empty):
    if empty is not None:
        options.check_callback("empty", empty)
        return empty
    if cupy := _cupy_of(x):
        return cupy.empty
    raise _needs_more("empty", x)


def _needs_more(name, x):
    return options.SpecError(
        f"{name}=None is for CuPy's arrays, and q is {options.a_kind(x)}: pass both stream=, the "
        "address of a CUstream or 0 for the default stream, and empty=, a function of a shape and "
        "a dtype's name that returns a contiguous array on q's GPU"
        + ("; or use sagebwd.attention, which takes torch tensors"
           if type(x).__module__ == "torch" else "")
    )  # fmt: skip


def _device_of(views):
    """The number of the GPU, which the CUDA array interface does not contain."""
    devices = {view.device for view in views} - {None}
    if len(devices) > 1:
        raise options.SpecError(f"q, k and v are on GPUs {sorted(devices)}: move them to one")
    if devices:
        return devices.pop()
    if len(_core.driver()["devices"]) > 1:
        raise options.SpecError(
            "q, k and v have only __cuda_array_interface__, which does not say on which of several "
            "GPUs they are: pass arrays that also have __dlpack__, or make one GPU visible"
        )
    return 0


def _number_of(q):
    """The number of the GPU of an array, or None for what is refused later."""
    if hasattr(q, "__dlpack_device__"):
        kind, number = q.__dlpack_device__()
        return int(number) if int(kind) == _CUDA else None
    return 0 if hasattr(q, "__cuda_array_interface__") else None


class _Call:
    """The common part of both passes: views of q, k and v, the operation, and the allocator."""

    def __init__(self, q, k, v, softmax_scale, layout, stream, empty, chosen):
        for name, x in zip("qkv", (q, k, v)):
            _check_place(name, x)
        self.stream, self._layout = _stream_of(q, stream), layout
        self._empty = _maker_of(q, empty)
        self.q, self.k, self.v = views = [self._view(n, x) for n, x in zip("qkv", (q, k, v))]
        for name, view in zip("qkv", views):
            check_rank(name, view.shape)
            if view.dtype not in ("bfloat16", "float16"):
                raise options.SpecError(
                    f"{name} is {view.dtype}; the kernels take bfloat16 or float16: convert it"
                )
        check_equal(*(view.dtype for view in views), "are", "have one dtype: convert them")
        self._problem = problem_of_shapes(*(view.shape for view in views), layout)
        batch, heads, _, queries, keys = self._problem
        if 0 in self._problem:
            raise options.SpecError(
                f"q has shape {self.q.shape} and k {self.k.shape}: without queries or keys nothing "
                "is launched; out and gradients are zero there, and lse -inf"
            )
        self.like_out, self.rows = (*self.q.shape[:3], self.v.shape[3]), (batch, heads, queries)
        self._scale = options.check_softmax_scale(softmax_scale, self.q.shape[3])
        text = options.text_of(options.with_mask(chosen, queries, keys))
        self.kernels = _operation(text, self.q.shape[3], self.q.dtype, _device_of(views))

    def _view(self, name, x):
        return View.of(name, x, self.stream)

    def new(self, shape, dtype):
        """A new array of the caller's library, and its view."""
        made = self._empty(shape, dtype)
        view = self._view("what empty() gives", made)
        if view.shape != tuple(shape) or view.dtype != dtype or not view.is_contiguous():
            raise options.SpecError(
                f"empty({shape}, {dtype!r}) gave {view.shape} of {view.dtype} with strides "
                f"{view.stride()}; it must return a contiguous array of that shape and dtype"
            )
        return made, view

    def like(self, name, x, shape, dtype):
        """A view of an array that must have this shape and dtype."""
        view = self._view(name, x)
        if view.shape != tuple(shape) or view.dtype != dtype:
            raise options.SpecError(
                f"{name} is {view.shape} of {view.dtype}; it must be {tuple(shape)} of {dtype}"
            )
        return view

    def of_rows(self, name, x):
        return self._contiguous(name, x, self.rows)

    def _contiguous(self, name, x, shape):
        view = self.like(name, x, shape, "float32")
        if not view.is_contiguous():
            raise options.SpecError(f"{name} has strides {view.stride()}; it must be contiguous")
        return view

    def mean(self, k_mean):
        """A view of what the caller wants to subtract from the keys, or None."""
        if k_mean is None:
            return None
        shape = (self._problem[0], self._problem[2], self.q.shape[3])
        return self._contiguous("k_mean", k_mean, shape)

    def run(self, prepare, strided, floats):
        """Launches a pass on the stream. `strided` are views besides q, k and v, by name; `floats`
        are contiguous views of float32, or None."""
        given = {"q": self.q, "k": self.k, "v": self.v, **strided}
        operands = [required_operand(name, view, self._layout) for name, view in given.items()]
        run = prepare(self._problem, [o[1:] for o in operands], self._scale, False, self.v.shape[3])
        _, workspace = self.new((run.workspace_bytes,), "uint8")
        addresses = [0 if view is None else view.data_ptr() for view in floats]
        run(*(o[0] for o in operands), *addresses, workspace.data_ptr(), self.stream)


#: A program may keep changing windows; only the latest operations are kept. They share kernels.
@functools.lru_cache(maxsize=256)
def _operation(text, head_dim, dtype, device):
    return _core.Attention(options.spec_of_text(text, head_dim=head_dim, dtype=dtype), device)


# ---- the passes ----------------------------------------------------------------------------------


@options.takes(fastest=fastest.of_q(number_of=_number_of))
def attention_forward(
    q, k, v, *, softmax_scale=None, layout="bhsd", k_mean=None, stream=None, empty=None, chosen
):
    """(out, lse) of softmax(softmax_scale q k^T) v (SageBwd, arXiv 2603.02170, Algorithm 1).

    Args:
        q: (batch, heads, queries, head_dim), bfloat16 (by DLPack) or float16, on a CUDA GPU. The
            last dimension must be contiguous; other strides and the address must be multiples of
            16 bytes.
        k, v: (batch, heads_kv, keys, head_dim). If head_dim is not 64, 128, 256 or 512, v
            may have fewer channels.
        softmax_scale: a number of either sign, or 0; None means 1/sqrt(head_dim).
        layout: 'bhsd', or 'bshd' for (batch, tokens, heads, head_dim) arrays.
        {options}
        k_mean: contiguous float32 of (batch, heads_kv, head_dim), or None: smooth_k subtracts it
            from the keys instead of their mean.
        stream: the address of the CUstream on which the kernels are launched, or an object that has
            it as `ptr`; None means CuPy's current stream. DLPack tells the arrays' library.
        empty: a function of a shape and a dtype's name ('float16', 'bfloat16', 'float32', 'uint8')
            that returns a contiguous array on q's GPU, allocated in the order of the stream; None
            means cupy.empty for CuPy's arrays.

    Returns:
        out, contiguous, of q's shape and dtype with v's channels, and lse, float32 of (batch,
        heads, queries).

    Raises:
        SpecError (a ValueError): no kernel supports these arrays or options.
        LibraryError, CompileError, DriverError, OfflineError, PackError (RuntimeErrors): as for
            `sagebwd.attention`.
    """
    call = _Call(q, k, v, softmax_scale, layout, stream, empty, chosen)
    out, out_view = call.new(call.like_out, call.q.dtype)
    lse, lse_view = call.new(call.rows, "float32")
    call.run(call.kernels.prepare_forward, {"out": out_view}, [lse_view, call.mean(k_mean)])
    return out, lse


@options.takes(fastest=fastest.of_q(1, _number_of))
def attention_backward(
    dout, q, k, v, out, lse, *, dlse=None, softmax_scale=None, layout="bhsd", k_mean=None,
    stream=None, empty=None, chosen,
):  # fmt: skip
    """(dq, dk, dv), contiguous, like q, k and v (SageBwd, arXiv 2603.02170, Algorithm 2).

    Args:
        dout: the gradient of out, of its shape and dtype.
        out, lse: what the forward returned for exactly these keys. For parts of the keys that share
            one k_mean they may be those of all keys; then only the sum of dq over the parts is
            right.
        q, k, v, k_mean, stream, empty and the options: as given to the forward.
        dlse: the gradient of lse, float32 of its shape, or None. It cannot be combined with k_mean.

    Raises what `attention_forward` raises.
    """
    if k_mean is not None and dlse is not None:
        raise options.SpecError(
            "k_mean and dlse together: dq depends on whether out and lse belong to exactly these "
            "keys, or to all that share the mean. Leave k_mean out in both passes, and pass out "
            "and lse of exactly these keys"
        )
    call = _Call(q, k, v, softmax_scale, layout, stream, empty, chosen)
    strided = {name: call.like(name, x, call.like_out, call.q.dtype)
               for name, x in (("out", out), ("dout", dout))}  # fmt: skip
    floats = [call.of_rows("lse", lse), None if dlse is None else call.of_rows("dlse", dlse),
              call.mean(k_mean)]  # fmt: skip
    made = [call.new(view.shape, view.dtype) for view in (call.q, call.k, call.v)]
    strided.update(zip(("dq", "dk", "dv"), (view for _, view in made)))
    call.run(call.kernels.prepare_backward, strided, floats)
    return tuple(array for array, _ in made)
