"""The examples: what they say where something is missing, and a tiny run without a GPU."""

import importlib.util
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import kernels_on_the_cpu  # noqa: F401

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def loaded(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def lora(monkeypatch, capsys):
    """The last line of `python lora.py ...`, which must leave with 2."""
    for needed in ("transformers", "peft"):
        pytest.importorskip(needed, reason=f"needs {needed}")
    module = loaded("lora")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["lora.py", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            module.main()
        assert left.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return run


def test_texts_that_lora_cannot_learn_from(lora, tmp_path):
    text = tmp_path / "a.txt"
    text.write_bytes(b"abcdefgh" * 1280)
    assert "/nope: No such file or directory" in lora("--base", "/nope", "--text", "/nope")
    assert "/nope: No such file or directory" in lora(
        "--base", "/nope", "--text", text, "--length", 64
    )
    assert "10240 tokens; pass a text of at least 81920" in lora("--base", text, "--text", text)
    assert "needs --base" in lora("--text", text)


def test_diffusion_says_that_it_needs_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SystemExit, match=r"^diffusion.py draws with pillow: pip install pillow$"):
        loaded("diffusion")


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return loaded("deterministic_training")


def test_deterministic_training_needs_a_gpu(deterministic, monkeypatch, capsys):
    monkeypatch.setattr(deterministic.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["deterministic_training.py"])
    with pytest.raises(SystemExit) as left:
        deterministic.main()
    assert left.value.code == 2
    assert "this needs a GPU: python -m sagebwd.doctor" in capsys.readouterr().err


def test_deterministic_training_repeats_its_losses(
    deterministic,
    kernels_on_the_cpu,
    capsys,
    tiny_tensors,  # noqa: F811
):
    options = Namespace(tokens=48, heads=2, head_dim=64, layers=1, steps=3, seed=0,
                        precision="gradients16")  # fmt: skip
    text = deterministic.source_code(8 * options.tokens)
    assert deterministic.runs_of(options, text, "cpu")
    *runs, last = capsys.readouterr().out.splitlines()
    assert [run[:24].rstrip() for run in runs] == [
        "PyTorch, not determinist", "PyTorch, deterministic", "sagebwd, deterministic",
        "sagebwd again"]  # fmt: skip
    assert "times as fast with sagebwd; its losses are repeated bit for bit" in last
    assert sum(kernels.launches for kernels in kernels_on_the_cpu.values()) == 2 * 3 * 2
    assert runs[1].partition("loss")[2] != runs[2].partition("loss")[2]  # ours computed
    assert not deterministic.torch.are_deterministic_algorithms_enabled()


def test_the_learned_router_of_the_example_learns(monkeypatch, capsys, tiny_tensors):
    module = loaded("sparse_linear")
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "BLOCK", 8)
    monkeypatch.setattr(sys, "argv", ["sparse_linear.py"])
    module.main()
    pooled, learned, norms = capsys.readouterr().out.splitlines()
    assert norms.startswith("norms of dQ, dK and dV: ")
    masses, errors = zip(*((float(line.split()[6]), float(line.split()[-1]))
                           for line in (pooled, learned)))  # fmt: skip
    assert masses[1] > masses[0] + 0.1 and errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("words, message", [
    (["--width", "100", "--head-dim", "32"], "--width 100 is no multiple of --head-dim 32"),
    (["--head-dim", "33"], "--head-dim 33: pass a multiple of 8 from 32 to 512"),
    (["--layers", "0"], "--layers 0: pass at least 1"),
    (["--attention", "pytorch"], "--attention pytorch --device cpu: .*pass --attention sagebwd"),
    (["--attention", "pytorch", "--device", "cuda", "--tokens", "1001"], "a multiple of 6 here"),
    (["--method", "ulysses"], "3 ranks cannot share 8 heads"),
    (["--tokens", "5"], "3 ranks need at least 6"),
    (["--device", "cuda"], "0 GPUs are here, and each rank needs one"),
])  # fmt: skip
def test_long_context_says_at_the_start_what_is_wrong(words, message, monkeypatch, capsys):
    module = loaded("long_context")
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert module.options(["--device", "cpu", "--tokens", "999"]).width == 1024
    with pytest.raises(SystemExit) as left:
        module.options(["--device", "cpu", *words])
    assert left.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_wan_with_sla2(monkeypatch, capsys, tmp_path, tiny_tensors):
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
    module = loaded("wan_sla2")
    torch = module.torch
    monkeypatch.setattr(module, "GPU", False)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=3, out_channels=3, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    options = Namespace(frames=3, size=16)
    own = module.loss_of(model, options, 3)
    own.backward()
    wanted = [weight.grad.clone() for weight in model.parameters()]
    modules, processor = module.make_sparse(model, 1.0)  # all blocks: the same attention
    weights = [p for name, p in model.named_parameters() if ".sparse." not in name]
    for stage_one in (True, False):
        model.zero_grad()
        processor.stage_one = stage_one
        ours = module.loss_of(model, options, 3)
        ours.backward()
        torch.testing.assert_close(ours, own)
        torch.testing.assert_close([weight.grad for weight in weights], wanted,
                                   rtol=1e-3, atol=1e-6)  # fmt: skip
    monkeypatch.setattr(sys, "argv", [
        "wan_sla2.py", "--frames", "4", "--size", "16", "--dense-steps", "4",
        "--stage-one-steps", "2", "--steps", "2", "--density", "0.25"])  # fmt: skip
    module.main()
    printed = capsys.readouterr()
    said = printed.out.splitlines()
    assert [line.split(":")[0][:10] for line in said] == ["dense", "with 25% o", "after trai"]
    told = printed.err.splitlines()
    assert told[:2] == ["dense: step 0 of 4", "dense: step 1 of 4"]
    assert "routers: step 1 of 2" in told
    assert "25% of the blocks, which have" in said[1]
    model.unfuse_qkv_projections()
    model.fuse_qkv_projections()
    with pytest.raises(ValueError, match="projections are fused"):
        module.make_sparse(model, 0.5)


