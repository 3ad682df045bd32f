"""Tuning: the fastest tiles for this GPU, found once and kept as records."""

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from sagebwd import _core, options
from sagebwd.kernels import local_arch

TuneError = _core.TuneError

#: The kernels that have tiles. Each is tuned by itself.
KERNELS = ("forward", "backward_dq", "backward_dkv")

_NO_GPU = ("Tuning times kernels: call it where such a GPU is, and take its records over with "
           "export_records and import_records")  # fmt: skip

_WORKER = os.path.join(os.path.dirname(__file__), "tune_worker.py")
# An embedded interpreter has no executable, a zipped package no file: the command line serves.
if sys.executable and os.path.exists(_WORKER):
    _core.set_tune_worker([sys.executable, _WORKER])


@dataclass(frozen=True)
class TunedKernel:
    """What tuning one kernel found."""

    kernel: str  #: 'forward', 'backward_dq' or 'backward_dkv'
    tile: str  #: the winner
    default_tile: str
    default_ms: float  #: median
    tuned_ms: float  #: median
    fresh: bool  #: tuned now; else the record was there
    kept: bool  #: on disk, for other processes
    record: dict = field(repr=False)  #: everything, with all timings of all candidates

    @property
    def speedup(self):
        return self.default_ms / self.tuned_ms if self.tuned_ms else 1.0


@options.takes(options.Operation)
def tune(
    *, seq_len=8192, seq_kv=None, batch=1, heads=8, heads_kv=None, kernels=KERNELS, tiles=(),
    force=False, rounds=15, device=None, group=None, progress=None, chosen,
):  # fmt: skip
    """Times every tile worth trying on this GPU and keeps the winners; a list of TunedKernel.

    Calls whose sizes fall into the same bucket use them from then on (SAGEBWD_TUNE=off|use|
    tune|frozen says whether). A tile replaces the default only where it is faster beyond doubt
    and, unless `deterministic` is False, gives the same bits. What has a record is not tuned again,
    unless `force`. Kernels that the operation does not launch are left out: without `deterministic`
    its backward may be one kernel, which has its default tile.

    Args:
        seq_len, seq_kv, batch, heads, heads_kv: sizes of the calls; None for as many as the other.
        kernels: which to tune, of KERNELS.
        tiles: let only these compete with the default.
        rounds: timings of each candidate, from 5 to 1000.
        device: a GPU's number or torch.device; None for PyTorch's current one, else 0.
        group: a torch.distributed group whose ranks all call this. Rank 0 tunes, the others take
            its records; TuneError on every rank where they would not run the same tiles.
        progress: called with (kernel, stage, tile, done, total).
        {options}

    Raises SpecError, LibraryError, CompileError or TuneError.
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
    device = _device_number(device)
    spec = options.Spec(**chosen)  # wrong use is wrong use without a GPU as well
    problem = _problem(batch, heads, heads_kv, seq_len, seq_kv)

    def what():
        local_arch(device, _NO_GPU)  # or what to do without one
        return spec, problem, device, kernels

    def tune_here():
        return _core.tune(*what(), tiles, force, rounds, progress)

    def in_use():
        return _core.tiles_in_use(*what())

    found = tune_here() if group is None else _tune_in_group(group, tune_here, in_use)
    return [_tuned_kernel(**kernel) for kernel in found]


@dataclass(frozen=True)
class PlanFigures:
    """How fast one precision is on this GPU, and how far from FP64."""

    precision: str  #: as `sagebwd.attention` takes it
    int8_products: int  #: of attention's seven
    forward_ms: float  #: median, all passes included
    backward_ms: float  #: median, all passes included
    errors: dict  #: relative L2 of 'O', 'dQ', 'dK' and 'dV' against FP64


@options.takes(options.Operation, but=("precision",))
def compare_plans(
    *, seq_len=8192, seq_kv=None, batch=1, heads=8, heads_kv=None, rounds=15, device=None,
    progress=None, chosen,
):  # fmt: skip
    """Runs every precision on this GPU, in turns; a list of PlanFigures, 'six-of-seven' first.

    Inputs are standard normal. Errors are those of one head with at most 2048 queries and keys,
    against an FP64 reference on the CPU; for other inputs there is `sagebwd.trace`.

    Args:
        seq_len, seq_kv, batch, heads, heads_kv: sizes that are timed; None for as many as the
            other.
        rounds: timings of each, from 1 to 1000.
        device: a GPU's number or torch.device; None for PyTorch's current one, else 0.
        progress: called with (what, done, total).
        {options}

    Raises SpecError, LibraryError, CompileError or DriverError.
    """
    options.check_callback("progress", progress)
    if options.whole_number("rounds", rounds) > 1000:
        raise options.SpecError(f"rounds={rounds}: pass a whole number from 1 to 1000")
    spec, device = options.Spec(**chosen), _device_number(device)
    local_arch(device, "Comparing plans runs them: call it where a GPU is")
    problem = _problem(batch, heads, heads_kv, seq_len, seq_kv)
    return [PlanFigures(**plan)
            for plan in _core.compare_plans(spec, problem, device, rounds, progress)]  # fmt: skip


def export_records(path):
    """Writes every record here into a file, for machines with such GPUs; how many there are.

    Raises TuneError where there is none or one cannot be read, OSError where the file cannot be
    written.
    """
    os.stat(os.path.dirname(os.path.abspath(path)))  # FileNotFoundError before anything else
    text = _core.tuning_records()
    if why := _core.write_output(os.fsencode(path), text):
        raise OSError(why)
    return len(json.loads(text)["records"])


def import_records(path, overwrite=False):
    """Takes over a file's records; a dict of how many were added, kept as they were, replaced.

    Records that are here already stay, unless `overwrite`. All or nothing: SpecError for a file
    that is not wholly sound.
    """
    options.yes_or_no("overwrite", overwrite)
    path = os.fspath(path)
    if os.path.exists(path) and not os.path.isfile(path):  # a FIFO would be waited for
        raise OSError(f"{path} is no regular file")
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


def _device_number(device):
    if getattr(device, "type", None) == "cuda":  # a torch.device
        device = device.index
    if device is None:
        device = _current_device()
    return options.whole_number("device", device, least=0)


def _current_device():
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.current_device()
    return 0


def _check_group(group):
    try:
        from torch.distributed import ProcessGroup
    except ImportError:  # without PyTorch, or in one that is built without it
        ProcessGroup = ()
    if not isinstance(group, ProcessGroup):
        raise options.SpecError(f"group={group!r}: pass a torch.distributed group, or None")


def _tune_in_group(group, tune_here, tiles_in_use):
    """What tune() of a group gives on each of its ranks, or an error on every one."""
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
