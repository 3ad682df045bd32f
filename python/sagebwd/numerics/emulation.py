"""`sagebwd.attention` in plain PyTorch, on any device, with any of the products in INT8.

It does what kernels cannot: negative controls in training (dP in INT8, no smoothing of K), the
error of one product at a time, machines without a GPU. The numerics are in numerics.py.
"""

import contextlib
import dataclasses

from sagebwd.core.compat import need

torch = need("torch", "sagebwd.emulation")

from sagebwd.core import forms, keywords, options, results, sequences, watching  # noqa: E402
from sagebwd.core.arguments import checks  # noqa: E402
from sagebwd.core.arguments.shapes import check_intervals  # noqa: E402
from sagebwd.core.arguments.tensors import check_k_mean  # noqa: E402
from sagebwd.core.compat import not_compiled  # noqa: E402
from sagebwd.core.keywords import also_named  # noqa: E402
from sagebwd.core.ops import (  # noqa: E402
    Differentiable,
    DifferentiatedOnce,
    as_autocast_wants,
    no_autocast,
    problem_of,
)  # noqa: E402
from sagebwd.core.transforms import refuse_batches, refuse_gradient  # noqa: E402
from sagebwd.lists import block_sparse, blocks  # noqa: E402
from sagebwd.numerics import expressions, float32, specs  # noqa: E402
from sagebwd.numerics.numerics import Rules, backward_chunk, forward_chunk  # noqa: E402

__all__ = ["emulated_attention", "emulated_backward", "emulated_block_sparse_attention",
           "emulated_forward"]  # fmt: skip

# `precision` takes more here, and PyTorch's operations have no order to fix and no sums in memory.
_NOT_HERE = ("precision", "deterministic", "dq_sums", "gradient_kernels")

#: Elements of one (queries x keys) matrix that are computed at once; about ten exist at a time.
CHUNK_ELEMENTS = 1 << 24


@contextlib.contextmanager
def full_precision(device):
    """No autocast and no TF32 while the emulation computes."""
    with float32.exact_products(), no_autocast(device.type):
        yield


def grouped(heads_kv, *tensors):
    """(B, H, ...) tensors as (B * Hk, H / Hk, ...)."""
    return [None if t is None else t.unflatten(1, (heads_kv, -1)).flatten(0, 1) for t in tensors]


