"""The module's passes with every tensor that a pass can take: packed sequences, a mean, dlse."""

import itertools

import numpy as np

import sagebwd
from sagebwd import _core
from sagebwd.core import options
from sagebwd.core.arguments.shapes import contiguous_strides

import simulator_needed  # noqa: E402, F401

LENGTHS = (70, 30)


def aligned(array):
    raw = np.zeros(array.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    there = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    there[...] = array
    return there


def test_packed_passes_take_all_their_tensors():
    random = np.random.default_rng(0)
    tokens, heads, d = sum(LENGTHS), 2, 64
    q, k, v, dout = (
        aligned(random.standard_normal((1, tokens, heads, d)).astype(np.float16)) for _ in range(4)
    )
    firsts = aligned(np.cumsum((0, *LENGTHS)).astype(np.int32))
    used = aligned(np.array(LENGTHS, np.int32))
    parts = [slice(*pair) for pair in itertools.pairwise(firsts)]
    mean = aligned(np.stack([k[0, part].mean(0, dtype=np.float32) for part in parts]))
    out, dq, dk, dv = (aligned(np.zeros_like(q)) for _ in range(4))
    lse, dlse = (aligned(np.zeros((heads, tokens), np.float32)) for _ in range(2))

    spec = options.spec_of_text("packed=yes", head_dim=d, dtype="fp16")
    kernels = _core.Attention(spec, 0, "")
    problem = (len(LENGTHS), heads, heads, tokens, tokens)
    strides = [contiguous_strides(q.shape, "bshd")]
    where = [x.ctypes.data for x in (firsts, firsts, used, used)]

    def run(prepared, *tensors):
        workspace = aligned(np.zeros(prepared.workspace_bytes, np.uint8))
        prepared(*(x.ctypes.data for x in tensors), mean.ctypes.data, *where,
                 workspace.ctypes.data, 0)  # fmt: skip

    run(kernels.prepare_forward(problem, strides * 4, d**-0.5, False, d), q, k, v, out, lse)
    run(kernels.prepare_backward(problem, strides * 8, d**-0.5, False, d),
        q, k, v, out, dout, dq, dk, dv, lse, dlse)  # fmt: skip
    for part in parts:
        of = [x[:, part].swapaxes(1, 2) for x in (q, k, v, dout)]
        exact = sagebwd.reference.exact(*of)
        for name, found in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv)):
            there, wanted = found[:, part].swapaxes(1, 2).astype(np.float64), exact[name]
            assert np.linalg.norm(there - wanted) < 0.03 * np.linalg.norm(wanted), name
