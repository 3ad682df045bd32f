"""Attention on the CPU, on NumPy arrays: exact in FP64, and as the kernels compute it.

q and dout are (batch, heads, queries, head_dim), k and v (batch, heads_kv, keys, head_dim), where
heads is a multiple of heads_kv; lse, dlse and delta are (batch, heads, queries). v may have fewer
channels, and then dout and out have as many. Everything is multi-threaded and releases the GIL.
Invalid arguments raise SpecError.
"""

from sagebwd import _core
from sagebwd.core import keywords, options
from sagebwd.core.arguments.shapes import Arrays, check_intervals
from sagebwd.core.keywords import also_named
from sagebwd.lists import blocks
from sagebwd.numerics import inputs, specs

__all__ = ["emulate", "exact", "random_inputs", "round_to"]


def round_to(array, dtype):
    """`array` rounded to nearest even in 'bf16' or 'fp16', as float32."""
    import numpy  # here, so that importing this package does not import it

    with numpy.errstate(over="ignore"):  # too large values become infinite, as in both types
        return _core.round_to(array, options.dtype_name(dtype))


def with_all_channels(q, v, *like_v):
    """v, and tensors with its channels, padded with zeros to q's channels. No result changes."""
    import numpy

    channels, missing = v.shape[3], q.shape[3] - v.shape[3]
    if missing <= 0:
        return [v, *like_v]
    for x in like_v:
        if x is not None and x.shape[3] != channels:
            raise options.SpecError(
                f"v has {channels} channels and dout or out {x.shape[3]}; they must have as many"
            )
    return [None if x is None else numpy.pad(x, [(0, 0)] * 3 + [(0, missing)])
            for x in (v, *like_v)]  # fmt: skip


def _of_channels(results, channels):
    """Results of `with_all_channels`: out and dv with V's channels."""
    return {name: x[..., :channels] if name in ("out", "dv") and x is not None else x
            for name, x in results.items()}  # fmt: skip


