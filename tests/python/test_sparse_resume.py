"""sparse_video goes on: with runs that were cut, and with a dense model that was interrupted."""

import json
import shutil
import signal

import pytest
from test_sparse_video import TOY_WORDS, torch  # noqa: F401
from test_sparse_video import command as command_with_pictures  # noqa: F401

from experiments import sparse_plan
from experiments.sparse_plan import TOY

ARMS = "adef"
FEW = ("--toy", "--densities", 0.25, "--seeds", 1, "--out")


@pytest.fixture(autouse=True, scope="module")
def few_arms():
    """Those that are dense, and of each router; test_sparse_video.py has every arm."""
    every = sparse_plan.groups

    def few(config):
        return [[run for run in group if run.arm in ARMS] for group in every(config)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_plan, "groups", few)
        yield


@pytest.fixture
def command(command_with_pictures, monkeypatch):  # noqa: F811
    """Without pictures, which take a fifth of the time; test_sparse_video.py has those."""
    from experiments import sparse_video

    monkeypatch.setattr(sparse_video, "draw_if_possible", lambda *given: None)
    return command_with_pictures


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with what a call left in "one" and the checkpoints in "kept"; `kept` copies it."""
    pytest.importorskip("torch", reason="needs PyTorch")
    from experiments import sparse_video

    folder = tmp_path_factory.mktemp("trained")
    words = *FEW, folder / "one", "--checkpoints", folder / "kept", "--device", "cpu"
    assert sparse_video.main([*map(str, words)]) == 0
    return folder


@pytest.fixture
def kept(trained, tmp_path):
    """The checkpoints in a copy of it, with which a test may do what it likes."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "kept"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder in which the dense model was trained in one go, longer than there."""
    pytest.importorskip("torch", reason="needs PyTorch")
    from experiments import sparse_video

    folder = tmp_path_factory.mktemp("whole")
    words = *TOY_WORDS, "--pretrain-steps", 9, "--out", folder, "--device", "cpu"
    assert sparse_video.main([*map(str, words)]) == 0
    return folder


def test_what_was_cut_is_done_by_a_later_call(command, tmp_path):
    path = tmp_path / "results/sparse-video.json"
    code, _, err = command(*TOY_WORDS, "--steps", 5, "--minutes", 1e-4)
    record = json.loads(path.read_text())
    assert code == 1 and not record["runs"]
    assert "not done: a:0, " in err and "without --minutes it does them all" in err
    # Nothing was trained by the plan: the next one is the full one.
    code, out, err = command(*TOY_WORDS, "--steps", 5)
    record = json.loads(path.read_text())
    assert code == 0 and "cut: " not in out and len(record["runs"]) == len(ARMS)
    assert {run["steps"] for run in record["runs"].values()} == {5} and "holds" not in err
    # Runs of fewer steps stay, and others get as many.
    kept = {"a:0": record["runs"]["a:0"] | {"steps": 2, "final": 7.0}}
    path.write_text(json.dumps(record | {"runs": kept, "plan": record["plan"] | {
        "steps": 2, "runs": ["a:0"], "cut": ["the others"]}}))  # fmt: skip
    code, out, err = command(*TOY_WORDS, "--steps", 5, "--minutes", 10)
    record = json.loads(path.read_text())
    assert code == 0 and [*record["runs"]] == record["plan"]["runs"]
    assert record["runs"]["a:0"] == kept["a:0"] and len(record["runs"]) == len(ARMS)
    assert {run["steps"] for run in record["runs"].values()} == {2}
    assert "the others" not in out and "cut: 2 steps instead of 5" in out
    assert err.count("results holds runs of 2 steps instead of 5") == 1
    assert "for all steps name another --out, and more --minutes or none" in err


@pytest.mark.parametrize("after, sent, stopped", [
    (3, [signal.SIGINT], 130), (5, [signal.SIGTERM] * 2, 143)])  # fmt: skip
def test_an_interrupted_dense_model_is_that_of_one_go(
    command, torch, tmp_path, whole, after, sent, stopped, monkeypatch  # noqa: F811
):
    from experiments.video_model import VideoModel

    words = (*TOY_WORDS, "--pretrain-steps", 9)
    calls, inner = [], VideoModel.loss

    def loss(model, *given):
        calls.append(torch.is_grad_enabled())
        if sum(calls) == after and calls[-1]:
            for number in sent:
                signal.raise_signal(number)
        return inner(model, *given)

    monkeypatch.setattr(VideoModel, "loss", loss)
    out = tmp_path / "parts"
    code, _, err = command(*words, "--out", out)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which stays ignored
    assert code == stopped and "; the same command goes on" in err
    assert [file.name for file in (out / "checkpoints").iterdir()] == ["dense-unfinished.pt"]
    code, _, err = command(*words, "--out", out, "--batch", 1)
    assert code == 1 and "dense-unfinished.pt is of another configuration (batch 2 there, 1" in err
    monkeypatch.setattr(VideoModel, "loss", inner)
    assert command(*words, "--out", out)[0] == 0
    assert not (out / "checkpoints/dense-unfinished.pt").exists()
    states = [torch.load(folder / "checkpoints/dense.pt") for folder in (whole, out)]
    assert states[1]["record"] == states[0]["record"] and states[1]["config"] == states[0]["config"]
    assert all(torch.equal(states[1]["model"][name], x) for name, x in states[0]["model"].items())
    one_go, parts = (json.loads((folder / "sparse-video.json").read_text())
                     for folder in (whole, out))  # fmt: skip
    assert parts["dense"] == one_go["dense"] and len(one_go["dense"]["curve"]) == 9
    assert [run["final"] for run in parts["runs"].values()] == [
        run["final"] for run in one_go["runs"].values()]  # fmt: skip


