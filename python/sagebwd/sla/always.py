"""`always=`: key blocks that are listed in any case, such as those of a video model's text."""

import torch

from sagebwd.core.arguments.checks import SpecTypeError, whole_number
from sagebwd.core.options import SpecError

_WANTED = (
    "numbers of key blocks as a slice, a range, a list or a tuple, such as slice(0, 4), or a bool "
    "tensor of (key blocks,)"
)


def checked(always):
    """What the other functions here take: None, a bool tensor, a slice, or numbers in ascending
    order. What depends on how many blocks there are is not checked."""
    if always is None:
        return None
    if isinstance(always, torch.Tensor):
        if always.dtype != torch.bool or always.dim() != 1:
            raise SpecError(f"always is {always.dtype} of {tuple(always.shape)}: pass {_WANTED}")
        return always
    if isinstance(always, slice):
        for part in (always.start, always.stop, always.step):
            if part is not None:
                _number(always, part, least=-(1 << 62))
        if always.step is not None and always.step < 1:
            raise SpecError(f"always={always}: pass a slice whose step is 1 or more")
        return always
    if not isinstance(always, (list, tuple, range)):
        raise SpecTypeError(f"always={always!r}: pass {_WANTED}")
    return tuple(sorted({_number(always, number, least=0) for number in always}))


def _number(always, number, least):
    return whole_number("a number of always", number, least, f"{_WANTED} (given: {always!r})")


def as_numbers(always):
    """The same without tensors: of a mask its numbers."""
    if isinstance(always, torch.Tensor):
        return tuple(always.nonzero().flatten().tolist())
    return always


def mask_of(always, count, device):
    """bool of (count,), or None for none; nothing waits for the device."""
    if always is None:
        return None
    if isinstance(always, torch.Tensor):
        if always.shape[0] != count:
            raise SpecError(f"always has shape {tuple(always.shape)} and there are {count} key "
                            f"blocks: pass a mask of ({count},)")  # fmt: skip
        if always.device != device:
            raise SpecError(f"always is on {always.device} and the scores on {device}: move one of "
                            "them")  # fmt: skip
        return always
    mask = torch.zeros(count, dtype=torch.bool, device=device)
    if isinstance(always, slice):
        mask[always] = True
        return mask
    if always and always[-1] >= count:
        raise SpecError(f"always has block {always[-1]} and there are {count} key blocks: pass "
                        f"numbers from 0 to {count - 1}")  # fmt: skip
    for first, end in _runs(always):
        mask[first:end] = True
    return mask


def _runs(numbers):
    """(first, end) of numbers that follow each other."""
    runs = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs


def how_many(always, count):
    """Of so many blocks. A tensor is read, for which its device is waited for."""
    if always is None:
        return 0
    if isinstance(always, torch.Tensor):
        return int(always.sum())
    return len(range(count)[always]) if isinstance(always, slice) else len(always)
