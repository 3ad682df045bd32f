"""The generator and the cache: the source of kernels, and their machine code."""

import re
import sys
from dataclasses import dataclass

from sagebwd import _core
from sagebwd.core import options


@dataclass(frozen=True)
class KernelSource:
    """The generated source of one kernel, and what launching it needs."""

    name: str  #: the name of the entry point, unique among all kernels
    kind: str  #: what the kernel does, such as 'forward'
    pass_: str  #: 'forward' or 'backward'
    tile: str  #: the tile, such as 'mma 64x128 w4 s1 b2'
    text: str  #: complete CUDA C++ without includes
    threads: int  #: threads per block
    shared_bytes: int  #: dynamic shared memory per block

    def __str__(self):
        return self.text


def archs():
    """The architectures for which kernels can be built: ['sm_80', ...]."""
    return _core.archs()


def local_arch(device=0, instead=None):
    """The architecture of a GPU of this machine.

    Raises a LibraryError if there is none, which says what to do `instead`; by default, to name the
    architecture.
    """
    driver = _core.driver()
    if driver["missing"]:
        instead = instead or (
            f"Without a GPU, name the architecture: arch= one of {', '.join(archs())}"
        )
        raise _core.LibraryError(f"{driver['missing'].rstrip('.')}. {instead}")
    if not 0 <= device < len(driver["devices"]):
        raise options.SpecError(f"device {device}: there are {len(driver['devices'])} GPUs here")
    return _core.arch_for_capability(*driver["devices"][device])


def device_number(device):
    """The number of a GPU that is given as one, as a torch.device, by a name such as 'cuda:1', or
    as None for the current one.

    Raises SpecError.
    """
    if isinstance(device, str) and (named := re.fullmatch(r"cuda(?::(\d+))?", device)):
        device = None if named[1] is None else int(named[1])
    if getattr(device, "type", None) == "cuda":  # a torch.device
        device = device.index
    if device is None:
        device = _current_device()
    wanted = "the number of a GPU, such as 0, or a name such as 'cuda:0'"
    return options.whole_number("device", device, least=0, values=wanted)


def _current_device():
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.current_device()
    return 0


def _operation(arch, backward, chosen):
    """Returns what both functions below pass to the C++ library."""
    options.yes_or_no("backward", backward)
    spec = options.Spec(**chosen)  # wrong use is reported without a GPU, too
    arch = local_arch() if arch is None else options.word("arch", arch, "a name such as 'sm_90a'")
    return spec, arch, backward


@options.takes(options.Operation)
def emit(arch=None, *, backward=True, chosen):
    """The CUDA source of every kernel of one operation, as a list of KernelSource.

    It does not need CUDA. Raises SpecError for options that no kernel supports.

    Args:
        arch: a name from `archs()`; None means that of this machine's first GPU.
        backward: with False, only the kernels of the forward.
        {options}
    """
    sources = _core.emit(*_operation(arch, backward, chosen))
    return [KernelSource(pass_=source.pop("pass"), **source) for source in sources]


@options.takes(options.Operation)
def build(arch=None, *, backward=True, chosen):
    """Compiles every kernel of one operation into the cache. It needs NVRTC, but no GPU.

    Returns a list of dicts, as `sagebwd build --json` prints it, with name, pass, cached (True if
    this process did not compile it), compile_ms, registers, spill_bytes and shared_bytes. Raises
    SpecError, LibraryError (no NVRTC) or CompileError.

    Args:
        arch, backward: as for `emit`.
        {options}
    """
    return _core.build(*_operation(arch, backward, chosen))


def cache_stats():
    """A dict that says where kernels are kept, and what the cache has done in this process.

    The keys are directory, disabled_reason (why the directory is not used, or empty), byte_limit
    (of the kernels in the directory; 0 means no limit), packs (the paths of SAGEBWD_CACHE_PACKS),
    offline (whether SAGEBWD_OFFLINE=1 forbids compiling) and counters, a dict of numbers:

    memory_hits       kernels that this process had already
    hits, pack_hits   kernels read from the directory, and from packs
    misses            kernels found in neither
    waits, timeouts   waits for another process that compiled the same kernel, and those given up
    heals             damaged files removed from the directory
    evictions         kernels removed to stay within the limit
    publish_failures  kernels and tuning records that could not be kept in the directory
    compiles          kernels compiled; compile_us is the time in microseconds, over all threads

    SAGEBWD_STATS=1 prints the counters at exit. `sagebwd cache stat` shows what is kept.
    """
    return _core.cache()
