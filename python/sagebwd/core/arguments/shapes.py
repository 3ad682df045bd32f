"""Arguments of any array library: which shapes belong together, which strides and scales kernels
take, and which arrays are given as NumPy's or as PyTorch's.
"""

from sagebwd import _core
from sagebwd.core import options


def problem_of_shapes(q, k, v, layout):
    """(batch, heads, heads_kv, seq_q, seq_kv) of shapes of rank 4, else SpecError.

    v may have fewer channels than q and k.
    """
    options.check_layout(layout)
    dims = (q[3], k[3], v[3])
    if dims[0] != dims[1] or dims[2] > dims[0]:
        check_equal(*dims, "have head dims",
                    "be equal, v's may be smaller: pad the smaller ones with zeros")  # fmt: skip
    if k[:3] != v[:3]:
        raise options.SpecError(
            f"k has shape {k} and v {v}; they must be equal except for the channels"
        )
    if q[0] != k[0]:
        raise options.SpecError(
            f"q has batch {q[0]} and k {k[0]}; they must be equal: expand the smaller one"
        )
    head, token = (1, 2) if layout == "bhsd" else (2, 1)
    heads, heads_kv = q[head], k[head]
    if heads_kv == 0 or heads == 0 or heads % heads_kv != 0:
        raise options.SpecError(
            f"q has {heads} heads and k and v have {heads_kv}; the first must be a positive "
            "multiple of the second (is layout= right?)"
        )
    return q[0], heads, heads_kv, q[token], k[token]


def check_value_channels(q, v):
    """SpecError if no kernel takes as many channels of v as its shape has. Asked before a launch,
    and where nothing is launched: for meta tensors and where JAX traces."""
    if v[3] != q[3]:
        _core.check_value_dim(int(v[3]), _core.Spec(head_dim=int(q[3])))


def check_intervals(intervals, problem):
    """The columns of startend_row_indices, an array or tensor, or 0 for None. TypeError for what is
    neither, and SpecError for another dtype or shape. `problem`: of `problem_of_shapes`."""
    if intervals is None:
        return 0
    if not (hasattr(intervals, "shape") and hasattr(intervals, "dtype")):
        raise TypeError(f"startend_row_indices is {options.a_kind(intervals)}; pass an int32 "
                        "array, such as the startend_row_indices of what sagebwd.masks makes")  # fmt: skip
    shape, (batch, _, heads_kv, _, keys) = tuple(intervals.shape), problem
    dtype = str(intervals.dtype).removeprefix("torch.")
    columns = shape[3] if len(shape) == 4 else 0
    fits = columns and shape[0] in (1, batch) and shape[1] in (1, heads_kv) and shape[2] == keys
    if dtype != "int32" or not fits:
        raise options.SpecError(
            f"startend_row_indices is {dtype} of {shape}; for these q and k it is int32 of "
            f"({batch} or 1, {heads_kv} or 1, {keys}, columns), with 1, 2 or 4 columns"
        )
    return columns


def check_rank(name, shape, packed=False):
    """SpecError unless there are four dimensions. `packed`: whether the caller takes packed
    sequences, which this tensor might hold."""
    if len(shape) != 4:
        raise options.SpecError(
            f"{name} has rank {len(shape)} (shape {shape}); it must have rank 4: (batch, head, "
            "token, channel), or layout='bshd'"
            + (". Packed sequences, (tokens, heads, head_dim), need cu_seqlens_q= and "
               "cu_seqlens_k=" if packed and len(shape) == 3 else "")
        )  # fmt: skip


def check_equal(of_q, of_k, of_v, have, must):
    if not of_q == of_k == of_v:
        raise options.SpecError(f"q, k and v {have} {of_q}, {of_k} and {of_v}; they must {must}")


def check_scale(scale, head_dim, spec):
    """`options.check_softmax_scale`, and the kernels' own check, in its words."""
    scale = options.check_softmax_scale(scale, head_dim)
    if scale < 0 and "s" not in options.plan_of(spec.precision):
        raise options.SpecError(
            f"softmax_scale = {scale:g} is not supported under '{spec.precision}', where Q is not "
            "copied: negate Q, or take another precision"
        )
    return scale


def contiguous_strides(shape, layout):
    """Batch, head and token strides of a contiguous tensor."""
    second = shape[3]
    first = shape[2] * second
    batch = shape[1] * first
    return (batch, first, second) if layout == "bhsd" else (batch, second, first)


def operand_of(t, layout):
    """(address, batch, head and token strides), or None where no kernel can read the tensor.

    `t` has shape, stride() in elements and data_ptr(). Copies move 16 bytes, so all of these must
    be multiples of 8 elements; the stride of a dimension of size one is never used.
    """
    shape, stride = t.shape, t.stride()
    batch = stride[0] if shape[0] > 1 else 0
    first = stride[1] if shape[1] > 1 else 0
    second = stride[2] if shape[2] > 1 else 0
    address = t.data_ptr()
    if stride[3] != 1 or (batch | first | second) & 7 or address & 15:
        return None
    return (address, batch, first, second) if layout == "bhsd" else (address, batch, second, first)


def required_operand(name, t, layout):
    operand = operand_of(t, layout)
    if operand is None:
        raise options.SpecError(
            f"{name} has strides {tuple(t.stride())} (elements) and address {t.data_ptr():#x}; the "
            "last stride must be 1, and the others and the address multiples of 16 bytes (8 "
            f"elements): pass {name}.{'clone' if t.is_contiguous() else 'contiguous'}()"
        )
    return operand


# ---- NumPy's arrays or PyTorch's tensors ---------------------------------------------------------


def _kind(name, x):
    package = type(x).__module__.split(".")[0]
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return "torch tensor" if package == "torch" else "NumPy array"
    raise TypeError(f"{name} is {options.a_kind(x)}; pass a NumPy array or a torch tensor")


class Arrays:
    """Arguments by name, all NumPy arrays or all torch tensors. Only q, k and v must not be None.

    Raises TypeError for anything else, SpecError for a mixture, for values that are no real numbers
    and for ranks other than four (three for lse and dlse).
    """

    def __init__(self, **given):
        self.given = given
        kinds = {name: _kind(name, x) for name, x in given.items()
                 if x is not None or name in ("q", "k", "v")}  # fmt: skip
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{name} is a {kind}" for name, kind in kinds.items())
            raise options.SpecError(f"{listed}: pass all as NumPy arrays or all as torch tensors")
        self.are_torch = "torch tensor" in kinds.values()
        for name in kinds:
            self._check(name, given[name])

    def _check(self, name, x):
        rank, axes = (3, "") if name in ("lse", "dlse") else (4, ", channel")
        if len(x.shape) != rank:
            raise options.SpecError(
                f"{name} has rank {len(x.shape)}; it must have rank {rank}: (batch, head, "
                f"token{axes})"
            )
        if self.are_torch and str(x.layout) != "torch.strided":
            raise options.SpecError(f"{name} is {x.layout}; pass a dense tensor: {name}.to_dense()")
        if self.are_torch and x.is_meta:
            raise options.SpecError(f"{name} is a meta tensor, which has no values")
        real = x.is_floating_point() if self.are_torch else x.dtype.kind in "fiu"
        if not real:
            raise options.SpecError(f"{name} is of {x.dtype}; its values must be real numbers")

    def numpy(self):
        """All of them as arrays on the CPU, in the order in which they were given."""
        given = list(self.given.values())
        if self.are_torch:
            given = [None if x is None else x.detach().float().cpu().numpy() for x in given]
        return given
