"""Pictures by --plot, and what shells complete by."""

import subprocess
import xml.etree.ElementTree as ElementTree

import pytest

SVG = "{http://www.w3.org/2000/svg}"
SHORT = ("--head-dim", "64", "--seq-len", "64", "--heads", "1")


def test_a_trace_has_a_bar_for_each_tensor(sagebwd, tmp_path):
    file = tmp_path / "errors.svg"
    shown = sagebwd("trace", *SHORT, "--plot", file).out.splitlines()
    picture = ElementTree.parse(file).getroot()
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    rows = [line.split() for line in shown[2:]]
    assert [row[0] for row in rows] == ["delta", "P", "dP", "dS", "O", "dQ", "dK", "dV"]
    assert all(tensor in texts and error in texts for tensor, _, error in rows)
    widths = [float(bar.get("width")) for bar in picture.iter(f"{SVG}rect")
              if bar.get("class") == "bar"]  # fmt: skip
    errors = [float(error) for *_, error in rows]
    longest = max(errors)
    assert len(widths) == len(errors)
    for width, error in zip(widths, errors):
        assert width / max(widths) == pytest.approx(error / longest, abs=2e-3)


@pytest.mark.parametrize("name", ["errors.png", ".svg", ""])
def test_another_kind_of_picture_is_wrong_use(sagebwd, name):
    refused = sagebwd("trace", *SHORT, "--plot", name)
    assert refused.code == 2
    assert f"--plot is '{name}'; it writes SVG" in refused.err


def test_a_picture_that_cannot_be_written_fails(sagebwd, tmp_path):
    failed = sagebwd("trace", *SHORT, "--plot", tmp_path / "no" / "errors.svg")
    assert failed.code == 1 and "errors.svg" in failed.err


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


def test_other_shells(sagebwd):
    assert "bashcompinit" in sagebwd("completion", "--help").out
    fish = sagebwd("completion", "fish").out.splitlines()
    assert "complete -c sagebwd -n '__fish_seen_subcommand_from build' -l head-dim" in fish
    refused = sagebwd("completion", "tcsh")
    assert refused.code == 2 and "it takes bash, zsh or fish" in refused.err
