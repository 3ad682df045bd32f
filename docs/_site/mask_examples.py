"""The masks that docs/use/masks.md shows: calls of sagebwd.masks, and whether query q sees key k.

The site draws them where there is no PyTorch. A test compares them with what the calls make.
"""

TOKENS = 16
MASKS = {
    "documents(lengths=[6, 10])": lambda q, k: k <= q and (q < 6) == (k < 6),
    "prefix_lm(5, 16)": lambda q, k: k <= q or k < 5,
    "shared_prefix(6, [5, 5])": lambda q, k: k <= q and (k < 6 or (q < 11) == (k < 11)),
    "tree([-1, 0, 1, 1, 0], lengths=[3, 3, 3, 3, 4])":
        lambda q, k: k <= q and not (3 <= k < 12 <= q) and not (6 <= k < 9 <= q),
    "spans(16, [(2, 6), (9, 14)])":
        lambda q, k: k <= q or any(a <= q < b and a <= k < b for a, b in ((2, 6), (9, 14))),
    "window_and_global(16, 3)": lambda q, k: q - 3 <= k <= q,
    "window_and_global(16, 3, 2, causal=False)":
        lambda q, k: abs(q - k) <= 3 or q < 2 or k < 2,
    "padding([11], 16)": lambda q, k: k < 11,
}  # fmt: skip
