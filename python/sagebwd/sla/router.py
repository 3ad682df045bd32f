"""Which blocks are listed: scores of pooled queries and keys, and the best of them."""

import math

import torch

from sagebwd.core import options
from sagebwd.core.keywords import known_keywords
from sagebwd.core.ops import no_autocast
from sagebwd.core.transforms import refuse_tangents, refuse_transforms
from sagebwd.lists import blocks
from sagebwd.lists.given import check_heads, check_tensor
from sagebwd.sla import always as always_listed
from sagebwd.sla.parts import alone, saved_tensors
from sagebwd.sla.route_kernels import best_blocks, best_by_sorting, block_sums, sums_of_both


def pooled(x, size):
    """The mean of each block of (batch, heads, tokens, channels), in FP32; and their tokens."""
    sums = block_sums(x, size)
    counts = block_tokens(x.shape[2], size, sums)
    return sums / counts, counts


def _compared(q, k, sizes):
    """(q, k, factor): pooled queries, and pooled keys less the mean of all keys, whose products are
    to be multiplied by the factor.

    If all blocks have as many tokens, a power of two, sums take the place of means: all that is
    computed from them has another exponent and the same bits, unless FP32 over- or underflows.
    """
    of_q, of_k = sums_of_both(q, k, sizes)
    factor = 1.0
    if _has_exact_mean(q.shape[2], sizes[0]):
        factor /= sizes[0]
    else:
        of_q = of_q / block_tokens(q.shape[2], sizes[0], of_q)
    if _has_exact_mean(k.shape[2], sizes[1]):
        return of_q, of_k - of_k.mean(2, keepdim=True), factor / sizes[1]
    counts = block_tokens(k.shape[2], sizes[1], of_k)
    of_k = of_k / counts
    return of_q, of_k - (of_k * counts).sum(2, keepdim=True) / max(1, k.shape[2]), factor


def _has_exact_mean(tokens, size):
    """Whether all blocks have as many tokens, and dividing by that changes exponents alone."""
    return tokens > 0 and tokens % size == 0 and size & (size - 1) == 0


def block_tokens(tokens, size, like):
    """How many tokens each block has, (blocks, 1)."""
    counts = like.new_full((blocks.count_of(tokens, size), 1), size)
    if tokens % size:
        counts[-1] = tokens % size
    return counts


@known_keywords({})
def pooled_block_scores(
    q, k, *, block_size=(128, 64), query_map=None, key_map=None, softmax_scale=None, layout="bhsd"
):
    """Scores of pairs of blocks, from the means of their queries and keys (SLA2, arXiv 2602.12675,
    Eq. 16 and Algorithm 2, without the softmax of line 8).

    Args:
        q: (batch, heads, queries, head_dim), of any floating type, on any device.
        k: (batch, heads_kv, keys, head_dim), where heads is a multiple of heads_kv. The mean of all
            keys is subtracted, which changes no order within a row.
        block_size: queries and keys of a block. The last blocks may be short: their mean is that of
            their tokens.
        query_map, key_map: (head_dim, head_dim), or (heads, head_dim, head_dim): what the learned
            router multiplies the means by, as torch.nn.Linear does with its weight. None means the
            identity.
        softmax_scale: the factor of the products. None means 1/sqrt(head_dim).
        layout: 'bhsd', or 'bshd' for (batch, tokens, heads, head_dim) tensors.

    Returns:
        FP32 (FP64 for q of FP64) of (batch, heads, query blocks, key blocks), differentiable in
        everything.

    Raises:
        SpecError (a ValueError), TypeError.
    """
    options.check_layout(layout)
    sizes = blocks.check_block_size(block_size, any_size=True)
    for name, t in (("q", q), ("k", k)):
        check_tensor(name, t)
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    check_heads(q, k)
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise options.SpecError(
            f"q of {tuple(q.shape)} and k of {tuple(k.shape)} do not belong together: pass one "
            "batch and one head_dim"
        )
    if q.device != k.device:
        raise options.SpecError(f"q is on {q.device} and k on {k.device}: move one of them")
    scale = options.check_softmax_scale(softmax_scale, q.shape[3])
    with no_autocast(q.device.type):
        of_q, of_k, factor = _compared(q, k, sizes)
        of_k = of_k.to(of_q.dtype)
        if q.shape[1] != k.shape[1]:
            of_k = of_k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        of_q = _mapped("query_map", of_q, query_map)
        of_k = _mapped("key_map", of_k, key_map)
        products = torch.bmm(of_q, of_k.mT)
        return products.mul_(scale * factor).unflatten(0, q.shape[:2])


