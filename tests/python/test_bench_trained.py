"""bench/trained.py without a GPU: a tiny Llama, and a stand-in for comfy-kitchen that is exact."""

import json
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("peft", reason="needs peft")
transformers = pytest.importorskip("transformers", reason="needs transformers")

import inference  # noqa: E402
import trained  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from tables_inference import adapted, of_layers  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")

TINY = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip


@pytest.fixture
def llama(monkeypatch):
    """It is opened in the place of a file, with a tokenizer of bytes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, weight in model.named_parameters():
        weight.data *= 12 if "q_proj" in name else 1  # attention that attends to something
    monkeypatch.setattr(trained, "opened", lambda path: (
        model, lambda text: {"input_ids": list(text.encode())}))  # fmt: skip

    def exact(q, k, v, *, scale=None, attn_mask=None):
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask, scale=scale, enable_gqa=True)  # fmt: skip

    monkeypatch.setitem(sys.modules, "comfy_kitchen", SimpleNamespace(
        int8_attention=exact, int8_attention_is_available=lambda: True))  # fmt: skip
    return model


@pytest.mark.parametrize("causal", [True, False])
def test_fp64_and_whose_errors_are_whose(causal, llama):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, 40, 32, generator=generator).bfloat16()
               for heads in (4, 2, 2))  # fmt: skip
    twice = [t.double().repeat_interleave(2, 1) for t in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), *twice,
                                                                is_causal=causal)  # fmt: skip
    assert torch.allclose(inference.in_fp64(q[0], k[0], v[0], causal), expected[0])
    attends = inference.subjects("cpu", causal) | {"none": lambda q, k, v: torch.zeros_like(q)}
    for first in 0, -1:
        row = inference.compared(q, k, v, attends, first, causal)
        assert row["errors"]["none"]["rel_l2"] == 1
        assert row["errors"]["comfy-kitchen"]["rel_l2"] < 0.004
        assert 0.004 < row["errors"]["sagebwd"]["rel_l2"] < 0.03
        assert row["sagebwd to comfy-kitchen"] == pytest.approx(
            row["errors"]["sagebwd"]["rel_l2"], rel=0.2)  # fmt: skip


def test_a_layer_is_what_attention_was_handed(llama):
    ids = torch.randint(256, (48,), generator=torch.Generator().manual_seed(2))
    layers = trained.layers_of(llama, ids)
    assert [[tuple(x.shape) for x in layer] for layer in layers] == [
        [(1, 4, 48, 32), (1, 2, 48, 32), (1, 2, 48, 32)]] * 3  # fmt: skip
    llama.config._attn_implementation = "sdpa"
    first = llama.model.layers[0]
    given = first.input_layernorm(llama.model.embed_tokens(ids[None]))
    values = first.self_attn.v_proj(given).view(1, 48, 2, 32).transpose(1, 2)
    assert torch.equal(layers[0][2], values)
    keys = first.self_attn.k_proj(given).view(1, 48, 2, 32).transpose(1, 2)
    assert torch.equal(layers[0][1][:, :, 0], keys[:, :, 0])  # position 0 is not rotated
    assert not torch.equal(layers[0][1][:, :, 1], keys[:, :, 1])


def test_a_whole_run(llama, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("what was said is said, and again. " * 40)
    before = {name: weight.clone() for name, weight in llama.named_parameters()}
    out = tmp_path / "trained.json"
    words = ["--model", str(text), "--text", str(text), "--device", "cpu", "--out", str(out)]
    sizes = "--captured 64 --length 32 --batch 2 --steps 30 --seeds 2 --rounds 1 --rate 1e-2"
    assert trained.main([*words, *sizes.split()]) == 0
    record = json.loads(out.read_text())
    assert record["status"] == "finished" and record["parameters"]["heads_kv"] == 2
    assert [row["layer"] for row in record["layers"]] == [0, 1, 2]
    assert all(0 < row["k_mean_over_k_norm"] < 1 for row in record["layers"])
    assert all(row["errors"]["sagebwd"]["rel_l2"] < 0.05 for row in record["layers"])
    assert record["forward"].keys() == {"causal", "all keys"}
    runs = record["fine_tunes"]
    assert [(run["attention"], run["seed"]) for run in runs] == [
        ("sdpa", 0), ("sagebwd", 0), ("sdpa", 1), ("sagebwd", 1)]  # fmt: skip
    for run in runs:
        by = run["held_out_by"]
        assert by["sdpa"] < record["held_out_before"]["sdpa"] - 0.1
        assert abs(by["comfy-kitchen"] - by["sdpa"]) < 0.01
        assert 0 < abs(by["sagebwd"] - by["sdpa"]) < 0.1
        assert len(run["train_loss"]) == 30
    assert abs(runs[0]["train_loss"][0] - runs[1]["train_loss"][0]) < 0.05  # the same batches
    assert runs[0]["train_loss"][0] != runs[2]["train_loss"][0]
    assert all(torch.equal(weight, before[name]) for name, weight in llama.named_parameters())
    assert "sagebwd, seed 1: " in capsys.readouterr().out
    errors = [row["errors"]["sagebwd"]["rel_l2"] for row in record["layers"]]
    assert of_layers(record)[2].startswith(f"| sagebwd | {min(errors):.4f} |")
    ours, theirs = (run["held_out_by"]["comfy-kitchen"] for run in (runs[3], runs[2]))
    assert adapted(record)[-1].endswith(f", {ours - theirs:+.4f} |")
