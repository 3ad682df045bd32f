"""Calls that are left to PyTorch because they are short: min_tokens= of `sdpa` and of `use`."""

import functools
import math

import torch

from sagebwd.core import crossover, fastest, options
from sagebwd.core.compat import called_by_the_compiler

AUTO = "auto"
#: Options that decide how attention is computed, and not what.
_OF_NUMERICS = frozenset((
    "precision", "granularity", "group_q", "group_kv", "sink_keys", "smooth_k", "smooth_q",
    "smooth_v",
    "rotate", "deterministic", "dq_sums", "dp_sums", "gradient_kernels",
))  # fmt: skip


class ShortCalls:
    """Which calls are left to PyTorch, and how many were.

    Args:
        min_tokens: the least tokens of a call that is not; 'auto' for `sagebwd.crossover_tokens` of
            each call's GPU, with a backward; None for no call.
        chosen: the options of the calls.

    Raises SpecError.
    """

    def __init__(self, min_tokens, chosen):
        if min_tokens is not None:
            if lost := sorted(chosen.keys() - _OF_NUMERICS):
                raise options.SpecError(f"min_tokens with {', '.join(lost)}: PyTorch's function, "
                                        "to which short calls go, has none of it")  # fmt: skip
            if isinstance(min_tokens, str) and min_tokens != AUTO:
                raise options.SpecError(f"min_tokens={min_tokens!r}: pass a number of tokens, "
                                        "'auto', or None")  # fmt: skip
            if min_tokens not in (AUTO, math.inf):
                min_tokens = options.whole_number("min_tokens", min_tokens, least=1)
        self.min_tokens, self._chosen = min_tokens, chosen
        self.count = 0

    def takes(self, query, key, causal):
        """Whether a call on (batch, heads, tokens, head_dim) tensors is short, which counts it."""
        if self.min_tokens is None:
            return False
        least = self.min_tokens
        if least == AUTO:
            index = query.device.index if query.is_cuda else None
            words = self._chosen.get("precision"), self._chosen.get("dp_sums")
            least = _least(index, query.shape[3], causal, *words)
            if isinstance(least, str):
                raise options.SpecError(least)
        if crossover.tokens_of(query.shape[2], key.shape[2]) >= least:
            return False
        if not torch.compiler.is_compiling():  # a graph would be compiled for each number
            self.count += 1
        return True

    def told(self):
        """Says what was left to PyTorch."""
        if self.min_tokens != AUTO:
            return f"{self.count}, which have fewer than {self.min_tokens} tokens"
        return f"{self.count}, which are faster with it (min_tokens='auto')"


@called_by_the_compiler
def _least(index, head_dim, causal, precision, dp_sums):
    """The crossover on a GPU; a text that says why nothing is known of it."""
    if index is None:
        return ("min_tokens='auto': the crossover is that of a GPU, and the tensors are on the "
                "CPU; pass a number")  # fmt: skip
    try:
        return _crossover(crossover.generation, index, head_dim, causal, precision, dp_sums)
    except options.SpecError as error:
        return f"min_tokens='auto': {error}"


@functools.cache
def _crossover(generation, index, head_dim, causal, precision, dp_sums):
    words = {"precision": precision or "six-of-seven", "dp_sums": dp_sums or "fp32"}
    if options.is_fastest(words["precision"]):
        words = fastest.fastest_precision(index, head_dim=head_dim)
    return crossover.crossover_tokens(index, head_dim=head_dim, causal=causal, **words)


def are_tensors_of_calls(*tensors):
    """Whether these have the shape of queries and keys; others are refused elsewhere."""
    return all(isinstance(t, torch.Tensor) and not t.is_nested and t.dim() == 4 for t in tensors)
