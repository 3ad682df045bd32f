"""The arguments that say which norm, RoPE and gate: names, defaults, checks and texts, without
PyTorch."""

import functools
import inspect
import numbers

from sagebwd.core import options
from sagebwd.core.arguments import checks
from sagebwd.core.compat import not_compiled
from sagebwd.core.keywords import FRONT as ARGUMENTS
from sagebwd.core.keywords import FRONT_OTHERWISE, RECOMPUTE

#: Those of functions that have a front end.
OF_ATTENTION = {**ARGUMENTS, "gate": None}
#: What to pass to functions of q and k in place of keywords that they do not have.
OTHERWISE = {
    **FRONT_OTHERWISE,
    "weight": "pass the norms' weights as q_norm= and k_norm=",
    "v": "the values have neither norm nor RoPE: leave them out",
}
_STYLES = ("halves", "interleaved")

_TEXTS = {
    "q_norm, k_norm": "the norm's gain, (head_dim,) or (heads, head_dim), of any floating type, as "
    "it multiplies (for Gemma 1 + weight). True means a norm without gain, None no norm.",
    "norm_eps": "what is added to the mean square.",
    "q_inv_rms, k_inv_rms": "what takes the place of 1 / sqrt(mean(x^2) + norm_eps), for models "
    "that normalise over all heads: (batch, tokens), or (batch, heads, tokens) in either layout. "
    "Without q_norm and k_norm there is no gain.",
    "rope": "(cos, sin) of (tokens, R/2) or (batch or 1, tokens, R/2), of any floating type, with "
    "any strides, which rotate R channels. The tables of many libraries have each angle twice, and "
    "whole ones would rotate twice as many: pass cos[..., :R/2] of a table that cat((f, f)) made "
    "(Llama, Qwen, GLM), cos[..., ::2] of one that repeat_interleave(f, 2) made (Cohere), whatever "
    "the style. They get no gradient.",
    "rope_k": "the same for the keys. None means `rope`.",
    "rope_style": "'halves' rotates channels i and i + R/2 (Llama, Qwen, Gemma), 'interleaved' 2i "
    "and 2i + 1 (GPT-J, GLM, Flux, Wan), counted from rope_begin.",
    "rope_begin": "the first of the R channels that are rotated; others stay as they are.",
}
_OF_ATTENTION = (
    "norm and RoPE of queries and keys before attention, as `qk_norm_rope` computes them; for "
    "packed sequences tables are (tokens, R/2), and 1/rms is (tokens,) or (heads, tokens). They "
    "receive gradients as there. `k_mean` is of what comes out. Unused tokens are normed and gated "
    "too, and have to be finite."
)
_GATE = (
    "a tensor like out, of any floating type: the result is out * sigmoid(gate), computed in FP32 "
    "and rounded once (gated attention, arXiv 2505.06708). It receives gradients, and lse is what "
    "it was."
)
_RECOMPUTE = (
    "keep q and k once from the forward to the backward, which forms them again behind norm and "
    "RoPE: the same bits for one more launch of that kernel, and for 2 bytes less a number of q and "
    "k. It needs PyTorch 2.8. torch.compile leaves such a call out of its graphs, and hooks for saved "
    "tensors do not get these two. Where nothing of norm and RoPE is learned it changes nothing."
)


def lines():
    """By what stands for them in docstrings, lines of an `Args:` section."""
    of_front = [options.filled(names, text) for names, text in _TEXTS.items()]
    of_attention = [options.filled(", ".join(ARGUMENTS), _OF_ATTENTION),
                    options.filled("gate", _GATE), options.filled("recompute_qk", _RECOMPUTE)]
    return {"{arguments}": "\n        ".join(of_front),
            "{front_end}": "\n        ".join(of_attention)}  # fmt: skip


def described(function):
    """Puts them into a function's docstring."""
    for name, text in lines().items() if function.__doc__ else ():
        function.__doc__ = function.__doc__.replace(name, text)
    return function


def check_numbers(q_norm, k_norm, norm_eps, rope, rope_k, rope_style, rope_begin):
    """norm_eps and rope_begin. SpecError for these or a style that are none, and for what says more
    of a norm or a RoPE that is not asked for."""
    real = isinstance(norm_eps, numbers.Real) and not isinstance(norm_eps, bool)
    if not real or not 0 <= norm_eps < 3.4e38:  # nor NaN
        raise options.SpecError(f"norm_eps={norm_eps!r}: pass a number from 0 on, such as 1e-6")
    if rope_style not in _STYLES:
        raise options.SpecError(f"rope_style={rope_style!r}: pass 'halves' or 'interleaved'")
    begin = checks.whole_number("rope_begin", rope_begin, least=0)
    if rope_k is not None and rope is None:
        raise options.SpecError("rope_k is given without rope: pass rope=(cos, sin) as well")
    if begin and rope is None:
        raise options.SpecError(f"rope_begin={begin} is given without rope: pass rope=(cos, sin)")
    if rope is None and rope_style != ARGUMENTS["rope_style"]:
        raise options.SpecError(
            f"rope_style={rope_style!r} is given without rope: pass rope=(cos, sin)"
        )
    if q_norm is None and k_norm is None and norm_eps != ARGUMENTS["norm_eps"]:
        raise options.SpecError(
            f"norm_eps={norm_eps!r} is given without q_norm or k_norm: pass these, True for a norm "
            "without gain"
        )
    return float(norm_eps), begin


