"""The quantisers of the kernels in plain PyTorch, bit for bit, and the steps before them.

Sources: SageBwd (arXiv 2603.02170) and, for the rules it leaves open, the C++ reference. `rules`
are those of numerics.py.
"""

import torch
import torch.nn.functional as F

_SMALLEST = 2.0**-119  # a group below this quantises to zero
_LEAST_BESIDE = 2.0**-60  # a head, where sums are brought from one unit of tokens to another
_SAMPLED_TOKENS = 256  # at most this many tokens determine the magnitude of a head
CHANNEL_TOKENS = 256  # tokens of a channel that share a scale under 'row'
_MOST_EXPONENT = 100


def tiled(x, rows, columns, fill=0.0):
    """The last two axes as (row tile, row, column tile, column), padded to whole tiles."""
    m, n = x.shape[-2:]
    if m % rows or n % columns:
        x = F.pad(x, (0, -n % columns, 0, -m % rows), value=fill)
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def untiled(tiles, m, n):
    return tiles.flatten(-2).flatten(-3, -2)[..., :m, :n]


def _psi(tiles, unsigned=False, smallest=_SMALLEST):
    """Integers and scales with one scale per tile: psi of the paper, in FP32.

    A tile whose maximum is not finite gets the scale NaN: it stays visible. One below `smallest`,
    a number or a tensor that broadcasts, is zeros.
    """
    tiles = tiles.float()
    limit = 255 if unsigned else 127
    top = tiles.abs().amax((-3, -1), keepdim=True)
    delta = top * (1.0 / limit)
    # Not 127 / top: PyTorch computes that as a reciprocal times 127, which rounds twice.
    inverse = torch.full_like(top, limit).div(top)
    integers = (tiles * inverse).round().clamp(0 if unsigned else -limit, limit)
    finite, tiny = top.isfinite(), top < smallest
    delta = torch.where(finite, delta.masked_fill(tiny, 0), torch.nan)
    return integers.masked_fill(tiny | ~finite, 0), delta


def quantized(x, rows, columns, math_dtype, unsigned=False, smallest=_SMALLEST):
    """`x` after quantisation with one scale per rows x columns tile of its last two axes."""
    integers, delta = _psi(tiled(x, rows, columns), unsigned, smallest)
    return untiled(integers.to(math_dtype) * delta, *x.shape[-2:])


def token_integers(x, group):
    """Integers, and one scale per token, (…, tokens, 1), which the tokens of a group share."""
    m, n = x.shape[-2:]
    integers, delta = _psi(tiled(x, group, n))
    return untiled(integers, m, n), delta[..., 0, 0].repeat_interleave(group, -2)[..., :m, :]


def key_integers(x, rules):
    """Does the same to keys for S. Under 'row' each 32 keys have four scales, one for the keys
    2t, 2t+1, 2t+8, ... 2t+25, with t = 0 to 3.

    Those are what one lane of the tensor cores' accumulators holds of a row of scores.
    """
    if not rules.by_rows:
        return token_integers(x, rules.group_kv)
    n = x.shape[-2]
    octets = F.pad(x, (0, 0, 0, -n % 32)).unflatten(-2, (-1, 4, 4, 2)).transpose(-4, -3)
    integers, scales = token_integers(octets.flatten(-5, -2), 8)

    def in_order(t):
        return t.unflatten(-2, (-1, 4, 4, 2)).transpose(-4, -3).flatten(-5, -2)[..., :n, :]

    return in_order(integers), in_order(scales)


def over_tokens(x, group, rules, raw=None):
    """The copy of `x` for products that sum over tokens, with one scale per channel and 256 tokens.

    A channel that is small beside its head counts as zeros. `raw` is what `x` was made of, and
    tells how large heads are; None: about 1.
    """
    if not rules.by_rows:
        return quantized(x, group, x.shape[-1], rules.math)
    smallest = _LEAST_BESIDE
    if raw is not None:
        smallest = (_magnitude(raw).clamp(max=1) * _LEAST_BESIDE).clamp(min=_SMALLEST)
        smallest = smallest[..., None, None]
    return quantized(x, CHANNEL_TOKENS, 1, rules.math, smallest=smallest)


def _magnitude(x):
    """The largest magnitude of some tokens of a head, (…, 1, 1): at most 256, evenly spaced.

    1 where they are zeros or not finite.
    """
    top = x[..., :: max(1, -(-x.shape[-2] // _SAMPLED_TOKENS)), :].float().abs()
    top = top.amax((-2, -1), keepdim=True)
    return top.where(top.isfinite() & (top > 0), 1.0)


def row_exponents(x):
    """Powers of two that bring the rows of 256 to one magnitude, that of their mean: (…, 1).

    Within -100..100, from the logarithms of the rows' largest magnitudes, linear between powers of
    two. Rows less than half an octave from the mean have one exponent, wherever that lies: rounding
    each row's own logarithm would separate rows of similar magnitude. Rows below 2^-119 and those
    that are not finite have the mean's, or the head's (`_magnitude`) where a unit has no others.
    """
    top = x.abs().amax(-1, keepdim=True)
    counted = top.isfinite() & (top >= _SMALLEST)
    fraction = 13
    logarithms = top.view(torch.int32) >> 23 - fraction
    pad = (0, 0, 0, -x.shape[-2] % CHANNEL_TOKENS)
    units = [F.pad(t, pad).unflatten(-2, (-1, CHANNEL_TOKENS))
             for t in (logarithms * counted, counted.int())]  # fmt: skip
    total, count = (t.sum(-2, keepdim=True) for t in units)
    of_head = _magnitude(x)
    of_head = of_head.where(of_head >= _SMALLEST, 1.0).view(torch.int32) >> 23 - fraction
    mean = (total // count.clamp(min=1)).where(count > 0, of_head[..., None])
    mean = mean.expand_as(units[0]).flatten(-3, -2)
    mean = mean[..., : x.shape[-2], :]
    logarithms = torch.where(counted, logarithms, mean)
    exponents = (logarithms - mean + (1 << fraction - 1) >> fraction) + (mean >> fraction) - 127
    return exponents.clamp(-_MOST_EXPONENT, _MOST_EXPONENT).int()


def power_of_two(exponents):
    """2^exponents from int32, exactly."""
    return (exponents + 127 << 23).view(torch.float32)


def signs(channels, device=None):
    """The signs, 1 or -1, of the channels before the Hadamard transform.

    -1 where c0 c1 + c2 c5 + c3 c4 + c6 c7 is odd, by the bits of channel c: a vector of one
    magnitude, such as an offset of all channels, is then no row of the matrix, which would gather
    it in one channel.
    """
    c = torch.arange(channels, device=device)
    odd = sum((c >> a) & (c >> b) & 1 for a, b in ((0, 1), (2, 5), (3, 4), (6, 7))) % 2
    return 1 - 2 * odd.float()


def hadamard(x):
    """The normalised Hadamard transform of the last axis (Sylvester order), in FP32.

    In blocks of the largest power of two that divides the axis, behind `signs`.
    """
    shape, size = x.shape, x.shape[-1] & -x.shape[-1]
    x = (x * signs(shape[-1], x.device)).unflatten(-1, (-1, size))
    stride = 1
    while stride < size:
        x = x.unflatten(-1, (-1, 2, stride))
        low, high = x.unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        stride *= 2
    return (x * size**-0.5).reshape(shape)
