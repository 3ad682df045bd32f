"""The options of the operation, as every front end spells and checks them.

`Options` is the one list: its fields become keywords of every public function that takes them, and
`Spec` passes them to the C++ library. A test compares this list with that of the library.
"""

import collections.abc
import dataclasses
import functools
import inspect
import re
import textwrap

from sagebwd import _core
from sagebwd.core.arguments.checks import (  # noqa: F401
    FASTEST,
    LEAST_SOFTMAX_SCALE,
    a_kind,
    check_callback,
    check_layout,
    check_softmax_scale,
    dtype_name,
    expression_text,
    is_fastest,
    refuse_fastest,
    whole_number,
    word,
    yes_or_no,
)
from sagebwd.core.keywords import OF_OPERATIONS, by_position, check_keywords, check_known

SpecError = _core.SpecError

#: Products of SageBwd that `precision` may name: S = tau Q K^T (forward and backward), O = P V,
#: dV = P^T dO, dP = dO V^T, dQ = tau dS K, dK = tau dS^T Q.
PRODUCTS = ("s", "pv", "dv", "dp", "dq", "dk")
#: Channels that kernels compute with: a head dimension uses the smallest that is not below it.
WIDTHS = _core.widths
#: Head dimensions for which every GPU has kernels, forward and backward.
USUAL_HEAD_DIMS = _core.usual_head_dims
#: Names of the precisions that have kernels.
PRECISIONS = _core.precisions


def _option(default, text, least=1, values=None):
    """Makes a field. `least` is the smallest value of a whole number; the C++ library is given one
    less for None. `values` says in words which numbers are valid, if not all from `least` on."""
    metadata = {"help": text, "least": least, "values": values}
    return dataclasses.field(default=default, metadata=metadata)


