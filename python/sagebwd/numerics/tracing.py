"""The error of every intermediate tensor of INT8 attention, against FP64."""

import difflib
import math
import warnings

from sagebwd import _core
from sagebwd.core import keywords, options
from sagebwd.core.arguments.shapes import Arrays
from sagebwd.core.compat import need
from sagebwd.numerics import inputs as named
from sagebwd.numerics import reference, specs

#: trace() reports these, in the paper's order (SageBwd, arXiv 2603.02170, Table 2).
TENSORS = ("delta", "P", "dP", "dS", "O", "dQ", "dK", "dV")
#: ... and of each this.
FIGURES = ("cosine", "rel_l2", "bias")


#: Sizes and the like, which are those of the tensors or of `inputs`.
_OTHERWISE = {
    **{name: f"the tensors say it; for inputs= pass inputs=dict(name=..., {name}=...)"
       for name in ("batch", "heads", "heads_kv", "seq_q", "seq_kv", "head_dim", "sigma",
                    "key_offset", "seed")},
    "seq_len": "the tensors say it; for inputs= pass inputs=dict(name=..., seq_q=...)",
}  # fmt: skip


@options.takes(but=keywords.NOT_EMULATED, otherwise=keywords.WITHOUT_KERNELS | _OTHERWISE)
def trace(
    q=None, k=None, v=None, dout=None, *, inputs=None, softmax_scale=None, dtype=None, device=None,
    block_mask=None, block_size=(128, 64), startend_row_indices=None, mask=None, score=None, chosen,
):  # fmt: skip
    """Cosine similarity, relative L2 error and bias of delta, P, dP, dS, O, dQ, dK, dV against FP64.

    The first two are the figures of SageBwd's Table 2 (arXiv 2603.02170). The bias is the sum of
    signed errors over that of magnitudes: rounding in one direction leaves one, which sums over
    tokens and steps keep (arXiv 2510.04212). Errors that several elements share, such as those of V
    in O, leave one too, whose sign differs from input to input.

    Args:
        q, dout: (batch, heads, queries, head_dim), NumPy arrays or torch tensors. They are rounded
            to `dtype` before both computations.
        k, v: (batch, heads_kv, keys, head_dim); v, and then dout too, may have fewer channels.
        inputs: instead of the four tensors, a name of `sagebwd.INPUTS`, or the arguments of
            `sagebwd.named_inputs` as a dict: dict(name='sink', seq_q=1024, heads=2).
        softmax_scale: a number of either sign, or 0; None means 1/sqrt(head_dim).
        dtype: 'bf16' or 'fp16'; None means the dtype of 16-bit torch tensors, and else 'bf16'.
        device: 'cpu' (the C++ reference, multi-threaded), 'cuda' (the emulation in PyTorch, with
            the same quantisers), or None for the device of the tensors.
        block_mask, block_size: lists of blocks, as for `sagebwd.block_sparse_attention`; a NumPy
            array or a torch tensor.
        startend_row_indices: intervals of hidden queries per key, as for `sagebwd.attention`; a
            NumPy array or a torch tensor.
        mask, score: expressions, as for `sagebwd.attention`; without PyTorch texts. What they index
            may be on any device.
        {options}

    precision is here also any collection of INT8 products, of sagebwd.PRODUCTS: ('dp',) alone shows
    what that product costs. As on the command line, 's,pv' and 'none' work.

    Returns a dict of tensor name -> {'cosine', 'rel_l2', 'bias'}, with NaN if a computation gives NaN. On a
    GPU, if kernels exist for the precision, the key 'kernels' holds the same for O, dQ, dK and dV
    of the kernels. The dict prints as a table; `to_pandas()` returns a data frame, and `to_dict()`
    plain dicts. Raises SpecError, also for sizes that do not fit in memory or that would take
    hours, TypeError for what is no array, mask or score, and on a GPU what `sagebwd.attention`
    raises.
    """

    def check(problem, head_dim, inputs_device):
        where = inputs_device if device is None else device
        if where is None or str(where) == "cpu":
            _core.check_size_of_trace(problem, head_dim)

    q, k, v, dout = named.operands((q, k, v, dout), inputs, dtype, check)
    given = dict(q=q, k=k, v=v, dout=dout)
    if missing := [name for name, x in given.items() if x is None]:
        raise TypeError(
            f"trace() needs {', '.join(missing)} as well: pass q, k, v and dout (the table "
            "includes the backward), or inputs= in their place, such as inputs='gaussian'"
        )
    arrays = Arrays(**given)
    dtype = options.dtype_name(_common_dtype(given) if dtype is None else dtype)
    if device is None:
        device = q.device if arrays.are_torch else "cpu"
    device = str(device)
    sizes, listed, intervals, tables = reference.told_of_mask(
        block_mask, block_size, startend_row_indices, q, k, mask, score
    )
    if device == "cpu":
        spec, plan = specs.emulated_spec(chosen, q, k, head_dim=q.shape[3], dtype=dtype, **sizes)
        scale = options.check_softmax_scale(softmax_scale, q.shape[3])
        q, k, v, dout = (reference.round_to(x, dtype) for x in arrays.numpy())
        _warn_of_non_finite(dtype, q=q, k=k, v=v, dout=dout)
        rounded = q, k, *reference.with_all_channels(q, v, dout)
        rounded = _core.Inputs(*rounded, None, scale, listed, intervals, tables)
        traced = _core.trace(rounded, spec, sorted(plan))
        return TraceTable({name: _with_none(**figures) for name, figures in traced.items()})
    if not device.startswith("cuda"):
        raise options.SpecError(f"device={device!r}: pass 'cpu' or 'cuda'")
    try:
        import torch
    except ImportError as error:
        raise options.SpecError(
            f"device={device!r} needs PyTorch ({error}): pass device='cpu'"
        ) from None
    if not torch.cuda.is_available():
        raise options.SpecError(
            f"device={device!r}: PyTorch sees no CUDA GPU here; pass device='cpu'"
        )
    lists = {} if listed is None else dict(block_mask=listed, block_size=block_size)
    return _trace_torch(arrays.given.values(), device, dtype, softmax_scale, chosen, lists,
                        intervals, mask, score)  # fmt: skip


