"""Keywords: further names of known ones, and messages about unknown ones."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

# Error messages translate these names, of other attention functions, into our options.
_FOREIGN_NAMES = {
    "is_causal": "causal", "scale": "softmax_scale", "sm_scale": "softmax_scale",
    "tensor_layout": "layout", "return_softmax_lse": "return_lse", "smooth": "smooth_k",
    "plan": "precision", "cu_seqlens": "cu_seqlens_q", "cu_seqlens_kv": "cu_seqlens_k",
    "seqused_kv": "seqused_k", "s_aux": "sink_logits", "sinks": "sink_logits",
    "learnable_sink": "sink_logits", "lse": "return_lse", "packed": "cu_seqlens_q",
    "intervals": "startend_row_indices", "max_logits": "return_max_logits",
}  # fmt: skip
_ELSEWHERE = "torch.nn.attention.flex_attention has it"
_CACHE = (
    "there is no KV cache: each call would quantise all keys again, which takes longer than 16-bit "
    "attention for a few queries. Generate with torch's scaled_dot_product_attention"
)
_DROPOUT = (
    "dropout is not supported: leave it out, or set the model's dropout of attention "
    "(attention_dropout, attention_probs_dropout_prob) to 0"
)
_ABSENT = {
    "dropout_p": _DROPOUT,
    "dropout": _DROPOUT,
    "attn_mask": "arbitrary masks are not supported: use causal=, window_left=, window_right=, or "
    f"seqused_k= for padding; {_ELSEWHERE}, and sagebwd.attention takes a mask= of positions, such "
    "as mask='q - k < 512', and the intervals that sagebwd.masks makes",
    "attn_bias": "score= of sagebwd.attention adds a tensor of one or two dimensions, such as "
    "score=sagebwd.masks.trace_score('s + bias[h, q - k + 511]', {'bias': tensor})",
    "window_size": "pass its two numbers as window_left= and window_right=",
    "sliding_window": "pass window_left=sliding_window - 1, because a sliding_window counts the "
    "query's own key as well",
    "softcap": "sagebwd.attention has score='50.0 * tanh(s / 50.0)', with your number in the place "
    "of 50.0",
    "alibi_slopes": "sagebwd.flash_attn_func takes them, and sagebwd.attention has "
    "score=sagebwd.masks.trace_score('s - slope[h] * abs(q - k)', {'slope': alibi_slopes})",
    **dict.fromkeys(("k_cache", "v_cache", "cache_seqlens", "block_table", "page_table"), _CACHE),
    "max_seqlen_q": "leave it out: lengths are read on the GPU",
    "max_seqlen_k": "leave it out: lengths are read on the GPU",
    "layout": "tensors are (batch, heads, tokens, head_dim) here: transpose others",
    **dict.fromkeys(
        ("block_mask", "block_indices", "block_counts", "block_bits", "block_size"),
        "sagebwd.block_sparse_attention has it, and sagebwd.emulation's "
        "emulated_block_sparse_attention"),
    "return_max_logits": "sagebwd.attention and sagebwd.block_sparse_attention return them, of "
    "calls on one GPU: call one of these",
    "return_seed_offset": "there is no dropout, and so no seed: leave it out",
    **dict.fromkeys(("head_dim", "dtype"), "the tensors say it: leave it out"),
    "enable_gqa": "grouped queries need no switch: pass k and v with fewer heads",
}
#: Functions that take intervals say this of masks instead.
_MASK_AS_INTERVALS = (
    "arbitrary masks are not supported: pass **sagebwd.masks.from_bool(attn_mask).arguments for a "
    "mask that hides at most two intervals of queries from each key, mask= for a function of "
    "positions, such as mask='q - k < 512', or use causal=, window_left=, window_right=, or "
    f"seqused_k= for padding; {_ELSEWHERE}"
)
WINDOWS = ("window_left", "window_right")
#: The options that calls with lists of blocks do not have.
NOT_WITH_LISTS = ("window_left", "window_right", "group_q", "sink_keys", "smooth_q", "dq_sums",
                  "gradient_kernels")  # fmt: skip
#: Those that the emulation of such calls does not have.
NOT_EMULATED_WITH_LISTS = ("window_left", "window_right", "sink_keys", "smooth_q", "precision",
                           "deterministic", "dq_sums", "gradient_kernels")  # fmt: skip
#: Options that choose among kernels, which the emulation does not have.
NOT_EMULATED = ("deterministic", "dq_sums", "gradient_kernels")
_PACKING = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
#: The arguments of `qk_norm_rope` that attention functions with a front end have too, and their
#: defaults.
FRONT = {
    "q_norm": None, "k_norm": None, "norm_eps": 1e-6, "q_inv_rms": None, "k_inv_rms": None,
    "rope": None, "rope_k": None, "rope_style": "halves", "rope_begin": 0,
}  # fmt: skip
#: Functions on torch tensors have this besides.
RECOMPUTE = {"recompute_qk": False}
#: What to pass in place of other names for these.
FRONT_OTHERWISE = {
    "q_weight": "pass the norm's weight as q_norm=",
    "k_weight": "pass the norm's weight as k_norm=",
    **dict.fromkeys(("eps", "epsilon", "variance_epsilon", "rms_norm_eps"), "pass norm_eps="),
    **dict.fromkeys(("cos", "sin", "freqs", "freqs_cis", "position_embeddings"),
                    "pass rope=(cos, sin), of (tokens, channels / 2)"),
    "interleaved": "pass rope_style='interleaved'",
    **dict.fromkeys(("rotary_dim", "rope_dim", "partial_rotary_factor"),
                    "leave it out: twice as many channels are rotated as the table has columns"),
    **dict.fromkeys(("position_ids", "positions"),
                    "pass the rows of these positions as rope=(cos[positions], sin[positions])"),
}  # fmt: skip
_WITH_FRONT = "sagebwd.attention, block_sparse_attention and sparse_linear_attention"
#: Arguments that `sagebwd.attention` has alone, or few others.
_OF_ATTENTION = {
    **dict.fromkeys(
        FRONT,
        f"it is an argument of {_WITH_FRONT}. Call one of these, or sagebwd.qk_norm_rope before",
    ),
    **dict.fromkeys(RECOMPUTE, f"it is an argument of {_WITH_FRONT}, on PyTorch's tensors: call one of these"),
    "gate": f"it is an argument of {_WITH_FRONT}. Call one of these, or multiply the result by "
    "torch.sigmoid(gate)",
    **dict.fromkeys(
        ("sink_logits", "k_mean", "startend_row_indices", "mask", "score"),
        "it is an argument of sagebwd.attention, which takes PyTorch's tensors",
    ),
    **dict.fromkeys(
        _PACKING,
        "this function takes no packed sequences or lengths: it is an argument of "
        "sagebwd.attention, which takes PyTorch's tensors",
    ),
}
NO_OPTION_OF_LISTS = "calls with lists of blocks have no such option: leave it out"
#: Functions with lists of blocks do not have these; the texts say what to do instead.
WITH_LISTS = {
    "topk": "list the blocks yourself, such as by sagebwd.top_blocks(scores, density)",
    "density": "the lists say which blocks there are; sagebwd.top_blocks takes it",
    **dict.fromkeys(("BLKQ", "BLKK", "BLOCK_SIZE"), "pass block_size=(queries, keys)"),
    **dict.fromkeys((*WINDOWS, "window_size", "sliding_window"), "list the blocks in the window"),
    **dict.fromkeys((*_PACKING, "cu_seqlens", "cu_seqlens_kv", "seqused_kv"),
                    "lists are of whole sequences: make a call for each"),
    **dict.fromkeys(("sink_keys", "smooth_q", "sink_logits", "s_aux", "sinks", "learnable_sink",
                     "k_mean"), NO_OPTION_OF_LISTS),
    **dict.fromkeys(("startend_row_indices", "mask"),
                    "sagebwd.attention has it, which skips the blocks that it hides"),
    "attn_mask": "pass block_mask=, which says which blocks are listed; there are no masks of "
    "tokens",
}  # fmt: skip
#: Functions that take no tensors say this of what calls are given.
OF_OPERATIONS = {
    **dict.fromkeys(("return_lse", "softmax_scale", "layout", "k_mean", "sink_logits"),
                    "the kernels are the same with any of its values: leave it out"),
    **dict.fromkeys(_PACKING, "pass packed=True"),
    **dict.fromkeys(("block_mask", "block_size"), "pass a block's sizes as sparse_q= and "
                    "sparse_kv="),
    "return_max_logits": "pass max_logits=True",
    "startend_row_indices": "pass the number of its columns as intervals=",
}  # fmt: skip
#: The modules of `sagebwd.nn` do not have these; the texts say what to do instead.
OF_MODULES = {
    **dict.fromkeys(("attn_mask", "block_mask"), "its router says which blocks are listed; "
                    "sagebwd.sparse_linear_attention has block_mask="),
    **dict.fromkeys(("dtype", "device"), "parameters are in FP32; move them by .to(device)"),
}  # fmt: skip
#: These ask for nothing with such a value, and may be given to functions that do not have them.
_HARMLESS = {"dropout_p": 0, "dropout": 0, "causal": False, "is_causal": False}
WITHOUT_KERNELS = dict.fromkeys(
    NOT_EMULATED, "it chooses among kernels, which the emulation has not: leave it out"
)


def also_named(**names):
    """Lets a function take keywords by further names: `also_named(seq_q="seq_len")`.

    TypeError if a call passes a keyword by both of its names.
    """

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*arguments, **keywords):
            for other, name in names.items():
                if other not in keywords:
                    continue
                if name in keywords:
                    raise TypeError(
                        f"{function.__name__}() got {name!r} and {other!r}, which are two names of "
                        "one argument: pass one of them"
                    )
                keywords[name] = keywords.pop(other)
            return function(*arguments, **keywords)

        return wrapper

    return decorate


def absent(name, causal="causal"):
    """Says what to do instead of using this option, which does not exist. `causal` is what the
    function calls that option."""
    return _ABSENT[name].replace("causal=", f"{causal}=")


class Words:
    """Puts a function's own names for arguments into errors of `attention`, which it calls.

    Args:
        names: of keywords and tensors of `attention`, by what the function calls them.
        texts: parts of messages, and what to say in place of each.
    """

    def __init__(self, names, texts):
        self.names, self.texts = names, texts
        self._known = re.compile(rf"(?<![\w'./])({'|'.join(names)})(?![\w/])") if names else None

    def put_into(self, error):
        """Makes the error speak of the function's arguments."""
        if len(error.args) != 1 or not isinstance(error.args[0], str):
            return
        message = error.args[0]
        for text, other in self.texts.items():
            message = message.replace(text, other)
        if self._known:
            message = self._known.sub(lambda found: self.names[found[0]], message)
        error.args = (message,)


