"""`sagebwd.attention`, and its forward and backward separately, on torch tensors."""

import torch

from sagebwd.core import (
    combining,
    direct,
    direct_masks,
    expressions,
    fastest,
    forms,
    interval_ops,
    mask_ops,
    max_logits,
    ops,
    options,
    results,
    sequences,
    table_gradients,
)
from sagebwd.core.arguments.tensors import assume_equal
from sagebwd.core.building import local_arch
from sagebwd.core.front_end import has_direct_front_end


@options.takes(
    shortcut=direct.attention, prepare=direct_masks.trace_functions, fastest=fastest.of_q()
)
@has_direct_front_end
def attention(
    q, k, v, *, softmax_scale=None, layout="bhsd", return_lse=False, return_max_logits=False,
    sink_logits=None, k_mean=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
    seqused_k=None, startend_row_indices=None, mask=None, score=None, chosen,
):  # fmt: skip
    """softmax(softmax_scale q k^T) v with INT8 matrix products, forward and backward.

    SageBwd (arXiv 2603.02170, Algorithms 1 and 2): of the seven products of attention and its
    gradients, all except dP = dO V^T are INT8 by default. The arguments are in seven groups:

    - Tensors: q, k, v, softmax_scale, layout, return_lse, return_max_logits.
    - Mask: causal, window_left, window_right, startend_row_indices, mask, sink_logits.
    - Scores: score.
    - Layer: q_norm, k_norm, norm_eps, q_inv_rms, k_inv_rms, rope, rope_k, rope_style,
      rope_begin, gate, recompute_qk.
    - Precision: precision, deterministic.
    - Sequences: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k.
    - Advanced: granularity, group_q, group_kv, sink_keys, smooth_k, smooth_q, smooth_v, rotate,
      dq_sums, dp_sums, gradient_kernels, k_mean.

    Args:
        q: (batch, heads, queries, head_dim), bfloat16 or float16, on a CUDA GPU. It may be a view
            whose last dimension is contiguous and whose other strides and address are multiples of
            16 bytes. Under torch.autocast inputs are cast to its dtype.
        k, v: (batch, heads_kv, keys, head_dim), of the same dtype. heads must be a multiple of
            heads_kv: query head h reads key head h // (heads // heads_kv). If head_dim is not 64,
            128, 256 or 512, v may have fewer channels, a multiple of 8 from 32 on; so has out.
        softmax_scale: a number of either sign, or 0; None means 1/sqrt(head_dim).
        layout: 'bhsd', or 'bshd' for (batch, tokens, heads, head_dim) tensors.
        {options}
        return_lse: also return the log-sum-exp.
        return_max_logits: also return the largest score of each head, which `qk_clip_` takes.
        sink_logits: (heads,), a learned logit per head that takes part in the softmax, as in
            gpt-oss. It receives gradients. The result is that of `with_sink`.
        k_mean: float32 of (batch, heads_kv, head_dim), or of (sequences, heads_kv, head_dim) for
            packed sequences, in either layout. smooth_k subtracts it from the keys instead of
            their mean, for example one mean for all parts of the keys (see `attention_backward`).
            It only changes roundings, and less if it is near the mean. It gets no gradient.
        cu_seqlens_q, cu_seqlens_k: int32 of (sequences + 1) on the GPU, for packed sequences as in
            flash-attention: where each sequence begins, and where the last one ends. q is then
            (tokens, heads, head_dim), k and v are (tokens, heads_kv, head_dim), with strides of
            multiples of 16 bytes. The lengths are read when the kernels run, so a captured CUDA
            graph can be replayed with others, including zero. They cannot be checked: sequences
            are cut off at the ends of the tensors. Each sequence gives the same bits as alone.
            causal=True requires one tensor for both, and granularity must be 'row'.
        seqused_q, seqused_k: int32 of (batch,) or (sequences,) on the GPU, or None: how many tokens
            of each sequence are used, counted from its first, as a padding mask says. For the
            others out and gradients are zero. 'bottom-right' and windows without a causal mask
            count from the last used token.
        startend_row_indices: int32 of (batch or 1, heads_kv or 1, keys, columns) on the GPU, or
            None: for each key the queries that do not see it, beside a causal mask (FlashMask,
            arXiv 2410.01359, section 4; `sagebwd.masks` makes them). With a causal mask those from
            the number on (1 column), or from the first to before the second (2); without one those
            from the first on and those before the second (2), or two such ranges (4). The numbers
            are read when the kernels run, so a captured CUDA graph can be replayed with others.
            Blocks of scores that nobody sees are skipped. They have no gradient. There are no
            windows, packed sequences, smooth_q, sink_keys and k_mean with them.
        mask: which keys a query sees, beside a causal mask: a function of (b, h, q, k), which are
            the batch, the query head and the positions of query and key; its text, such as
            'q >= k & q - k < 512'; or what `sagebwd.masks.trace_mask` or `from_flex` gives, which
            may index int32 tensors. Kernels are compiled for the text, and read tensors when they
            run. The device finds the blocks of scores that nobody sees, which are skipped: in each
            call, or once in a `sagebwd.masks.block_mask`, which several calls may be given. What
            excludes startend_row_indices excludes a mask, too.
        score: what becomes of a scaled score before the softmax: a function of (s, b, h, q, k); its
            text, such as '50.0 * tanh(s / 50.0)'; or what `sagebwd.masks.trace_score` or
            `from_flex` gives, which may index float32 tensors, as ALiBi and relative biases do. Its
            derivative is formed symbolically. A score that indexes tensors excludes packed
            sequences, startend_row_indices and k_mean. There are no smooth_q, sink_keys and
            dp_sums='fp16' with a score, and granularity must be 'row'. Tensors that require grad
            get one, where they are added to scores or multiplied with them, and not within a
            function such as tanh. PyTorch computes it, not the kernels: all scores a second time,
            hidden ones too, for a part of the queries at a time. That takes several times as long
            as the rest of the backward, and memory in proportion to the keys.
        {front_end}

    Returns:
        out, contiguous, like q; with `return_lse` (out, lse). lse is float32 of (batch, heads,
        queries) in both layouts, and of (heads, tokens) for packed sequences: the natural logarithm
        of the sum of exponentials of the scaled scores, and -inf for a query that sees no key. Both
        are differentiable once. With an empty batch or no queries, out and lse are empty. With no
        keys, out is zero and lse is -inf.

        With `return_max_logits` max_logits comes last: float32 of (heads,), for each query head the
        largest score of the call that the softmax sees, over all sequences, queries and the keys
        that these see. It is softmax_scale q k as the kernels have it, with their roundings, or
        what `score` makes of that, and up to two steps of the INT32 sum of q k larger, about a part
        in 10^4; sink_logits do not count. It is -inf if no query of the head sees a key, and NaN if
        lse of one of its queries is NaN. The same inputs give the same bits. out and lse do not
        change by it on Hopper, and by roundings at most elsewhere. It has no gradient.

    Raises:
        SpecError (a ValueError): no kernel supports these shapes, dtypes, strides, devices or
            options.
        TypeError: a keyword is unknown, or an argument is not a tensor.
        LibraryError, CompileError, DriverError (RuntimeErrors): NVRTC or the driver is missing, a
            kernel does not compile, or a CUDA call failed. This includes a kernel that would have
            to be compiled during the capture of a CUDA graph (see `warmup`).
        OfflineError, PackError (RuntimeErrors): SAGEBWD_OFFLINE=1 is set and a kernel is neither in
            the cache nor in a pack, or a pack of SAGEBWD_CACHE_PACKS cannot be used.
        RuntimeError: in the backward, if deterministic=False is used under
            torch.use_deterministic_algorithms(True), as for PyTorch's own operators. Under
            warn_only=True it is a warning.
        NotImplementedError: the backward is differentiated.
    """
    options.yes_or_no("return_lse", return_lse)
    chosen = results.with_max_logits(return_max_logits, chosen)
    packing = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    given = k_mean, packing, startend_row_indices, mask, score
    out, lse, *more = _forward(q, k, v, softmax_scale, layout, chosen, *given)
    if sink_logits is not None:
        out, lse = combining.with_sink(out, lse, sink_logits, layout=layout)
    return results.returned(out, lse, return_lse, more)


