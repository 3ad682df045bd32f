"""Tuning: finds the fastest tiles for this GPU once, and keeps them as records."""

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

from sagebwd import _core
from sagebwd.core import fastest, options
from sagebwd.core.building import device_number, local_arch
from sagebwd.core.keywords import also_named

TuneError = _core.TuneError

#: The kernels that have tiles. Each is tuned separately.
KERNELS = ("forward", "backward_dq", "backward_dkv")

_NO_GPU = ("Tuning times kernels: call it on a machine with the kind of GPU to tune for, and copy "
           "its records with export_records and import_records")  # fmt: skip

_WORKER = os.path.join(os.path.dirname(__file__), "tune_worker.py")
# Without an executable (embedded interpreters) or a file (zipped packages) the command line is
# used.
if sys.executable and os.path.exists(_WORKER):
    _core.set_tune_worker([sys.executable, _WORKER])


@dataclass(frozen=True)
class TunedKernel:
    """The result of tuning one kernel."""

    kernel: str  #: 'forward', 'backward_dq' or 'backward_dkv'
    tile: str  #: the winner
    default_tile: str
    default_ms: float  #: median time of the default tile
    tuned_ms: float  #: median time of the winner
    fresh: bool  #: tuned now; False if there was a record
    kept: bool  #: whether the record is on disk, for other processes
    record: dict = field(repr=False)  #: the record, with all timings of all candidates

    @property
    def speedup(self):
        return self.default_ms / self.tuned_ms if self.tuned_ms else 1.0


@also_named(seq_q="seq_len")
@options.takes(options.Operation, fastest=fastest.of_device)
def tune(
    *, seq_len=8192, seq_kv=None, batch=1, heads=8, heads_kv=None, kernels=KERNELS, tiles=(),
    force=False, rounds=15, device=None, group=None, progress=None, chosen,
):  # fmt: skip
    """Times every promising tile on this GPU and keeps the winners; returns a list of TunedKernel.

    Later calls of similar sizes use the winners, unless SAGEBWD_TUNE says otherwise. A tile
    replaces the default only if it is clearly faster and, unless `deterministic` is False, gives
    the same bits. Kernels that have a record are only tuned again with `force`. Kernels that the
    operation
    does not launch are left out: with deterministic=False its backward may be one kernel, which
    always has its default tile.

    Args:
        seq_len, seq_kv: queries and keys of the calls; seq_kv=None means as many keys as queries.
        batch, heads, heads_kv: sizes of the calls; heads_kv=None means as many as heads.
        kernels: which kernels to tune: 'forward', 'backward_dq', 'backward_dkv'.
        tiles: only these tiles compete with the default.
        force: tune again even if there is a record.
        rounds: timings per candidate, from 5 to 1000.
        device: the number of a GPU, a torch.device, or a name such as 'cuda:1'; None means
            PyTorch's current one, or 0.
        group: a torch.distributed group in which all ranks call this function. Rank 0 tunes, and
            the others take over its records.
        progress: called with (kernel, stage, tile, done, total).
        {options}

    Raises SpecError, LibraryError, CompileError or TuneError. In a group every rank raises
    TuneError if the ranks would not run the same tiles.
    """
    kernels, tiles = _words("kernels", kernels), _words("tiles", tiles)
    options.yes_or_no("force", force)
    options.check_callback("progress", progress)
    if unknown := [name for name in kernels if name not in KERNELS]:
        raise options.SpecError(
            f"{unknown[0]!r} is no kernel with tiles: those are {', '.join(KERNELS)}"
        )
    if options.whole_number("rounds", rounds, least=5) > 1000:
        raise options.SpecError(f"rounds={rounds}: pass a whole number from 5 to 1000")
    if group is not None:
        _check_group(group)
    device = device_number(device)
    spec = options.Spec(**chosen)  # wrong use is reported without a GPU, too
    problem = _problem(batch, heads, heads_kv, seq_len, seq_kv)

    def what():
        local_arch(device, _NO_GPU)  # raises if there is no GPU
        return spec, problem, device, kernels

    def tune_here():
        return _core.tune(*what(), tiles, force, rounds, progress)

    def in_use():
        return _core.tiles_in_use(*what())

    found = tune_here() if group is None else _tune_in_group(group, tune_here, in_use)
    return [_tuned_kernel(**kernel) for kernel in found]


@dataclass(frozen=True)
class PrecisionFigures:
    """Speed and errors of one precision on this GPU."""

    precision: str  #: as `sagebwd.attention` takes it
    gradient_kernels: str  #: 'fused' or 'split', as `sagebwd.attention` takes it
    int8_products: int  #: how many of the seven products are INT8
    forward_ms: float  #: median time, quantisation included
    backward_ms: float  #: median time, quantisation included
    errors: dict  #: relative L2 errors of 'O', 'dQ', 'dK' and 'dV' against FP64


