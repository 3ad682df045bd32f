"""What a study makes of records and checkpoints that are damaged, or of something else."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from test_study import record_of, write  # noqa: E402

from experiments import study  # noqa: E402
from experiments.study_plan import PLANS, Arm  # noqa: E402


@pytest.mark.parametrize("broken", ["{", "1", "[]", '{"regime": "a", "arm": {}}'])
def test_a_broken_record_is_named(tmp_path, capsys, broken):
    write(tmp_path, record_of(Arm("a", "sdpa", 256, 4, lr=1.0)))
    (tmp_path / "b.json").write_text(broken)
    with pytest.raises(SystemExit) as left:
        study.main(["--summary", "--out", str(tmp_path)])
    assert left.value.code == 2
    assert f"{tmp_path / 'b.json'} is no record of an arm" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"status": "finishd"}, {"final_val_loss": float("nan")}])
def test_records_that_cannot_be_are_named(tmp_path, capsys, change):
    write(tmp_path, record_of(Arm("a", "sdpa", 256, 4, lr=1.0)) | change)
    with pytest.raises(SystemExit):
        study.main(["--summary", "--out", str(tmp_path)])
    assert f"{tmp_path / 'a.json'} is no record of an arm" in capsys.readouterr().err


def test_records_of_two_corpora_are_not_judged_together(tmp_path, capsys):
    write(tmp_path, record_of(Arm("a", "sdpa", 256, 4, lr=1.0)))
    write(tmp_path, record_of(Arm("b", "sdpa", 256, 4, lr=1.0)) | {"corpus": {"sha256": "1"}})
    with pytest.raises(SystemExit):
        study.main(["--summary", "--out", str(tmp_path)])
    assert "such as a and b, with corpus sha256 0 (given: 1)" in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"mine": 1}', "[]"])
@pytest.mark.parametrize("how", ["--summary", "toy"])
def test_a_study_json_of_something_else_stays(corpus_file, tmp_path, capsys, how, content):
    write(tmp_path, record_of(Arm("a", "sdpa", 256, 4, lr=1.0)))
    path = tmp_path / "study.json"
    path.write_text(content)
    with pytest.raises(SystemExit) as left:
        study.main([how, "--device", "cpu", "--out", str(tmp_path), "--corpus", str(corpus_file)])
    said = capsys.readouterr().err
    assert left.value.code == 2 and f"{path} is " in said and "name another --out" in said
    assert path.read_text() == content and len([*tmp_path.glob("*.json")]) == 2


@pytest.mark.usefixtures("forked_workers")
def test_a_damaged_checkpoint_is_named(corpus_file, tmp_path, capfd):
    arm = next(a for a in PLANS["toy"]() if a.lr is not None)
    path = tmp_path / "checkpoints" / f"{arm.name}.pt"
    path.parent.mkdir()
    path.write_bytes(b"PK")
    assert study.main(["toy", "--device", "cpu", "--out", str(tmp_path), "--corpus",
                       str(corpus_file), "--only", arm.name]) == 1  # fmt: skip
    said = capfd.readouterr().err
    assert f"checkpoints/{arm.name}.pt is no checkpoint" in said and "Traceback" not in said
    assert "remove it to begin this arm again" in said and "File " not in said


@pytest.mark.usefixtures("forked_workers")
def test_a_record_that_cannot_be_written_is_named(corpus_file, tmp_path, capfd):
    arm = PLANS["toy"]()[0]
    (tmp_path / f"{arm.name}.json.partial").symlink_to("/dev/full")
    assert study.main(["toy", "--device", "cpu", "--out", str(tmp_path), "--corpus",
                       str(corpus_file), "--only", "sweep-*"]) == 1  # fmt: skip
    said = capfd.readouterr().err
    assert f"{arm.name}: failed: {tmp_path}/{arm.name}.json: No space left on device\n" in said
    assert "File " not in said
