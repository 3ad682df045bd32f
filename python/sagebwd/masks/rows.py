"""Reads what the constructors of intervals are given: numbers per sequence, for one or several."""

import torch

from sagebwd.core.arguments.checks import SpecError, SpecTypeError, a_kind, whole_number

#: The largest number that int32 holds.
MOST_TOKENS = 2**31 - 1


def listed(name, given):
    """The tensor, array or sequence as nested lists; a number as it is."""
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, (list, tuple, range)):
        return [listed(name, item) for item in given]
    return given


def depth_of(given):
    """How many lists lie in each other; an empty one has no more inside."""
    return 1 + max(map(depth_of, given), default=0) if isinstance(given, list) else 0


def rows_of(name, given, least=0, depth=1):
    """One list per sequence, and whether several were given: what has `depth` levels of lists is
    one sequence, what has one more is several.

    SpecError for other levels, for no sequences and for what are no whole numbers >= `least`.
    """
    rows = listed(name, given)
    if not isinstance(rows, list) and depth:
        raise SpecTypeError(f"{name} is {a_kind(given)}; pass a list of numbers per sequence, or a "
                            "tensor")  # fmt: skip
    # A pair is never empty, so that empty lists of those are sequences that have none.
    several = depth_of(rows) > depth or (depth == 2 and [] in rows)
    if several and (depth_of(rows) > depth + 1 or not all(isinstance(r, list) for r in rows)):
        raise SpecError(f"{name} has lists of several depths: pass a list for one sequence, or one "
                        "such list per sequence of the batch")  # fmt: skip
    return [_checked(name, row, least) for row in (rows if several else [rows])]


def _checked(name, row, least):
    if isinstance(row, list):
        return [_checked(name, item, least) for item in row]
    return whole_number(name, row, least)


def numbers_of(name, given, least=0):
    """One number per sequence: of one number, or of a list of them."""
    rows = listed(name, given)
    rows = rows if isinstance(rows, list) else [rows]
    if not rows:
        raise SpecError(f"{name} is empty: pass one number per sequence")
    return [whole_number(name, row, least) for row in rows]


def matched(first, rows, second, others):
    """Both lists with one entry per sequence; a list of one serves all. SpecError otherwise."""
    batch = max(len(rows), len(others))
    if not {len(rows), len(others)} <= {1, batch}:
        raise SpecError(f"{first} is of {len(rows)} sequences and {second} of {len(others)}: pass "
                        "as many, or one for all")  # fmt: skip
    return [x * (batch // len(x)) for x in (rows, others)]


def token_count(name, tokens):
    """A number of tokens, which the numbers of intervals can say. SpecError for others."""
    tokens = whole_number(name, tokens)
    if tokens > MOST_TOKENS:
        raise SpecError(f"{name}={tokens}: intervals are told in int32, which has numbers up to "
                        f"{MOST_TOKENS}: pass at most as many, or shorter sequences")  # fmt: skip
    return tokens


def tokens_of(name, used, tokens):
    """How many tokens the sequences have, of which so many are `used` each."""
    if max(used) > MOST_TOKENS:
        raise SpecError(f"{name} has {max(used)} tokens: intervals are told in int32, which has "
                        f"numbers up to {MOST_TOKENS}: pass at most as many")  # fmt: skip
    if tokens is not None:
        tokens = token_count("tokens", tokens)
        if max(used) > tokens:
            raise SpecError(f"{name} has {max(used)} tokens, and tokens={tokens}: pass at least as "
                            "many")  # fmt: skip
        return tokens
    if len(set(used)) > 1:
        raise SpecError(f"{name} has sequences of {' and '.join(map(str, sorted(set(used))))} "
                        "tokens: pass tokens=, which the shorter ones are padded to")  # fmt: skip
    return used[0]


def device_of(device, *given):
    """`device`, or that of the first tensor; None stands for the CPU."""
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    return device if device is not None or not tensors else tensors[0].device


def columns_of(rows, device):
    """startend_row_indices of columns per sequence: (batch, 1, keys, columns)."""
    table = [torch.stack([torch.as_tensor(c, dtype=torch.int32) for c in row], -1) for row in rows]
    return torch.stack(table)[:, None].contiguous().to(device)
