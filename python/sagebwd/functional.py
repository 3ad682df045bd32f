"""`sagebwd.attention` and its explicit halves, on torch tensors."""

import torch

from sagebwd import combining, direct, forms, ops, options, sequences
from sagebwd.kernels import local_arch
from sagebwd.tensors import assume_equal


@options.takes(shortcut=direct.attention)
def attention(
    q, k, v, *, softmax_scale=None, layout="bhsd", return_lse=False, sink_logits=None,
    k_mean=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, chosen,
):  # fmt: skip
    """softmax(softmax_scale q k^T) v with INT8 matrix products, forward and backward.

    SageBwd (arXiv 2603.02170, Algorithms 1 and 2): of the seven products of attention and its
    gradient all but dP = dO V^T are INT8 by default.

    Args:
        q: (batch, heads, queries, head_dim), bfloat16 or float16, on a CUDA GPU. Any view whose
            last dimension is contiguous and whose other strides and address are multiples of 16
            bytes. Under torch.autocast inputs are cast to its dtype.
        k, v: (batch, heads_kv, keys, head_dim); heads must be a multiple of heads_kv (query head
            h reads key head h // (heads // heads_kv)). v may have fewer channels, a multiple of 8
            from 32 on, where head_dim is none of 64, 128 and 256: so has out then.
        softmax_scale: of either sign, or 0; None means 1/sqrt(head_dim).
        layout: 'bhsd', or 'bshd' for (batch, tokens, heads, head_dim) tensors.
        {options}
        return_lse: also return the log-sum-exp.
        sink_logits: (heads,), a learned logit per head that the softmax sees beside the scores, as
            in gpt-oss; it takes gradients. What `with_sink` gives.
        k_mean: float32 of (batch, heads_kv, head_dim), of packed sequences (sequences, heads_kv,
            head_dim), in either layout: what smooth_k takes off the keys in place of their mean,
            such as one mean for all parts of the keys (`attention_backward`). It changes roundings
            alone, the less the nearer it is to the mean, and takes no gradient.
        cu_seqlens_q, cu_seqlens_k: of packed sequences, as in flash-attention: int32 of (sequences
            + 1) on the GPU, where each begins and the end. q is then (tokens, heads, head_dim), k
            and v (tokens, heads_kv, head_dim), whose strides must be multiples of 16 bytes. They
            are read when the kernels run: a captured CUDA graph takes other lengths, also of zero.
            Nobody can check them then: what lies outside the tensors is cut off at their ends.
            Each sequence gives the bits that it gives alone. causal=True asks for one tensor as
            both; 'block' granularity is not built.
        seqused_q, seqused_k: int32 of (batch or sequences) on the GPU, or None: how many of each
            one's tokens count, from the first on, as a padding mask says; the others' out and
            gradients are zero. 'bottom-right' and a window without causal count from the last
            tokens that do.

    Returns:
        out, contiguous, like q; with `return_lse` (out, lse), lse being float32 of (batch, heads,
        queries) in both layouts, of packed sequences (heads, tokens): the natural logarithm of the
        sum of exp of the scaled scores, -inf where a query sees no key. Both are differentiable,
        once. With an empty batch or no queries, out and lse are empty; with no keys, out is zero
        and lse -inf.

    Raises:
        SpecError (a ValueError): shapes, dtypes, strides, devices or options that no kernel takes.
        TypeError: unknown keywords, or arguments that are no tensors.
        LibraryError, CompileError, DriverError (RuntimeErrors): NVRTC or the driver is missing, a
            kernel does not compile, or a CUDA call failed; in particular when a kernel would have
            to be compiled during the capture of a CUDA graph (see `warmup`).
        OfflineError, PackError (RuntimeErrors): SAGEBWD_OFFLINE=1 and a kernel is in no layer of
            the cache, or a pack that SAGEBWD_CACHE_PACKS names cannot be used.
        RuntimeError: in the backward, deterministic=False under
            torch.use_deterministic_algorithms(True), as of PyTorch's own operators; a warning
            under its warn_only=True.
        NotImplementedError: in the backward of the backward.
    """
    options.yes_or_no("return_lse", return_lse)
    packing = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    out, lse = _forward(q, k, v, softmax_scale, layout, chosen, k_mean, packing)
    if sink_logits is not None:
        out, lse = combining.with_sink(out, lse, sink_logits, layout=layout)
    return (out, lse) if return_lse else out


