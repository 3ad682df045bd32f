"""Import, exit and fork, as a program's other parts see them."""

import os
import subprocess
import sys

import pytest
import warm

from sagebwd import _core

needs_nvrtc = pytest.mark.skipif(bool(_core.nvrtc()["missing"]), reason="needs NVRTC")


def run(code, **variables):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=os.environ | variables, timeout=300)  # fmt: skip


@pytest.mark.parametrize("torch", ["", "import sys; sys.modules['torch'] = None; "])
def test_import_changes_no_environment(torch):
    """A child may live in another container or virtual environment than this process."""
    code = torch + (
        "import os, ctypes; before = dict(os.environ)\n"
        "c = ctypes.CDLL(None); c.getenv.restype = ctypes.c_char_p\n"
        "import sagebwd; sagebwd.archs(); sagebwd.doctor()\n"
        "assert dict(os.environ) == before\n"
        "assert not c.getenv(b'SAGEBWD_NVRTC')\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "SAGEBWD_NVRTC"}
    if torch:  # which must not have been imported
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              env=environment)  # fmt: skip
    else:
        done = warm.run(["-c", code], loaded="torch", env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.anywhere
def test_nvrtc_of_the_wheels_is_found_all_the_same(tmp_path):
    """The wheels are in a --target folder, which only this Python knows."""
    folder = tmp_path / "nvidia/cu13/lib"
    folder.mkdir(parents=True)
    (folder / "libnvrtc.so.13").write_text("no library")
    (tmp_path / "nvidia/__init__.py").write_text("")
    environment = {k: v for k, v in os.environ.items() if k != "SAGEBWD_NVRTC"}
    code = (f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules['torch'] = None\n"
            "from sagebwd import _compat, _core\n"
            "print(_compat.in_wheels())\n")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=environment)  # fmt: skip
    assert done.stdout.strip() == str(folder / "libnvrtc.so.13"), done.stderr


BUILD = "sagebwd.build('sm_89', head_dim=64, dtype='fp16')"
EXACT = ("sagebwd.reference.exact(*(sagebwd.reference.random_inputs(700, head_dim=64, heads=8)[:3])"
         ")")  # fmt: skip


@pytest.mark.anywhere
@needs_nvrtc
@pytest.mark.parametrize("work", [BUILD, EXACT], ids=["build", "exact"])
@pytest.mark.parametrize("wait", [0.05, 0.3, 0.7])
def test_the_interpreter_ends_while_a_daemon_thread_works(work, wait, tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import sagebwd, threading, time\n"
        "def loop():\n"
        f"    while True: {work}\n"
        "threading.Thread(target=loop, daemon=True).start()\n"
        f"time.sleep({wait})\n"
    )
    done = run(code, SAGEBWD_CACHE_DIR=str(tmp_path / "cache"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.anywhere
@needs_nvrtc
def test_a_child_forked_while_a_thread_compiles_compiles_or_refuses(tmp_path):
    """Whenever that is: NVRTC's own locks would hold it up for ever."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import os, sagebwd, signal, threading, time\n"
        "def build(**more): return sagebwd.build('sm_80', head_dim=64, backward=False, **more)\n"
        "def child_of(work):\n"
        "    child = os.fork()\n"
        "    if child: return child\n"
        "    signal.alarm(200)  # which ends it\n"
        "    try: os._exit(0 if all(k['spill_bytes'] == 0 for k in work()) else 1)\n"
        "    except sagebwd.LibraryError as e:\n"
        "        os._exit(2 if 'forked by process %d ' % os.getppid() in str(e) else 3)\n"
        "    finally: os._exit(4)\n"
        "def status(child): return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "thread = threading.Thread(target=build); thread.start()\n"
        "children = []\n"
        "while thread.is_alive() and len(children) < 30:\n"
        "    children.append(child_of(build)); time.sleep(.04 * len(children))\n"
        "thread.join()\n"
        "print(*{status(child) for child in children})\n"
        "print(status(child_of(lambda: build(causal='top-left', dtype='bf16'))))\n"
    )
    done = run(code, SAGEBWD_CACHE_DIR=str(tmp_path / "cache"))
    during, after = done.stdout.splitlines()
    assert set(during.split()) <= {"0", "2"}, done
    assert after == "0", done  # nothing was compiling then
