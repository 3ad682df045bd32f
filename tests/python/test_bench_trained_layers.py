"""bench/trained_layers.py and its table without a GPU: a tiny Llama and a tiny encoder."""

import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

import trained_layers  # noqa: E402
from tables_trained import layers_by_scheme, rotations  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")

LLAMA = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
BERT = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip


class Tokenizer(SimpleNamespace):
    """Of bytes."""

    def __call__(self, text):
        return {"input_ids": list(text.encode())}


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Folders as those of transformers, and a text."""
    monkeypatch.setattr(trained_layers, "PIECE", 32)
    made, tokenizer = {}, Tokenizer(cls_token_id=1, sep_token_id=2)
    for name, config, kind in (
        ("llama", transformers.LlamaConfig(**LLAMA), transformers.LlamaForCausalLM),
        ("encoder", transformers.BertConfig(**BERT), transformers.BertModel),
    ):
        torch.manual_seed(0)
        made[name] = kind(config).bfloat16().eval()
        for weight in (w for n, w in made[name].named_parameters() if "q" in n.split(".")[-2]):
            weight.data *= 12  # attention that attends to something
        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": [kind.__name__]}))
        (folder / "model.safetensors").write_bytes(name.encode())
    monkeypatch.setattr(trained_layers, "opened", lambda path, kind: (made[path.name], tokenizer))
    (tmp_path / "text.txt").write_text("what was said is said, and again by others. " * 30)
    return made


def test_all_precisions_scales_and_rotations_are_schemes():
    found = trained_layers.schemes()
    assert len(found) == 2 * 2 * 4 + len(trained_layers.VARIANTS)
    assert found["row, six-of-seven"] == {"granularity": "row", "rotate": True,
                                          "precision": "six-of-seven"}  # fmt: skip
    assert found["block, no rotation, gradients16"]["rotate"] is False


def test_gradients_are_those_of_the_loss(models):
    """An output's gradient says how the loss changes with it."""
    llama = models["llama"].float()
    ids = torch.randint(256, (40,), generator=torch.Generator().manual_seed(1))
    layers, loss = trained_layers.captured(
        llama, lambda: trained_layers.language_loss(llama, None, ids))  # fmt: skip
    assert [causal for _, causal in layers] == [True, True]
    (q, k, v, dout), _ = layers[1]
    assert q.shape == dout.shape == (1, 4, 40, 32) and k.shape == v.shape == (1, 2, 40, 32)
    assert llama.config._attn_implementation != "keeping"
    direction, h = torch.randn(40, 4 * 32, generator=torch.Generator().manual_seed(2)), 2e-2
    losses = []
    for sign in (1, -1):
        output = llama.model.layers[1].self_attn.o_proj
        handle = output.register_forward_pre_hook(
            lambda _, given, sign=sign: (given[0] + sign * h * direction,))
        with torch.no_grad():
            losses.append(trained_layers.language_loss(llama, None, ids).double())
        handle.remove()
    of_heads = direction.view(40, 4, 32).transpose(0, 1)
    expected = (dout[0].double() * of_heads).sum()
    assert float((losses[0] - losses[1]) / (2 * h)) == pytest.approx(float(expected), rel=0.02)
    assert loss == pytest.approx(float(losses[0]), abs=0.01)


def test_what_follows_a_piece_is_what_an_encoder_is_to_find(models):
    encoder, seen = models["encoder"], []
    ids = torch.arange(3, 3 + 5 * 32)  # two pairs of pieces, and one piece that is left over
    encoder.register_forward_hook(lambda module, given, more, out: seen.append(more["input_ids"]),
                                  with_kwargs=True)  # fmt: skip
    loss = trained_layers.sentence_loss(encoder, Tokenizer(cls_token_id=1, sep_token_id=2), ids)
    assert seen[0].shape == (4, 32) and seen[0][:, 0].tolist() == [1] * 4
    assert seen[0][:, -1].tolist() == [2] * 4 and seen[0][1, 1] == 3 + 33
    assert 0 < float(loss.detach()) < 2 * trained_layers.SHARPNESS


def test_a_whole_run(models, tmp_path, capsys):
    out = tmp_path / "trained-layers.json"
    words = ["--models", str(tmp_path / "llama"), str(tmp_path / "encoder"), "--device", "cpu",
             "--text", str(tmp_path / "text.txt"), "--tokens", "128",
             "--out", str(out)]  # fmt: skip
    assert trained_layers.main(words) == 0
    record = json.loads(out.read_text())
    assert [(m["name"], m["layers"], m["head_dim"]) for m in record["models"]] == [
        ("llama", 2, 32), ("encoder", 1, 32)]  # fmt: skip
    assert record["models"][1]["batch"] == 4 and record["models"][1]["tokens"] == 32
    rows = record["rows"]
    assert [(row["model"], row["layer"], row["causal"]) for row in rows] == [
        ("llama", 0, True), ("llama", 1, True), ("encoder", 0, False)]  # fmt: skip
    for row in rows:
        errors = row["errors"]
        assert [*errors] == [trained_layers.BF16, *trained_layers.schemes()]
        ours, paper = errors["row, six-of-seven"], errors["block, no rotation, six-of-seven"]
        for tensor in trained_layers.TENSORS:
            assert 0 < errors[trained_layers.BF16][tensor] < 1.3 * ours[tensor]
            assert ours[tensor] < paper[tensor] < 0.3
        assert errors["row, gradients16"]["dV"] < ours["dV"]
        assert errors["row, qk16"]["O"] != ours["O"] and row["statistics"]["k_std"] > 0
    assert "row, six-of-seven" in capsys.readouterr().out
    assert layers_by_scheme(record, "llama")[2].startswith("| bf16 (PyTorch) | ")
    wins = rotations(record)
    assert len(wins) == 2 + 2 * 2 and wins[2].startswith("| llama, `row` | ")

    assert trained_layers.sound(record)
    rows[0]["errors"]["row, qk16"]["dK"] = float("nan")
    assert not trained_layers.sound(record)


def test_a_model_that_is_not_there_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        trained_layers.main(["--models", str(tmp_path / "none"), "--text", "x", "--device", "cpu"])
    assert "there is no such folder or file" in capsys.readouterr().err