@options.takes(fastest=fastest.of_q())
def attention_forward(
    q, k, v, *, softmax_scale=None, layout="bhsd", k_mean=None, cu_seqlens_q=None,
    cu_seqlens_k=None, seqused_q=None, seqused_k=None, startend_row_indices=None, mask=None,
    score=None, chosen,
):  # fmt: skip
    """`attention(..., return_lse=True)`: (out, lse), for callers with their own backward.

    The arguments, results and errors are those of `attention`. `merge` joins results over parts of
    the keys; for their backward see `attention_backward`.
    """
    packing = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    given = k_mean, packing, startend_row_indices, mask, score
    return _forward(q, k, v, softmax_scale, layout, chosen, *given)


@options.takes(fastest=fastest.of_q(position=1))
def attention_backward(
    dout, q, k, v, out, lse, *, dlse=None, part=None, softmax_scale=None, layout="bhsd",
    k_mean=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    startend_row_indices=None, mask=None, score=None, chosen,
):  # fmt: skip
    """(dq, dk, dv), contiguous, like q, k and v (SageBwd, arXiv 2603.02170, Algorithm 2).

    Args:
        dout: the gradient of out, of its shape and dtype, with any strides.
        q, k, v, k_mean, startend_row_indices, mask, score and the options: as given to the forward.
        out, lse: what the forward returned for exactly these keys; for parts of the keys see below.
        dlse: the gradient of lse, float32 of its shape, or None.
        part: (out, lse) of these keys alone, if `out`, `lse` and `dlse` belong to more keys, as
            after `merge`.

    Parts of the keys, as in ring attention: smooth_k changes dq, and the backward corrects for this
    using out and lse. The correction is only right if out and lse were computed from exactly these
    keys. With those of all keys, dq of a part would be wrong: by 0.2 to 0.45 of dQ in 2 to 4 parts,
    for keys of mean 2 and deviation 1. Do one of these; dk and dv of a part are then its own, and
    dq is the sum over the parts:

    - Pass `part=`, the result of the part's own forward. This works with any means, and with dlse.
    - Pass the same k_mean to the forward and the backward of every part. The dq of a part is then
      incomplete, but the sum is right, because the rows of dS sum to zero over all keys. With dlse
      they do not, so dlse requires `part`. For the mean over the ranks of a ring:
      `k_mean = k.float().sum(tokens); all_reduce(k_mean); k_mean /= keys_of_all`.
    - Pass smooth_k=False, which is less exact if the keys have a mean.
    - Call `attention(..., return_lse=True)` for each part, `merge` the results, and use autograd.

    Raises what `attention` raises.
    """
    q, k, v = inputs(q, k, v)
    check_tensors(dout=dout, out=out, lse=lse, dlse=lse if dlse is None else dlse)
    if part is not None:
        dout, out, lse, dlse = combining.of_part(part, dout, out, lse, dlse, layout=layout)
    elif k_mean is not None and dlse is not None:
        raise options.SpecError(
            "k_mean and dlse without part: dq depends on whether out and lse belong to exactly "
            "these keys, or to all that share the mean. Pass part=(out, lse) of these keys alone, "
            "even if there are no other keys"
        )
    packing = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    words, *operands = expressions.spoken(mask, score)
    expressions.refuse_gradients(operands[1])
    if special := _special(q, k, v, softmax_scale, layout, chosen, k_mean, packing,
                           startend_row_indices, words, operands):  # fmt: skip
        what, *more, text = special
        backward = getattr(torch.ops.sagebwd, f"{what}_backward")
        return backward(dout, q, k, v, out, lse, dlse, *more, softmax_scale, layout, text)
    if sequences.are_packed(packing):
        given = sequences.as_batch(dout, q, k, v, out, lse, dlse)
        text = _packed_text(chosen, softmax_scale, layout, packing) + words
        told = sequences.told(packing, k_mean)
        gradients = torch.ops.sagebwd.backward(*given, softmax_scale, "bshd", text, *told)
        return tuple(gradient[0] for gradient in gradients)
    text = text_of(chosen, softmax_scale, layout, q, k, packing) + words
    told = sequences.told(packing, k_mean)
    return torch.ops.sagebwd.backward(
        dout, q, k, v, out, lse, dlse, softmax_scale, layout, text, *told
    )


