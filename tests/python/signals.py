"""Programs that are interrupted while they work."""

import signal
import subprocess
import sys
import time

import pytest


@pytest.fixture(autouse=True)
def hangups_as_in_a_terminal():
    """nohup has the tests ignore SIGHUP, and what they start would, too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def interrupted(code):
    """Runs Python code that prints 'at work', and sends it SIGINT half a second later: its exit
    code, and what it wrote to standard output and standard error from then on."""
    process = subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdout.readline() == "at work\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=1200)
    return process.returncode, out, err
