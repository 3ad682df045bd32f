"""Models of transformers whose scores are capped or biased, for tests here and on a GPU."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from alike import relative  # noqa: E402

import sagebwd.integrations.transformers  # noqa: E402, F401

SIZES = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
         "max_position_embeddings": 256}  # fmt: skip


def _drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _model(kind, config, implementation, dtype):
    """Weights are the same in all dtypes."""
    torch.manual_seed(0)
    config._attn_implementation = implementation
    make = getattr(kind, "from_config", None) or kind._from_config
    return make(config, dtype=torch.bfloat16).to(dtype)


def gemma2(implementation, device, dtype=torch.bfloat16, cap=1.0):
    """Its first layer sees windows of 16 tokens."""
    config = transformers.Gemma2Config(
        **SIZES, attn_logit_softcapping=cap, sliding_window=16, query_pre_attn_scalar=64,
        layer_types=["sliding_attention", "full_attention"])  # fmt: skip
    model = _model(transformers.AutoModelForCausalLM, config, implementation, dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("q_proj.weight"):
            parameter.data *= 10  # scores that a cap changes
    return model.to(device)


def t5(implementation, device, dtype=torch.bfloat16, biased=True):
    """All layers of the encoder share its first layer's table of biases, as those of the decoder
    do."""
    if not hasattr(transformers.models.t5.modeling_t5, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("the T5 of this transformers has attention of its own")
    config = transformers.T5Config(
        vocab_size=100, d_model=128, d_kv=64, d_ff=128, num_layers=2, num_heads=2,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0)  # fmt: skip
    model = _model(transformers.T5ForConditionalGeneration, config, implementation, dtype)
    for table in tables_of(model):
        table.data = _drawn(*table.shape, seed=3).to(dtype) * 2 * biased
    return model.to(device)


def tables_of(model):
    return [p for name, p in model.named_parameters() if "relative_attention_bias" in name]


def inputs_of_gemma2(device, padded):
    """(keywords, 1 for tokens and 0 for padding)"""
    ids = torch.randint(100, (2, 40), generator=torch.Generator().manual_seed(1))
    padding = torch.ones(2, 40, dtype=torch.int64)
    padding[1, 30:] = 1 - padded
    given = dict(input_ids=ids.to(device), attention_mask=padding.to(device), use_cache=False)
    return given, padding.to(device)


def inputs_of_t5(device, padded):
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(1, 100, (2, n), generator=generator) for n in (40, 24))
    padding, labelled = (torch.ones(2, n, dtype=torch.int64) for n in (40, 24))
    padding[1, 30:] = labelled[1, 18:] = 1 - padded
    given = dict(input_ids=ids, attention_mask=padding, decoder_input_ids=labels,
                 decoder_attention_mask=labelled)  # fmt: skip
    given = {name: t.to(device) for name, t in given.items()}
    return {**given, "use_cache": False}, labelled.to(device)


def results(model, weights, given, backend=None):
    """Logits of tokens, and the gradients of all parameters; with a backend in one graph."""
    call = model
    if backend is not None:
        torch._dynamo.reset()
        call = torch.compile(model, fullgraph=True, backend=backend)
    logits = call(**given).logits * weights[..., None]
    direction = _drawn(*logits.shape, seed=2).to(logits.device)
    (logits.float() * direction).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return logits.detach(), torch.cat(gradients)


#: By name: a model, its inputs, and what another model lacks that does not do what this one asks.
MODELS = {"gemma2": (gemma2, inputs_of_gemma2, {"cap": None}),
          "t5": (t5, inputs_of_t5, {"biased": False})}  # fmt: skip


def check(name, device, padded=False, backend=None):
    """The model is as near to eager attention in FP32 as that in BF16 is, with room for INT8's
    errors, and one that lacks what it asks for is far away."""
    make, inputs, lost = MODELS[name]
    given, weights = inputs(device, padded)
    if not padded:
        given = {name: x for name, x in given.items() if "mask" not in name}
    model = make("sagebwd", device)
    found = results(model, weights, given, backend)
    plain = results(make("eager", device), weights, given)
    exact = make("eager", device, torch.float32)
    right = results(exact, weights, given)
    other = results(make("eager", device, torch.float32, **lost), weights, given)
    for x, y, z, w in zip(found, plain, right, other):
        off = relative(x, z)
        assert off < 2 * relative(y, z) + 0.03, (off, relative(y, z))
        assert relative(w, z) > 2 * off, (relative(w, z), off)
    if tables := tables_of(model):  # which are few among all parameters
        tables, wanted = (torch.cat([table.grad.flatten() for table in of])
                          for of in (tables, tables_of(exact)))  # fmt: skip
        assert relative(tables, wanted) < 0.1, relative(tables, wanted)
