"""Blocks of tokens: how many there are, how many are kept, and checks that need no PyTorch."""

import math
import numbers

from sagebwd.core.arguments.checks import SpecTypeError, whole_number
from sagebwd.core.options import SpecError

#: Sizes of the blocks for which there are kernels.
SIZES = (64, 128)
LINEAR = ("complement", "all")
SCORES = ("logits", "softmax")


def count_of(tokens, size):
    """How many blocks of `size` tokens hold them; the last one may be short."""
    return (tokens + size - 1) // size  # of numbers without a sign, which compilers follow


def words_of(blocks):
    """Words of a list of so many blocks, as bits; one bit at least is of none."""
    return blocks // 32 + 1


def check_block_size(block_size, any_size=False):
    """(queries, keys) of a block. `any_size`: without kernels every positive size will do."""
    pair = isinstance(block_size, (tuple, list)) and len(block_size) == 2
    if not pair:
        raise SpecTypeError(f"block_size={block_size!r}: pass two numbers, queries and keys, such "
                            "as (128, 64)")  # fmt: skip
    sizes = tuple(whole_number("block_size", size) for size in block_size)
    if not any_size and not set(sizes) <= set(SIZES):
        raise SpecError(f"block_size={sizes}: kernels have 64 and 128 queries and keys in a "
                        "block; pass two of these, such as (128, 64)")  # fmt: skip
    return sizes


def refuse_flex_mask(name, mask):
    """TypeError for a BlockMask of flex_attention, which says what its blocks are as lists."""
    if type(mask).__name__ != "BlockMask" or not hasattr(mask, "to_dense"):
        return
    sizes = tuple(mask.BLOCK_SIZE)
    made = ""
    if not set(sizes) <= set(SIZES):
        made, sizes = f"make it with BLOCK_SIZE=128 (it has {sizes}), and ", (128, 128)
    raise SpecTypeError(
        f"{name} is flex_attention's BlockMask: {made}pass block_mask=mask.to_dense().bool() and "
        f"block_size={sizes}. A block of which its mask_mod hides a part is then listed as a "
        "whole. Where that part lies ahead of the queries, pass causal='top-left' too, which "
        "block_sparse_attention has; with other parts use flex_attention"
    )


def check_lists(name, shape, problem, sizes):
    """SpecError unless an argument of this name and shape has the lists of a problem."""
    batch, heads, heads_kv, seq_q, seq_kv = problem
    lists, keys = count_of(seq_q, sizes[0]), count_of(seq_kv, sizes[1])
    last = {"block_mask": keys, "block_bits": words_of(keys)}.get(name)
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads, heads_kv)
    if not fits or shape[2] != lists or last not in (None, shape[3]):
        word = {"block_mask": "key blocks", "block_bits": "words"}.get(name, "width")
        wanted = (f"{either(batch)}, {either(heads, heads_kv)}, {lists}, "
                  f"{word if last is None else last}")  # fmt: skip
        raise SpecError(
            f"{name} has shape {shape}; {seq_q} queries and {seq_kv} keys in blocks of {sizes} "
            f"need (batch, heads, query blocks, {word}) = ({wanted})"
        )


def either(*numbers):
    return " or ".join(map(str, sorted({*numbers, 1}, reverse=True)))


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