Function = TypeVar("Function", bound=Callable[..., Any])


def by_position(function, further=None):
    """How many arguments a function takes by position, and what raises the TypeError for more.
    `further` is an argument that it takes by name, if its signature has none."""
    signature = inspect.signature(function).parameters.values()
    taken = [p.name for p in signature if p.kind <= p.POSITIONAL_OR_KEYWORD]
    further = further or next((p.name for p in signature if p.name not in taken), None)
    told = f"pass the others by name, such as {further}=" if further else "leave the others out"

    def refuse(count):
        own = [name for name in taken if name != "self"]
        raise TypeError(f"{_name_of(function)}() takes {', '.join(own) or 'nothing'} by position, "
                        f"and {count - len(taken) + len(own)} arguments are given so: {told}")

    return len(taken), refuse


def _name_of(function):
    return function.__qualname__.rpartition("<locals>.")[2].removesuffix(".__init__")


def check_known(function, keywords, known, otherwise):
    """`check_keywords`, after those that ask for nothing are taken out of the dict."""
    if [name for name in keywords if name not in known]:  # in a way that every PyTorch compiles
        drop_harmless(keywords, known)
        check_keywords(function, keywords, known, otherwise)


def known_keywords(otherwise: dict[str, str]) -> Callable[[Function], Function]:
    """Unknown keywords of a function raise a TypeError that says what to pass."""

    def decorate(function: Function) -> Function:
        known = frozenset(inspect.signature(function).parameters) - {"self"}
        name = _name_of(function)
        said = {other: text for other, text in otherwise.items() if other not in known}
        most, refuse_more = by_position(function)

        @functools.wraps(function)
        def wrapper(*arguments, **keywords):
            if len(arguments) > most:
                refuse_more(len(arguments))
            check_known(name, keywords, known, said)
            return function(*arguments, **keywords)

        return wrapper  # type: ignore[return-value]

    return decorate