def _trace_torch(given, device, dtype, softmax_scale, chosen, lists, intervals=None, mask=None,
                 score=None):  # fmt: skip
    """`trace` by the emulation, on any device of PyTorch. `lists`: a mask of all heads, or none;
    `intervals`: startend_row_indices as an array, or None."""
    import torch

    from sagebwd.lists import block_sparse
    from sagebwd.numerics import emulation, exact, expressions

    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    tensors = [torch.as_tensor(x, device=device).detach().to(low) for x in given]
    _warn_of_non_finite(dtype, **dict(zip(("q", "k", "v", "dout"), tensors)))
    q, k = tensors[:2]
    chosen = dict(chosen, softmax_scale=softmax_scale)
    listed = None
    if lists:
        lists["block_mask"] = torch.tensor(lists["block_mask"], device=device)
        listed, _ = block_sparse.tokens_of(block_sparse.pack_blocks(**lists), q, k,
                                             lists["block_size"])  # fmt: skip
    told = {"mask": expressions.moved(mask, q.device), "score": expressions.moved(score, q.device)}
    told = {name: x for name, x in told.items() if x is not None}
    problem = *q.shape[:2], k.shape[1], q.shape[2], k.shape[2]
    of_call, tables = expressions.told(told.get("mask"), told.get("score"), problem, q.device)
    if intervals is not None:
        told["startend_row_indices"] = torch.tensor(intervals, device=device)
    columns, hidden = emulation.intervals_of(told.get("startend_row_indices"), q, k)
    listed = hidden if columns else listed
    rules = emulation.emulation_rules(*tensors[:3], **chosen, intervals=columns,
                                      expressions=of_call,
                                      block_size=lists.get("block_size", (0, 0)))  # fmt: skip
    kernels = _kernel_results(tensors, rules, chosen | told, lists) if q.is_cuda else {}
    kernels = dict(zip(kernels, emulation.grouped(k.shape[1], *kernels.values())))
    tensors = emulation.grouped(k.shape[1], *tensors, listed, expressions.heads_of(q))
    found = {}, {}  # sums over the tensors of the emulation, and of the kernels
    with emulation.full_precision(q.device):
        for part in emulation.chunks(*tensors[:2]):
            *chunk, seen, at = (t if t is None else t[part] for t in tensors)
            more = dict(listed=seen, expressed=expressions.expressed(of_call, tables, at))
            reference = exact.exact_chunk(*chunk, rules.mask, rules.scale, **more)
            of_kernels = {name: x[part] for name, x in kernels.items()}
            for sums, results in zip(found, (_emulated_chunk(*chunk, rules, more), of_kernels)):
                for name, x in results.items():
                    of_part = _sums(x, reference[name])
                    sums[name] = [a + b for a, b in zip(sums.get(name, [0] * 6), of_part)]
    table, of_kernels = ({name: _figures(*s) for name, s in sums.items()} for sums in found)
    return TraceTable(table | ({"kernels": of_kernels} if kernels else {}))


def _common_dtype(given):
    """The 16-bit dtype of the arrays; 'bf16' if none has 16 bits. SpecError if they disagree."""
    dtypes = {name: x.dtype for name, x in given.items()}
    low = [dtype for dtype in dtypes.values() if str(dtype).endswith("float16")]
    if low and len(set(map(str, dtypes.values()))) > 1:
        listed = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        raise options.SpecError(
            f"{listed}: pass dtype='bf16' or 'fp16', to which all are rounded, or convert them"
        )
    return low[0] if low else "bf16"


def _warn_of_non_finite(dtype, **tensors):
    """Warns of values that make every figure that depends on them NaN."""
    for name, x in tensors.items():
        finite = x.isfinite() if hasattr(x, "isfinite") else abs(x) < math.inf
        if not finite.all():
            warnings.warn(
                f"{name} holds {int((~finite).sum())} values that are NaN or infinite once they "
                f"are rounded to {dtype}: figures that depend on them are NaN", stacklevel=4,
            )  # fmt: skip


