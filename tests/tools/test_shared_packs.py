"""A folder of packs that one account of a site writes and everybody else reads."""

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from cache_helpers import OPERATION, empty
from places import BINARY, ROOT


@pytest.fixture
def shared(cache, tmp_path):
    """The folder, with a pack of the forward's kernels, one of the backward's and others."""
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    for part in ("forward", "backward", "key_mean", "front", "gate"):
        result = cache("export", "--kernel", part, "--out", folder / f"{part}.pack")
        assert result.code == 0, result.err
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)


def test_every_command_knows_a_folder_of_packs(shared, sagebwd, tmp_path):
    here = {"SAGEBWD_CACHE_PACKS": str(shared), **empty(tmp_path)}
    before = sorted((path.name, path.stat().st_mtime_ns) for path in shared.iterdir())
    built = sagebwd("build", *OPERATION, "--json", SAGEBWD_OFFLINE="1",
                    SAGEBWD_NVRTC="/nonexistent", **here)  # fmt: skip
    assert built.code == 0, built.err
    assert all(kernel["cached"] for kernel in built.json["kernels"])
    assert built.json["counters"]["pack_hits"] == len(built.json["kernels"])
    kernels = sagebwd("cache", "explain", *OPERATION, "--json", **here).json["kernels"]
    assert {kernel["layer"] for kernel in kernels} == {"pack"}
    places = {Path(kernel["place"]) for kernel in kernels}
    assert {place.parent for place in places} == {shared} and len(places) > 1
    files = [str(path) for path in sorted(shared.iterdir())]
    for packs in (sagebwd("cache", "stat", "--json", **here).json["packs"],
                  sagebwd("doctor", "--json", **here).json["cache"]["packs"]):  # fmt: skip
        assert [pack["path"] for pack in packs] == files
        assert all(pack["usable"] and pack["kernels"] for pack in packs)
    assert sagebwd("cache", "verify", "--pack", shared, **empty(tmp_path)).code == 0
    lacking = sagebwd("build", "--arch", "sm_80", "--head-dim", 32, SAGEBWD_OFFLINE="1", **here)
    assert lacking.code == 1 and f"{shared}/backward.pack (a pack for sm_80)" in lacking.err
    after = sorted((path.name, path.stat().st_mtime_ns) for path in shared.iterdir())
    assert after == before and not (tmp_path / "empty").exists()


@pytest.mark.parametrize("wrong", ["group", "nothing", "kernels", "unnamed"])
def test_a_folder_that_cannot_be_used_says_what_its_owner_does(shared, built, sagebwd, tmp_path,
                                                               wrong):
    folder = shared
    if wrong == "group":  # as shared folders are made
        folder.chmod(0o2775)
        remedy = f"let its owner run: chmod go-w '{folder}' (one account then writes the folder"
    else:
        folder = tmp_path / "other"
        folder.mkdir()
        remedy = "'sagebwd prebuild --out FILE.pack' writes one"
        if wrong == "kernels":
            shutil.copy(next(built.glob("*.kernel")), folder)
            remedy = "makes a pack of it with 'sagebwd cache export"
        if wrong == "unnamed":
            shutil.copy(shared / "forward.pack", folder / "forward")
            remedy = "'forward' is one: its owner renames it to 'forward.pack'"
    here = {"SAGEBWD_CACHE_PACKS": str(folder), **empty(tmp_path)}
    for words in (["build", *OPERATION], ["doctor"], ["cache", "ls"], ["cache", "verify"]):
        result = sagebwd(*words, **here)
        assert result.code == 1 and remedy in result.out + result.err, words
    stat = sagebwd("cache", "stat", "--json", **here).json["packs"]
    assert [pack["path"] for pack in stat] == [str(folder)] and remedy in stat[0]["error"]
    # A shared cache directory is what somebody may have tried first.
    tried = sagebwd("cache", "ls", SAGEBWD_CACHE_DIR=str(folder)) if wrong == "group" else None
    assert not tried or "name a folder of packs in SAGEBWD_CACHE_PACKS" in tried.err


def test_packs_of_another_version_are_named(shared, sagebwd, tmp_path):
    templates = tmp_path / "templates"
    shutil.copytree(ROOT / "templates", templates)
    for template in (templates / "kernels").glob("key_mean*"):
        template.write_text(template.read_text() + "\n// of a later version\n")
    here = {"SAGEBWD_CACHE_PACKS": str(shared), "SAGEBWD_OFFLINE": "1", **empty(tmp_path)}
    later = sagebwd("build", *OPERATION, **here, SAGEBWD_TEMPLATE_DIR=str(templates))
    other = "a pack for sm_80, whose kernel of this name has another source"
    assert later.code == 1 and later.err.count(other) == 1, later.err
    assert f"key_mean.pack ({other}, as after an update of sagebwd)" in later.err
    for json in [], ["--json"]:
        doctor = sagebwd("doctor", *json, **here, SAGEBWD_TEMPLATE_DIR=str(templates))
        said = f"kernels of this version of sagebwd in {shared / 'key_mean.pack'}: another version"
        assert doctor.code == 0 and doctor.out.count(said) == 1, doctor.out  # others are current
    packs = {Path(p["path"]).name: p["current_kernels"] for p in doctor.json["cache"]["packs"]}
    assert packs["key_mean.pack"] == 0 < packs["forward.pack"]
    alone = here | {"SAGEBWD_CACHE_PACKS": str(shared / "key_mean.pack")}
    none = sagebwd("doctor", **alone, SAGEBWD_TEMPLATE_DIR=str(templates))
    assert none.code == 1 and "neither the directory nor a pack has one of this version" in none.out
    assert "key_mean.pack: 1 kernel of another version, " in none.out
    assert sagebwd("doctor", **alone).code == 0


