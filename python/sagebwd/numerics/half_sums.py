"""dP with sums in FP16 (`dp_sums='fp16'`) in plain PyTorch, bit for bit that of the kernels.

templates/tile/math/dp_sums16.cuh says what is computed and why.
"""

import torch
import torch.nn.functional as F

_DEPTH = 16  # products of one instruction
_DOUT_EXPONENT, _VALUE_EXPONENT = -4, 9  # magnitudes of dO and V lie below these powers of two
_THREADS = 256  # of the kernels that sum the values
_MEAN_CHUNK, _MOST_MEAN_CHUNKS = 256, 16


def half_dp(dout, v, exponents, width):
    """2^-exponents (dO V^T - dO mean(V)^T), and dO mean(V)^T, (..., 1).

    dout is (n, G, M, D) and v (n, 1, N, D), in FP32, in kernels that compute with `width` channels.
    """
    centre = _mean(v, width)
    centre = centre.where(centre.isfinite(), 0)
    highest, lowest = v.amax(-2, keepdim=True), (-v).amax(-2, keepdim=True)
    largest = torch.maximum(highest - centre, lowest + centre).amax(-1, keepdim=True)
    up_v, down_v = _power_below(_VALUE_EXPONENT, largest)
    up, down = _power_below(_DOUT_EXPONENT, dout.abs().amax(-1, keepdim=True))
    sums = _half_products(dout * up, (v - centre) * up_v)
    factor = down * _two_to(-exponents) * down_v
    of_centre = (dout.double() * centre.double()).sum(-1, keepdim=True).float()
    return sums.float() * factor, of_centre


def _mean(v, width):
    """The mean over tokens, summed in FP32 in the order of the kernels."""
    n = v.shape[-2]
    rows, parts = _THREADS // (width // 8), _THREADS // width
    share = -(-n // _MOST_MEAN_CHUNKS)
    chunk = max(_MEAN_CHUNK, -(-share // 64) * 64)
    chunks = -(-n // chunk)
    v = F.pad(v, (0, 0, 0, chunks * chunk - n)).unflatten(-2, (chunks, chunk))
    v = F.pad(v, (0, 0, 0, -chunk % rows)).unflatten(-2, (-1, rows))
    of_chunks = _sum(_sum(v, -3), -2)  # (..., chunks, channels)
    of_parts = F.pad(of_chunks, (0, 0, 0, -chunks % parts)).unflatten(-2, (-1, parts))
    return (_sum(_sum(of_parts, -3), -2) / n)[..., None, :]


def _sum(x, axis):
    """The sum over an axis, one after the other from 0 on."""
    total = torch.zeros_like(x.select(axis, 0))
    for part in x.unbind(axis):
        total = total + part
    return total


def _power_below(exponent, magnitude):
    """Powers of two that bring magnitudes below 2^exponent, and their inverses.

    Within 2^-126 and 2^126; NaN for what is not finite.
    """
    above = (magnitude.contiguous().view(torch.int32) >> 23) - 126
    power = (exponent - above).clamp(-126, 126)
    finite = magnitude.isfinite()
    return tuple(_two_to(p).where(finite, torch.nan) for p in (power, -power))


def _two_to(exponents):
    return (exponents.int() + 127 << 23).view(torch.float32)


def _half_products(a, b):
    """A B^T of what becomes FP16, with sums in FP16 as mma.sync.m16n8k16 forms them.

    From 0 on, the exact sum of 16 products and of the sum so far is rounded once.
    """
    a, b = (_rounded(x.double()) for x in (a, b))
    total = 0
    for x, y in zip(a.split(_DEPTH, -1), b.split(_DEPTH, -1)):
        total = _rounded(total + x @ y.mT)
    return total


def _rounded(x):
    """FP64 rounded to FP16 once; PyTorch's own conversion would round to FP32 in between."""
    step = torch.ldexp(torch.ones_like(x), (torch.frexp(x).exponent - 11).clamp(min=-24))
    rounded = (x / step).round() * step
    return torch.where(rounded.abs() < 65520, rounded, rounded * torch.inf)