def chunks(q, k):
    """Slices of grouped heads, each with at most CHUNK_ELEMENTS scores (or one group)."""
    each = q.shape[1] * q.shape[2] * k.shape[2]
    step = max(1, CHUNK_ELEMENTS // max(1, each))
    return [slice(i, i + step) for i in range(0, max(1, q.shape[0]), step)]


def by_chunks(function, heads_kv, *tensors):
    """`function(q, k, ...)`, for a few grouped heads at a time, so that memory stays bounded.

    Takes (B, H, ...) tensors or None, and returns the function's results in this shape.
    """
    tensors = grouped(heads_kv, *tensors)

    def whole(parts):
        groups, *rest = parts[0].shape[1:]
        out = parts[0].new_empty(tensors[0].shape[0] // heads_kv, heads_kv * groups, *rest)
        torch.cat(parts, out=grouped(heads_kv, out)[0])  # no view: it may be changed in place
        return out

    with torch.no_grad(), full_precision(tensors[0].device):
        parts = chunks(*tensors[:2])
        results = [function(*(t if t is None else t[part] for t in tensors)) for part in parts]
        return [whole(parts) for parts in zip(*results)]


def forward(q, k, v, rules, k_mean=None, listed=None, tables=None, *packing, sequence=0):
    """(out, lse, max_logits) of (B, H, M, D) and (B, Hk, N, D) tensors; out in `rules.dtype`.

    `listed` says which keys a query sees beside the mask: (B, H, M, N) of lists, or intervals of
    (B, Hk, N, columns); None means all. `tables` has what the expressions of `rules` index.
    `packing` says where sequences lie, and each is computed by itself, as the one that expressions
    call b, or `sequence`. Tokens outside all of them have zeros in out, and -inf in lse.
    """
    if packing:
        out, lse, largest = _nothing(q, v)
        for i, queries, keys, mean in _each_sequence(q, k, k_mean, packing):
            out[queries], lse[queries], found = forward(q[queries], k[keys], v[keys], rules, mean,
                                                        sequence=i)  # fmt: skip
            largest = torch.maximum(largest, found)
        return out, lse, largest
    if q.numel() == 0 or k.numel() == 0:
        return _nothing(q, v)

    def rounded(q, k, v, k_mean, listed, at):
        expressed = expressions.expressed(rules.expressions, tables, at)
        out, lse, largest = forward_chunk(q, k, v, rules, k_mean, listed, expressed)
        return out.to(rules.dtype), lse.float(), largest.float()

    out, lse, largest = by_chunks(rounded, k.shape[1], q, k, v, _beside_keys(k_mean), listed,
                                  expressions.heads_of(q, sequence))  # fmt: skip
    return out, lse, largest.amax((0, 2))


def _nothing(q, v):
    """(out, lse, max_logits) of queries that see no key."""
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    unseen = (q.new_full(shape, -torch.inf, dtype=torch.float32)
              for shape in (q.shape[:3], q.shape[1:2]))  # fmt: skip
    return out, *unseen


def _each_sequence(q, k, k_mean, packing):
    """(number, queries, keys, its mean of k) of each sequence: where they lie in (B, H, S, ...)
    tensors."""
    problem = *q.shape[:2], k.shape[1], q.shape[2], k.shape[2]
    for i, (b, *tokens) in enumerate(sequences.spans(problem, packing)):
        queries, keys = ((slice(b, b + 1), slice(None), part) for part in tokens)
        yield i, queries, keys, None if k_mean is None else k_mean[i : i + 1]


def _beside_keys(k_mean):
    """(B, Hk, D) as (B, Hk, 1, D)."""
    return None if k_mean is None else k_mean[:, :, None]


def backward(dout, q, k, v, out, lse, dlse, rules, k_mean=None, listed=None, tables=None,
             *packing, sequence=0):  # fmt: skip
    """(dq, dk, dv) in `rules.dtype`; the arguments are those of `forward`."""
    if packing:
        dq, dk, dv = (t.new_zeros(t.shape) for t in (q, k, v))
        for i, queries, keys, mean in _each_sequence(q, k, k_mean, packing):
            rows = lse[queries], None if dlse is None else dlse[queries]
            dq[queries], dk[keys], dv[keys] = backward(
                dout[queries], q[queries], k[keys], v[keys], out[queries], *rows, rules, mean,
                sequence=i,
            )  # fmt: skip
        return [dq, dk, dv]
    if q.numel() == 0 or k.numel() == 0:
        return [t.new_zeros(t.shape) for t in (q, k, v)]

    def rounded(*chunk):
        *tensors, k_mean, listed, at = chunk
        expressed = expressions.expressed(rules.expressions, tables, at)
        gradients = backward_chunk(*tensors, rules, k_mean, listed, expressed)[:3]
        return [gradient.to(rules.dtype) for gradient in gradients]

    at = expressions.heads_of(q, sequence)
    tensors = q, k, v, out, lse, dout, dlse, _beside_keys(k_mean), listed, at
    return by_chunks(rounded, k.shape[1], *tensors)


def _watched_backward(*arguments):
    """The gradients, of which watchers hear."""
    gradients = backward(*arguments)
    if watching.watchers and gradients[0].numel():
        *tensors, rules, k_mean = arguments[:9]
        listed, tables, *packing = arguments[9:]
        form = _form_of(*tensors[1:4], rules, listed)
        if form.has_intervals:
            packing = None, listed  # as the kernels tell of theirs
        elif rules.expressions is not None and not packing:
            packing = expressions.as_kernels_tell(rules.expressions, tables)
        watching.backward_ran(form, *tensors, *gradients, packing, k_mean)
    return tuple(gradients)


_not_compiled = not_compiled("sagebwd.emulation", ", or use sagebwd.attention on a GPU")


@_not_compiled  # by compiled autograd
def _gradients(*arguments):
    refuse_batches(arguments[0], arguments[6])
    return DifferentiatedOnce.apply(_watched_backward, *arguments)


@dataclasses.dataclass(frozen=True)
class Emulated:
    """Watchers hear this of a call, as they hear a `forms.Form` of one of the kernels."""

    shapes: tuple  #: of q, k and v, which are (B, H, M, D) and (B, Hk, N, D)
    rules: Rules
    has_lists: bool
    has_intervals: bool


def _form_of(q, k, v, rules, listed=None):
    has_intervals = listed is not None and listed.dtype == torch.int32
    return Emulated((tuple(q.shape), tuple(k.shape), tuple(v.shape)), rules,
                    listed is not None and not has_intervals, has_intervals)  # fmt: skip


@_not_compiled
@also_named(plan="precision")
@options.takes(but=_NOT_HERE, otherwise=keywords.WITHOUT_KERNELS)
def emulated_attention(
    q, k, v, *, softmax_scale=None, layout="bhsd", precision="six-of-seven", return_lse=False,
    return_max_logits=False, math_dtype=torch.float32, k_mean=None, cu_seqlens_q=None,
    cu_seqlens_k=None, seqused_q=None, seqused_k=None, startend_row_indices=None, mask=None,
    score=None, chosen,
):  # fmt: skip
    """`sagebwd.attention` by PyTorch's own operations: slow, on any device, differentiable once.

    These arguments take more than those of `sagebwd.attention`:
        precision: a precision, or any collection of INT8 products: 's' (S = tau Q K^T), 'pv'
            (O = P V), 'dv' (dV = P^T dO), 'dp' (dP = dO V^T), 'dq' (dQ = tau dS K), 'dk'
            (dK = tau dS^T Q). The others use 16-bit operands.
        group_q, group_kv: any positive numbers of tokens.
        math_dtype: torch.float32, as in the kernels, or torch.float64.

    Shapes, dtypes and results are those of `sagebwd.attention`. Packed sequences and padded batches
    are computed one by one. Any head dimension works, and so do combinations of options without
    kernels. Score functions are evaluated in FP64, without the error of a GPU's tanh. A tensor that
    a score indexes gets no gradient here, and raises an error if it requires grad. Memory: about
    ten matrices of CHUNK_ELEMENTS elements, or of the queries x keys of one key head if that is
    more, and with a score about as many again in FP64. Raises SpecError, and TypeError for what is
    no tensor, mask or score.
    """
    wanted = return_lse, return_max_logits
    results.check_wanted(*wanted)
    q, k, v = _inputs(q, k, v)
    chosen |= dict(softmax_scale=softmax_scale, precision=precision, math_dtype=math_dtype)
    packing = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    beside = startend_row_indices, mask, score
    if any(t is not None for t in packing):
        found = _by_sequences(q, k, v, layout, k_mean, packing, beside, chosen)
        return results.of_all(*found, *wanted)
    rules, q, k, v, *more = _told(q, k, v, layout, k_mean, beside, chosen)
    out, *rest = _differentiable(q, k, v, rules, k_mean, *more)
    return results.of_all(*swapped(layout, out), *rest, *wanted)


def _told(q, k, v, layout, k_mean, beside, given):
    """(rules, q, k, v, intervals, tables) of a call, in the emulation's layout. `beside`: its
    startend_row_indices, mask and score."""
    problem = problem_of(q, k, v, layout)
    intervals, *of_scores = beside
    expressions.refuse_gradients(of_scores[1])
    of_call, tables = expressions.told(*of_scores, problem, q.device, k_mean, intervals=intervals)
    columns, hidden = intervals_of(intervals, *swapped(layout, q, k))
    rules = emulation_rules(q, k, v, layout=layout, intervals=columns, expressions=of_call,
                            **given)  # fmt: skip
    q, k, v = swapped(layout, q, k, v)
    _check_mean(k_mean, k, rules)
    return rules, q, k, v, hidden, tables


def intervals_of(intervals, q, k):
    """How many columns startend_row_indices has, and its numbers as (B, Hk, N, columns); (0, None)
    for None. q and k are (B, H, M, D) and (B, Hk, N, D). Raises SpecError and TypeError."""
    problem = *q.shape[:2], *k.shape[1:2], q.shape[2], k.shape[2]
    columns = check_intervals(intervals, problem)
    if not columns:
        return 0, None
    if not isinstance(intervals, torch.Tensor):
        raise TypeError(f"startend_row_indices is {checks.a_kind(intervals)}; pass a torch tensor")
    if intervals.device != q.device:
        raise options.SpecError(f"startend_row_indices is on {intervals.device} and q on "
                                f"{q.device}: move it")  # fmt: skip
    return columns, forms.saveable(intervals).expand(q.shape[0], k.shape[1], -1, -1)


def _differentiable(q, k, v, rules, k_mean, *more):
    """(out, lse, max_logits). It tells watchers that the call ran."""
    refuse_gradient(k_mean)
    if watching.watchers:
        watching.forward_ran(_form_of(q, k, v, rules, *more[:1]))
    return Differentiable.apply(forward, _gradients, q, k, v, rules, k_mean, *more)


def _inputs(q, k, v, kernels="sagebwd.attention"):
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} is {checks.a_kind(t)}; pass a torch tensor")
        if t.is_meta:
            raise options.SpecError(
                f"{name} is on {t.device}, where nothing is computed; pass tensors of another "
                f"device, or call {kernels}, which takes meta tensors"
            )
    return as_autocast_wants(q.device.type, q, k, v)


@_not_compiled
@also_named(plan="precision")
@options.takes(but=keywords.NOT_EMULATED_WITH_LISTS,
               otherwise=keywords.WITH_LISTS | keywords.WITHOUT_KERNELS)  # fmt: skip
def emulated_block_sparse_attention(
    q, k, v, *, block_mask=None, block_indices=None, block_counts=None, block_bits=None,
    block_size=(128, 64), softmax_scale=None, layout="bhsd", precision="six-of-seven",
    return_lse=False, return_max_logits=False, math_dtype=torch.float32, chosen,
):  # fmt: skip
    """`sagebwd.block_sparse_attention` by PyTorch's own operations, as `emulated_attention` is
    `attention`: on any device, slow, with any of the products in INT8.

    precision and math_dtype take what they take there. Memory: what `emulated_attention` takes, and
    a byte for each query and key of all heads.
    """
    results.check_wanted(return_lse, return_max_logits)
    sizes = blocks.check_block_size(block_size)
    q, k, v = _inputs(q, k, v, "sagebwd.block_sparse_attention")
    bits = block_sparse.bits_of(
        q, k, v, layout, sizes, None, block_mask, block_indices, block_counts, block_bits
    )
    chosen |= dict(softmax_scale=softmax_scale, precision=precision, math_dtype=math_dtype)
    rules = emulation_rules(q, k, v, layout=layout, block_size=sizes, **chosen)
    q, k, v = swapped(layout, q, k, v)
    listed, wrong = block_sparse.tokens_of(bits, q, k, sizes)
    out, lse, largest = _differentiable(q, k, v, rules, None, listed, None)
    out, lse = out.masked_fill(wrong[..., None], torch.nan), lse.masked_fill(wrong, torch.nan)
    largest = largest.masked_fill(wrong.any(-1).any(0), torch.nan)
    return results.of_all(*swapped(layout, out), lse, largest, return_lse, return_max_logits)


def _check_mean(k_mean, k, rules):
    """`check_k_mean` for keys of (B, Hk, N, D)."""
    check_k_mean(k_mean, (*k.shape[:2], k.shape[3]), k.device, rules.smooth_k)


def _by_sequences(q, k, v, layout, k_mean, packing, beside, chosen):
    """The results, one sequence after the other; zero and -inf for tokens of no sequence."""
    options.check_layout(layout)
    intervals, *of_scores = beside
    of_call, _ = expressions.told(*of_scores, None, q.device, k_mean, packing, intervals)
    packed = sequences.are_packed(packing)
    chosen = sequences.with_mask(chosen, packing)
    if packed:
        q, k, v = sequences.as_batch(q, k, v)
        layout = "bshd"
    problem = problem_of(q, k, v, layout)
    count = sequences.check_packing(problem, q.device, packing) or problem[0]
    rules = emulation_rules(q, k, v, layout=layout, expressions=of_call, **chosen)
    check_k_mean(k_mean, (count, problem[2], k.shape[3]), k.device, rules.smooth_k)
    tensors = swapped(layout, q, k, v)
    out, lse, largest = _differentiable(*tensors, rules, k_mean, None, None, *packing)
    (out,) = swapped(layout, out)
    return (out[0], lse[0], largest) if packed else (out, lse, largest)


@_not_compiled
def emulated_forward(
    q, k, v, *, layout="bhsd", k_mean=None, startend_row_indices=None, mask=None, score=None,
    **given,
):  # fmt: skip
    """(out, lse) as from `sagebwd.attention_forward`, with the options of `emulated_attention`."""
    beside = startend_row_indices, mask, score
    rules, q, k, v, *more = _told(q, k, v, layout, k_mean, beside, given)
    out, lse, _ = forward(q, k, v, rules, k_mean, *more)
    return swapped(layout, out)[0], lse


@_not_compiled
def emulated_backward(
    dout, q, k, v, out, lse, *, dlse=None, layout="bhsd", k_mean=None, startend_row_indices=None,
    mask=None, score=None, **given,
):  # fmt: skip
    """[dq, dk, dv] as from `sagebwd.attention_backward`; the options of `emulated_attention`."""
    beside = startend_row_indices, mask, score
    rules, q, k, v, *more = _told(q, k, v, layout, k_mean, beside, given)
    dout, out = swapped(layout, dout, out)
    return swapped(layout, *backward(dout, q, k, v, out, lse, dlse, rules, k_mean, *more))


@also_named(plan="precision")
@options.takes(but=_NOT_HERE, otherwise=keywords.WITHOUT_KERNELS)
def emulation_rules(
    q, k, v, *, layout="bhsd", softmax_scale=None, precision="six-of-seven",
    math_dtype=torch.float32, block_size=(0, 0), intervals=0, expressions=None, chosen,
):  # fmt: skip
    """The `Rules` of these tensors under these options; raises SpecError. `expressions` are the
    `Expressions` of the call's mask and score, or None.

    Groups may have any size; by default they are those of the kernels.
    """
    problem_of(q, k, v, layout)
    if math_dtype not in (torch.float32, torch.float64):
        raise options.SpecError(f"math_dtype={math_dtype}: pass torch.float32 or torch.float64")
    q, k = swapped(layout, q, k)
    given = {name: chosen.pop(name) for name in ("group_q", "group_kv")}
    nearest = dict(head_dim=options.width_of(q.shape[3]), precision=precision,
                   sparse_q=block_size[0], sparse_kv=block_size[1],
                   intervals=intervals)  # fmt: skip
    if expressions is not None:
        nearest |= dict(mask=expressions.mask, score=expressions.score)
    kernels, plan = specs.emulated_spec({**chosen, **nearest}, q, k)
    groups = {name: getattr(kernels, name) if size is None else options.whole_number(name, size)
              for name, size in given.items()}  # fmt: skip
    chosen = options.with_mask(chosen, q.shape[2], k.shape[2]) | {"sink_keys": kernels.sink_keys}
    mask, scale = options.Mask.among(chosen), options.check_softmax_scale(softmax_scale, q.shape[3])
    return Rules(mask, scale, plan=plan, dtype=q.dtype, math=math_dtype, expressions=expressions,
                 **groups, **chosen)  # fmt: skip


def swapped(layout, *tensors):
    """Converts between (B, H, S, D) and the layout, in both directions."""
    return [t.transpose(1, 2) for t in tensors] if layout == "bshd" else list(tensors)