@pytest.mark.parametrize("folder", ["it's a folder", "a:b"])
def test_what_prebuild_advises_suits_a_shell(sagebwd, needs_nvrtc, tmp_path, folder):
    (tmp_path / folder).mkdir()
    words = ("--dtype", "bf16", "--causal", "none", "--pass", "forward", "--out", "é.pack")
    result = sagebwd("prebuild", *OPERATION, *words, cwd=tmp_path / folder)
    assert result.code == 0, result.err
    if ":" in folder:
        assert "Copy it to a path without a colon" in result.out
    else:
        assert f"SAGEBWD_CACHE_PACKS={tmp_path / folder}/é.pack" in shlex.split(result.out)


def test_doctor_names_packs_that_are_left_out_for_their_names(shared, sagebwd, tmp_path):
    shutil.copy(shared / "forward.pack", shared / "d128")
    (shared / "notes.txt").write_text("no pack")
    here = {"SAGEBWD_CACHE_PACKS": str(shared), **empty(tmp_path)}
    result = sagebwd("doctor", "--json", **here)
    said = [item for item in result.json["missing"] if "d128" in item["what"]]
    assert result.code == 0 and len(said) == 1 and "notes" not in result.out
    assert said[0]["remedy"] == f"its owner renames it to '{shared}/d128.pack'"
    here["SAGEBWD_CACHE_PACKS"] += "/forward.pack"  # by its name nothing else is looked at
    assert "d128" not in sagebwd("doctor", "--json", **here).out


@pytest.fixture
def as_nobody(cache, tmp_path):
    """Runs a copy of the command line as another user, with a folder of one pack."""
    if os.geteuid() != 0:
        pytest.skip("only root can become other users")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared = folder / "shared"
        shared.mkdir()
        assert cache("export", "--out", shared / "all.pack").code == 0
        shutil.copy(BINARY, folder / "sagebwd")
        folder.chmod(0o755)

        def run(*words, **more):
            environment = {"SAGEBWD_CACHE_DIR": "/nonexistent/cache", "SAGEBWD_OFFLINE": "1",
                           "SAGEBWD_CACHE_PACKS": str(shared), **more}  # fmt: skip
            return subprocess.run([*words, folder / "sagebwd", "build", *map(str, OPERATION)],
                                  env=environment, user=65534 if not words else 0,
                                  capture_output=True, text=True)  # fmt: skip

        run.shared = shared
        yield run


def test_packs_that_readers_cannot_read_say_what_their_owner_does(as_nobody):
    shared = as_nobody.shared
    assert as_nobody().returncode == 0
    pack = shared / "another.pack"
    pack.write_bytes((shared / "all.pack").read_bytes())
    pack.chmod(0o600)  # one of two
    refused = as_nobody()
    assert refused.returncode == 1
    assert f"{pack}: the pack cannot be opened: Permission denied; " in refused.stderr
    assert f"let its owner run: chmod a+r '{pack}'" in refused.stderr
    shared.chmod(0o700)  # as of a umask of 077
    refused = as_nobody()
    assert refused.returncode == 1
    assert f"let its owner run: chmod a+rx '{shared}'" in refused.stderr


def test_an_owner_without_a_number_here_is_not_recommended(as_nobody):
    for path in (as_nobody.shared, *as_nobody.shared.iterdir()):
        os.chown(path, 12345, 12345)
    inside = ["unshare", "--user", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"]).returncode != 0:
        pytest.skip("no user namespaces")
    refused = as_nobody(*inside, PATH=os.environ["PATH"])
    assert refused.returncode == 1
    assert f"{as_nobody.shared}: its owner has no number in this user namespace" in refused.stderr
    assert "SAGEBWD_TRUSTED_OWNERS=65534 would trust them all" in refused.stderr
    assert "set SAGEBWD_TRUSTED_OWNERS" not in refused.stderr


def test_a_software_accounts_folder_serves_users_who_trust_it(as_nobody):
    site, shared = 12345, as_nobody.shared
    for path in (shared, shared / "all.pack"):
        os.chown(path, site, site)
    refused = as_nobody()
    assert refused.returncode == 1
    assert f"{shared}: it belongs to user {site}, who is neither" in refused.stderr
    assert f"set SAGEBWD_TRUSTED_OWNERS={site};" in refused.stderr
    trusted = as_nobody(SAGEBWD_TRUSTED_OWNERS=str(site))
    assert trusted.returncode == 0, trusted.stderr
