"""Relative L2 error that sums of dQ in FP16 add (`dq_sums='fp16'`), emulated with NumPy.

    python bench/dq_sums.py
    python bench/dq_sums.py 1024 65536

Inputs are Gaussian, with 64 queries, no mask and an exact softmax. dQ of each block of 128 keys is
computed in FP64, multiplied by the factor of the query (templates/tile/dq/dq_factor.cuh), rounded
to FP16, and added in FP16 in a random order.
"""

import sys

import numpy as np

BLOCK = 128  #: the number of keys whose part of dQ is added at a time
QUERIES = 64


def parts_of(n, d, draw):
    """dQ of each block of keys (blocks, queries, channels), and bounds of each query's sums."""
    q, dout, k, v = (draw.standard_normal((m, d)) for m in (QUERIES, QUERIES, n, n))
    s = q @ k.T / np.sqrt(d)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    dp = dout @ v.T
    delta = (p * dp).sum(axis=1, keepdims=True)
    ds = p * (dp - delta)
    parts = [ds[:, i : i + BLOCK] @ k[i : i + BLOCK] for i in range(0, n, BLOCK)]
    lengths = np.linalg.norm(dout, axis=1) * np.linalg.norm(v, axis=1).max()
    return np.stack(parts), (lengths + abs(delta[:, 0])) * abs(k).max()


def added(parts, dtype):
    """Adds the parts one after the other. Each part and each sum is rounded."""
    sums = np.zeros(parts.shape[1:], dtype)
    for part in parts:
        sums = (sums.astype(np.float64) + part.astype(dtype).astype(np.float64)).astype(dtype)
    return sums.astype(np.float64)


def error(n, d, seed=1):
    """The errors of all queries together, and of the worst one."""
    draw = np.random.default_rng(seed)
    parts, bounds = parts_of(n, d, draw)
    exact = parts.sum(axis=0)
    factors = 2.0 ** (14 - np.floor(np.log2(1.125 * bounds)))[:, None]
    got = added(draw.permutation(parts) * factors, np.float16) / factors
    by_query = np.linalg.norm(got - exact, axis=1) / np.linalg.norm(exact, axis=1)
    return np.linalg.norm(got - exact) / np.linalg.norm(exact), by_query.max()


if __name__ == "__main__":
    for head_dim in 64, 128:
        for tokens in map(int, sys.argv[1:] or (1024, 8192, 65536)):
            whole, worst = error(tokens, head_dim)
            print(f"D{head_dim} N {tokens}: {whole:.5f}, of the worst query {worst:.5f}")
