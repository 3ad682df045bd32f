"""Threads that make and drop objects of the module at the same time, on a simulated GPU."""

import subprocess
import sys


import simulator_needed  # noqa: E402, F401

CODE = """
import sys, threading
from sagebwd import _core
sys.setswitchinterval(1e-5)
spec = _core.Spec(head_dim=64)
def operations():
    for _ in range(3000): _core.Attention(spec, 0)
def specs():
    for _ in range(30000): _core.Spec(head_dim=128)
threads = [threading.Thread(target=work) for work in (operations, specs) * 4]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_objects_are_made_by_several_threads():
    """pybind11's table of objects is the GIL's: what enters it without is lost, or ends the
    process."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True,
                          timeout=120)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
