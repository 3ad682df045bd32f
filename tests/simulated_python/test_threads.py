"""Threads that make and drop objects of the module at the same time, on a simulated GPU."""

import sys
from pathlib import Path

import simulator_needed  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import warm  # noqa: E402

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
    done = warm.run(["-c", CODE], timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
