"""Tiny models of transformers with random weights: logits and gradients beside eager ones."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from alike import relative  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from transformers_cases import configurations  # noqa: E402

import sagebwd.integrations.transformers as door  # noqa: E402
from sagebwd import SpecError  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")

TINY = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 256}  # fmt: skip
CONFIGS = configurations(TINY, window=8, experts=1)


def model_of(name, implementation):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation = implementation
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in (p for n, p in model.named_parameters() if "sinks" in n):
        torch.nn.init.normal_(parameter)
    for parameter in (p for n, p in model.named_parameters() if "q_proj.weight" in n):
        parameter.data *= 8  # attention that attends to something
    return model


def tokens(*shape):
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(1))


def run(name, implementation, ids, padding, **given):
    """Logits where there is no padding, and the gradients of all weights."""
    model = model_of(name, implementation)
    logits = model(ids, **given).logits
    weights = torch.ones_like(ids)[..., None] if padding is None else padding[..., None]
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits.float() * direction * weights).sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logits * weights, gradients


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_gradients(name, padded):
    ids = tokens(2, 24)
    padding = None
    if padded:
        padding = torch.ones(2, 24, dtype=torch.int64)
        padding[1, 17:] = 0
    found, expected = (run(name, kind, ids, padding, attention_mask=padding)
                       for kind in ("sagebwd", "eager"))  # fmt: skip
    assert relative(found[0], expected[0]) < 0.05
    assert relative(found[1], expected[1]) < 0.12
    # A lost mask gives results that are far away.
    everything = torch.ones(2, 1, 24, 24, dtype=torch.bool)
    other = run(name, "eager", ids, padding, attention_mask=everything)
    assert relative(other[0], expected[0]) > 0.2


def test_packed_sequences():
    ids, lengths = tokens(1, 30), (11, 19)
    firsts = torch.tensor([0, 11, 30], dtype=torch.int32)
    where = {"cu_seq_lens_q": firsts, "cu_seq_lens_k": firsts, "max_length_q": 19,
             "max_length_k": 19}  # fmt: skip
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    found = model_of("llama", "sagebwd")(ids, position_ids=positions, **where).logits
    model = model_of("llama", "eager")
    expected = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
    assert relative(found, expected) < 0.05
    alone = model_of("llama", "sagebwd")(ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(alone, found)


def test_with_a_cache_positions_pack_nothing_as_for_sdpa():
    """As the page says. transformers decides it."""
    ids = tokens(1, 30)
    positions = torch.cat([torch.arange(n) for n in (11, 19)])[None]
    found, expected = (model_of("llama", kind)(ids, position_ids=positions, use_cache=True).logits
                       for kind in ("sagebwd", "sdpa"))  # fmt: skip
    assert relative(found, expected) < 0.05


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_generation_with_a_cache(name, cache):
    ids = tokens(1, 12)
    scores = {}
    for kind in ("sagebwd", "eager"):
        out = model_of(name, kind).generate(
            ids, max_new_tokens=6, do_sample=False, cache_implementation=cache,
            return_dict_in_generate=True, output_scores=True, disable_compile=True)  # fmt: skip
        scores[kind] = torch.stack(out.scores)
    assert relative(scores["sagebwd"][:1], scores["eager"][:1]) < 0.06


def test_what_it_does_not_honour_is_refused():
    model, ids = model_of("llama", "sagebwd"), tokens(2, 12)

    def refused(match, error=SpecError, **given):
        with pytest.raises(error, match=match):
            model(ids, **given)

    said = "is not that of causal.*nobody says it as a function.*padding_side = 'right'"
    refused(said, attention_mask=torch.ones(2, 1, 12, 12).bool())
    refused("output_attentions", output_attentions=True)
    module = torch.nn.Linear(2, 2)
    q = torch.zeros(1, 4, 8, 32, dtype=torch.bfloat16)
    with pytest.raises(SpecError, match="dropout"):
        door.attend(module, q, q, q, None, dropout=0.1)
    with pytest.raises(TypeError, match=r"use.*'granularit'.*'granularity'"):
        door.use(granularit="block")
    with pytest.raises(TypeError, match=r"'sink_logits'; it is an argument of sagebwd.attention"):
        door.use(sink_logits=None)
    with pytest.raises(TypeError, match=r"use\(\) takes no causal: each model says it"):
        door.use(causal=True)
    for given in ({"precision": "nonsense"}, {"smooth_k": "no"}):
        with pytest.raises(SpecError, match="'n"):
            door.use(**given)


def test_options_are_for_all_models_from_there_on():
    ids = tokens(2, 24)
    plain = model_of("llama", "sagebwd")(ids).logits
    door.use(precision="gradients16", granularity="block")
    try:
        assert not torch.equal(model_of("llama", "sagebwd")(ids).logits, plain)
    finally:
        door.use()
    assert torch.equal(model_of("llama", "sagebwd")(ids).logits, plain)


def test_lora_learns_as_with_eager_attention(tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft")
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 24).tolist()]
    losses = {}
    for kind in ("sagebwd", "eager"):
        model = peft.get_peft_model(model_of("llama", kind), peft.LoraConfig(
            r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"))
        arguments = transformers.TrainingArguments(
            tmp_path / kind, max_steps=8, per_device_train_batch_size=4, learning_rate=1e-2,
            logging_steps=1, report_to=[], use_cpu=True, bf16=False, seed=0, save_strategy="no",
            disable_tqdm=True)  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        losses[kind] = torch.tensor([x["loss"] for x in trainer.state.log_history if "loss" in x])
    assert losses["eager"][-1] < losses["eager"][0]
    assert float((losses["sagebwd"] - losses["eager"]).abs().max()) < 0.05
