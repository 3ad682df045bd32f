"""sagebwd.arrays on CuPy's own arrays, on CuPy's streams, against FP64 by NumPy."""

import exact
import numpy as np
import pytest

import sagebwd
from sagebwd import arrays

cupy = pytest.importorskip("cupy", reason="needs CuPy")

CHECKED = {"causal": {"causal": True}, "window": {"left": 40, "right": 25}, "all": {}}
CHOSEN = {"causal": {"causal": True}, "window": {"window_left": 40, "window_right": 25}, "all": {}}


def make(m=333, d=64, seed=0):
    random = np.random.default_rng(seed)
    shapes = (2, 4, m, d), (2, 2, m, d), (2, 2, m, d), (2, 4, m, d)
    return [cupy.asarray(random.standard_normal(shape), cupy.float16) for shape in shapes]


def both_passes(q, k, v, dout, **chosen):
    out, lse = arrays.attention_forward(q, k, v, **chosen)
    return (out, lse, *arrays.attention_backward(dout, q, k, v, out, lse, **chosen))


def assert_right(found, given, checked):
    expected = exact.attention(*map(cupy.asnumpy, given), **checked)
    exact.assert_near(map(cupy.asnumpy, found), expected)


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("kind", CHOSEN)
def test_right_on_the_default_stream(kind, d):
    given = make(d=d)
    found = both_passes(*given, **CHOSEN[kind])
    assert all(isinstance(x, cupy.ndarray) for x in found)
    assert_right(found, given, CHECKED[kind])


@pytest.mark.parametrize("how", ["current", "named"])
def test_right_behind_work_of_another_stream(how):
    """The inputs come late, on a stream that does not wait for the default one."""
    expected = both_passes(*make(m=1000), causal=True)
    given = [cupy.full_like(x, cupy.nan) for x in make(m=1000)]
    late = make(m=1000)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        slow = cupy.ones((4096, 4096), cupy.float32)
        for _ in range(20):
            slow = slow @ slow * 1e-4
        for x, y in zip(given, late):
            x[...] = y
        chosen = {"stream": stream} if how == "named" else {}
        found = both_passes(*given, causal=True, **chosen)
    stream.synchronize()
    assert all((x == y).all() for x, y in zip(found, expected))


def test_two_streams_at_a_time():
    given = [make(m=700, seed=seed) for seed in (1, 2)]
    expected = [both_passes(*arrays_, causal=True) for arrays_ in given]
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in given]
    found = []
    for _ in range(10):
        for stream, arrays_ in zip(streams, given):
            with stream:
                found.append(both_passes(*arrays_, causal=True))
    for stream in streams:
        stream.synchronize()
    for i, results in enumerate(found):
        assert all((x == y).all() for x, y in zip(results, expected[i % 2]))


def test_refusals():
    q, k, v, _ = make()
    with pytest.raises(sagebwd.SpecError, match="float32"):
        arrays.attention_forward(q.astype(cupy.float32), k, v)
    for given in ({}, {"stream": 0, "empty": cupy.empty}):
        with pytest.raises(sagebwd.SpecError, match="q is an ndarray on the CPU; the kernels"):
            arrays.attention_forward(cupy.asnumpy(q), k, v, **given)
