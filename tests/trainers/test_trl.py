"""TRL: what its own collators make of samples, in a model of transformers."""

import pytest

#: Everything of its trainers that is no batch of tokens.
MISSING = ("datasets", "pandas", "trl.chat_template_utils", "trl.data_utils", "trl.models",
           "trl.trainer.base_trainer", "trl.trainer.model_config", "trl.trainer.sft_config",
           "trl.import_utils")  # fmt: skip
SAMPLES = [[(7 * i + j * j) % 97 + 1 for j in range(n)] for i, n in enumerate((13, 30, 9))]


@pytest.fixture
def trainer(imported):
    return imported("trl.trainer.sft_trainer", ("trl", "trl.trainer"), MISSING)


def at(device, **tensors):
    return {name: t.to(device) for name, t in tensors.items()}


@pytest.mark.parametrize("packed", [False, True])
def test_padding_free_batches(trainer, device, packed):
    """padding_free=True, and packing=True, whose rows have several samples each."""
    import torch
    from comparison import compare_models

    import sagebwd.integrations.transformers

    sagebwd.integrations.transformers.use()
    samples = [{"input_ids": x} for x in SAMPLES]
    if packed:
        samples = [{"input_ids": SAMPLES[0] + SAMPLES[1], "seq_lengths": [13, 30]},
                   {"input_ids": SAMPLES[2], "seq_lengths": [9]}]  # fmt: skip
    made = trainer.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(samples)
    assert "attention_mask" not in made and (made["position_ids"] == 0).sum() == 3
    batch = at(device, input_ids=made["input_ids"], position_ids=made["position_ids"])
    one = torch.arange(batch["input_ids"].shape[1], device=device)[None]
    compare_models(batch, {**batch, "position_ids": one}, device)


def test_padded_batches(trainer, device):
    from comparison import model_gradients, relative, tiny_llama

    import sagebwd.integrations.transformers

    sagebwd.integrations.transformers.use()
    made = trainer.DataCollatorForLanguageModeling(pad_token_id=0)([{"input_ids": x}
                                                                    for x in SAMPLES])  # fmt: skip
    batch = at(device, input_ids=made["input_ids"], attention_mask=made["attention_mask"])
    found, expected = (model_gradients(tiny_llama(name, device), batch, batch["attention_mask"])
                       for name in ("sagebwd", "eager"))  # fmt: skip
    assert relative(found[0], expected[0]) <= 0.05 and relative(found[1], expected[1]) <= 0.12


def test_prompts_that_are_padded_on_the_left(trainer, device):
    """As GRPO has them: prompts end, and completions begin, at one place in all rows."""
    import torch
    import transformers
    from comparison import compare_models
    from packaging.version import Version

    import sagebwd.integrations.transformers

    if Version(transformers.__version__) < Version("5.5"):
        pytest.skip("needs transformers 5.5")
    sagebwd.integrations.transformers.use()
    from trl.trainer.utils import pad

    prompts, completions = [torch.tensor(x) for x in SAMPLES], [torch.tensor(x)
                                                               for x in SAMPLES[::-1]]  # fmt: skip
    ids, mask = (torch.cat([pad(left, padding_side="left"), pad(right)], 1).to(device)
                 for left, right in ((prompts, completions),
                                     [[torch.ones_like(t) for t in side]
                                      for side in (prompts, completions)]))  # fmt: skip
    batch = {"input_ids": ids, "attention_mask": mask}
    compare_models(batch, {"input_ids": ids}, device, weights=mask)