_WINDOWS = "a whole number of at least 0, or None for no bound (C++ and the command line take -1)"


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query sees. Only numerics.visible_keys() interprets it."""

    causal: object = _option(
        False,
        "False for no mask; 'top-left' (query i sees key j if j <= i); 'bottom-right' (if "
        "j <= i + keys - queries); or True, if there are as many queries as keys.",
    )

    window_left: int = _option(
        None,
        "sliding window: how many keys a query sees before its own. None means all. Query i's own "
        "key is key i, except without 'top-left' for unequal lengths: it is then key i + keys - "
        "queries. flash-attention calls this number window_size[0], and many models store one "
        "more, as sliding_window.",
        least=0, values=_WINDOWS,
    )  # fmt: skip
    window_right: int = _option(
        None,
        "sliding window: how many keys a query sees after its own. None means all. A causal mask "
        "hides them.",
        least=0, values=_WINDOWS,
    )  # fmt: skip

    @classmethod
    def among(cls, options):
        """Takes the mask out of `options`, a dict."""
        return cls(**{field.name: options.pop(field.name) for field in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True)
class Options(Mask):
    """These options decide what attention computes from its tensors."""

    granularity: str = _option(
        "row",
        "which values share a quantisation scale: under 'row' those of a token (or of 8 keys), or "
        "of a channel of 256 tokens; under 'block' those of a group of tokens (the paper's).",
    )
    group_q: int = _option(
        None, "queries per quantisation group; None means the granularity's default."
    )
    group_kv: int = _option(
        None,
        "keys per quantisation group; None means the granularity's default, or a block's keys if "
        "a list's blocks have fewer.",
    )
    sink_keys: int = _option(
        None,
        "1 computes the first key separately in FP32, because many models attend mostly to it; 0 "
        "does not. None means 1 where 1 is supported: under 'row' without window_left.",
        least=0,
    )
    smooth_k: bool = _option(
        True, "subtract the mean of the keys before quantising (SageAttention, arXiv 2410.02367)."
    )
    smooth_q: bool = _option(
        False,
        "subtract the mean of every 256 queries (under 'block', of every group) before quantising, "
        "and add what it contributes to scores and dK in FP32 (SageAttention2, arXiv 2411.10958). "
        "Only mma.sync kernels have it: on sm_90a they take about twice as long, and three times "
        "at 256 channels. It needs 4 bytes per 256 scores, and excludes 'qk16' and packing.",
    )
    smooth_v: bool = _option(
        False,
        "quantise the values without the mean of one in eight of them, and add it to out: where "
        "values have a mean, out and dQ are more exact (SageAttention2, arXiv 2411.10958).",
    )
    rotate: bool = _option(
        True, "apply a Hadamard transform to q and k before quantising them for the scores."
    )
    precision: str = _option(
        "six-of-seven",
        "which of the seven products are INT8. 'six-of-seven': all except dP (SageBwd, arXiv "
        "2603.02170, section 3). Further products are in 16 bits with 'dv16' (dV; 5 are INT8), "
        "'qk16' (the scores in both passes; 4) and 'gradients16' (dV, dQ and dK; 3). 'fastest' "
        "stands for what `fastest_precision` says, and for its dp_sums unless they are given.",
    )
    deterministic: bool = _option(
        True,
        "the same inputs give the same bits. With False, one kernel may compute all gradients under "
        "precision='gradients16', and adds dQ up in any order.",
    )
    dq_sums: str = _option(
        "fp32",
        "the format in which one kernel for all gradients sums dQ in memory: 'fp32', or 'fp16', "
        "which takes half the bytes; a factor per query keeps finite inputs from overflowing. It "
        "needs deterministic=False, precision='gradients16', at most 128 channels, and sm_90a.",
    )
    dp_sums: str = _option(
        "fp32",
        "the format in which tensor cores sum dP: 'fp32', or 'fp16', which GeForce GPUs do at "
        "twice the rate. Powers of two keep finite inputs from overflowing, and the mean of v is "
        "subtracted before. Only mma.sync kernels have 'fp16': those of all GPUs except sm_90. One "
        "token that is much larger than all others has larger errors with it.",
    )
    gradient_kernels: str = _option(
        "any",
        "which kernels form the gradients: 'fused', one for all, forms S and dP once; 'split', one "
        "for dQ and one for dK and dV; 'any' is what is faster on the GPU, for GeForce at the length "
        "of the call. 'fused' takes at most "
        "128 channels and precision 'six-of-seven', 'qk16' or, without deterministic, "
        "'gradients16'; above 64 channels GPUs with 99 KB of shared memory per block take "
        "'six-of-seven' alone. 'block' has it for 'gradients16' alone.",
    )


@dataclasses.dataclass(frozen=True)
class Operation(Options):
    """`Options`, and what tensors would say."""

    head_dim: int = _option(
        128, "a multiple of 8 from 32 to 512.", values="a multiple of 8 from 32 to 512"
    )
    dtype: object = _option("bf16", "'bf16' or 'fp16', or the same types of PyTorch or NumPy.")
    packed: bool = _option(
        False,
        "the kernels for calls with cu_seqlens_q and cu_seqlens_k, or with seqused_q or seqused_k.",
    )
    sparse_q: int = _option(0, "queries per block of `block_sparse_attention`, or 0.", least=0)
    sparse_kv: int = _option(0, "keys per block there, or 0.", least=0)
    linear: str = _option(
        "none",
        "the kernels of `sparse_linear_attention` for an alpha that is given: 'complement' or "
        "'all', as its linear=; or 'none'. It needs sparse_q and sparse_kv.",
    )
    intervals: int = _option(
        0,
        "the kernels of calls with startend_row_indices: its columns, 1, 2 or 4; or 0.",
        least=0, values="1, 2 or 4, or 0 for none",
    )  # fmt: skip
    mask: str = _option("", "the kernels of calls with this mask: its text, such as 'q >= k'.")
    score: str = _option(
        "", "the kernels of calls with this score function: its text, such as 's / 2.0'."
    )
    max_logits: bool = _option(False, "the kernels of calls with return_max_logits=True.")


_KINDS = {
    field.name: (field.type, field.default, field.metadata["least"], field.metadata["values"])
    for field in dataclasses.fields(Operation)
}


# ---- keywords ------------------------------------------------------------------------------------

def takes(kind=Options, but=(), shortcut=None, otherwise=None, prepare=None, fastest=None):
    """Puts the fields of `kind` among the keywords of a function, which gets them as `chosen`.

    The function's signature lists them, and so does its docstring in place of `{options}`. `but`
    names fields to leave out. An unknown keyword raises a TypeError that names similar ones.
    `prepare` may change the dict of keywords, and `fastest` (core/fastest.py) puts the words there
    that precision='fastest' stands for. `shortcut` is called then, with the same arguments as the
    function; a result other than None is returned.
    `otherwise` says of some unknown keywords what to pass instead.
    """
    otherwise = otherwise or (OF_OPERATIONS if kind is Operation else {})

    def decorate(function):
        fields = [f for f in dataclasses.fields(kind) if f.name not in but]
        standard = {f.name: f.default for f in fields}
        own = [p for p in inspect.signature(function).parameters.values() if p.name != "chosen"]
        known = frozenset(p.name for p in own) | frozenset(standard)
        said = {name: text for name, text in otherwise.items() if name not in known}
        most, refuse_more = by_position(function, fields[0].name)

        @functools.wraps(function)
        def wrapper(*arguments, **keywords):
            if len(arguments) > most:
                refuse_more(len(arguments))
            if prepare:
                prepare(keywords)
            if fastest and is_fastest(keywords.get("precision")):
                fastest(arguments, keywords)
            if shortcut:
                result = shortcut(*arguments, **keywords)
                if result is not None:
                    return result
            chosen = {name: keywords.pop(name, default) for name, default in standard.items()}
            check_known(function.__name__, keywords, known, said)
            return function(*arguments, chosen=chosen, **keywords)

        listed = [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default)
                  for f in fields]  # fmt: skip
        wrapper.__signature__ = inspect.Signature(own[:most] + listed + own[most:])
        if function.__doc__:
            wrapper.__doc__ = function.__doc__.replace("{options}", described(fields))
        return wrapper

    return decorate


def described(fields):
    """Their names and help, as lines of an `Args:` section."""
    return "\n        ".join(filled(f.name, f.metadata["help"]) for f in fields)


def filled(name, text):
    """An argument in such a section."""
    return textwrap.fill(f"{name}: {text}", width=100, subsequent_indent=" " * 12)


def defaults(kind=Options):
    """Every option of `kind`, at its default."""
    return {field.name: field.default for field in dataclasses.fields(kind)}


# ---- spellings -----------------------------------------------------------------------------------


def causal_name(causal, seq_q=1, seq_kv=1):
    """'none', 'top-left' or 'bottom-right' for what a caller may pass.

    `True` is clear only if there are as many queries as keys.
    """
    if causal is False:
        return "none"
    if causal is True:
        if seq_q != seq_kv:
            raise SpecError(
                f"causal=True is ambiguous for {seq_q} queries and {seq_kv} keys: pass "
                "causal='top-left' (key j is visible to query i iff j <= i, as in PyTorch's "
                "scaled_dot_product_attention) or causal='bottom-right' (iff j <= i + N - M, as "
                "in flash-attention)"
            )
        return "top-left"
    if isinstance(causal, str) and causal in ("none", "top-left", "bottom-right"):
        return causal
    raise SpecError(
        f"causal={causal!r}: pass False or 'none', True, 'top-left' or 'bottom-right'"
    )


def with_mask(options, seq_q, seq_kv):
    """`options` with a mask that means the same without these sizes."""
    return {**options, "causal": causal_name(options["causal"], seq_q, seq_kv)}


def needs_as_many(options):
    """Whether with_mask() requires as many queries as keys."""
    return options["causal"] is True


def _spelled(name, value):
    """An option's value as the C++ library reads it. Raises SpecError."""
    if name == "causal":
        return causal_name(value)
    if name == "dtype":
        return dtype_name(value)
    kind, default, least, values = _KINDS[name]
    if kind is bool:
        return "yes" if yes_or_no(name, value) else "no"
    if kind is int:
        none = value is None is default
        return str(least - 1 if none else whole_number(name, value, least, values))
    if name in ("mask", "score"):
        return expression_text(name, value)
    return refuse_fastest(word(name, value, f"a word, such as {default!r}"))


