"""Masks of pairs of a query and a key, as one number for each query and one for each key.

Two kinds of masks that hide keys are found in a dense one, whatever made it:

- nested: of any two queries, one sees all that the other sees. A query sees the keys that are seen
  as often as its rarest one. Padding, prefixes and causal masks are such, and a refiner's, in which
  tokens see each other and the others see the first one.
- disjoint: any two queries see the same keys, or none in common. A query sees the keys whose first
  query is that of one of its own. Documents are such, one behind the other or mixed.

A mask of 0 and 1 that is added to scores is a function of the score where it is a product.
"""

import torch

from sagebwd.masks.block_mask import block_mask
from sagebwd.masks.tracing import trace_mask, trace_score

#: Queries whose part of a mask is counted at a time.
ROWS = 1024


def said(seen, sizes):
    """The `BlockMask` of a mask for kernels, None where it is of neither kind. The host waits.

    Args:
        seen: bool of (batch or 1, queries, keys).
        sizes: (batch, heads, queries, keys) of the call.
    """
    found = [(text, *rows, _is(text, seen, *rows)) for text, rows in _candidates(seen)]
    for (text, key, query, _), same in zip(found, torch.stack([x[-1] for x in found]).tolist()):
        if same:
            mask = trace_mask(text, {"key": key, "query": query})
            return block_mask(mask, *sizes, device=seen.device)
    return None


def added_ones(mask):
    """The score function of a mask of 0 and 1 that is added to scores, as those are that diffusers'
    pipelines of Chroma and CogView4 hand over; None unless a number of each query times one of
    each key gives it. The host waits.

    Args:
        mask: a float tensor of (batch or 1, queries, keys).
    """
    of_query, of_key = mask.amax(2), mask.amax(1)
    is_product = mask == of_query[:, :, None] * of_key[:, None]
    if not bool((is_product & ((mask == 0) | (mask == 1))).all()):
        return None
    return trace_score("s + query[b, q] * key[b, k]", {"query": of_query, "key": of_key})


def _candidates(seen):
    """(text, (numbers of keys, numbers of queries)) of each kind, int32 of (batch or 1, tokens)."""
    queries = seen.shape[1]
    often = seen.sum(1, dtype=torch.int32)
    rarest = torch.cat([torch.where(rows, often[:, None], queries + 1).amin(2)
                        for rows in seen.split(ROWS, 1)], 1)  # fmt: skip
    yield "key[b, k] >= query[b, q]", (often, rarest)
    whole = seen.view(torch.uint8)
    first = whole.argmax(1).int()  # the first query that sees a key
    of_key = torch.where(often > 0, first, -1)
    of_query = torch.where(seen.any(2), first.gather(1, whole.argmax(2)), -2)
    yield "key[b, k] == query[b, q]", (of_key.int(), of_query.int())


def _is(text, seen, key, query):
    key, query = key[:, None], query[:, :, None]
    return (seen == (key >= query if ">=" in text else key == query)).all()