@options.takes()
def attention_forward(
    q, k, v, *, softmax_scale=None, layout="bhsd", k_mean=None, cu_seqlens_q=None,
    cu_seqlens_k=None, seqused_q=None, seqused_k=None, chosen,
):  # fmt: skip
    """`attention(..., return_lse=True)`: (out, lse), for callers with their own backward.

    Partial results over chunks of the keys `merge`; for the backward of chunks see
    `attention_backward`.
    """
    packing = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    return _forward(q, k, v, softmax_scale, layout, chosen, k_mean, packing)


@options.takes()
def attention_backward(
    dout, q, k, v, out, lse, *, dlse=None, part=None, softmax_scale=None, layout="bhsd",
    k_mean=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, chosen,
):  # fmt: skip
    """(dq, dk, dv), contiguous, like q, k and v: a pure function of its arguments.

    Args:
        dout: gradient of out, like q, with any strides.
        q, k, v and the options: as given to the forward.
        out: like q; lse: float32 of (batch, heads, queries); of exactly these keys, or see below.
        dlse: gradient of lse, float32 like it, or None.
        part: (out, lse) of these keys alone, where `out`, `lse` and `dlse` are of more keys than
            these, as `merge` gives them.
        k_mean: as given to the forward.

    Parts of the keys, as in ring attention. What smooth_k takes from dq is put back on the premise
    that out and lse are of exactly these keys; with those of all keys a part's dq would silently
    lack the row sum of its dS times mean(K): with keys of mean 2 and deviation 1, .2 to .45 of dQ
    in 2 to 4 parts. Each of these is right; dk and dv of a part are its own, dq is the sum over
    the parts:

    - `part=`, which each part's forward has given or gives again. With any means, and with dlse.
    - One k_mean for all parts, here and in their forwards: what each dq lacks cancels in the sum,
      in exact arithmetic, for the rows of dS sum to zero over all keys. Without dlse, for they sum
      to it: that is refused without `part`. The mean of all keys, over the ranks of a ring:
      `k_mean = k.float().sum(tokens); all_reduce(k_mean); k_mean /= keys_of_all`.
    - smooth_k=False, less exact where keys have a mean.
    - `attention(..., return_lse=True)` of each part and `merge`, by autograd.

    Raises what `attention` raises.
    """
    q, k, v = _inputs(q, k, v)
    _check_tensors(dout=dout, out=out, lse=lse, dlse=lse if dlse is None else dlse)
    if part is not None:
        dout, out, lse, dlse = combining.of_part(part, dout, out, lse, dlse, layout=layout)
    elif k_mean is not None and dlse is not None:
        raise options.SpecError(
            "k_mean and dlse without part: whether out and lse are of exactly these keys, or of "
            "all that share the mean, makes a difference to dq. Pass part=(out, lse) of these keys "
            "alone, also where they are all"
        )
    packing = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    if sequences.are_packed(packing):
        given = sequences.as_batch(dout, q, k, v, out, lse, dlse)
        text = _packed_text(chosen, softmax_scale, packing)
        told = sequences.told(packing, k_mean)
        gradients = torch.ops.sagebwd.backward(*given, softmax_scale, "bshd", text, *told)
        return tuple(gradient[0] for gradient in gradients)
    text = _text(chosen, softmax_scale, layout, q, k)
    told = sequences.told(packing, k_mean)
    return torch.ops.sagebwd.backward(
        dout, q, k, v, out, lse, dlse, softmax_scale, layout, text, *told
    )