def text_of(options):
    """Options in one line, for `spec_of_text`. Plain Python, because torch.compile traces it."""
    return " ".join([f"{name}={_spelled(name, value)}" for name, value in options.items()])


def spec_of_text(text, **more):
    """The resolved spec of `text_of`'s line and further options."""
    spelled = {name: _spelled(name, value) for name, value in more.items()}
    return _core.Spec(**dict(item.split("=", 1) for item in text.split()), **spelled)


class Spec(_core.Spec):
    """The checked options of one attention operation, from keywords or from a line of text.

    With keywords, such as Spec(head_dim=64, causal=True), options that are left out have their
    defaults. Spec(line) reads such a line as 'd64 no-rotate': all that it leaves out has its
    default. It also reads what str() gives. Only such printed lines have `numerics=`, and a switch
    that they do not name, such as rotate, is off.

    Every option is an attribute, and repr() is an expression for the same Spec. The attribute
    `numerics` is the version of the numerics: operations of one version compute the same integers,
    bit for bit. Raises SpecError for impossible options and for lines that cannot be read,
    TypeError for unknown options.
    """

    __slots__ = ()

    def __init__(self, line=None, /, **given):
        check_keywords("Spec", given, frozenset(_KINDS), OF_OPERATIONS)
        if line is None:
            super().__init__(**{name: _spelled(name, value) for name, value in given.items()})
            return
        if given or not isinstance(line, str):
            raise TypeError(f"Spec() takes one line of text or keywords; given are {line!r} and "
                            f"{', '.join(given) or 'no keywords'}")  # fmt: skip
        for part in line.split():
            refuse_fastest(part)
        if not line.isascii():
            raise SpecError(f"cannot read spec {line!r}: it has characters that are not ASCII")
        super().__init__(line)


