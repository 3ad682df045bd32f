"""Masks that people train with, as intervals. All have as many queries as keys, except where a
function says otherwise. The numbers that they are made of are read on the host."""

from itertools import accumulate, pairwise

import torch

from sagebwd.core import options
from sagebwd.core.arguments.checks import SpecError, whole_number
from sagebwd.masks.intervals import Intervals
from sagebwd.masks.rows import (
    columns_of,
    device_of,
    matched,
    numbers_of,
    rows_of,
    token_count,
    tokens_of,
)


def _repeated(values, lengths):
    return torch.repeat_interleave(torch.tensor(values, dtype=torch.int32), torch.tensor(lengths))


def _corner(causal, queries=1, keys=1):
    """False, 'top-left' or 'bottom-right'; for as many queries as keys both corners are one."""
    name = options.causal_name(causal, queries, keys)
    return False if name == "none" else "top-left" if queries == keys else name


def documents(cu_seqlens=None, *, lengths=None, tokens=None, causal=True, device=None):
    """Documents one behind the other in a sequence: a token sees its own document alone.

    Args:
        cu_seqlens: where documents begin, from 0 on, and the end of the last one: a list or tensor
            of documents + 1 numbers, or one such list per sequence of the batch.
        lengths: in the place of cu_seqlens, how many tokens each document has, likewise.
        tokens: how many tokens a sequence has; None: as many as the documents. Tokens behind the
            last document are a further one.
        causal: as in `Intervals`: whether a token sees only those up to itself in its document.
        device: where the intervals are; None means where the given tensor is, or the CPU.

    Returns `Intervals` of (batch, 1, tokens, 1) if causal, else of 2 columns. Raises SpecError.
    """
    if (cu_seqlens is None) == (lengths is None):
        raise SpecError("pass either cu_seqlens or lengths=")
    if lengths is None:
        name, rows = "cu_seqlens", rows_of("cu_seqlens", cu_seqlens)
        for row in rows:
            if not row or row[0] != 0 or sorted(row) != row:
                raise SpecError(f"cu_seqlens={row}: pass numbers that begin with 0 and never "
                                "fall")  # fmt: skip
        rows = [[end - begin for begin, end in pairwise(row)] for row in rows]
    else:
        name, rows = "lengths", rows_of("lengths", lengths)
    causal, made = _corner(causal), []
    count = tokens_of(name, [sum(row) for row in rows], tokens)
    for row in rows:
        row = [*row, count - sum(row)]
        ends = list(accumulate(row))
        begins = [end - length for end, length in zip(ends, row)]
        made.append([_repeated(x, row) for x in ([ends] if causal else [ends, begins])])
    return Intervals(columns_of(made, device_of(device, cu_seqlens, lengths)), causal)


def prefix_lm(prefixes, tokens, *, device=None):
    """Causal text of which everybody sees a prefix: query q sees key k if k <= q or k < prefix.

    Args:
        prefixes: how many tokens the prefix has: a number, or one per sequence (a list or tensor).
        tokens: how many tokens a sequence has.
        device: where the intervals are; None means where the given tensor is, or the CPU.

    Returns `Intervals` of (batch, 1, tokens, 2), not causal. Raises SpecError.
    """
    tokens, rows = token_count("tokens", tokens), numbers_of("prefixes", prefixes)
    tokens_of("prefixes", rows, tokens)
    keys = torch.arange(tokens)
    made = [[torch.full_like(keys, tokens), keys * (keys >= prefix)] for prefix in rows]
    return Intervals(columns_of(made, device_of(device, prefixes)))


def shared_prefix(prefix, branches, *, tokens=None, device=None):
    """A prefix, such as a prompt, and branches of it, such as sampled answers, one behind the
    other: every branch sees the prefix and itself, causally, and no other branch.

    Positions (RoPE) of each branch go on from those of the prefix, which no mask says.

    Args:
        prefix: how many tokens the prefix has: a number, or one per sequence of the batch.
        branches: how many tokens each branch has: a list or tensor, or one per sequence.
        tokens: how many tokens a sequence has; None: as many as prefix and branches. Tokens behind
            the last branch are a document of their own.
        device: where the intervals are; None means where the given tensor is, or the CPU.

    Returns causal `Intervals` of (batch, 1, tokens, 1). Raises SpecError.
    """
    both = matched("prefix", numbers_of("prefix", prefix),
                   "branches", rows_of("branches", branches))  # fmt: skip
    used = [first + sum(row) for first, row in zip(*both)]
    count, made = tokens_of("a prefix with its branches", used, tokens), []
    for first, row, end in zip(*both, used):
        ends = list(accumulate(row, initial=first))[1:]
        made.append([_repeated([end, *ends, count], [first, *row, count - end])])
    return Intervals(columns_of(made, device_of(device, prefix, branches)), "top-left")