def _mapped(name, x, weight):
    """(batch, heads, blocks, channels) by a map, as (batch heads, blocks, channels)."""
    if weight is None:
        return x.flatten(0, 1)
    channels = x.shape[3]
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{name} is {options.a_kind(weight)}; pass a torch tensor, or None")
    if not weight.is_floating_point() or weight.device != x.device:
        raise options.SpecError(f"{name} is {weight.dtype} on {weight.device}: pass floating "
                                f"numbers on {x.device}")  # fmt: skip
    if tuple(weight.shape) not in ((channels, channels), (x.shape[1], channels, channels)):
        raise options.SpecError(
            f"{name} has shape {tuple(weight.shape)}: pass ({channels}, {channels}), or "
            f"({x.shape[1]}, {channels}, {channels}) for a map per head"
        )
    weight = weight.to(x.dtype).mT
    if weight.dim() == 2:
        return torch.mm(x.flatten(0, 2), weight).unflatten(0, (x.shape[0] * x.shape[1], x.shape[2]))
    return (x @ weight).flatten(0, 1)


def _check_scores(scores):
    if not isinstance(scores, torch.Tensor):
        raise TypeError(f"scores is {options.a_kind(scores)}; pass a torch tensor")
    if not scores.is_floating_point() or scores.dim() < 1:
        raise options.SpecError(f"scores is {scores.dtype} of {tuple(scores.shape)}: pass floating "
                                "numbers of (..., key blocks)")  # fmt: skip


@torch.no_grad()
@known_keywords({"is_causal": "pass causal=, queries= and keys="})
def top_blocks(
    scores, density, *, causal=False, queries=None, keys=None, block_size=(128, 64), always=None
):
    """The best blocks of each row: bool, like `scores`, True for the `density` highest.

    In each row max(1, floor(density n)) of n blocks are True. Among equal scores the earlier block
    is taken, so that the same scores always give the same lists. NaN counts as the highest. A block
    of score -inf is never True, so that a row may have fewer. It has no gradient.

    Args:
        scores: (..., key blocks), as `pooled_block_scores` gives them.
        density: the share of the key blocks, above 0 and at most 1. The paper has 0.1, 0.05, 0.03.
        causal: as for the attention that takes the lists. Blocks that lie ahead of all queries of a
            row then count as -inf, and each row lists the best of the blocks that its first query
            sees, without which queries might see nothing. Otherwise blocks ahead may be listed.
        queries, keys: with causal, the numbers of tokens; block_size: those of a block.
        always: blocks that every row lists, whatever their scores, such as those of text tokens in
            a video model: bool of (key blocks,), or their numbers as a slice, range, list or tuple.
            They count among the `density`, which should be the share of them and more: the others
            are the best of the rest. Where they are more, rows list these alone, and with causal
            the best block that the first query sees.

    Raises SpecError and TypeError.
    """
    _check_scores(scores)
    sizes = blocks.check_block_size(block_size, any_size=True)
    if causal is False or causal == "none":
        return top_lists(scores, density, sizes, always)[0]
    kept, forced = _wanted(scores, density, always)
    scores = _without_those_ahead(scores, causal, queries, keys, sizes)
    if forced is not None:
        forced = forced | scores.isnan()
    return best_by_sorting(scores, kept, forced)


@torch.no_grad()
def top_lists(scores, density, sizes, always):
    """(mask, bits): `top_blocks`, and what `pack_blocks` gives of it where that costs nothing, or
    None."""
    return best_blocks(scores, *_wanted(scores, density, always), sizes)


def _wanted(scores, density, always):
    """How many blocks a row lists, and which in any case: bool of (key blocks,), or None."""
    count = scores.shape[-1]
    forced = always_listed.mask_of(always_listed.checked(always), count, scores.device)
    return blocks.kept_of(density, count), forced