def nearest(given, known) -> str:
    """What to add to a message: the known word that is near, in brackets, or nothing."""
    near = difflib.get_close_matches(str(given).lower(), list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def drop_harmless(given, known):
    """Takes out of a dict the keywords that are not `known` and ask for nothing."""
    for name, nothing in _HARMLESS.items():
        value = given.get(name)
        if name not in known and isinstance(value, (bool, int, float)) and value == nothing:
            del given[name]


def check_keywords(function, given, known, otherwise):
    """TypeError for a name that is not `known`; `otherwise` says what to use instead of some."""
    for name in given:
        if name in otherwise:
            raise TypeError(f"{function}() takes no {name}: {otherwise[name]}")
        if name not in known:
            refuse_keyword(function, name, known - otherwise.keys())


def refuse_keyword(function, name, known):
    """Raises the TypeError that names what to use instead, or similar keywords."""
    if name == "attn_mask" and "startend_row_indices" in known:
        hint = _MASK_AS_INTERVALS
    elif name in _ABSENT:
        only_is_causal = "is_causal" in known and "causal" not in known
        hint = absent(name, "is_causal" if only_is_causal else "causal")
    elif (here := _FOREIGN_NAMES.get(name, name)) in _OF_ATTENTION and here not in known:
        hint = _OF_ATTENTION[here].replace("it is", "it is" if here == name else f"{here} is")
    elif name in FRONT_OTHERWISE and FRONT.keys() <= known:
        hint = FRONT_OTHERWISE[name]
    elif _FOREIGN_NAMES.get(name) in known:
        hint = f"did you mean {_FOREIGN_NAMES[name]!r}?"
    else:
        near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"known keywords: {', '.join(sorted(known))}"
        )
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {hint}")
