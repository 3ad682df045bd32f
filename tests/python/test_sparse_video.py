"""The experiment with SLA2: its plan, data and arms, and all of it at toy size."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import sparse_plan
from experiments.sparse_plan import ARMS, TOY, Costs, Run, SparseConfig, at, plan_of

COSTS = Costs(dense=0.05, sparse=0.04, stage_one=0.1, validation=0.5, setup=1.0)


# ---- the plan, without PyTorch -------------------------------------------------------------------


def test_everything_is_planned_once_and_the_verdict_first():
    config = SparseConfig()
    plan = plan_of(config, None, None)
    labels = [run.label() for run in plan.runs]
    with_density, without = 10, 2
    assert len(labels) == len(set(labels))
    assert {run.arm for run in plan.runs} == ARMS.keys() and not plan.cut
    wanted = {Run(arm, density if ARMS[arm].needs_density else 0, seed) for arm in ARMS
              for density in config.densities for seed in range(3)
              if arm != "k" or (density == 0.05 and seed == 0)}  # fmt: skip
    assert set(plan.runs) == wanted and len(ARMS) == with_density + without
    assert labels[:6] == ["a:0", "b:0.05:0", "c:0", "d:0.05:0", "e:0.05:0", "f:0.05:0"]
    assert set(labels[6:16]) == {f"{arm}:{density}:{seed}" for arm in "de" for density, seed in (
        (0.05, 1), (0.05, 2), (0.03, 0), (0.03, 1), (0.03, 2))}  # fmt: skip


@pytest.mark.parametrize("seconds", [20, 120, 300, 1000, 100_000])
def test_what_does_not_fit_is_cut_and_named(seconds):
    config = SparseConfig()
    plan = plan_of(config, seconds, COSTS)
    every = [run.label() for run in plan_of(config, None, None).runs]
    cut = [what.partition(" ")[0] for what in plan.cut if ":" in what]
    assert sorted([run.label() for run in plan.runs] + cut) == sorted(every)
    routed = {run.density for run in plan.runs if run.density}
    spent = sum(COSTS.of(run, plan.steps, config.evals) for run in plan.runs)
    spent += len(routed) * plan.stage_one_steps * COSTS.stage_one
    assert spent <= seconds
    assert (plan.steps < config.steps) == any("steps instead of" in what for what in plan.cut)
    if seconds == 100_000:
        assert not plan.cut and plan.steps == config.steps
    if seconds == 300:
        assert {run.arm for run in plan.runs} >= set("abcdef")


def test_the_verdict_is_what_the_losses_say():
    def run(arm, seed, final):
        return {"arm": arm, "density": 0.05, "seed": seed, "final": final}

    runs = {
        str(i): run(*given)
        for i, given in enumerate(
            [("d", 0, 0.5), ("d", 1, 0.6), ("e", 0, 0.4), ("e", 1, 0.61), ("f", 0, 0.65)]
        )
    }
    layers = {"d": [{"error": x} for x in (0.3, 0.2, 0.1)],
              "e": [{"error": x} for x in (0.2, 0.1, 0.3)]}  # fmt: skip
    found = sparse_plan.verdict(runs, {"0.05": layers}, (0.05, 0.03))
    assert found == {
        "0.05": {"e_below_d_in_seeds": "1 of 2", "e_below_d_in_layers": "2 of 3",
                 "f_above_both": True},
        "0.03": {"e_below_d_in_seeds": None, "e_below_d_in_layers": None, "f_above_both": None},
    }  # fmt: skip
    runs["5"] = run("f", 1, 0.605)
    assert sparse_plan.verdict(runs, {}, (0.05,))["0.05"]["f_above_both"] is False


def test_impossible_configurations_are_refused():
    for match, given in (("steps 0", dict(steps=0)), ("densities", dict(densities=(0.5, 2.0))),
                         ("pretrain-steps -1", dict(pretrain_steps=-1))):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            at(TOY, **given)
    assert at(TOY, steps=7, batch=None).steps == 7


def run(*words, blocked="import sys; ", folder=None):
    code = blocked + (
        "import sys, runpy; sys.argv = ['-m', *sys.argv[1:]]; runpy.run_module("
        "'experiments.sparse_video', run_name='__main__', alter_sys=True)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def test_a_device_that_is_not_there_gets_advice_of_this_command(command):
    code, _, err = command("--device", "cuda:99", "--toy")
    assert code == 1 and "--device cpu runs this with --toy or --how bf16" in err
    code, out, _ = command("--help")
    assert "defaults of its own, among them --how bf16" in " ".join(out.split())


def test_help_needs_no_torch_and_work_says_that_it_does(tmp_path):
    blocked = "import sys; sys.modules['torch'] = None; "
    done = run("--help", blocked=blocked)
    assert done.returncode == 0 and "--minutes X" in done.stdout and not done.stderr
    done = run("--toy", blocked=blocked, folder=tmp_path)
    assert done.returncode == 1 and "needs PyTorch" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not os.listdir(tmp_path)


# ---- with PyTorch --------------------------------------------------------------------------------


@pytest.fixture
def torch(tiny_tensors):
    return pytest.importorskip("torch", reason="needs PyTorch")


def test_videos_are_functions_of_seed_and_step(torch):
    from experiments.sprites import as_tokens, videos

    video = videos(3, 7, 2, 32, 16, "cpu")
    torch.rand(5)
    assert video.shape == (2, 32, 3, 16, 16) and torch.equal(video, videos(3, 7, 2, 32, 16, "cpu"))
    assert not torch.equal(video, videos(3, 8, 2, 32, 16, "cpu"))
    assert not torch.equal(video[0], video[1]) and 0.5 < video.std() < 1.5
    # Frames differ, and neighbours differ less than those far away.
    near = (video[:, 1:] - video[:, :-1]).square().mean()
    assert 0 < near < 0.6 * (video[:, 4:] - video[:, :-4]).square().mean()
    tokens = as_tokens(video, 4)
    assert tokens.shape == (2, 32 * 4 * 4, 48)
    patch = video[1, 5, :, 8:12, 4:8]  # frame 5, row 2, column 1
    assert torch.equal(tokens[1, 5 * 16 + 2 * 4 + 1], patch.flatten())


def test_the_model_has_the_size_that_is_said(torch):
    from experiments.video_model import VideoModel

    with torch.device("meta"):
        model = VideoModel(SparseConfig())
    parameters = sum(p.numel() for p in model.parameters())
    assert 20e6 < parameters < 22e6 and SparseConfig().tokens == 8192
    assert all(layer.q_norm.weight.shape == (64,) for layer in model.layers())


def test_the_model_is_what_rectified_flow_trains(torch):
    """Untrained, it predicts zero: its loss is the mean square of the velocity. It sees places."""
    from experiments.video_model import VideoModel

    model = VideoModel(TOY)
    clean, noise = torch.randn(2, 2, TOY.tokens, 48)
    found = model.loss(clean, noise, torch.tensor([0.2, 0.9]))
    torch.testing.assert_close(found, (noise - clean).square().mean((1, 2)))
    tables = model.tables
    assert tables.shape == (2, TOY.tokens, 8)
    assert len({tuple(row.tolist()) for row in tables.permute(1, 0, 2).flatten(1)}) == TOY.tokens


def test_compiled_parts_are_the_model_and_one_for_all_models(torch, quick_compiler):
    from experiments.video_model import VideoModel

    clean, noise = torch.randn(2, 2, TOY.tokens, 48)
    found = []
    for config in (TOY, at(TOY, compile=True), at(TOY, compile=True)):
        torch.manual_seed(0)
        model = VideoModel(config)
        for weight in (model.last.weight, *(block.modulation.weight for block in model.blocks)):
            torch.nn.init.normal_(weight, std=0.1)  # a new model ignores its blocks
        loss = model.loss(clean, noise, torch.tensor([0.2, 0.9])).sum()
        weights = model.first.weight, model.blocks[1].attention.qkv.weight
        found.append((loss, *torch.autograd.grad(loss, weights)))
    assert len(quick_compiler) == 2
    for other in found[1:]:
        for x, y in zip(other, found[0]):
            torch.testing.assert_close(x, y, rtol=0.05, atol=0.02 * float(y.detach().abs().max()))


def tensors(torch, dtype):
    shape = (2, 2, TOY.tokens, TOY.head_dim)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
    return [t.to(dtype).requires_grad_() for t in (q, k, v)], dout.to(dtype)


def test_gathered_blocks_are_listed_attention(torch):
    import sagebwd
    from experiments.sparse_arms import gathered
    from sagebwd.sla.exact import listed_attention

    given, dout = tensors(torch, torch.float32)
    mask = sagebwd.top_blocks(torch.randn(2, 2, 4, 8), 0.4)
    dlse = torch.randn(2, 2, TOY.tokens)
    results = []
    for function, kept in ((gathered, [3]), (listed_attention, [])):
        out, lse = function(*given, mask, *kept, TOY.block_size, 0.3)
        gradients = torch.autograd.grad((out, lse), given, (dout, dlse))
        results.append((out, lse, *gradients))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    # Another forward: its results are used, and the backward recomputes from its lse.
    out, lse = results[0][:2]
    shifted = gathered(*given, mask, 3, TOY.block_size, 0.3,
                       lambda *_: (2 * out.detach(), lse.detach() + 1))  # fmt: skip
    assert torch.equal(shifted[0], 2 * out)
    (dv,) = torch.autograd.grad(shifted[0], given[2:], dout)
    torch.testing.assert_close(
        dv * 2.718281828,
        torch.autograd.grad(gathered(*given, mask, 3, TOY.block_size, 0.3)[0], given[2:], dout)[0],
        rtol=1e-4,
        atol=1e-5,
    )


def test_arms_are_what_they_are_called(torch):
    import sagebwd
    from experiments.sparse_arms import attention_of
    from sagebwd.sla.exact import listed_attention

    (q, k, v), _ = tensors(torch, torch.float32)
    found = {arm: attention_of(arm, 0.25, 0, TOY, "bf16") for arm in ARMS}
    with torch.no_grad():
        out = {arm: module(q, k, v) for arm, module in found.items()}
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        mask = found["d"].block_mask(q, k)
        sparse = listed_attention(q, k, v, mask, TOY.block_size, 0.25)[0]
        rest, every = (
            sagebwd.block_linear_attention(q, k, v, block_mask=m, block_size=TOY.block_size)
            for m in (mask, torch.zeros_like(mask))
        )
    wanted = {"a": dense, "b": sparse, "c": every, "d": (sparse + rest) / 2,
              "j": (sparse + every) / 2}  # fmt: skip
    for arm, expected in wanted.items():
        torch.testing.assert_close(out[arm], expected, rtol=1e-4, atol=1e-5)
    for arm in ("e", "g", "h-head", "i", "k"):  # untrained maps are the identity
        torch.testing.assert_close(out[arm], out["d"], rtol=1e-4, atol=1e-5)
    assert (out["f"] - out["d"]).abs().max() > 0.01
    assert (out["h-estimated"] - out["d"]).abs().max() > 0.01
    assert mask.sum(-1).unique().tolist() == [2]


@pytest.fixture
def command(torch, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def called(*words):
        from experiments import sparse_video

        try:
            code = sparse_video.main(["--device", "cpu", *map(str, words)])
        except SystemExit as left:
            code = left.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return called


TOY_WORDS = ("--toy", "--densities", 0.25, "--seeds", 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a whole call, for copies."""
    pytest.importorskip("torch", reason="needs PyTorch")
    from experiments import sparse_video

    folder = tmp_path_factory.mktemp("trained")
    words = *TOY_WORDS, "--device", "cpu", "--out", folder
    assert sparse_video.main([*map(str, words)]) == 0
    return folder