@options.takes(options.Operation)
def warmup(*, backward=True, device=None, sizes=None, chosen):
    """Compiles (or takes from the cache) and loads every kernel of one operation.

    After it, calls with these options run without a compile and can be captured into a CUDA graph.

    Args:
        backward: without it only the forward's kernels.
        device: a CUDA device, None for the current one.
        sizes: (batch, heads, key/value heads, queries, keys) of the calls to come; without it the
            kernels have their default tiles, with it those that tuning found for such calls. Of
            packed sequences: how many, and the tokens of all together.
        {options}

    Raises what `attention` raises.
    """
    text = options.text_of(chosen)
    options.spec_of_text(text)  # wrong use is wrong use without a GPU as well
    if sizes is not None:
        names = ("batch", "heads", "key/value heads", "queries", "keys")
        if not isinstance(sizes, (tuple, list)) or len(sizes) != len(names):
            raise options.SpecError(f"sizes={sizes!r}: pass {', '.join(names)}")
        sizes = tuple(options.whole_number(name, size) for name, size in zip(names, sizes))
    forms.operation(_gpu(device), text).warmup(options.yes_or_no("backward", backward), sizes)


def _gpu(device):
    """The number of a CUDA device. SpecError for another, LibraryError where there is none."""
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
        "Warming up loads kernels into a GPU: call it where one is. Without a GPU, "
        "sagebwd.build(arch=...) compiles them into the cache",
    )
    return torch.cuda.current_device() if chosen.index is None else chosen.index


def _check_tensors(**tensors):
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
    "pass q.to_local(), k.to_local() and v.to_local()"
)


def _inputs(q, k, v):
    """The inputs as autocast wants them: PEFT and layer norms hand over float32."""
    if not (
        isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    ):
        _check_tensors(q=q, k=k, v=v)
    if q.is_nested or k.is_nested or v.is_nested:
        raise options.SpecError(
            "q, k or v is a nested tensor: pass its values as packed sequences, (tokens, heads, "
            "head_dim), and where each begins as cu_seqlens_q and cu_seqlens_k"
        )
    for t in (q, k, v):
        if type(t) is not torch.Tensor and type(t).__module__.startswith("torch.distributed."):
            raise options.SpecError(_OF_DTENSORS)
    return ops.as_autocast_wants("cuda", q, k, v) if q.is_cuda else (q, k, v)


def _forward(q, k, v, softmax_scale, layout, chosen, k_mean, packing):
    q, k, v = _inputs(q, k, v)
    told = sequences.told(packing, k_mean)
    if sequences.are_packed(packing):
        text = _packed_text(chosen, softmax_scale, packing)
        given = sequences.as_batch(q, k, v)
        out, lse = torch.ops.sagebwd.forward(*given, softmax_scale, "bshd", text, *told)
        return out[0], lse[0]
    text = _text(chosen, softmax_scale, layout, q, k)
    return torch.ops.sagebwd.forward(q, k, v, softmax_scale, layout, text, *told)


def _packed_text(chosen, softmax_scale, packing):
    """`_text` where lengths are on the device."""
    options.check_softmax_scale(softmax_scale, 1)
    return options.text_of(sequences.with_mask(chosen, packing))


def _text(chosen, softmax_scale, layout, q, k):
    """The options for the operators."""
    options.check_layout(layout)
    options.check_softmax_scale(softmax_scale, 1)
    if q.dim() == 4 and k.dim() == 4:  # other ranks the operator refuses with its own message
        token = 2 if layout == "bhsd" else 1
        if options.needs_as_many(chosen):
            assume_equal(q.shape[token : token + 1], k.shape[token : token + 1])
        chosen = options.with_mask(chosen, q.shape[token], k.shape[token])
    return options.text_of(chosen)