@options.takes(options.Operation, fastest=fastest.of_device)
def warmup(*, backward=True, device=None, sizes=None, chosen):
    """Compiles (or takes from the cache) and loads every kernel of one operation.

    Afterwards calls with these options compile nothing and can be captured into a CUDA graph.

    Args:
        backward: with False, only the kernels of the forward.
        device: a CUDA device; None means the current one.
        sizes: (batch, heads, heads_kv, queries, keys) of the calls to come, for the tiles that
            tuning found for such calls; None means the default tiles. For packed sequences batch
            is their number, and queries and keys are the tokens of all together.
        {options}

    Raises what `attention` raises.
    """
    text = options.text_of(chosen)
    options.spec_of_text(text)  # wrong use is reported without a GPU, too
    if sizes is not None:
        names = ("batch", "heads", "heads_kv", "queries", "keys")
        if not isinstance(sizes, (tuple, list)) or len(sizes) != len(names):
            raise options.SpecError(f"sizes={sizes!r}: pass {', '.join(names)}")
        sizes = tuple(options.whole_number(name, size) for name, size in zip(names, sizes))
    forms.operation(_gpu(device), text).warmup(options.yes_or_no("backward", backward), sizes)


def _gpu(device):
    """The number of a CUDA device. SpecError for other devices, LibraryError without a GPU."""
    try:
        chosen = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError, ValueError):
        chosen = None
    if chosen is None or chosen.type != "cuda":
        raise options.SpecError(
            f"device={device!r}: pass a CUDA device, or None for the current one"
        )
    local_arch(
        chosen.index or 0,
        "Warming up loads kernels into a GPU. Without one, sagebwd.build(arch=...) compiles them "
        "into the cache",
    )
    return torch.cuda.current_device() if chosen.index is None else chosen.index


