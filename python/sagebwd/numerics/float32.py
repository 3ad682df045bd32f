"""FP32 products without TF32 and BF16: a setting of PyTorch that the whole process shares.

PyTorch has two ways to say it. From 2.9 on each backend has a setting for matrix products, which is
'none' where it takes that of all operations of the backend, and this one 'none' where it takes that
of all backends. The older one, torch.set_float32_matmul_precision, writes those of both backends:
where a user has set the newer ones it cannot say what is set, and raises when asked.

No thread can have products of its own, so threads that compute are counted. The first one switches,
where something has to be switched at all, and the last one leaves what the first one found: also
'none' where that was, as anything else would hide what the user sets for all backends later.
"""

import contextlib
import os
import threading

import torch

#: Those of the newer way, by (backend, operation).
_get = getattr(torch._C, "_get_fp32_precision_getter", None)
_set = getattr(torch._C, "_set_fp32_precision_setter", None)
_IS_NEW = _get is not None and _set is not None

_BACKENDS = ("cuda", "mkldnn")
#: The newer way has these names for products that are FP32 throughout.
_EXACT = ("none", "ieee")

_lock = threading.Lock()
_count = 0  #: how many contexts of all threads are open
_here = threading.local()  #: and how many of them are of this thread
_before = None  #: a function that restores what the first of them found


def may_be_rounded(device):
    """Whether FP32 products on this device may round their operands to TF32 or BF16."""
    return _is_rounded("cuda" if device.type == "cuda" else "mkldnn")


def _is_rounded(backend):
    if _IS_NEW:
        return _get(backend, "matmul") not in _EXACT
    return torch.get_float32_matmul_precision() != "highest"


@contextlib.contextmanager
def exact_products():
    """FP32 products are FP32 throughout in this context, and in other threads as long as it is
    open."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter():
    global _count, _before
    with _lock:
        if any(map(_is_rounded, _BACKENDS)):
            # Also where a user has switched back since the first one, whose restoring comes last.
            _before = _both(_switch(), _before)
        _count += 1
        _here.count = getattr(_here, "count", 0) + 1


def _both(first, then):
    return first if then is None else lambda: (first(), then())


def _leave():
    global _count, _before
    with _lock:
        _count -= 1
        _here.count -= 1
        if not _count and _before is not None:
            _before()
            _before = None


def _switch():
    """Has FP32 products be FP32 throughout; a function that takes this back, except for what has
    been set since."""
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer settings say what it cannot
        legacy = "highest"
    if not _IS_NEW:
        torch.set_float32_matmul_precision("highest")
        return lambda: _is_highest() and torch.set_float32_matmul_precision(legacy)
    found = {backend: _own(backend, "matmul") for backend in _BACKENDS}
    if legacy != "highest":
        # A user of the older way, who asks by it in another thread, is to be answered.
        torch.set_float32_matmul_precision("highest")
    for backend in _BACKENDS:
        if _is_rounded(backend):
            _set(backend, "matmul", "ieee")
    ours = {backend: _get(backend, "matmul") for backend in _BACKENDS}

    def restore():
        set_since = [_get(backend, "matmul") != ours[backend] for backend in _BACKENDS]
        if legacy != "highest" and not any(set_since) and _is_highest():
            torch.set_float32_matmul_precision(legacy)
        for backend, since in zip(_BACKENDS, set_since):
            if not since and _own(backend, "matmul") != found[backend]:
                _set(backend, "matmul", found[backend])

    return restore


def _is_highest():
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        return False


def _own(backend, operation):
    """Returns what is set for this backend and operation themselves. PyTorch tells only what is in
    force. If that equals what is set above them, the setting above is changed for a moment, to
    something that allows no more than it did."""
    in_force = _get(backend, operation)
    if backend == "generic" or in_force == "none":
        return in_force
    above = ("generic", "all") if operation == "all" else (backend, "all")
    if _get(*above) != in_force:
        return in_force
    own_above = _own(*above)
    _set(*above, "none" if in_force == "ieee" else "ieee")
    follows = _get(backend, operation) != in_force
    _set(*above, own_above)
    return "none" if follows else in_force


def _after_fork():
    """A child has this thread alone: no other one will close its contexts there."""
    global _count, _before
    _count = getattr(_here, "count", 0)
    if not _count and _before is not None:
        _before()
        _before = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release,
                        after_in_child=_lock.release)  # fmt: skip
    os.register_at_fork(after_in_child=_after_fork)