@also_named(seq_q="seq_len")
@options.takes(options.Operation, but=("precision",))
def compare_precisions(
    *, seq_len=8192, seq_kv=None, batch=1, heads=8, heads_kv=None, rounds=15, device=None,
    progress=None, chosen,
):  # fmt: skip
    """Times every precision on this GPU, in turns, and measures its errors.

    Each runs with the gradient_kernels that it has by default here and, unless the option is given,
    with the other ones if they exist. Returns a list of PrecisionFigures, that of the default of
    'six-of-seven' first. A precision that this GPU cannot run is left out, with a warning. Inputs
    are standard normal. Errors are those of one head with at most 2048 queries and keys, against
    FP64 on the CPU. For the errors of other inputs use `sagebwd.trace`.

    Args:
        seq_len, seq_kv: queries and keys; seq_kv=None means as many keys as queries.
        batch, heads, heads_kv: sizes; heads_kv=None means as many as heads.
        rounds: timings per precision, from 1 to 1000.
        device: the number of a GPU, a torch.device, or a name such as 'cuda:1'; None means
            PyTorch's current one, or 0.
        progress: called with (what, done, total).
        {options}

    Raises SpecError, LibraryError, CompileError or DriverError.
    """
    options.check_callback("progress", progress)
    if options.whole_number("rounds", rounds) > 1000:
        raise options.SpecError(f"rounds={rounds}: pass a whole number from 1 to 1000")
    spec, device = options.Spec(**chosen), device_number(device)
    local_arch(device, "compare_precisions() runs kernels: call it on a machine with a GPU")
    problem = _problem(batch, heads, heads_kv, seq_len, seq_kv)
    rows, left_out = _core.compare_plans(spec, problem, device, rounds, progress)
    for line in left_out:
        warnings.warn(f"sagebwd: left out {line}", stacklevel=2)
    return [PrecisionFigures(**figures) for figures in rows]


#: The names until version 0.1.
PlanFigures, compare_plans = PrecisionFigures, compare_precisions


def export_records(path):
    """Writes all tuning records of this machine into a file, for machines with the same GPU.

    Returns how many there are. Raises TuneError if there is none or one cannot be read, and OSError
    if the file cannot be written.
    """
    os.stat(os.path.dirname(os.path.abspath(path)))  # FileNotFoundError before anything else
    text = _core.tuning_records()
    if why := _core.write_output(os.fsencode(path), text):
        raise OSError(why)
    return len(json.loads(text)["records"])


def import_records(path, overwrite=False):
    """Adds the tuning records of a file that `export_records` wrote.

    Returns a dict of how many records were added, kept and replaced. Records that this machine has
    already are kept, or replaced with `overwrite`. Raises SpecError, and adds nothing, if any
    record of the file is damaged; OSError if the file cannot be read.
    """
    options.yes_or_no("overwrite", overwrite)
    path = os.fspath(path)
    if os.path.exists(path) and not os.path.isfile(path):  # open() would wait for a FIFO
        raise OSError(f"{path} is not a regular file")
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    counts = _core.import_tuning_records(text, overwrite)
    return dict(zip(("added", "kept", "replaced"), counts))


def _words(name, given):
    several = isinstance(given, Iterable) and not isinstance(given, str)
    words = list(given) if several else [given]
    if not all(isinstance(word, str) and word.isascii() for word in words):
        raise options.SpecError(f"{name}={given!r}: pass names")
    return words


def _tuned_kernel(kernel, record, fresh, kept):
    record = json.loads(record)
    medians = {tried["tile"]: tried["median_ms"] for tried in record["candidates"]}
    tile, default_tile = record["tile"], record["default_tile"]
    return TunedKernel(
        kernel, tile, default_tile, medians[default_tile], medians[tile], fresh, kept, record
    )


def _problem(batch, heads, heads_kv, seq_len, seq_kv):
    sizes = dict(batch=batch, heads=heads, heads_kv=heads if heads_kv is None else heads_kv,
                 seq_len=seq_len, seq_kv=seq_len if seq_kv is None else seq_kv)  # fmt: skip
    return tuple(options.whole_number(name, size) for name, size in sizes.items())


def _check_group(group):
    try:
        from torch.distributed import ProcessGroup
    except ImportError:  # without PyTorch, or in one that is built without it
        ProcessGroup = ()
    if not isinstance(group, ProcessGroup):
        raise options.SpecError(f"group={group!r}: pass a torch.distributed group, or None")


def _tune_in_group(group, tune_here, tiles_in_use):
    """tune() in a group: every rank returns the same, or every rank raises an error."""
    import torch.distributed as dist

    rank, message = dist.get_rank(group), [None, None]

    def broadcast():
        dist.broadcast_object_list(message, src=dist.get_global_rank(group, 0), group=group)

    if rank == 0:
        try:
            message[0] = tune_here()
        except Exception as error:  # the others must not wait for ever
            message[1] = _named(error)
            broadcast()
            raise
    broadcast()
    found, why = message
    if why:
        raise TuneError(f"rank 0 could not tune: {why}")
    try:
        for kernel in found if rank else ():
            _core.import_tuning_records(kernel["record"], True)
        in_use = tiles_in_use()
        mine = hashlib.sha256(json.dumps(in_use).encode()).hexdigest()
    except Exception as error:  # the others must not wait for ever
        in_use = mine = _named(error)
    digests = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, mine, group=group)
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing or in_use == mine:
        one = (differing or [0])[0]
        raise TuneError(
            f"ranks {differing} of the group do not run with rank 0's tiles: they have another "
            f"GPU, driver or version of sagebwd, or no record could be kept. Rank 0: {digests[0]}, "
            f"rank {one}: {digests[one]}, here: {in_use}"
        )
    return found


def _named(error):
    return f"{type(error).__name__}: {error}"
