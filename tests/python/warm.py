"""Python programs in processes of their own that begin at once: a server that has imported PyTorch
forks them. An import of PyTorch takes three seconds of a core."""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from types import NoneType

#: The loader and OpenMP read these as a process starts: forked ones have their server's.
AT_START = ("LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Popen(subprocess.Popen):
    """subprocess.Popen of [sys.executable, *flags, "-m" or "-c", what, *words]. `loaded` has been
    imported by then, if it is here: "torch" alone is for tests of who imports what, and
    "torch._dynamo", which takes two seconds, for programs that make an optimizer or import
    transformers or diffusers."""

    def __init__(self, *given, loaded="sagebwd", **named):
        self.loaded = loaded
        super().__init__(*given, **named)

    def _execute_child(self, *given, **named):
        call = inspect.signature(subprocess.Popen._execute_child).bind(self, *given, **named)
        given = call.arguments
        python, *words = map(os.fspath, given["args"])
        kind = next(i for i, word in enumerate(words) if word in ("-m", "-c"))
        assert python == sys.executable and not given["pass_fds"]
        environment = dict(os.environ if given["env"] is None else given["env"])
        files = [given[end] if given[end] != -1 else number
                 for number, end in enumerate(("p2cread", "c2pwrite", "errwrite"))]  # fmt: skip
        server = _server(tuple(words[:kind]), _path_of_server(environment.get("PYTHONPATH")),
                         tuple(environment.get(name) for name in AT_START))  # fmt: skip
        with _adopting():
            self.pid = server.start(files, {
                "loaded": self.loaded, "kind": words[kind], "words": words[kind + 1:],
                "environment": environment, "session": given["start_new_session"],
                "folder": os.fspath(given["cwd"] or os.getcwd())})  # fmt: skip
        self._child_created = True
        self._close_pipe_fds(*(given[end] for end in (
            "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))  # fmt: skip


def run(words, timeout=300, **more):
    """subprocess.run of such a program, whose output is kept as text."""
    with Popen([sys.executable, *map(str, words)], stdin=subprocess.DEVNULL, text=True,
               stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextlib.contextmanager
def _adopting():
    """An orphan becomes a child of this process, which can then wait for it."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


class _Server:
    def __init__(self, words, environment):
        self.requests, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *words, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                env=environment, stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
        atexit.register(self.end)

    def start(self, files, request):
        """The process's number. It is an orphan by then."""
        number = _asked(self.requests, files, json.dumps(request).encode())
        assert number, "the server of tests/python/warm.py has ended"
        return int.from_bytes(number, "little")

    def end(self):
        self.requests.close()
        self.process.wait()


def _path_of_server(given):
    """PYTHONPATH of the server of programs that are given this one: that of the tests, where theirs
    has all of it, as the tests' has PyTorch and sagebwd."""
    own = os.environ.get("PYTHONPATH")
    return own if set(_entries(own)) <= set(_entries(given)) else given


def _entries(path):
    return [os.path.abspath(entry) for entry in (path or "").split(os.pathsep) if entry]


@functools.cache
def _server(flags, path, at_start):
    environment = {name: value for name, value in os.environ.items() if name not in AT_START}
    given = zip((*AT_START, "PYTHONPATH"), (*at_start, path))
    environment.pop("PYTHONPATH", None)
    return _Server(
        (*flags, __file__),
        environment | {name: value for name, value in given if value is not None},
    )


def _asked(server, files, text):
    """The number of the process that it forks, 4 bytes."""
    socket.send_fds(server, [len(text).to_bytes(4, "little")], files)
    server.sendall(text)
    return server.recv(4, socket.MSG_WAITALL)


def _load(name):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
    # A program's collections and its end then look through its own objects alone, which is half of
    # its time. At the end Triton complains of what it made that is not looked through.
    gc.freeze()
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)


def _requested(requests):
    """Waits for requests and forks a process for each, in which it returns the request. What is to
    be loaded beside PyTorch is loaded once, by a server that is forked for it."""
    loaded, others = "torch", {}
    _load(loaded)
    while True:
        length, files, _, _ = socket.recv_fds(requests, 4, 3)
        if not length:
            os._exit(0)  # as those of `others` do then
        text = requests.recv(int.from_bytes(length, "little"), socket.MSG_WAITALL)
        name = json.loads(text)["loaded"]
        if name != loaded and name not in others:
            others[name], theirs = socket.socketpair()
            if not os.fork():
                for file in (requests, *others.values()):
                    file.close()
                for file in files:
                    os.close(file)
                requests, loaded, others = theirs, name, {}
                _load(loaded)
                continue
            theirs.close()
        if name != loaded:
            number = _asked(others[name], files, text)
        else:
            ours, theirs = os.pipe()
            between = os.fork()
            if not between:
                process = os.fork()
                if not process:
                    break
                os.write(theirs, process.to_bytes(4, "little"))
                os._exit(0)
            number = os.read(ours, 4)
            os.waitpid(between, 0)
            for file in (ours, theirs):
                os.close(file)
        requests.sendall(number)
        for file in files:
            os.close(file)
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in (ours, theirs, *files):
        os.close(file)
    for file in (requests, *others.values()):
        file.close()
    return json.loads(text)


def _become(request):
    """As Python is when it starts; for -c the names of the program."""
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which the server may ignore, by nohup
    os.chdir(request["folder"])
    own = set(_entries(os.environ.get("PYTHONPATH")))
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["kind"], *request["words"][1:]]
    given = _entries(os.environ.get("PYTHONPATH"))
    first = "" if request["kind"] == "-c" else request["folder"]
    sys.path[:] = dict.fromkeys([first, *given, *(at for at in sys.path[1:] if at not in own)])
    for action in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings.simplefilter(action)
    main = types.ModuleType("__main__")
    if request["kind"] == "-c":
        sys.modules["__main__"] = main
    return main.__dict__


def _run(kind, what, names):
    if kind == "-c":
        exec(compile(what, "<string>", "exec"), names)
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def _leave(status):
    """Ends as Python does, except that what Triton made is not looked through, which takes a
    second."""
    if "triton" in sys.modules and isinstance(status, (int, NoneType)):
        threading._shutdown()  # waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit((status or 0) & 0xFF)


if __name__ == "__main__":
    _request = _requested(socket.socket(fileno=int(sys.argv[1])))
    _names, _what = _become(_request), _request["words"][0]
    try:
        _run(_request["kind"], _what, _names)
    except SystemExit as _left:
        _leave(_left.code)
        raise
    _leave(0)
