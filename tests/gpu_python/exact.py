"""Attention and its gradients in FP64 by NumPy, and how far results may be from it."""

import numpy as np

#: Relative L2 of INT8 attention's results on Gaussian inputs. Recorded are .015 of out, .03 of
#: gradients (bench/results/errors.json); a wrong mask, scale or head is off by .3 and more.
LIMIT = 0.05


def attention(q, k, v, dout, *, dlse=None, scale=None, causal=False, left=None, right=None):
    """(out, lse, dq, dk, dv) of (batch, head, token, channel); heads may share keys."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = scale * q @ k.swapaxes(2, 3)
    behind = np.arange(k.shape[2])[None] - np.arange(q.shape[2])[:, None]  # of the key, top-left
    seen = np.ones(behind.shape, bool)
    if causal:
        seen &= behind <= 0
    if left is not None:
        seen &= behind >= -left
    if right is not None:
        seen &= behind <= right
    scores = np.where(seen, scores, -np.inf)
    largest = scores.max(-1, keepdims=True)
    lse = largest + np.log(np.exp(scores - largest).sum(-1, keepdims=True))
    p = np.exp(scores - lse)
    out = p @ v
    dp = dout @ v.swapaxes(2, 3)
    ds = p * (dp - (dout * out).sum(-1, keepdims=True))
    if dlse is not None:
        ds += p * np.asarray(dlse, np.float64)[..., None]
    dk, dv = ds.swapaxes(2, 3) @ q * scale, p.swapaxes(2, 3) @ dout
    dk, dv = (x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))
    return out, lse[..., 0], scale * ds @ k, dk, dv


def assert_near(found, expected, limit=LIMIT, names=("out", "lse", "dq", "dk", "dv")):
    for name, x, y in zip(names, found, expected, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape, name
        off = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert off <= limit, f"{name} is off by {off}"
