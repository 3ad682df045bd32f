"""tools/Dockerfile and ./run image, which tries it: what it consists of, and by what means."""

import re
import subprocess

import pytest
from places import ROOT
from test_run import checkout  # noqa: F401

DOCKERFILE = (ROOT / "tools/Dockerfile").read_text()
LINES = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M)).splitlines()


def rest_of(instruction):
    return [line.split(" ", 1)[1] for line in LINES if line.startswith(instruction + " ")]


def in_bash(script):
    return subprocess.check_output(["bash", "-euc", script], cwd=ROOT, text=True)


def test_the_image_installs_what_run_installs():
    packages = in_bash("source tools/run/packages.sh; echo $packages_to_build").split()
    [first] = [line for line in rest_of("RUN") if "g++" in line]
    assert first.split("--no-install-recommends ")[1].split() == packages
    extra = re.search(r"pip install .*'/src\[(\w+)\]'", DOCKERFILE)[1]
    assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()


def test_its_user_is_not_root_and_its_variables_are_known(sagebwd, tmp_path):
    assert rest_of("USER") == ["user"] and "useradd --create-home user" in DOCKERFILE
    variables = dict(pair.split("=", 1) for pair in rest_of("ENV"))
    assert variables["SAGEBWD_OFFLINE"] == "1"
    assert variables["SAGEBWD_CACHE_PACKS"] + "/sagebwd.pack" in DOCKERFILE
    ours = {name: "" for name in variables if name.startswith("SAGEBWD_")}
    report = sagebwd("doctor", "--json", **ours, SAGEBWD_CACHE_DIR=str(tmp_path / "none"))
    assert report.code == 0 and "nothing reads" not in report.out
    # The image's kernels can be built.
    [prebuild] = [rest.split("=", 1)[1].strip('"') for rest in rest_of("ARG")]
    assert sagebwd("prebuild", *prebuild.split(), "--dry-run").code == 0


def test_its_instructions_are_known_to_the_script():
    script = in_bash("source tools/run/image.sh; image_steps tools/Dockerfile")
    assert "does not know" not in script
    assert script.count("as_user env") == len(rest_of("RUN")) >= 5
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    unknown = in_bash("source tools/run/image.sh; echo HEALTHCHECK x | image_steps /dev/stdin")
    assert "does not know HEALTHCHECK" in unknown and "exit 1" in unknown


DOCKER = """#!/bin/bash
echo "${0##*/} $*" >>CALLS
[[ $1 != info || -n $WORKS && ${0##*/} == "$WORKS" ]]
"""


@pytest.mark.parametrize("works", ["docker", "podman", ""])
def test_what_builds_it(checkout, works):  # noqa: F811
    for tool in ("docker", "podman"):
        path = checkout.folder / "bin" / tool
        path.write_text(DOCKER.replace("CALLS", str(checkout.folder / "calls")))
        path.chmod(0o755)
    (checkout.folder / "bin/setpriv").symlink_to("/bin/false")  # so that there is no root either
    result = checkout("image", WORKS=works)
    calls = (checkout.folder / "calls").read_text().splitlines()
    if not works:
        assert result.returncode == 3  # skipped, by name
        assert result.stderr.startswith("No fresh debian:bookworm here: ")
        assert calls == ["docker info", "podman info"]
        return
    assert result.returncode == 0, result.stderr
    build, run = calls[-2:]
    assert build.startswith(f"{works} build -f tools/Dockerfile --build-arg PREBUILD=--arch sm_80 ")
    assert run.startswith(f"{works} run --rm sagebwd-image sh -ec ") and "sagebwd doctor" in run
    assert result.stdout.endswith("\n1 passed, 0 failed, 0 skipped\n")


def test_an_image_takes_no_more_words(checkout):  # noqa: F811
    result = checkout("image", "all")
    assert result.returncode == 2 and "image takes no more words: 'all'" in result.stderr
