"""Processes of a program that is tested: as those that multiprocessing spawns, but forked from it,
as each of those imports PyTorch for four seconds of a core."""

import contextlib
import multiprocessing
import os
import signal
import types
from multiprocessing.context import ForkProcess


class _Process(ForkProcess):
    """The first argument of such a process is the end of a pipe that is its own."""

    def run(self):
        # Whoever waits for the end of a pipe of the program shall not wait for this process.
        kept = {0, 1, 2, self._args[0].fileno(), multiprocessing.parent_process().sentinel}
        for file in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
            with contextlib.suppress(OSError):  # of the listing itself
                os.close(file)
        for number, at_start in ((signal.SIGINT, signal.default_int_handler),
                                 (signal.SIGTERM, signal.SIG_DFL),
                                 (signal.SIGHUP, signal.SIG_DFL)):  # fmt: skip
            if signal.getsignal(number) is not signal.SIG_IGN:  # which a spawned process keeps
                signal.signal(number, at_start)
        super().run()


def spawn_no_more(*modules):
    """These modules of the program get such processes from their `multiprocessing`."""
    context = types.SimpleNamespace(Process=_Process, Pipe=multiprocessing.Pipe)
    for module in modules:
        module.multiprocessing = types.SimpleNamespace(get_context=lambda how: context)
