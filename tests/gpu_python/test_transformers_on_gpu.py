"""Small models of transformers with random weights on the GPU, beside PyTorch's attention."""

import pytest
from inputs import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")

import transformers_checks  # noqa: E402
from transformers_cases import configurations  # noqa: E402

import sagebwd.integrations.transformers  # noqa: E402, F401

SMALL = {"vocab_size": 100, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
         "max_position_embeddings": 1024}  # fmt: skip
CONFIGS = configurations(SMALL, window=128, experts=2)


def run(name, implementation, ids, padding):
    """Logits of tokens, and the gradients of all weights."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation, config._experts_implementation = implementation, "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    for parameter in (p for n, p in model.named_parameters() if "sinks" in n):
        torch.nn.init.normal_(parameter)
    logits = model(ids, attention_mask=padding).logits * padding[..., None]
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).cuda()
    (logits.float() * direction).sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return [t.detach().double() for t in (logits, gradients)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_gradients(name, padded):
    ids = torch.randint(0, 100, (2, 500), generator=torch.Generator().manual_seed(1)).cuda()
    padding = torch.ones(2, 500, dtype=torch.int64, device="cuda")
    if padded:
        padding[1, 317:] = 0
    results = (run(name, kind, ids, padding) for kind in ("sagebwd", "eager"))
    for found, expected in zip(*results):
        assert float((found - expected).norm() / expected.norm()) < 0.03


@transformers_checks.each
def test_models(check):
    check("cuda", 4)
