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
import types

#: Python, the loader and OpenMP read these as a process starts: forked ones have their server's.
AT_START = ("LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONWARNINGS")
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
        server = _server((*words[:kind], __file__, self.loaded),
                         tuple(environment.get(name) for name in AT_START))  # fmt: skip
        with _adopting():
            self.pid = server.start(files, {
                "kind": words[kind], "words": words[kind + 1:], "environment": environment,
                "session": given["start_new_session"],
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
        text = json.dumps(request).encode()
        socket.send_fds(self.requests, [len(text).to_bytes(4, "little")], files)
        self.requests.sendall(text)
        number = self.requests.recv(4, socket.MSG_WAITALL)
        assert number, "the server of tests/python/warm.py has ended"
        return int.from_bytes(number, "little")

    def end(self):
        self.requests.close()
        self.process.wait()


@functools.cache
def _server(words, at_start):
    environment = {name: value for name, value in os.environ.items() if name not in AT_START}
    given = {name: value for name, value in zip(AT_START, at_start) if value is not None}
    return _Server(words, environment | given)


def _requested(requests):
    """Waits for requests and forks a process for each, in which it returns the request."""
    while True:
        length, files, _, _ = socket.recv_fds(requests, 4, 3)
        if not length:
            sys.exit()
        text = requests.recv(int.from_bytes(length, "little"), socket.MSG_WAITALL)
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
        requests.sendall(number)
        for file in (ours, theirs, *files):
            os.close(file)
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in (ours, theirs, *files):
        os.close(file)
    requests.close()
    return json.loads(text)


def _become(request):
    """As Python is when it starts; for -c the names of the program."""
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which the server may ignore, by nohup
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["kind"], *request["words"][1:]]
    sys.path[0] = "" if request["kind"] == "-c" else request["folder"]
    main = types.ModuleType("__main__")
    if request["kind"] == "-c":
        sys.modules["__main__"] = main
    return main.__dict__


if __name__ == "__main__":
    for _loaded in "torch", sys.argv[1]:
        with contextlib.suppress(ImportError):
            importlib.import_module(_loaded)
        # A program's end then looks through its own objects alone, which is half of its time. At
        # the end Triton complains of what it made that is not looked through.
        if "triton" not in sys.modules:
            gc.freeze()
    _request = _requested(socket.socket(fileno=int(sys.argv[2])))
    _names, _what = _become(_request), _request["words"][0]
    if _request["kind"] == "-c":
        exec(compile(_what, "<string>", "exec"), _names)
    else:
        runpy.run_module(_what, run_name="__main__", alter_sys=True)