def lists_of(block_mask, block_size, q, k):
    """(options of the spec, bytes of (batch, heads, query blocks, key blocks)) of a mask of blocks;
    ({}, None) if there is none."""
    sizes = blocks.check_block_size(block_size)
    if block_mask is None:
        if sizes != (128, 64):
            raise options.SpecError(f"block_size={block_size} and no lists: pass block_mask= too")
        return {}, None
    import numpy

    blocks.refuse_flex_mask("block_mask", block_mask)
    mask = block_mask.cpu().numpy() if hasattr(block_mask, "cpu") else block_mask
    if not isinstance(mask, numpy.ndarray):
        raise TypeError(
            f"block_mask is {options.a_kind(block_mask)}; pass a NumPy array or a torch tensor"
        )
    if mask.dtype not in (numpy.bool_, numpy.uint8):
        raise options.SpecError(f"block_mask is of {mask.dtype}; pass bool or uint8")
    heads, heads_kv = q.shape[1], k.shape[1]
    problem = q.shape[0], heads, heads_kv, q.shape[2], k.shape[2]
    blocks.check_lists("block_mask", mask.shape, problem, sizes)
    if mask.shape[1] not in (1, heads):
        mask = mask.repeat(heads // heads_kv, 1)
    mask = numpy.broadcast_to(mask != 0, (q.shape[0], heads, *mask.shape[2:]))
    return dict(sparse_q=sizes[0], sparse_kv=sizes[1]), mask


def told_of_mask(block_mask, block_size, intervals, q, k, mask=None, score=None):
    """(options of the spec, lists of blocks, intervals, tables), the latter three as `_core.Inputs`
    takes them: `lists_of`, or the numbers of startend_row_indices, an array or tensor; and what
    `specs.told_of_expressions` gives."""
    problem = *q.shape[:2], k.shape[1], q.shape[2], k.shape[2]
    columns = check_intervals(intervals, problem)
    for name, x in (("mask", mask), ("score", score)):
        if block_mask is not None and x is not None:
            raise options.SpecError(f"block_mask and {name} are given together, which is not "
                                    "supported: leave one of the two out")  # fmt: skip
    of_expressions, tables = specs.told_of_expressions(mask, score, problem, intervals)
    sizes, *listed = _told_of_lists(block_mask, block_size, intervals, columns, q, k)
    return {**sizes, **of_expressions}, *listed, tables


def _told_of_lists(block_mask, block_size, intervals, columns, q, k):
    if not columns:
        return *lists_of(block_mask, block_size, q, k), None
    if block_mask is not None:
        raise options.SpecError("block_mask and startend_row_indices are given together: leave one "
                                "of the two out")  # fmt: skip
    lists_of(None, block_size, q, k)  # refuses the size of blocks
    on_host = intervals.cpu().numpy() if hasattr(intervals, "cpu") else intervals
    return dict(intervals=columns), None, on_host


@also_named(seq_q="seq_len", seq_len_kv="seq_kv")
@inputs.names_what_it_does_not_know({})
def random_inputs(
    seq_len, *, head_dim=128, heads=1, heads_kv=None, batch=1, seq_kv=None, dtype="bf16",
    sigma=1.0, seed=0,
):  # fmt: skip
    """(q, k, v, dout) with q, k ~ N(0, sigma^2) and v, dout ~ N(0, 1), rounded to `dtype`.

    They are `sagebwd.named_inputs("gaussian", ...)`, as float32 arrays: q and dout are (batch,
    heads, seq_len, head_dim), k and v are (batch, heads_kv, seq_kv, head_dim). heads_kv=None means
    heads, and seq_kv=None means seq_len. A seed gives the same numbers on every machine.
    """
    heads_kv = heads if heads_kv is None else heads_kv
    seq_kv = seq_len if seq_kv is None else seq_kv
    sizes = dict(batch=batch, heads=heads, heads_kv=heads_kv, seq_len=seq_len, seq_kv=seq_kv,
                 head_dim=head_dim)  # fmt: skip
    return inputs.draw("gaussian", sizes, dtype, sigma, 0, seed)


@options.takes(options.Mask)
def exact(
    q, k, v, dout=None, *, dlse=None, softmax_scale=None, matrices=False, block_mask=None,
    block_size=(128, 64), startend_row_indices=None, mask=None, score=None, chosen,
):  # fmt: skip
    """Attention in FP64, and its gradients if `dout` is given.

    Returns a dict of float64 arrays: out, lse (natural logarithm, scaled scores), delta, dq, dk,
    dv, and with `matrices` p, dp and ds of (batch, heads, queries, keys). Arrays that were not
    computed are None. `ds` does not contain the softmax scale. The mask and score are given as to
    `sagebwd.attention`, with startend_row_indices as a NumPy array or a torch tensor, and lists of
    blocks as to `sagebwd.block_sparse_attention`. Without PyTorch mask and score are texts. Raises
    SpecError, and TypeError for what is no array, mask or score.
    """
    q, k, v, dout, dlse = Arrays(q=q, k=k, v=v, dout=dout, dlse=dlse).numpy()
    sizes, *seen = told_of_mask(block_mask, block_size, startend_row_indices, q, k, mask, score)
    spec = specs.spec_of_call(**options.with_mask(chosen, q.shape[2], k.shape[2]), **sizes)
    scale = options.check_softmax_scale(softmax_scale, q.shape[3])
    inputs = _core.Inputs(q, k, *with_all_channels(q, v, dout), dlse, scale, *seen)
    results = _core.exact(inputs, spec, options.yes_or_no("matrices", matrices))
    return _of_channels(results, v.shape[3])


@options.takes(but=keywords.NOT_EMULATED, otherwise=keywords.WITHOUT_KERNELS)
def emulate(
    q, k, v, dout=None, *, dlse=None, softmax_scale=None, dtype="bf16", matrices=False,
    round_outputs=False, out=None, lse=None, block_mask=None, block_size=(128, 64),
    startend_row_indices=None, mask=None, score=None, chosen,
):  # fmt: skip
    """Attention as the kernels compute it (the same integers, sums in FP32), on the CPU.

    Returns the dict of `exact()`, in float32. Raises SpecError, and TypeError for what is no array,
    mask or score.

    Args:
        dtype: the type that inputs are rounded to first.
        matrices: also return p, dp and ds.
        round_outputs: round out, dq, dk and dv to `dtype`, as the kernels do.
        out, lse: results of a forward, for the backward; pass both or neither.
        block_mask, block_size: lists of blocks, as for `sagebwd.block_sparse_attention`.
        startend_row_indices: intervals of hidden queries per key, as for `sagebwd.attention`; a
            NumPy array or a torch tensor.
        mask, score: expressions, as for `sagebwd.attention`; without PyTorch texts.
        {options}
            precision is here also any collection of INT8 products, of sagebwd.PRODUCTS.
    """
    if (out is None) != (lse is None):
        raise options.SpecError("out and lse go together: pass both, of one forward, or neither")
    arrays = Arrays(q=q, k=k, v=v, dout=dout, dlse=dlse, out=out, lse=lse)
    q, k, v, dout, dlse, out, lse = arrays.numpy()
    sizes, *seen = told_of_mask(block_mask, block_size, startend_row_indices, q, k, mask, score)
    rules, plan = specs.emulated_spec(chosen, q, k, head_dim=q.shape[3], dtype=dtype, **sizes)
    q, k, v, dout = (None if x is None else round_to(x, dtype) for x in (q, k, v, dout))
    scale = options.check_softmax_scale(softmax_scale, q.shape[3])
    channels = v.shape[3]
    v, dout, out = with_all_channels(q, v, dout, out)
    inputs = _core.Inputs(q, k, v, dout, dlse, scale, *seen)
    switches = dict(matrices=matrices, round_outputs=round_outputs)
    switches = [options.yes_or_no(*switch) for switch in switches.items()]
    results = _core.emulate(inputs, rules, sorted(plan), *switches, out, lse)
    return _of_channels(results, channels)
