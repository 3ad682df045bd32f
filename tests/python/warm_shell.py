"""Shell scripts whose `python` starts programs of warm.py, which have imported PyTorch."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import warm

#: `python` asks for a program, by its folder and its words, and waits for its exit status.
PYTHON = r"""
python() {
  local status
  printf '%s\0' "$(($# + 1))" "$PWD" "$@" >&"$ASK"
  read -r status <&"$ANSWER"
  cat "$SAID/out"
  cat "$SAID/err" >&2
  return "$status"
}
"""


def run(script, *, env, **more):
    """subprocess.run of a script by bash -euo pipefail, which starts one `python` at a time."""
    asked, ask = os.pipe()
    answer, answered = os.pipe()
    words = ["bash", "-euo", "pipefail", "-c", PYTHON + script]
    with tempfile.TemporaryDirectory() as said:
        thread = threading.Thread(target=_answer, args=(asked, answered, said, env))
        process = subprocess.Popen(
            words, env=env | {"ASK": str(ask), "ANSWER": str(answer), "SAID": said}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(ask, answer),
            **more)  # fmt: skip
        os.close(ask)
        os.close(answer)
        thread.start()
        try:
            out, err = process.communicate(timeout=1200)
        finally:
            process.kill()
            thread.join()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def _answer(asked, answered, said, env):
    """Runs what is asked for until nobody can ask any more."""
    with open(asked, "rb") as asked, open(answered, "w") as answered:
        while count := _word(asked):
            folder, *words = (_word(asked) for _ in range(int(count)))
            with open(Path(said, "out"), "wb") as out, open(Path(said, "err"), "wb") as err:
                done = warm.Popen([sys.executable, *words], loaded="torch._dynamo", cwd=folder,
                                  env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
                print(done.wait(), file=answered, flush=True)


def _word(file):
    """The next, which a zero byte ends."""
    return b"".join(iter(lambda: file.read(1).replace(b"\0", b""), b"")).decode()
