"""The generator and the cache: what the operation's kernels are, and their machine code."""

from dataclasses import dataclass

from sagebwd import _core, options


@dataclass(frozen=True)
class KernelSource:
    """The generated source of one kernel and what its launch needs."""

    name: str  #: of the entry point, unique among all kernels
    kind: str  #: what the kernel does, e.g. 'forward'
    pass_: str  #: 'forward' or 'backward'
    tile: str  #: the tile configuration, e.g. 'mma 64x128 w4 s1 b2'
    text: str  #: complete, header-free CUDA C++
    threads: int  #: per block
    shared_bytes: int  #: dynamic shared memory per block

    def __str__(self):
        return self.text


def archs():
    """The architectures kernels can be built for, e.g. ['sm_80', ...]."""
    return _core.archs()


def local_arch(device=0, instead=None):
    """The architecture name of a GPU of this machine.

    Without one a LibraryError, which says what to do `instead`; None: to name the architecture.
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


def _operation(arch, backward, chosen):
    """What both functions below hand to the C++ library."""
    options.yes_or_no("backward", backward)
    spec = options.Spec(**chosen)  # wrong use is wrong use without a GPU as well
    arch = local_arch() if arch is None else options.word("arch", arch, "a name such as 'sm_90a'")
    return spec, arch, backward


@options.takes(options.Operation)
def emit(arch=None, *, backward=True, chosen):
    """The CUDA source of every kernel of one operation, as a list of KernelSource.

    Needs no CUDA. Raises SpecError for what cannot be built.

    Args:
        arch: a name from `archs()`, or None for this machine's first GPU.
        backward: without it only the forward's kernels.
        {options}
    """
    sources = _core.emit(*_operation(arch, backward, chosen))
    return [KernelSource(pass_=source.pop("pass"), **source) for source in sources]


@options.takes(options.Operation)
def build(arch=None, *, backward=True, chosen):
    """Compiles every kernel of one operation into the cache; needs NVRTC, but no GPU.

    Returns what `sagebwd build --json` prints: a list of dicts with name, pass, cached (this
    process did not compile it), compile_ms, registers, spill_bytes and shared_bytes. Raises
    SpecError, LibraryError (no NVRTC) or CompileError.

    Args:
        arch, backward: as for `emit`.
        {options}
    """
    return _core.build(*_operation(arch, backward, chosen))


def cache_stats():
    """A dict of where kernels are kept and what the cache did in this process so far.

    Keys: directory; disabled_reason (why the directory is not used, or empty); byte_limit of its
    kernels (0: none); packs, the paths of SAGEBWD_CACHE_PACKS; offline, whether SAGEBWD_OFFLINE=1
    forbids compiling; and counters, a dict of numbers:

    memory_hits       kernels that this process had already
    hits, pack_hits   kernels read from the directory, from packs
    misses            kernels in neither
    waits, timeouts   waits for another process that compiled the same kernel; those given up
    heals             bad files removed from the directory
    evictions         kernels removed to stay within the limit
    publish_failures  kernels and tuning records that could not be kept in the directory
    compiles          kernels compiled, and compile_us, the microseconds of it summed over threads

    SAGEBWD_STATS=1 prints the counters at exit. `sagebwd cache stat` shows what is kept.
    """
    return _core.cache()
