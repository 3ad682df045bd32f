"""Models of transformers with random weights, for tests here and on a GPU.

Each is computed by sagebwd and by PyTorch's attention in bfloat16, and by the latter in float32
with the same weights: sagebwd may be twice as far from that as bfloat16 is, and .02 more.
"""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from alike import relative  # noqa: E402

import sagebwd.integrations.transformers  # noqa: E402, F401

SIZES = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
         "max_position_embeddings": 1024}  # fmt: skip


def configurations(sizes, window, experts):
    """By name: a plain model, one that normalises q and k, and one with sinks, and with windows in
    its first of two layers, whose tokens take so many of two experts."""
    return {
        "llama": lambda: transformers.LlamaConfig(**sizes),
        "qwen3": lambda: transformers.Qwen3Config(**sizes),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **sizes, sliding_window=window, num_local_experts=2, num_experts_per_tok=experts,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    }  # fmt: skip


def llama():
    return transformers.AutoModelForCausalLM, transformers.LlamaConfig(**SIZES)


def llama_of_one_layer():
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    return transformers.AutoModelForCausalLM, config


def modernbert():
    """Layers of windows of 16 tokens around each."""
    config = transformers.ModernBertConfig(
        vocab_size=100, hidden_size=128, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=2, max_position_embeddings=1024, local_attention=16,
        global_attn_every_n_layers=3, pad_token_id=0, cls_token_id=1, sep_token_id=2,
        bos_token_id=1, eos_token_id=2)  # fmt: skip
    return transformers.AutoModel, config


def minimax_m3():
    """Queries see 2 blocks of 16 keys, which an indexer chooses."""
    reason = "this transformers has no MiniMax-M3"
    module = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl",
                                 reason=reason)  # fmt: skip
    configs = pytest.importorskip("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl",
                                  reason=reason)  # fmt: skip
    config = configs.MiniMaxM3VLTextConfig(
        **SIZES, layer_types=["minimax_m3_sparse"] * 2, mlp_layer_types=["dense"] * 2,
        index_n_heads=1, index_head_dim=64, index_block_size=16, index_topk_blocks=2,
        index_local_blocks=1)  # fmt: skip
    return module.MiniMaxM3VLTextModel, config


def llama4():
    """The first of two layers sees chunks of 24 tokens alone."""
    reason = "this transformers hands over no functions of masks"
    pytest.importorskip("transformers", minversion="5.5", reason=reason)
    config = transformers.Llama4TextConfig(
        **SIZES, attention_chunk_size=24, layer_types=["chunked_attention", "full_attention"],
        intermediate_size_mlp=128, no_rope_layers=[1, 1], attn_temperature_tuning=False,
        moe_layers=[])  # fmt: skip
    return transformers.Llama4ForCausalLM, config


def gemma4():
    """The last two of four layers share the keys of those before."""
    module = pytest.importorskip("transformers.models.gemma4.modeling_gemma4",
                                 reason="this transformers has no Gemma 4")  # fmt: skip
    sizes = {**SIZES, "num_hidden_layers": 4}
    config = transformers.Gemma4TextConfig(
        **sizes, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=512, vocab_size_per_layer_input=100, hidden_size_per_layer_input=16,
        global_head_dim=64)  # fmt: skip
    return module.Gemma4ForCausalLM, config


def model_of(case, implementation, device, dtype=torch.bfloat16):
    """With weights that are the same for all implementations and dtypes."""
    torch.manual_seed(0)
    kind, config = case()
    make = getattr(kind, "from_config", None) or kind._from_config
    config._attn_implementation = implementation
    model = make(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "Wqkv.weight", "attn.Wo.weight")):
            parameter.data *= 6  # attention that attends to something, and counts
    return model.to(device=device, dtype=dtype)


def tokens(*shape, device):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 100, shape, generator=generator).to(device)


def result(model, weights=None, **given):
    """Logits or hidden states, times `weights`, and the gradients of all weights of the model."""
    out = model(**given)
    out = out.logits if "logits" in out else out.last_hidden_state
    if weights is not None:
        out = out * weights[..., None].to(out.dtype)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.device)
    (out.float() * direction).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return out, torch.cat(gradients)


def assert_right(case, device, call, exact=None):
    """That `call` of a model by sagebwd gives what PyTorch's attention gives; `exact` is the call
    of those where it is another one. Gives the right result."""
    found = call(model_of(case, "sagebwd", device))
    exact = exact or call
    plain = exact(model_of(case, "sdpa", device))
    right = exact(model_of(case, "sdpa", device, torch.float32))
    for x, y, z in zip(found, plain, right):
        assert relative(x, z) < 2 * relative(y, z) + 0.02, (relative(x, z), relative(y, z))
    return right


def packing(lengths, device):
    """(cu_seqlens, position_ids) of sequences in one row."""
    firsts = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    return firsts, torch.cat([torch.arange(n) for n in lengths])[None].to(device)


def flash_keywords(firsts, lengths):
    return {"cu_seq_lens_q": firsts, "cu_seq_lens_k": firsts, "max_length_q": max(lengths),
            "max_length_k": max(lengths)}  # fmt: skip


def padding_of(lengths, n, device):
    """The mask of sequences that are padded on the right."""
    return (torch.arange(n) < torch.tensor(lengths)[:, None]).long().to(device)