def test_all_of_it_at_toy_size(command, tmp_path):
    code, out, err = command(*TOY_WORDS)
    assert code == 0 and "SLA2, learned router" in out and "runs [" not in err
    assert "verdict: at density 0.25 the learned router's loss is below the pooled one's in " in out
    record = json.loads((tmp_path / "results/sparse-video.json").read_text())
    assert len(record["runs"]) == len(ARMS) and not record["plan"]["cut"]
    assert all(len(run["curve"]) == 2 for run in record["runs"].values())
    layers = record["stage_one"]["0.25"]
    assert layers.keys() == ARMS.keys() - set("abc")
    assert all(len(of_arm) == TOY.layers and 0 < of_arm[0]["mass"] <= of_arm[0]["best_mass"]
               for of_arm in layers.values())  # fmt: skip
    assert record["verdict"]["0.25"]["e_below_d_in_layers"].endswith(" of 2")
    rows = list(csv.DictReader((tmp_path / "results/sparse-video.csv").open()))
    assert len(rows) == 2 * len(ARMS) and {row["arm"] for row in rows} == set(ARMS)
    # What has been done is not done again, and what is missing is.
    del record["runs"]["f:0.25:0"]
    (tmp_path / "results/sparse-video.json").write_text(json.dumps(record))
    code, _, err = command(*TOY_WORDS)
    assert code == 0 and "run f:0.25:0" in err and "run e:" not in err and "dense [" not in err
    again = json.loads((tmp_path / "results/sparse-video.json").read_text())
    assert again["runs"].keys() == record["runs"].keys() | {"f:0.25:0"}
    code, _, err = command(*TOY_WORDS, "--steps", 9)
    assert code == 2 and "of another configuration (steps 3 there, 9 given): name another" in err
    code, out, err = command(*TOY_WORDS)
    assert code == 0 and "verdict: " in out and "[" not in err