def check_tensors(**tensors):
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(
                f"{name} is {options.a_kind(t)}; sagebwd.attention takes torch tensors on a GPU. "
                "For NumPy arrays there are sagebwd.reference and sagebwd.trace"
            )


_OF_DTENSORS = (
    "q, k or v is a DTensor: each rank computes its own heads or batches, which attention does not "
    "mix. Wrap the call in torch.distributed.tensor.experimental.local_map, with in_placements and "
    "out_placements of Shard(0) for batches or Shard(1) for heads (Shard(2) in layout='bshd'), or "
    "pass q.to_local(), k.to_local() and v.to_local(). To share heads, k and v need a multiple of "
    "the ranks"
)


class _Arrived(torch.autograd.Function):
    """Waits for what a collective gives: kernels and messages need its memory."""

    @staticmethod
    def forward(ctx, x):
        return x.wait()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def _is_under_way(t):
    """Whether torch.distributed's functional collectives gave this tensor; without their import."""
    return type(t).__name__ == "AsyncCollectiveTensor" and not torch.compiler.is_compiling()


def inputs(q, k, v):
    """The inputs, cast as autocast wants: PEFT and layer norms produce float32."""
    if not (
        isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    ):
        check_tensors(q=q, k=k, v=v)
    if q.is_nested or k.is_nested or v.is_nested:
        raise options.SpecError(
            "q, k or v is a nested tensor: pass its values as packed sequences, (tokens, heads, "
            "head_dim), and where each begins as cu_seqlens_q and cu_seqlens_k"
        )
    if any(map(_is_under_way, (q, k, v))):
        q, k, v = (_Arrived.apply(t) if _is_under_way(t) else t for t in (q, k, v))
    for t in (q, k, v):
        if type(t) is not torch.Tensor and type(t).__module__.startswith("torch.distributed."):
            raise options.SpecError(_OF_DTENSORS)
    return ops.as_autocast_wants("cuda", q, k, v) if q.is_cuda else (q, k, v)


