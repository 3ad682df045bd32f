"""Masks as expressions, each beside a dense mask that is made without them, for tests on a GPU and
on a simulated one.

A case is a function of about how many tokens and of a device. It gives the mask, as attention takes
it, and which keys queries see: bool of (batch or 1, heads or 1, queries, keys). A batch is of 2
sequences and 4 heads.
"""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from alike import results  # noqa: E402, F401

from sagebwd import masks  # noqa: E402

BATCH, HEADS, HEADS_KV = 2, 4, 2


def _none(queries, keys, batch=1, heads=1):
    return torch.zeros(batch, heads, queries, keys, dtype=torch.bool)


def _ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def window(n, device):
    seen = torch.ones(1, 1, n, n, dtype=torch.bool).tril().triu(-(n // 6))
    return f"q >= k & q - k <= {n // 6}", seen


def windows_of_heads(n, device):
    widths = [1, n // 9, n // 4, n]
    seen = torch.cat([torch.ones(1, 1, n, n, dtype=torch.bool).tril().triu(-width)
                      for width in widths], 1)  # fmt: skip
    width = masks.operand("width", _ints(widths, device))
    return masks.trace_mask(lambda b, h, q, k: (q >= k) & (q - k <= width[h])), seen


def documents(n, device):
    """Each sequence has another number of documents."""
    lengths = [n // 4, n // 2, n - n // 4 - n // 2], [n // 3, n - n // 3]
    seen = _none(n, n, BATCH)
    for mask, row in zip(seen[:, 0], lengths):
        first = 0
        for length in row:
            mask[first : first + length, first : first + length] = True
            first += length
    of = [[i for i, length in enumerate(row) for _ in range(length)] for row in lengths]
    return masks.trace_mask("doc[b, q] == doc[b, k]", {"doc": _ints(of, device)}), seen


def prefix_lm(n, device):
    prefixes = [n // 3, n // 7]
    seen = torch.ones(1, 1, n, n, dtype=torch.bool).tril().repeat(BATCH, 1, 1, 1)
    for mask, prefix in zip(seen, prefixes):
        mask[..., :prefix] = True
    prefix = masks.operand("prefix", _ints(prefixes, device))
    return masks.trace_mask(lambda b, h, q, k: (q >= k) | (k < prefix[b])), seen


def block_diffusion(n, device):
    """Noised tokens, then the same clean ones: a block of noise sees itself and the clean blocks
    before it, and a clean block the clean ones up to itself (arXiv 2503.09573, section 3.1)."""
    half, size = n // 2, max(5, n // 12)
    seen = _none(2 * half, 2 * half)
    for first in range(0, half, size):
        end = min(first + size, half)
        seen[..., first:end, first:end] = True
        seen[..., first:end, half : half + first] = True
        seen[..., half + first : half + end, half : half + end] = True

    def sees(b, h, q, k):
        block_q = masks.where(q >= half, q - half, q) // size
        block_k = masks.where(k >= half, k - half, k) // size
        noised = (q < half) & (k < half) & (block_q == block_k)
        before = (q < half) & (k >= half) & (block_k < block_q)
        clean = (q >= half) & (k >= half) & (block_k <= block_q)
        return noised | before | clean

    return sees, seen


def natten(n, device):
    """The pixels of an image see windows of 7 x 7 around them, which stay inside of the image."""
    width, radius = 23, 3
    height = max(7, n // width)
    tokens = height * width
    seen = _none(tokens, tokens).view(height, width, height, width)
    for y in range(height):
        for x in range(width):
            top = min(max(y - radius, 0), height - 7)
            left = min(max(x - radius, 0), width - 7)
            seen[y, x, top : top + 7, left : left + 7] = True

    def sees(b, h, q, k):
        def near(of_query, of_key, size):
            middle = masks.minimum(masks.maximum(of_query, radius), size - 1 - radius)
            return abs(middle - of_key) <= radius

        return near(q // width, k // width, height) & near(q % width, k % width, width)

    return sees, seen.view(1, 1, tokens, tokens)


def flamingo(n, device):
    """Text sees the last image before it, and before the first one nothing (arXiv 2204.14198,
    section 2.4). There are fewer keys than queries."""
    images, size = 5, max(9, n // 7)
    places = [[n // 11, n // 3, n // 2, n // 2 + 7, n - n // 6], [0, 3, n // 5, n // 4, n // 2]]
    seen = _none(n, images * size, BATCH)
    last = torch.full((BATCH, n), -1, dtype=torch.int32)
    for b, row in enumerate(places):
        for image, place in enumerate(row):
            last[b, place:] = image
        for q in range(n):
            if (image := sum(place <= q for place in row) - 1) >= 0:
                seen[b, 0, q, image * size : (image + 1) * size] = True
    image = masks.operand("image", last.to(device))
    return masks.trace_mask(lambda b, h, q, k: image[b, q] == k // size), seen


def sliding_tiles(n, device):
    """Tiles of 16 tokens in rows of 5 see 3 x 3 tiles around them (arXiv 2502.04507)."""
    rows, columns, size = max(1, n // 80), 5, 16
    tokens = rows * columns * size
    seen = _none(tokens, tokens).view(rows, columns, size, rows, columns, size)
    for y in range(rows):
        for x in range(columns):
            seen[y, x, :, max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2] = True

    def sees(b, h, q, k):
        y, x = (q // size // columns, q // size % columns)
        down, right = (k // size // columns, k // size % columns)
        return (abs(y - down) <= 1) & (abs(x - right) <= 1)

    return masks.trace_mask(sees), seen.reshape(1, 1, tokens, tokens)


def jagged(n, device):
    """Sequences of several lengths, and nothing else: queries behind the last see nothing."""
    lengths = [n - 1, n // 2 + 3]
    seen = _none(n, n, BATCH)
    for mask, length in zip(seen, lengths):
        mask[..., :length, :length] = True
    mask = masks.trace_mask("q < length[b] & k < length[b]", {"length": _ints(lengths, device)})
    return mask, seen


CASES = {case.__name__: case for case in (
    window, windows_of_heads, documents, prefix_lm, block_diffusion, natten, flamingo,
    sliding_tiles, jagged)}  # fmt: skip


def inputs(seen, device, channels=128, dtype=torch.bfloat16, seed=0):
    """q, k, v, which take gradients, and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(seed)
    queries, keys = seen.shape[2:]
    sizes = (HEADS, queries), (HEADS_KV, keys), (HEADS_KV, keys), (HEADS, queries)
    q, k, v, dout = (
        torch.randn(BATCH, *size, channels, device=device, generator=generator).to(dtype)
        for size in sizes
    )
    return [t.requires_grad_() for t in (q, k, v)], dout


def exact(leaves, dout, seen):
    """(lse, [out and gradients]) in FP64; 0 and -inf for queries that see nothing."""
    leaves = [t.detach().double().requires_grad_() for t in leaves]
    q, k, v = leaves
    k, v = (t.repeat_interleave(HEADS // HEADS_KV, 1) for t in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ v
    gradients = torch.autograd.grad(out, leaves, dout.double())
    return scores.logsumexp(-1).detach(), [out.detach(), *gradients]


def assert_near(found, right, limit=0.03):
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, right):
        off = float((x.double() - y).norm() / y.norm())
        assert off < limit, f"{name} is off by {off}"  # NaN, too
