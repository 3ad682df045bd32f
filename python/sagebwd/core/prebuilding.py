"""Packs: the kernels of many operations in one file, for machines that do not compile."""

import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from sagebwd import _core
from sagebwd.core import options

# Options that may have several values.
_SEVERAL = ("head_dim", "dtype", "causal", "granularity", "precision")


def _list(value):
    """One value or several, as a list without repeats."""
    return list(
        dict.fromkeys(value if isinstance(value, (list, tuple, set, frozenset)) else [value])
    )


@options.takes(options.Operation, but=_SEVERAL)
def prebuild(
    out, *, arch, head_dim=options.USUAL_HEAD_DIMS, dtype=("bf16", "fp16"),
    causal=("none", "top-left"), granularity="row", precision="six-of-seven",
    backward=True, records=(), progress=None, chosen,
):  # fmt: skip
    """Compiles the kernels of every combination of the options into the pack `out`.

    `arch` and the options up to `precision` take one value or several. It needs NVRTC, but no GPU.
    Equal options give equal bytes. A call that was interrupted continues where it stopped.
    Use the file with SAGEBWD_CACHE_PACKS=out, and with SAGEBWD_OFFLINE=1 where nothing may be
    compiled.

    `records` names files of tuning records. Those of these operations are added to the pack, with
    the kernels of their tiles. `progress(kernel, arch, done, total)` is called after each kernel.

    Returns a dict: out, bytes, kernels, compiled (by this call), resumed (compiled by an
    interrupted call), records, records_left_out (they are of other operations), compiler,
    lowest_driver (the CUDA version of the oldest driver that loads all kernels, such as 12080) and
    threads. Raises SpecError, PackError (the file cannot be written), LibraryError (no NVRTC for
    these architectures) or CompileError (then there is no pack, and the next call continues).
    """
    options.yes_or_no("backward", backward)
    options.check_callback("progress", progress)
    if arch is None:
        raise options.SpecError(f"name the architectures: arch= some of {', '.join(_core.archs())}")
    lists = dict(zip(("arch", *_SEVERAL), map(
        _list, (arch, head_dim, dtype, causal, granularity, precision))))  # fmt: skip
    if empty := [name for name, values in lists.items() if not values]:
        raise options.SpecError(f"{empty[0]} is an empty list: there is nothing to build")
    specs = [
        (options.Spec(**dict(zip(_SEVERAL, values)), **chosen),
         options.word("arch", one, "a name such as 'sm_90a'"))
        for one, *values in itertools.product(*lists.values())
    ]
    several = isinstance(records, Iterable) and not isinstance(records, (str, bytes))
    paths = list(records) if several else [records]
    if not all(isinstance(path, (str, bytes, os.PathLike)) for path in paths):
        raise options.SpecError(f"records={records!r}: pass a file's path, or several")
    files = [Path(os.fsdecode(path)).read_bytes() for path in paths]
    return _core.prebuild(os.fsencode(out), specs, backward, files, progress)
