"""The arguments that say which norm, RoPE and gate: names, defaults and texts, without PyTorch."""

from sagebwd.core import options
from sagebwd.core.keywords import FRONT as ARGUMENTS

#: Those of functions that have a front end.
OF_ATTENTION = {**ARGUMENTS, "gate": None}

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


def lines():
    """By what stands for them in docstrings, lines of an `Args:` section."""
    of_front = [options.filled(names, text) for names, text in _TEXTS.items()]
    of_attention = [options.filled(", ".join(ARGUMENTS), _OF_ATTENTION),
                    options.filled("gate", _GATE)]  # fmt: skip
    return {"{arguments}": "\n        ".join(of_front),
            "{front_end}": "\n        ".join(of_attention)}  # fmt: skip


def described(function):
    """Puts them into a function's docstring."""
    for name, text in lines().items() if function.__doc__ else ():
        function.__doc__ = function.__doc__.replace(name, text)
    return function
