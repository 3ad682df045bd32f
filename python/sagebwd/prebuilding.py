"""Packs: the kernels of many operations in one file, for machines that may not compile."""

import itertools
import os
from pathlib import Path

from sagebwd import _core
from sagebwd.options import HEAD_DIMS, Operation, SpecError, spec, takes

__all__ = ["prebuild"]

# Options that may have several values.
_SEVERAL = ("head_dim", "dtype", "causal", "granularity", "precision")


def _list(value):
    """One value or several, as a list without repeats."""
    several = isinstance(value, (list, tuple, set, frozenset))
    return list(dict.fromkeys(value if several else [value]))


@takes(Operation, but=(*_SEVERAL, "deterministic"))
def prebuild(
    out, *, arch, head_dim=HEAD_DIMS, dtype=("bf16", "fp16"), causal=("none", "top-left"),
    granularity="row", precision="six-of-seven", backward=True, records=(), progress=None, options,
):  # fmt: skip
    """Compiles the kernels of every combination of the options into the pack `out`.

    `arch` and the options up to `precision` take one value or several. Needs NVRTC, but no GPU.
    The same options give the same bytes; a call that was interrupted goes on where it was. Use
    the file with SAGEBWD_CACHE_PACKS=out, and SAGEBWD_OFFLINE=1 where nothing may be compiled.

    `records` names files of tuning records: those of these operations go into the pack, with the
    kernels of their tiles. `progress(kernel, arch, done, total)` is called after each kernel.

    Returns a dict: out, bytes, kernels, compiled (by this call), resumed (by an interrupted one),
    records, records_left_out (of other operations), compiler, lowest_driver (the CUDA version of
    the oldest driver that loads all of it, e.g. 12080) and threads. Raises SpecError, PackError
    (the file cannot be written), LibraryError (no NVRTC for these architectures) or CompileError
    (then there is no pack, and what did compile is kept for the next call).
    """
    if arch is None:
        raise SpecError(f"name the architectures: arch= some of {', '.join(_core.archs())}")
    several = map(_list, (arch, head_dim, dtype, causal, granularity, precision))
    specs = [
        (spec(one, **dict(zip(_SEVERAL, values)), **options), one)
        for one, *values in itertools.product(*several)
    ]
    if not specs:
        raise SpecError("an empty list among the options: there is nothing to build")
    one_file = isinstance(records, (str, bytes, os.PathLike))
    files = [Path(os.fsdecode(path)).read_bytes() for path in ([records] if one_file else records)]
    return _core.prebuild(os.fspath(out), specs, bool(backward), files, progress)
