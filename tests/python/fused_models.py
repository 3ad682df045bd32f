"""Small models of transformers whose layers `fuse` takes, for tests here and on a GPU."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
         "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
           "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
           "shared_expert_intermediate_size": 32}  # fmt: skip
_NORM = "RMSNorm over each head (gain: weight)"
_NORM_PLUS = "RMSNorm over each head (gain: 1 + weight)"
_WHOLE = "RMSNorm over all heads at once (gain: weight)"
_HALVES = "RoPE (halves, tables (f, f))"

#: By family: its configuration, what it has beside SIZES, and what is fused in its attention.
FAMILIES = {
    "llama": ("Llama", {"attention_bias": True, "attention_dropout": 0.1}, _HALVES),
    "mistral": ("Mistral", {"sliding_window": 8, "num_key_value_heads": 4}, _HALVES),
    "qwen2": ("Qwen2", {"use_sliding_window": True, **_MIXED}, _HALVES),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}, f"{_NORM} and {_HALVES}"),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS, f"{_NORM} and {_HALVES}"),
    "gemma3": ("Gemma3Text", _MIXED, f"{_NORM_PLUS} and {_HALVES}"),
    "olmo2": ("Olmo2", {}, f"{_WHOLE} and {_HALVES}"),
    "glm4": ("Glm4", {}, "RoPE (interleaved, tables (f, f))"),
    "glm4_moe": ("Glm4Moe", {"use_qk_norm": True, "n_routed_experts": 2, "num_experts_per_tok": 1,
                             "moe_intermediate_size": 32, "first_k_dense_replace": 2},
                 f"{_NORM} and {_HALVES}"),
    "cohere": ("Cohere", {}, "RoPE (interleaved, tables (f0, f0, f1, f1))"),
    "gpt_oss": ("GptOss", {**_MIXED, "num_local_experts": 2, "num_experts_per_tok": 2,
                           "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
                "RoPE (halves, tables f)"),
    "qwen3_next": ("Qwen3Next", _EXPERTS | _LINEAR, f"{_NORM_PLUS} and {_HALVES}"),
}  # fmt: skip


def config_of(family, **sizes):
    name, more, _ = FAMILIES[family]
    kind = getattr(transformers, f"{name}Config", None)
    if kind is None:
        pytest.skip(f"this transformers has no {name}")
    return kind(**{**SIZES, **more, **sizes})


def model_of(family, implementation="eager", dtype=torch.float32, **sizes):
    """With random weights that are as large for norms, biases and sinks as for all else."""
    torch.manual_seed(0)
    config = config_of(family, **sizes)
    config._attn_implementation, config._experts_implementation = implementation, "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = "norm" in name and family not in ("gemma3", "qwen3_next")
            wide = 6 if "q_proj.weight" in name else 1  # attention that attends to something
            parameter.normal_(float(is_gain), 0.1 * wide)
    return model.to(dtype)


def tokens(*shape, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 100, shape, generator=generator).to(device)


def results(model, ids, **given):
    """The loss, the logits where there is no padding, and each parameter's gradient."""
    model.zero_grad()
    mask = given.get("attention_mask")
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    out = model(ids, labels=labels, use_cache=False, **given)
    out.loss.backward()
    logits = out.logits.detach()
    found = {"loss": out.loss.detach(), "logits": logits if mask is None else logits[mask == 1]}
    return found | {name: parameter.grad.clone() for name, parameter in model.named_parameters()
                    if parameter.grad is not None}  # fmt: skip


def assert_near(found, expected, bound):
    """Each result is off by a part of its size, or, for gradients that are next to nothing beside
    those of other parameters, of a thousandth of the largest."""
    assert found.keys() == expected.keys() and len(found) > 2
    least = 1e-3 * max(float(t.norm()) for name, t in expected.items() if "." in name)
    for name, right in expected.items():
        size = max(float(right.norm()), least)
        assert float((found[name] - right).double().norm()) <= bound * size, name
