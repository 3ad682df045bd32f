"""Places for files, progress on a terminal, and what shells complete by."""

import contextlib
import os
import pty
import re
import subprocess

import pytest
from places import BINARY


def test_a_folder_that_is_missing_is_no_place_for_files(sagebwd, tmp_path):
    """Only DIR itself is made."""
    failed = sagebwd("emit", "--head-dim", 64, "-o", tmp_path / "no" / "kernels")
    assert failed.code == 1 and f"cannot create the folder {tmp_path}/no/kernels" in failed.err
    assert list(tmp_path.iterdir()) == []
    assert sagebwd("emit", "--head-dim", 64, "-o", tmp_path / "kernels").code == 0
    assert sagebwd("emit", "--head-dim", 64, "-o", tmp_path / "kernels").code == 0
    written = {path.name.removesuffix("_d64.cu") for path in (tmp_path / "kernels").glob("*.cu")}
    assert len(written) == 11
    assert {"sagebwd_quantize_forward", "sagebwd_front", "sagebwd_gate"} <= written


def completed(sagebwd, tmp_path, *words):
    script = tmp_path / "completion.bash"
    script.write_text(sagebwd("completion", "bash").out)
    ask = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _sagebwd; '
    ask += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", ask, "bash", script, "sagebwd", *words],
                          capture_output=True, text=True, check=True)  # fmt: skip
    return done.stdout.split()


def test_bash_completes_commands_and_options(sagebwd, tmp_path):
    assert completed(sagebwd, tmp_path, "tr") == ["trace"]
    assert completed(sagebwd, tmp_path, "cache", "pr") == ["prune"]
    assert completed(sagebwd, tmp_path, "build", "--head") == ["--head-dim"]
    assert completed(sagebwd, tmp_path, "build", "--arch", "sm_80", "--dt") == ["--dtype"]
    assert completed(sagebwd, tmp_path, "completion", "z") == ["zsh"]


def test_bash_completes_the_words_that_options_take(sagebwd, tmp_path):
    precisions = ["six-of-seven", "qk16", "dv16", "gradients16"]
    assert completed(sagebwd, tmp_path, "build", "--precision", "") == precisions
    assert completed(sagebwd, tmp_path, "trace", "--inputs", "heavy") == ["heavy-channels"]
    assert completed(sagebwd, tmp_path, "cache", "ls", "--arch", "sm_90") == ["sm_90a"]
    listed = completed(sagebwd, tmp_path, "prebuild", "--arch", "sm_80,sm_12")
    assert listed == ["sm_80,sm_120", "sm_80,sm_121"]
    assert completed(sagebwd, tmp_path, "prebuild", "--out", "") == []  # bash then offers files


def test_other_shells(sagebwd):
    assert "bashcompinit" in sagebwd("completion", "--help").out
    fish = sagebwd("completion", "fish").out.splitlines()
    build = "complete -c sagebwd -n '__fish_seen_subcommand_from build' -l "
    assert f"{build}dtype -x -a 'bf16 fp16'" in fish and f"{build}spec -r -F" in fish
    assert f"{build}smooth-q" in fish
    refused = sagebwd("completion", "tcsh")
    assert refused.code == 2 and "it takes bash, zsh or fish" in refused.err


def on_terminal(cache, *words):
    """Gives what the command line writes to standard error where that is a terminal."""
    try:
        controller, terminal = pty.openpty()
    except OSError as error:  # /dev/pts is not mounted, as in some minimal roots
        pytest.skip(f"no terminals here: {error}")
    environment = {**os.environ, "SAGEBWD_CACHE_DIR": str(cache)}
    with subprocess.Popen([BINARY, *map(str, words)], stdout=subprocess.DEVNULL, stderr=terminal,
                          env=environment) as process:  # fmt: skip
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # what a terminal without a writer gives
            while more := os.read(controller, 4096):
                shown += more
    os.close(controller)
    assert process.returncode == 0, shown
    return shown.decode()


def test_a_trace_that_lasts_shows_for_how_long(cache_dir):
    for length in (5000, 10000, 20000, 40000):  # as long as it takes to last for a second
        shown = on_terminal(cache_dir, "trace", "--seq-len", length, "--heads", 1)
        if "tracing" in shown:
            break
    assert re.search(r"tracing 1 head, [1-9]\d* s", shown) and shown.endswith("\r\x1b[K")


@pytest.mark.usefixtures("needs_nvrtc")
def test_a_build_shows_how_many_kernels_are_done(tmp_path):
    words = ["--head-dim", 128, "--arch", "sm_90a"]  # longer than a second
    counted = re.findall(r" (\d+)/(\d+), ", on_terminal(tmp_path / "cache", "build", *words))
    assert counted and int(counted[-1][0]) == int(counted[-1][1]) > 2