@pytest.mark.usefixtures("forked_workers")
def test_runs_side_by_side_are_those_one_by_one(command, trained, tmp_path):
    code, _, err = command(*TOY_WORDS, "--gpus", 2, "--out", tmp_path)
    assert code == 0 and "runs [" in err
    one, two = (json.loads((folder / "sparse-video.json").read_text())
                for folder in (trained, tmp_path))  # fmt: skip
    assert [*two["runs"]] == [*one["runs"]] == two["plan"]["runs"]
    assert two["stage_one"].keys() == one["stage_one"].keys()
    for label, run in one["runs"].items():
        assert two["runs"][label]["final"] == pytest.approx(run["final"], rel=1e-4)
    for arm, layers in one["stage_one"]["0.25"].items():
        for layer, other in zip(layers, two["stage_one"]["0.25"][arm]):
            assert other == pytest.approx(layer, rel=1e-2, abs=1e-4)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("file", ["dense.pt", "routers-0.25.pt"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_damaged_checkpoint_is_named(command, trained, tmp_path, file, count):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "sparse-video.json"
    record = json.loads(path.read_text())
    del record["runs"]["f:0.25:0"], record["runs"]["e:0.25:0"]
    path.write_text(json.dumps(record))
    (tmp_path / "checkpoints" / file).write_bytes(b"none")
    code, _, err = command(*TOY_WORDS, "--gpus", count, "--out", tmp_path)
    said = (f"{file} is no checkpoint of these commands, or not the whole of one: PyTorch cannot "
            "load it: remove it, or name other --checkpoints")
    assert code == 1 and said in err and "Traceback" not in err


def test_too_little_time_is_said(command, tmp_path):
    code, out, _ = command(*TOY_WORDS, "--minutes", 0.02, "--steps", 1000)
    record = json.loads((tmp_path / "results/sparse-video.json").read_text())
    assert code == 1 and "cut: 100 steps instead of 1000" in out
    assert len(record["plan"]["cut"]) > 5 and record["costs"]["sparse"] > 0


def test_a_picture_is_drawn_of_a_record(command, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "sparse-video.json"
    runs = {"d:0.05:0": {"arm": "d", "density": 0.05, "seed": 0, "curve": [[0, 1.0], [9, 0.5]],
                         "final": 0.5}}  # fmt: skip
    path.write_text(json.dumps({"config": {"densities": [0.05]}, "runs": runs}))
    code, out, _ = command("--draw", path)
    assert code == 0 and (tmp_path / "sparse-video.png").stat().st_size > 10_000
    assert out.strip().endswith("sparse-video.png")


def test_wrong_use_is_refused(command):
    Path("none.csv").write_text("run,arm")
    Path("list.json").write_text("[]")
    Path("part.json").write_text('{"config": {}, "runs": {}}')
    Path("other.json").write_text('{"config": {"densities": [0.5]}, "runs": {"x": {}}}')
    Path("results").mkdir()
    Path("results/sparse-video.json").write_text("{")
    for words, part in (
        (["--draw", "none.csv"], "none.csv is no record of this experiment"),
        (["--draw", "list.json"], "list.json is no record of this experiment"),
        (["--draw", "part.json"], "part.json is no whole record of this experiment"),
        (["--draw", "other.json"], "other.json is no whole record of this experiment"),
        (["--toy"], "sparse-video.json is no record of this experiment"),
        (["--steps", "0", "--toy"], "steps 0: it must be at least 1"),
        (["--temperature", "0", "--toy"], "temperature 0.0: pass a positive number"),
        (["--how", "int8"], "pass --how bf16"),
        (["--toy", "--gpus", "0"], "--gpus 0: it must be at least 1"),
        (["--toy", "--densities", "0"], "densities (0.0,)"),
        (["--toy", "--device", "banana"], "--device banana: pass cuda"),
        (["--toy", "--device", "meta"], "--device meta: pass cuda"),
        (["--toy", "--minutes", "0"], "--minutes 0: pass a positive number"),
        (["--toy", "--minutes", "nan"], "--minutes nan: pass a positive number"),
        (["--toy", "--minutes", "-1"], "--minutes -1: pass a positive number"),
        (["--draw", "absent.json"], "absent.json: No such file"),
    ):
        code, _, err = command(*words)
        assert code == 2 and part in err, err
