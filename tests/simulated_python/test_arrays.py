"""sagebwd.arrays on a simulated GPU, whose memory NumPy's arrays are."""

import ctypes

import numpy as np
import pytest

import sagebwd
from sagebwd import arrays
from sagebwd.integrations import arrays as integrated

import simulator_needed  # noqa: E402, F401


class ByInterface:
    """A NumPy array as if it lay on a GPU, with the CUDA array interface alone."""

    stream = None

    def __init__(self, array):
        self.array = array

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.array.shape, "strides": self.array.strides, "version": 3,
                "typestr": self.array.dtype.str, "data": (self.array.ctypes.data, False),
                "stream": self.stream}  # fmt: skip


class ByDlpack:
    """Gives the array by DLPack alone, in NumPy's own capsule, whose device is altered."""

    def __init__(self, array):
        self.array, self.streams = array, []

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        capsule = self.array.__dlpack__()
        at = integrated._pointer_of(capsule, b"dltensor")
        ctypes.cast(at, ctypes.POINTER(integrated._Tensor)).contents.device_type = 2
        return capsule


def given(kind, *shapes):
    random = np.random.default_rng(0)
    return [kind(random.standard_normal(shape).astype(np.float16)) for shape in shapes]


def empty(kind):
    def make(shape, dtype):
        raw = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 256, np.uint8)
        start = -raw.ctypes.data % 256
        flat = raw[start:].view(dtype) if start % np.dtype(dtype).itemsize == 0 else None
        return kind(flat[: int(np.prod(shape))].reshape(shape))

    return make


def aligned(x):
    """A copy of an array at a multiple of 256 bytes."""
    copy = empty(lambda array: array)(x.shape, x.dtype)
    copy[...] = x
    return copy


def error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("kind", [ByInterface, ByDlpack])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_both_passes_are_near_the_reference(kind, layout):
    q, k, v, dout = given(aligned, (1, 2, 70, 64), (1, 1, 90, 64), (1, 1, 90, 64), (1, 2, 70, 64))
    exact = sagebwd.reference.exact(q, k, v, dout, causal="bottom-right")

    def there(x):  # a view in the other layout
        return kind(x if layout == "bhsd" else x.swapaxes(1, 2))

    chosen = {"causal": "bottom-right", "layout": layout, "stream": 0, "empty": empty(kind)}
    out, lse = arrays.attention_forward(there(q), there(k), there(v), **chosen)
    gradients = arrays.attention_backward(there(dout), there(q), there(k), there(v), out, lse,
                                          dlse=empty(kind)((1, 2, 70), "float32"), **chosen)
    for name, found in zip(("out", "dq", "dk", "dv"), (out, *gradients)):
        found = found.array if layout == "bhsd" else found.array.swapaxes(1, 2)
        assert error(found.astype(np.float64), exact[name]) < 0.03, name
    assert error(lse.array, exact["lse"]) < 1e-3


def test_parts_of_the_keys_share_a_mean():
    q, k, v, dout = given(aligned, (1, 2, 70, 64), (1, 1, 96, 64), (1, 1, 96, 64), (1, 2, 70, 64))
    k += np.float16(2)
    exact = sagebwd.reference.exact(q, k, v, dout)
    mean = aligned(k.mean(2, dtype=np.float32))
    halves = slice(0, 48), slice(48, 96)
    parts = [[ByInterface(aligned(x[:, :, half])) for x in (k, v)] for half in halves]
    chosen = {"stream": 0, "empty": empty(ByInterface)}

    def errors(k_mean):
        chosen["k_mean"] = k_mean
        given = [arrays.attention_forward(ByInterface(q), *part, **chosen) for part in parts]
        lses = np.stack([lse.array for _, lse in given])
        lse = np.logaddexp.reduce(lses, 0)
        out = sum(out.array * np.exp(of - lse)[..., None] for (out, _), of in zip(given, lses))
        rest = ByInterface(aligned(out.astype(np.float16))), ByInterface(aligned(lse))
        dq = 0
        for part, half in zip(parts, halves):
            of_part = arrays.attention_backward(ByInterface(dout), ByInterface(q), *part, *rest,
                                                **chosen)  # fmt: skip
            dq = dq + of_part[0].array.astype(np.float64)
            for name, found in zip(("dk", "dv"), of_part[1:]):
                assert error(found.array.astype(np.float64), exact[name][:, :, half]) < 0.04
        return error(out, exact["out"]), error(dq, exact["dq"])

    assert max(errors(ByInterface(mean))) < 0.03
    assert errors(None)[1] > 0.1  # what a mean for each part leaves out


def test_dlpack_is_told_of_the_stream():
    q, k, v = given(lambda x: ByDlpack(aligned(x)), *[(1, 1, 64, 64)] * 3)
    arrays.attention_forward(q, k, v, stream=0, empty=empty(ByDlpack))
    assert q.streams == [1]  # DLPack's number of the legacy default stream


def test_refusals():
    q, k, v = given(lambda x: ByInterface(aligned(x)), *[(1, 1, 64, 64)] * 3)
    chosen = {"stream": 0, "empty": empty(ByInterface)}

    def refused(match, *tensors, **changed):
        with pytest.raises(sagebwd.SpecError, match=match):
            arrays.attention_forward(*(tensors or (q, k, v)), **{**chosen, **changed})

    refused("stream=None is for CuPy's .*: pass both stream=, .* and empty=", stream=None)
    refused("empty=None is for CuPy's .*: pass both stream=, .* and empty=", empty=None)
    refused("stream='s' is a str: pass the address", stream="s")
    refused("q is an ndarray on the CPU; the kernels take arrays on a CUDA GPU", q.array, k, v)
    refused("q is a list; pass an array", [1], k, v)
    refused("q is float32; the kernels take", ByInterface(q.array.astype(np.float32)), k, v)
    refused("k has rank 3", q, ByInterface(k.array[0]), v)
    refused("q has strides .* multiples of 16 bytes", ByInterface(q.array[..., ::-1]), k, v)
    refused("without queries or keys", ByInterface(q.array[:, :, :0]), k, v)
    refused(r"empty\(.*\) gave", empty=lambda shape, dtype: empty(ByInterface)((8,), dtype))
    busy = ByInterface(q.array)
    busy.stream = 77
    refused("being written on stream 0x4d, and the call is on 0x0: pass stream=0x4d", busy, k, v)
    mean = np.zeros((1, 1, 64), np.float32)
    refused(r"k_mean is \(1, 64\) of float32; it must be", k_mean=ByInterface(mean[0]))
    refused("k_mean is given and smooth_k is off", k_mean=ByInterface(mean), smooth_k=False)
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        arrays.attention_forward(q, k, v, cu_seqlens_q=None, **chosen)
    out, lse = arrays.attention_forward(q, k, v, **chosen)
    with pytest.raises(sagebwd.SpecError, match="k_mean and dlse together"):
        arrays.attention_backward(out, q, k, v, out, lse, dlse=lse, k_mean=mean, **chosen)
    with pytest.raises(sagebwd.SpecError, match=r"lse is \(1, 1, 63\) of float32; it must be"):
        arrays.attention_backward(out, q, k, v, out, ByInterface(lse.array[..., 1:]), **chosen)