def check_pairs(name, pairs, begin, channels):
    """SpecError for a table of more pairs of channels than heads have from `begin` on, or none."""
    if not pairs or begin + 2 * pairs > channels:
        raise options.SpecError(
            f"{name} has {pairs} pairs of channels from rope_begin={begin} on, and "
            f"heads have {channels} channels: pass {max(0, channels - begin) // 2} pairs at "
            "most, or a lower rope_begin. A table that has each angle twice is to be halved: "
            "cos[..., :R/2] where cat((f, f)) made it, cos[..., ::2] where repeat_interleave did"
        )


def asks(given):
    """Whether these arguments ask for a norm or a RoPE. SpecError for what says more of one that is
    not asked for."""
    told = {**ARGUMENTS, **given}
    check_numbers(*(told[name] for name in ("q_norm", "k_norm", "norm_eps", "rope", "rope_k",
                                            "rope_style", "rope_begin")))  # fmt: skip
    return any(told[name] is not None
               for name in ("q_norm", "k_norm", "q_inv_rms", "k_inv_rms", "rope"))  # fmt: skip


def with_front_end(before, gated, shortcut=None, not_kept=None):
    """A decorator that gives a function of (q, k, v, ...) the keywords of OF_ATTENTION, in its
    signature and, for `{front_end}`, in its docstring.

    Args:
        before: (q, k, v, arguments, **keywords of the function) -> (q, k, v) behind norm and RoPE.
        gated: (out, gate) -> out times the gate.
        shortcut: (q, k, v, **keywords) -> what the function gives, or None. It is asked before the
            function, with the keywords of its `chosen` among the others.
        not_kept: (q, k) -> the context in which these are not kept, for functions that have
            `recompute_qk` as well.
    """
    added = OF_ATTENTION if not_kept is None else {**OF_ATTENTION, **RECOMPUTE}
    names = frozenset(added)  # a compiler that reads the dictionary takes its numbers for dynamic

    def decorate(function):
        listed = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
                  for name, default in added.items()]  # fmt: skip
        signature = inspect.signature(function)

        def attended(tensors, keywords):
            found = None
            if shortcut:
                others = {name: given for name, given in keywords.items() if name != "chosen"}
                found = shortcut(**tensors, **keywords["chosen"], **others)
            return function(**tensors, **keywords) if found is None else found

        def behind(tensors, given, keywords):
            return dict(zip("qkv", before(*(tensors[name] for name in "qkv"), given, **keywords)))

        @not_compiled("a call with recompute_qk=True")
        def attended_and_not_kept(tensors, given, keywords):
            if not asks(given):
                raise options.SpecError(
                    "recompute_qk=True is given without norm or RoPE, behind which q and k are "
                    "formed again: pass q_norm=, k_norm= or rope=, or leave it out"
                )
            tensors = behind(tensors, given, keywords)
            with not_kept(tensors["q"], tensors["k"]):
                return attended(tensors, keywords)

        @functools.wraps(function)
        def wrapper(*arguments, **keywords):
            asked = [name for name in keywords if name in names]
            if not asked:
                return function(*arguments, **keywords)
            given = {name: keywords.pop(name) for name in asked}
            gate, again = given.pop("gate", None), given.pop("recompute_qk", False)
            tensors = dict(zip("qkv", arguments))
            named = {name: keywords[name] for name in "qkv" if name in keywords}
            twice = any(name in tensors for name in named)
            if len(arguments) > 3 or twice or len(tensors) + len(named) < 3:
                return function(*arguments, **keywords)  # which says what is missing or there twice
            tensors |= {name: keywords.pop(name) for name in named}
            if options.yes_or_no("recompute_qk", again):
                found = attended_and_not_kept(tensors, given, keywords)
            else:
                tensors = behind(tensors, given, keywords) if asks(given) else tensors
                found = attended(tensors, keywords)
            if gate is None:
                return found
            if isinstance(found, tuple):
                return (gated(found[0], gate), *found[1:])
            return gated(found, gate)

        wrapper.__signature__ = signature.replace(
            parameters=[*signature.parameters.values(), *listed]
        )
        return described(wrapper)

    return decorate
