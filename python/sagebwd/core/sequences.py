"""Packed sequences and padded batches: what says where sequences lie, and how long they are.

`packing` is (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), each a tensor or None.
"""

from itertools import pairwise

import torch

from sagebwd.core import options

NAMES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


def are_packed(packing):
    """Whether the tensors hold packed sequences. Wrong arguments raise SpecError or TypeError."""
    for name, t in zip(NAMES, packing):
        if t is not None and not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} is {options.a_kind(t)}; pass an int32 tensor on the GPU")
    first_q, first_k = packing[:2]
    if (first_q is None) != (first_k is None):
        raise options.SpecError("pass cu_seqlens_q and cu_seqlens_k, or neither")
    return first_q is not None


def told(packing, k_mean):
    """The operators' last arguments, usually none. TypeError for a mean that is not a tensor."""
    if k_mean is None:
        return packing if any(t is not None for t in packing) else ()
    if not isinstance(k_mean, torch.Tensor):
        raise TypeError(f"k_mean is {options.a_kind(k_mean)}; pass a float32 torch tensor, or None")
    return *packing, k_mean


def packing_and_mean(told):
    """The arguments of told(), without those that are None."""
    return (told[:-1], told[-1]) if len(told) > len(NAMES) else (told, None)


def as_batch(*tensors):
    """Tensors of packed sequences as those of a batch of one."""
    for t in tensors:
        if t is not None and t.dim() not in (2, 3):
            raise options.SpecError(
                f"a tensor has shape {tuple(t.shape)}; with cu_seqlens_q tensors are (tokens, "
                "heads, head_dim), and lse (heads, tokens)"
            )
    return [None if t is None else t[None] for t in tensors]


def with_mask(chosen, packing):
    """`options.with_mask` for calls with lengths on the device."""
    for first in (0, 2):
        pair, names = packing[first : first + 2], NAMES[first : first + 2]
        if options.needs_as_many(chosen) and pair[0] is not pair[1]:
            given = [name for name, t in zip(names, pair) if t is not None]
            what = (
                f"for {' and '.join(given)} that are two tensors" if len(given) == 2
                else f"with {given[0]} alone"
            )  # fmt: skip
            raise options.SpecError(
                f"causal=True is ambiguous {what}: pass one as both, causal='top-left' (key j is "
                "visible to query i iff j <= i), or 'bottom-right' as in flash-attention"
            )
    return options.with_mask(chosen, 1, 1)


def check_packing(problem, device, packing):
    """How many packed sequences there are, 0 where sequences are the batch's; SpecError for tensors
    that do not say where they lie.
    """
    given = dict(zip(NAMES, packing))
    for name, t in given.items():
        if t is None:
            continue
        if t.dim() != 1 or t.dtype != torch.int32 or t.device != device or t.stride(0) != 1:
            raise options.SpecError(
                f"{name} is {tuple(t.shape)} {t.dtype} on {t.device}; it must be contiguous "
                f"torch.int32 of one dimension on {device}"
            )
    first_q, first_k = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    if (first_q is None) != (first_k is None):
        raise options.SpecError("pass cu_seqlens_q and cu_seqlens_k, or neither")
    sequences = 0
    if first_q is not None:
        sequences = first_q.shape[0] - 1
        if first_k.shape != first_q.shape or sequences < 1:
            raise options.SpecError(
                f"cu_seqlens_q has {first_q.shape[0]} numbers and cu_seqlens_k {first_k.shape[0]}; "
                "both must have one more than there are sequences: where each begins, and the end"
            )
        if problem[0] != 1:
            raise options.SpecError(
                f"with cu_seqlens_q the tensors are (tokens, heads, head_dim), not a batch of "
                f"{problem[0]}"
            )
    for name in ("seqused_q", "seqused_k"):
        used = given.get(name)
        if used is not None and used.shape[0] != (sequences or problem[0]):
            raise options.SpecError(
                f"{name} has {used.shape[0]} numbers; there are {sequences or problem[0]} sequences"
            )
    return sequences


def spans(problem, packing):
    """(batch, queries, keys) of each sequence, two slices of tokens that lie within the tensors.

    Waits for the device.
    """
    first_q, first_k, used_q, used_k = (None if t is None else t.tolist() for t in packing)
    batch, _, _, *rooms = problem

    def of(first, used, room):
        ends = [(0, room)] * batch if first is None else list(pairwise(first))
        ends = [(min(max(a, 0), room), min(max(b, 0), room)) for a, b in ends]
        lengths = [max(0, b - a) for a, b in ends]
        if used is not None:
            lengths = [max(0, min(pair)) for pair in zip(lengths, used)]
        return [slice(a, a + length) for (a, _), length in zip(ends, lengths)]

    each = zip(of(first_q, used_q, rooms[0]), of(first_k, used_k, rooms[1]))
    return [(i if first_q is None else 0, *pair) for i, pair in enumerate(each)]