def check_alone(what, k_mean, packing, intervals):
    """SpecError for what calls with intervals, a mask or tensors of a score do not have."""
    if intervals is not None and what != "startend_row_indices":
        raise options.SpecError(f"startend_row_indices and {what} are given together, which is not "
                                "supported: let a mask say both, such as by tensors that it "
                                "indexes with k")  # fmt: skip
    named = zip(("k_mean", *sequences.NAMES), (k_mean, *packing))
    given = [name for name, t in named if t is not None]
    if given:
        other = ("leave it out" if given[0] == "k_mean" else
                 "pass tensors of (batch, heads, tokens, head_dim), and sagebwd.masks.documents or "
                 "masks.padding, with zeros in the padding, for where sequences lie")  # fmt: skip
        raise options.SpecError(f"{given[0]} and {what} are given together, which is not "
                                f"supported: {other}")  # fmt: skip


def what_is_special(words, of_score, k_mean, packing, intervals):
    """'mask', or what a score is that indexes tensors, or None, for the words and operands that
    `mask_ops.spoken` gives. SpecError for what calls of these or with intervals do not have."""
    what = "mask" if " mask=" in words else "a score that indexes tensors" if of_score else None
    if what is not None or intervals is not None:
        check_alone(what or "startend_row_indices", k_mean, packing, intervals)
    return what


def _special(q, k, v, softmax_scale, layout, chosen, k_mean, packing, intervals, words, operands):
    """The beginning of the operators' names, their further tensors and the options, of calls with
    intervals, a mask or tensors that a score function reads; or None for others."""
    of_mask, of_score = operands
    what = what_is_special(words, of_score, k_mean, packing, intervals)
    if what is None and intervals is None:
        return None
    text = text_of(chosen, softmax_scale, layout, q, k) + words
    if what is None:
        return "interval", *interval_ops.told(intervals, q, k, v, layout, text)
    return "masked", *mask_ops.told(of_mask, of_score, q, k, v, layout, text), text


def _forward(q, k, v, softmax_scale, layout, chosen, k_mean, packing, intervals, mask, score):
    q, k, v = inputs(q, k, v)
    words, *operands = expressions.spoken(mask, score)
    if special := _special(q, k, v, softmax_scale, layout, chosen, k_mean, packing, intervals,
                           words, operands):  # fmt: skip
        what, *more, text = special
        if torch.is_grad_enabled() and any(t.requires_grad for t in operands[1].values()):
            return table_gradients.attention(q, k, v, more, softmax_scale, layout, text,
                                             operands[1])  # fmt: skip
        forward = max_logits.operator_of(f"{what}_forward", text)
        return forward(q, k, v, *more, softmax_scale, layout, text)
    told = sequences.told(packing, k_mean)
    if sequences.are_packed(packing):
        text = _packed_text(chosen, softmax_scale, layout, packing) + words
        given = sequences.as_batch(q, k, v)
        forward = max_logits.operator_of("forward", text)
        out, lse, *more = forward(*given, softmax_scale, "bshd", text, *told)
        return out[0], lse[0], *more
    text = text_of(chosen, softmax_scale, layout, q, k, packing) + words
    forward = max_logits.operator_of("forward", text)
    return forward(q, k, v, softmax_scale, layout, text, *told)


def _packed_text(chosen, softmax_scale, layout, packing):
    """`text_of` for packed sequences, to which a layout says nothing."""
    options.check_layout(layout)
    options.check_softmax_scale(softmax_scale, 1)
    return options.text_of(sequences.with_mask(chosen, packing))


def text_of(chosen, softmax_scale, layout, q, k, packing=(None,) * 4):
    """The options for the operators."""
    options.check_layout(layout)
    options.check_softmax_scale(softmax_scale, 1)
    if q.dim() == 4 and k.dim() == 4:  # the operator refuses other ranks
        token = 2 if layout == "bhsd" else 1
        if options.needs_as_many(chosen):
            sequences.with_mask(chosen, packing)  # raises SpecError where used lengths may differ
            assume_equal(q.shape[token : token + 1], k.shape[token : token + 1])
        chosen = options.with_mask(chosen, q.shape[token], k.shape[token])
    return options.text_of(chosen)
