"""Intervals of hidden queries per key, and the masks that loops write from their numbers."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

#: By columns and whether the mask is causal: the numbers of key `k` of `n`, in key head `h`.
NUMBERS = {
    (1, True): lambda k, n, h: [n if k < 3 else min(n, k + 40 + 9 * h)],
    (2, True): lambda k, n, h: [min(n, k + 25), min(n, k + 25 + (50 + 30 * h) * (k % 3))],
    (2, False): lambda k, n, h: [n - k // 4, (k // 2 + 7 * h) * (k % 5 > 0)],
    (4, False): lambda k, n, h: [n - k // 3, n - k // 6, k // 4, k // 2 + h],
}


def numbers_of(columns, causal, batch, heads, n):
    """startend_row_indices, int32 of (batch, heads, n, columns)."""
    of = NUMBERS[columns, causal]
    rows = [[[of(k, n, h + b) for k in range(n)] for h in range(heads)] for b in range(batch)]
    return torch.tensor(rows, dtype=torch.int32)


def seen_by(numbers, causal, heads, queries):
    """(batch, heads, queries, keys), a key and an interval at a time, as FlashMask has it (arXiv
    2410.01359, section 3)."""
    batch, of_heads, keys, columns = numbers.shape
    mask = torch.ones(batch, of_heads, queries, keys, dtype=torch.bool)
    for b in range(batch):
        for h in range(of_heads):
            for k, of_key in enumerate(numbers[b, h].tolist()):
                column = mask[b, h, :, k]
                if causal:
                    column[:k] = False
                    column[slice(*of_key) if columns == 2 else slice(of_key[0], None)] = False
                elif columns == 2:
                    column[of_key[0] :] = False
                    column[: of_key[1]] = False
                else:
                    column[of_key[0] : of_key[1]] = False
                    column[of_key[2] : of_key[3]] = False
    return mask.repeat_interleave(heads // of_heads, 1)
