"""Blocks of tokens: how many there are, how many are kept, and checks that need no PyTorch."""

import math
import numbers

from sagebwd.checks import SpecTypeError, whole_number
from sagebwd.options import SpecError

#: Sizes of the blocks for which there are kernels.
SIZES = (64, 128)
LINEAR = ("complement", "all")
SCORES = ("logits", "softmax")


def count_of(tokens, size):
    """How many blocks of `size` tokens hold them; the last one may be short."""
    return -(-tokens // size)


def check_block_size(block_size, any_size=False):
    """(queries, keys) of a block. `any_size`: without kernels every positive size will do."""
    pair = isinstance(block_size, (tuple, list)) and len(block_size) == 2
    if not pair:
        raise SpecTypeError(f"block_size={block_size!r}: pass two numbers, queries and keys, such "
                            "as (128, 64)")  # fmt: skip
    sizes = tuple(whole_number("block_size", size) for size in block_size)
    if not any_size and not set(sizes) <= set(SIZES):
        raise SpecError(f"block_size={sizes}: kernels have 64 and 128 queries and keys; pass two "
                        "of these, such as (128, 64)")  # fmt: skip
    return sizes


def kept_of(density, blocks):
    """How many of a row's blocks are exact: max(1, floor(density blocks + 1e-9)), and 0 of none."""
    number = isinstance(density, numbers.Real) and not isinstance(density, bool)
    if not number or not 0 < density <= 1:
        raise (SpecError if number else SpecTypeError)(
            f"density={density!r}: pass the share of the key blocks that is exact, a number above "
            "0 and at most 1, such as 0.05"
        )
    return min(blocks, max(1, math.floor(density * blocks + 1e-9)))


def check_temperature(temperature):
    """The temperature as a float; SpecError unless it is positive and finite."""
    number = isinstance(temperature, numbers.Real) and not isinstance(temperature, bool)
    if not number or not 0 < temperature < math.inf:
        raise (SpecError if number else SpecTypeError)(
            f"temperature={temperature!r}: pass a positive number; the paper has 0.1"
        )
    return float(temperature)


def one_of(name, value, known):
    """`value`; SpecError unless it is among the words that are known."""
    if value not in known:
        raise SpecError(f"{name}={value!r}: pass {' or '.join(map(repr, known))}")
    return value


def check_alpha_number(alpha):
    """SpecError for a plain number outside [0, 1]; tensors are not read."""
    if isinstance(alpha, numbers.Real) and not 0 <= alpha <= 1:
        raise SpecError(f"alpha={alpha!r}: it is the share of the exact branch; pass a number from "
                        "0 to 1, or a tensor")  # fmt: skip
    return alpha