def spans(tokens, spans, *, device=None):
    """Causal text with spans, such as images, whose tokens all see each other: query q sees key k
    if k <= q or one span has both.

    Intervals can also say, by `Intervals` of four columns, that a span is hidden from one interval
    of later queries. They cannot say that it is hidden from two, such as from two later images
    with text between them that sees it: that needs an expression (`trace_mask`).

    Args:
        tokens: how many tokens a sequence has.
        spans: (begin, end) of each span, with begin <= end and none inside another: a list, or one
            such list per sequence of the batch.
        device: where the intervals are; None means where the given tensor is, or the CPU.

    Returns `Intervals` of (batch, 1, tokens, 2), not causal. Raises SpecError.
    """
    tokens, made = token_count("tokens", tokens), []
    for row in rows_of("spans", spans, depth=2):
        begins, last = torch.arange(tokens), 0
        pairs = all(isinstance(span, list) and len(span) == 2 for span in row)
        for begin, end in sorted(row) if pairs else [(0, -1)]:
            if not last <= begin <= end <= tokens:
                raise SpecError(f"spans={row}: pass (begin, end) pairs from 0 to {tokens} that do "
                                "not overlap")  # fmt: skip
            begins[begin:end] = begin
            last = end
        made.append([torch.full_like(begins, tokens), begins])
    return Intervals(columns_of(made, device_of(device, spans)))


def window_and_global(tokens, window, global_tokens=0, *, causal=True, device=None):
    """A sliding window, and first tokens that see all and that all see (Longformer, arXiv
    2004.05150, section 3.1): query q sees key k if |q - k| <= window, or if one of them is among
    the first `global_tokens`. A causal mask hides keys behind the query besides.

    Args:
        tokens: how many tokens a sequence has.
        window: how many keys before its own, and without causal behind its own, a query sees, as
            window_left= of `sagebwd.attention`.
        global_tokens: how many tokens at the beginning are global.
        causal: as in `Intervals`: whether the mask is also causal.
        device: where the intervals are; None means the CPU.

    Returns `Intervals` of (1, 1, tokens, columns): 1 column if causal, else 2, or 4 with global
    tokens. Raises SpecError.
    """
    tokens, window = token_count("tokens", tokens), whole_number("window", window, least=0)
    first = whole_number("global_tokens", global_tokens, least=0)
    tokens_of("global_tokens", [first], tokens)
    keys = torch.arange(tokens)
    below = (keys + window + 1).clamp(max=tokens).where(keys >= first, tokens)
    above = (keys - window).clamp(min=first).where(keys >= first, first)
    causal = _corner(causal)
    if causal:
        columns = [below]
    elif first:
        columns = [below, torch.full_like(keys, tokens), torch.full_like(keys, first), above]
    else:
        columns = [below, above]
    return Intervals(columns_of([columns], device), causal)


def padding(lengths, tokens, *, queries=None, causal=False, device=None):
    """Sequences of several lengths, padded at the end: no query sees a key of the padding.

    Queries of the padding see the sequence, so that their outputs are finite. Keys and values of the
    padding share scales and the mean with others, as all keys do: let them be finite and no larger
    than others, zeros say. `seqused_k` of `sagebwd.attention` reads none of them.

    Args:
        lengths: how many keys each sequence of the batch has: a list or tensor, or a number.
        tokens: how many keys there are with the padding.
        queries: how many queries there are; None: as many as keys.
        causal: as in `Intervals`.
        device: where the intervals are; None means where the given tensor is, or the CPU.

    Returns `Intervals` of (batch, 1, tokens, 1) if causal, else of 2 columns. Raises SpecError.
    """
    tokens, rows = token_count("tokens", tokens), numbers_of("lengths", lengths)
    tokens_of("lengths", rows, tokens)
    queries = tokens if queries is None else token_count("queries", queries)
    causal, keys = _corner(causal, queries, tokens), torch.arange(tokens)
    made = [[(keys < length) * queries, torch.zeros_like(keys)][: 1 if causal else 2]
            for length in rows]  # fmt: skip
    return Intervals(columns_of(made, device_of(device, lengths)), causal)