def _without_those_ahead(scores, causal, queries, keys, block_size):
    """Scores of which those ahead of all queries of a row are -inf, and the best of those that the
    first query sees is NaN, which counts as the highest. No other is NaN."""
    if queries is None or keys is None:
        raise options.SpecError(f"causal={causal!r}: pass queries= and keys=, the numbers of "
                                "tokens, which say what lies ahead")  # fmt: skip
    queries, keys = options.whole_number("queries", queries), options.whole_number("keys", keys)
    sizes = blocks.check_block_size(block_size, any_size=True)
    shape = tuple(map(blocks.count_of, (queries, keys), sizes))
    if tuple(scores.shape[-2:]) != shape:
        raise options.SpecError(
            f"scores is of {tuple(scores.shape)}, and {queries} queries and {keys} keys have "
            f"{shape} blocks of {sizes}: pass the block_size of the scores, and the lengths of q "
            "and k"
        )
    corner = options.causal_name(causal, queries, keys)
    shift = keys - queries if corner == "bottom-right" else 0
    first_query = torch.arange(shape[0], device=scores.device)[:, None] * sizes[0]
    last_query = (first_query + sizes[0]).clamp(max=queries) - 1
    first_key = torch.arange(shape[1], device=scores.device) * sizes[1]
    scores = scores.masked_fill(first_key > last_query + shift, -math.inf)
    seen = first_key <= first_query + shift
    found, best = scores.masked_fill(~seen, -math.inf).max(-1, keepdim=True)
    scores = scores.masked_fill(scores.isnan(), math.inf)
    of_best = scores.gather(-1, best)
    return scores.scatter(-1, best, of_best.masked_fill(found != -math.inf, math.nan))


def soft_top_blocks(scores, density, temperature=0.1, *, always=None):
    """`top_blocks` with values from 0 to 1 and a gradient (SLA2, arXiv 2602.12675, section 4.2).

    sigmoid(scores / temperature + lambda), with the lambda of each row for which the row sums to as
    many blocks as `top_blocks` lists. As the temperature falls it becomes `top_blocks`. The
    gradient is exact: it contains that of lambda. A score of -inf gives 0. Unless every block is
    listed, a NaN makes its row NaN, and +inf may become NaN.

    Args:
        scores, density: as for `top_blocks`.
        temperature: a positive number.
        always: as for `top_blocks`. These blocks have 1, and no gradient.

    Returns values of the type of `scores`.

    Raises SpecError and TypeError.
    """
    _check_scores(scores)
    refuse_tangents(scores)
    refuse_transforms("soft_top_blocks")
    temperature = blocks.check_temperature(temperature)
    count, always = scores.shape[-1], always_listed.checked(always)
    kept = blocks.kept_of(density, count)
    forced = always_listed.mask_of(always, count, scores.device)
    if forced is None:
        return _soft(scores, kept, count, temperature)
    many = always_listed.how_many(always, count)
    rest = scores.masked_fill(forced, -math.inf)
    return _soft(rest, max(0, kept - many), count - many, temperature).masked_fill(forced, 1)


def _soft(scores, kept, count, temperature):
    """Rows that sum to `kept` of `count` blocks; there may be others, whose scores are -inf."""
    if kept not in (0, count):
        return _SoftTop.apply(scores, kept, temperature)
    every = torch.ones_like(scores, dtype=torch.bool)  # the gradient is 0
    listed = every & (scores != -math.inf) if kept else ~every
    return torch.where(every, listed.to(scores.dtype), scores)


class _SoftTop(torch.autograd.Function):
    """Rows of sigmoids with a given sum, and their gradient by the implicit function theorem."""

    @staticmethod
    def forward(ctx, scores, kept, temperature):
        with alone(scores.device):
            x = scores.double() / temperature
            best = x.topk(kept + 1).values
            least = x.masked_fill(x == -math.inf, math.inf).amin(-1, keepdim=True)
            last = torch.maximum(best[..., kept - 1 : kept], least)  # of those that shall be 1
            x -= last
            # The sigmoid of 40 is 1, and of -40 nothing beside 1. If the next is so far below,
            # lambda lies in the middle.
            next_one = (best[..., kept:] - last).clamp_min(-160)
            low, high = -40 - next_one, torch.full_like(last, 40)
            apart = low > high
            middle = (low + high) / 2
            low, high = torch.where(apart, middle, low), torch.where(apart, middle, high)
            for _ in range(56):
                middle = (low + high) / 2
                above = (x + middle).sigmoid_().sum(-1, keepdim=True) > kept
                low, high = torch.where(above, low, middle), torch.where(above, middle, high)
            m = (x + (low + high) / 2).sigmoid_()
        ctx.temperature = temperature
        soft = m.to(scores.dtype)
        ctx.save_for_backward(soft)
        return soft

    @staticmethod
    def backward(ctx, dm):
        (m,) = saved_tensors(ctx)
        slope = m * (1 - m)
        total = slope.sum(-1, keepdim=True)
        mean = (slope * dm).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1)
        return slope / ctx.temperature * (dm - mean), None, None
