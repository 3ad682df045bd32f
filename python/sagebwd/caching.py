"""What the cache of compiled kernels did in this process, and where it is."""

from sagebwd import _core


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