@pytest.mark.parametrize("message, words", [
    (r"--density 0.0: pass a share above 0 and at most 1", ["--density", "0"]),
    (r"--density 2.0: pass a share", ["--density", "2"]),
    (r"--density nan: pass a share", ["--density", "nan"]),
    (r"--steps -1: pass at least 0", ["--steps", "-1"]),
    (r"--stage-one-steps 0: pass at least 1", ["--stage-one-steps", "0"]),
    (r"--size 3: pass at least 4", ["--size", "3"]),
    (r"--size 7: the model takes multiples of 2 up to 128", ["--size", "7"]),
    (r"--frames 65: the model takes multiples of 1 up to 64", ["--frames", "65"]),
])  # fmt: skip
def test_wan_with_sla2_refuses_before_it_trains(message, words, monkeypatch, capsys):
    pytest.importorskip("diffusers", reason="needs diffusers")
    module = loaded("wan_sla2")
    monkeypatch.setattr(module, "train", None)
    monkeypatch.setattr(sys, "argv", ["wan_sla2.py", *words])
    with pytest.raises(SystemExit) as left:
        module.main()
    assert re.search(message, f"{capsys.readouterr().err} {left.value}")


def test_folders_of_wan_with_sla2(monkeypatch, capsys, tmp_path, tiny_tensors):
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
    module = loaded("wan_sla2")
    monkeypatch.setattr(module, "GPU", False)
    monkeypatch.setattr(module, "DEVICE", "cpu")

    def run(folder):
        monkeypatch.setattr(sys, "argv", [
            "wan_sla2.py", "--frames", "2", "--size", "4", "--stage-one-steps", "1", "--steps", "0",
            "--model", str(folder)])  # fmt: skip
        module.main()

    def saved(name, **other):
        given = dict(num_attention_heads=1, attention_head_dim=32, in_channels=3, out_channels=3,
                     text_dim=16, freq_dim=16, ffn_dim=32, num_layers=1, rope_max_seq_len=32)
        diffusers.WanTransformer3DModel(**{**given, **other}).save_pretrained(tmp_path / name)

    saved("pipeline/transformer")
    saved("alone")
    for name in ("pipeline", "alone"):  # of one block, which --density 0.1 cannot leave out
        run(tmp_path / name)
        assert "with 100% of the blocks" in capsys.readouterr().out
    saved("pictures", in_channels=6)
    saved("embedded", image_dim=16, added_kv_proj_dim=32)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"_class_name": "CogVideoXTransformer3DModel"}')
    for name, message in (("pictures", "makes videos from pictures"),
                          ("embedded", "makes videos from pictures"),
                          ("other", "has a CogVideoXTransformer3DModel"),
                          ("missing", "has no folder 'transformer', as Wan's models")):  # fmt: skip
        with pytest.raises(SystemExit, match=message):
            run(tmp_path / name)
