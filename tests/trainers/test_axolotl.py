"""axolotl: its own batches of packed samples in a model of transformers, its check of
attn_implementation, and its attention to packed rows by torch.nn.attention.varlen."""

import pytest

BARE = ("axolotl.utils.collators",)
#: These are of configurations, data sets and reports, none of attention.
MISSING = ("addict", "datasets", "posthog", "trl", "wandb", "art", "colorama", "numba", "psutil")
LENGTHS = (13, 30, 9), (21, 20)


def collated(module):
    """Two packed rows by its collator, without the mask, as its trainer leaves it out."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1}, "a"))
    collate = module.V2BatchSamplerDataCollatorForSeq2Seq(
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]"))  # fmt: skip

    def sample(i, n):
        ids = [(7 * i + j * j) % 97 + 1 for j in range(n)]
        return {"input_ids": ids, "labels": ids, "position_ids": list(range(n))}

    batch = collate([[sample(i, n) for i, n in enumerate(lengths)] for lengths in LENGTHS])
    return {name: batch[name] for name in ("input_ids", "position_ids")}


def test_the_plugin_of_the_page_makes_the_name_known(imported, page):
    for package in ("pydantic", "PIL"):
        pytest.importorskip(package, reason="needs a trainer's code: whose settings import these")
    config = imported("axolotl.utils.schemas.config", BARE, MISSING)
    kind = config.AxolotlInputConfig
    with pytest.raises(ValueError, match="sagebwd"):
        kind.validate_attn_implementation("sagebwd")
    names = {}
    exec(page("axolotl")[0], names)
    names["SageBwd"]().register({})
    assert kind.validate_attn_implementation("sagebwd") == "sagebwd"
    settings = kind.model_construct(attn_implementation="sagebwd")
    assert settings.attn_supports_packing and settings.attn_decontaminates_packing
    assert settings.attn_needs_dtype_cast and not settings.attn_uses_flash_lib


def test_packed_samples(imported, device):
    import torch
    from comparison import compare_models

    import sagebwd.integrations.transformers

    sagebwd.integrations.transformers.use()
    batch = collated(imported("axolotl.utils.collators.batching", BARE, MISSING))
    assert (batch["position_ids"] == 0).sum() >= 5
    batch = {name: torch.as_tensor(x).to(device) for name, x in batch.items()}
    one = torch.arange(batch["input_ids"].shape[1], device=device).expand_as(batch["input_ids"])
    compare_models(batch, {**batch, "position_ids": one}, device)


def test_its_attention_to_packed_rows(imported, device, registry, tokens):
    """`attn_implementation: sdpa` with packing, where sagebwd is activated for the process."""
    import torch
    from comparison import compare, documents, drawn
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = imported("axolotl.monkeypatch.attention.sdpa_varlen", BARE, MISSING)
    attend = module._build_varlen_forward(sdpa_attention_forward)
    torch.nn.attention.activate_flash_attention_impl("sagebwd")
    lengths = tokens((900, 20, 1000), (30, 7, 23))
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    inputs = [drawn(sum(lengths), heads, 64, seed=i, device=device)
              for i, heads in enumerate((4, 2, 2))]  # fmt: skip

    def packed(q, k, v):
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return attend(torch.nn.Module(), q, k, v, None, position_ids=positions)[0][0]

    compare(packed, inputs, None, reference=documents(lengths))