def _sums(x, reference):
    """The FP64 sums that the figures of a tensor come from; sums over chunks are added."""
    x, reference = x.double().flatten(), reference.double().flatten()
    errors = x - reference
    return map(float, (x @ reference, errors.sum(), reference.abs().sum(),
                       x @ x, reference @ reference, errors @ errors))  # fmt: skip


def _figures(dot, signed, magnitude, *squares):
    norm, reference, difference = map(math.sqrt, squares)
    if norm == reference == 0:  # both are all zeros
        return dict.fromkeys(FIGURES, 0.0) | {"cosine": 1.0}
    if reference == 0:
        return _with_none(0.0 * dot, math.inf + difference, math.inf + difference)  # or NaN
    cosine = dot / (norm * reference) if norm else 0.0
    return dict(zip(FIGURES, (cosine, difference / reference, signed / magnitude)))


def _with_none(cosine, rel_l2, bias):
    """The figures; None for all where the exact tensor is all zeros and ours is not."""
    if cosine == 0 and rel_l2 == math.inf:
        cosine = rel_l2 = bias = None
    return dict(zip(FIGURES, (cosine, rel_l2, bias)))


def _emulated_chunk(q, k, v, dout, rules, more):
    """The emulation's tensors by the names of TENSORS. `more`: listed and expressed."""
    from sagebwd.numerics.numerics import backward_chunk, forward_chunk

    out, lse, _ = forward_chunk(q, k, v, rules, **more)
    dq, dk, dv, delta, p, dp, ds = backward_chunk(q, k, v, out, lse, dout, None, rules, **more)
    return dict(zip(TENSORS, (delta, p, dp, ds, out, dq, dk, dv)))


def _kernel_results(tensors, rules, chosen, lists):
    """O, dQ, dK, dV from the kernels; empty if no kernels exist for these INT8 products."""
    precision = options.precision_of(rules.plan)
    if precision is None:
        return {}
    from sagebwd.core import functional, keywords
    from sagebwd.lists import block_sparse

    forward, backward = functional.attention_forward, functional.attention_backward
    given = dict(chosen, precision=precision)
    if lists:
        forward = block_sparse.block_sparse_attention_forward
        backward = block_sparse.block_sparse_attention_backward
        given = {name: value for name, value in given.items()
                 if name not in keywords.NOT_WITH_LISTS} | lists  # fmt: skip
    q, k, v, dout = (t.contiguous() for t in tensors)
    out, lse = forward(q, k, v, **given)
    gradients = backward(dout, q, k, v, out, lse, **given)
    return dict(zip(("O", "dQ", "dK", "dV"), (out, *gradients)))


# ---- what it gives -------------------------------------------------------------------------------


#: How a table calls the figures, and their digits.
_SHOWN = {"cosine": ("cosine", 6), "rel_l2": ("rel. L2", 5), "bias": ("bias", 6)}


def _text(figure, digits):
    return "exact 0" if figure is None else f"{figure:.{digits}f}"


class TraceTable(dict):
    """Name of a tensor -> its figures by name; on a GPU 'kernels' -> the same of the kernels.

    All are None where the exact tensor is all zeros and ours is not. `print` shows a table.
    """

    def __missing__(self, name):
        near = {known.lower(): known for known in self}.get(str(name).lower()) or next(
            iter(difflib.get_close_matches(str(name), self, n=1)), None)  # fmt: skip
        raise KeyError(f"{name!r} is no row; " + (f"did you mean {near!r}? " if near else "")
                       + f"There are {', '.join(self)}")  # fmt: skip

    def rows(self):
        """(computed by, tensor, cosine, rel_l2, bias) of each, in one list."""
        tables = {"emulation": {k: v for k, v in self.items() if k != "kernels"},
                  "kernels": self.get("kernels", {})}  # fmt: skip
        return [(by, tensor, *(figures[name] for name in FIGURES))
                for by, table in tables.items() for tensor, figures in table.items()]  # fmt: skip

    def to_dict(self):
        """Plain dicts, for json."""
        return {name: dict(figures) for name, figures in self.items()}

    def to_pandas(self):
        """A pandas.DataFrame with a row per tensor, and ImportError without pandas."""
        columns = ["computed by", "tensor", *FIGURES]
        return need("pandas", "to_pandas()").DataFrame(self.rows(), columns=columns)

    def __str__(self):
        lines = [("", "tensor", *(name for name, _ in _SHOWN.values()))]
        for by, tensor, *figures in self.rows():
            texts = (_text(x, digits) for x, (_, digits) in zip(figures, _SHOWN.values()))
            lines.append((by, tensor, *texts))
        with_source = "kernels" in self
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join(
            (f"{by:{widths[0]}}  " if with_source else "") + f"{tensor:{widths[1]}}  "
            + "  ".join(f"{text:>{width}}" for text, width in zip(texts, widths[2:]))
            for by, tensor, *texts in lines
        )
