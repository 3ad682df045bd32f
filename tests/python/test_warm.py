"""A program that tests start with `warm` is as one that Python starts."""

import os
import signal
import subprocess
import sys

import pytest
import warm

SHOW = """
import os, sys
leads = os.getsid(0) == os.getpid()
print(sys.argv, sys.path[0], os.getcwd(), os.environ.get("OURS"), __name__, leads)
print(sys.stdin.read(), file=sys.stderr)
"""
ENDS = ["sys.exit(3)", "raise ValueError", "raise KeyboardInterrupt", "os.abort()",
        "os._exit(4)", "os.kill(os.getpid(), 9)", "atexit.register(print, 'at the end')",
        "threading.Thread(target=lambda: (time.sleep(0.1), print('a thread'))).start()"]  # fmt: skip


def both(words, **more):
    words = [sys.executable, *words]
    more |= {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
             "stdin": subprocess.PIPE}  # fmt: skip
    for start in subprocess.Popen, warm.Popen:
        with start(words, **more) as process:
            out, err = process.communicate("given")
        yield out, err.splitlines()[-1:], process.returncode


@pytest.mark.parametrize("session", [False, True])
def test_it_gets_what_it_is_given(tmp_path, session):
    (tmp_path / "shows.py").write_text(SHOW)
    more = dict(cwd=tmp_path, env=os.environ | {"OURS": "here"}, start_new_session=session)
    for words in (["-c", SHOW, "a", "b c"], ["-m", "shows", "--d"]):
        as_python, warmly = both(words, **more)
        assert warmly == as_python and f" here __main__ {session}" in warmly[0]


def test_what_python_reads_as_it_starts(tmp_path):
    (tmp_path / "ours.py").write_text("where = 'in a folder that was added'")
    code = (
        "import ours, sys, warnings; warnings.warn('not shown', UserWarning)\n"
        "print(ours.where, sys.path[:3], [*dict.fromkeys(sys.path)] == sys.path)"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    as_python, warmly = both(["-c", code], cwd=tmp_path, env=environment)
    assert warmly == as_python and "in a folder" in warmly[0] and not warmly[1]


@pytest.mark.parametrize("loaded", ["torch", "sagebwd", "torch._dynamo"])
def test_what_is_loaded_by_then(loaded):
    pytest.importorskip("torch", reason="needs PyTorch")
    names = ["torch", "sagebwd", "torch._dynamo"]
    code = f"import sys; print([name for name in {names} if name in sys.modules])"
    wanted = f"{[*dict.fromkeys(['torch', loaded])]}\n"
    assert [warm.run(["-c", code], loaded=loaded).stdout for _ in range(2)] == [wanted] * 2


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_any(end):
    as_python, warmly = both(["-c", f"import atexit, os, sys, threading, time; {end}"])
    assert warmly == as_python


def test_signals_reach_it_and_its_files_close():
    code = "import time; print('at work', flush=True); time.sleep(60)"
    process = warm.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "at work\n" and process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == ""
    assert process.returncode == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