def width_of(channels):
    """How many channels kernels compute with for this head dimension, at most the largest width."""
    return min((width for width in WIDTHS if width >= channels), default=WIDTHS[-1])


# ---- INT8 products of a precision ----------------------------------------------------------------


def plan_of(precision):
    """The INT8 products that `precision` means: the name of a precision, or names of products, in a
    collection or, as the command line has them, in a string ('s,pv', or 'none').

    Names: 'six-of-seven' (all except dP; SageBwd, arXiv 2603.02170, section 3), and with 16-bit
    operands in further products 'dv16' (dV), 'qk16' (S) and 'gradients16' (dV, dQ and dK). The
    reference and the emulation take any subset of PRODUCTS; kernels exist for the named ones.
    Raises SpecError.
    """
    if isinstance(precision, str):
        if precision == "none" or precision in PRODUCTS or "," in precision or "+" in precision:
            return plan_of(() if precision == "none" else re.split("[,+]", precision))
        named = refuse_fastest(word("precision", precision, "a word, such as 'qk16'"))
        try:
            return frozenset(_core.plan_of(named))
        except SpecError as error:
            raise SpecError(f"{error} (without kernels any INT8 products among {PRODUCTS}, such "
                            "as 's,pv', or 'none')") from None  # fmt: skip
    try:
        plan = None if isinstance(precision, collections.abc.Mapping) else frozenset(precision)
    except TypeError:
        plan = None
    if plan is None:
        raise SpecError(
            f"precision={precision!r}: pass one of {PRECISIONS} or a tuple of some of {PRODUCTS}"
        )
    unknown = sorted(map(str, plan - set(PRODUCTS)))
    if unknown:
        raise SpecError(f"unknown products {', '.join(unknown)} in precision: known are {PRODUCTS}")
    return plan


def precision_of(plan):
    """The name of the precision with these INT8 products, or None."""
    return next((name for name in PRECISIONS if plan == plan_of(name)), None)