def test_a_dense_model_is_kept_every_few_minutes(torch, monkeypatch):  # noqa: F811
    from experiments import sparse_train

    class Kept(list):
        read, write = (lambda self: None), list.append

    def written(seconds):
        kept = Kept()
        monkeypatch.setattr(sparse_train, "KEEP_SECONDS", seconds)
        place = sparse_train.Workplace(TOY, torch.device("cpu"), lambda *told: None)
        place.pretrain(None, kept)
        return [state["step"] for state in kept]

    assert written(180) == [] and written(-1) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("words, file, said", [
    (("--pretrain-steps", 9), "dense.pt", "pretrain-steps 6 there, 9 given"),
    (("--batch", 1), "dense.pt", "batch 2 there, 1 given"),
    (("--stage-one-steps", 9), "routers-0.25.pt", "stage-one-steps 3 there, 9 given"),
    (("--temperature", 0.5), "routers-0.25.pt", "temperature 0.1 there, 0.5 given"),
])  # fmt: skip
def test_checkpoints_of_another_configuration_are_refused(
    command, tmp_path, kept, words, file, said
):
    code, out, err = command(*FEW, tmp_path / "two", "--checkpoints", kept, *words)
    assert code == 1 and not out and "[" not in err
    assert f"{file} is of another configuration ({said}): remove it, or name other" in err


def test_another_out_shows_the_dense_model_that_it_goes_on_from(command, tmp_path, kept):
    kept = "--checkpoints", kept
    code, _, err = command(*FEW, tmp_path / "two", *kept, "--steps", 4)  # which they do not need
    assert code == 0 and "dense [" not in err
    one, two = (json.loads((tmp_path / name / "sparse-video.json").read_text())
                for name in ("one", "two"))  # fmt: skip
    assert two["dense"] == one["dense"] and two["dense"]["steps"] == TOY.pretrain_steps


def test_routers_of_fewer_steps_are_said_to_be_that(command, torch, tmp_path, kept):  # noqa: F811
    path = kept / "routers-0.25.pt"
    routers = torch.load(path)
    routers["config"]["steps_of_stage_one"] = 2  # as for want of time
    torch.save(routers, path)
    code, out, _ = command(*FEW, tmp_path / "two", "--checkpoints", kept)
    record = json.loads((tmp_path / "two/sparse-video.json").read_text())
    assert code == 0 and record["plan"]["stage_one_steps"] == 2
    assert "and in stage 1 2 instead of 3" in out
    code, _, err = command(*FEW, tmp_path / "one", "--steps", 4)
    assert code == 2 and "steps 3 there, 4 given" in err
    # Runs that are there were made from other routers, and from another dense model.
    path = tmp_path / "one/sparse-video.json"
    one = json.loads(path.read_text())
    del one["runs"]["e:0.25:0"]
    path.write_text(json.dumps(one))
    code, _, err = command(*FEW, tmp_path / "one", "--checkpoints", kept)
    assert code == 1 and "(steps-of-stage-one 2 there, 3 given)" in err
    path.write_text(json.dumps(one | {"dense": one["dense"] | {"steps": 5}}))
    code, _, err = command(*FEW, tmp_path / "one", "--checkpoints", kept)
    assert code == 1 and "dense.pt is not the dense model that the runs in" in err


def test_a_checkpoint_without_its_configuration_is_named(
    command, torch, tmp_path  # noqa: F811
):
    (tmp_path / "checkpoints").mkdir()
    torch.save({"first.weight": torch.zeros(1)}, tmp_path / "checkpoints/dense.pt")
    code, _, err = command(*FEW, tmp_path)
    assert code == 1 and "dense.pt is no checkpoint of these commands: it has no 'config'" in err


def test_runs_go_on_with_their_own_dense_model_alone(command, tmp_path, kept):
    out = tmp_path / "one"
    kept.rename(out / "checkpoints")
    path = out / "sparse-video.json"
    record = json.loads(path.read_text())
    del record["runs"]["e:0.25:0"]
    path.write_text(json.dumps(record))
    (out / "checkpoints").rename(tmp_path / "away")
    code, _, err = command(*FEW, out)
    assert code == 1 and "dense.pt, the dense model of the runs in" in err and "[" not in err
    assert json.loads(path.read_text()) == record
    assert command(*FEW, out, "--checkpoints", tmp_path / "away")[0] == 0


def test_routers_belong_to_one_dense_model(command, torch, tmp_path, kept):  # noqa: F811
    dense = torch.load(kept / "dense.pt")
    dense["record"]["curve"][-1][1] += 1  # another training of as many steps
    torch.save(dense, kept / "dense.pt")
    code, _, err = command(*FEW, tmp_path / "two", "--checkpoints", kept)
    assert code == 1 and "routers-0.25.pt is of another configuration (dense-model " in err
    (kept / "dense.pt").unlink()
    code, _, err = command(*FEW, tmp_path / "two", "--checkpoints", kept)
    assert code == 1 and "routers-0.25.pt is of a dense model that " in err and "[" not in err
