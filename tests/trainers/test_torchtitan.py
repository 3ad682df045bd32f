"""torchtitan's VarlenAttention with packed documents, through PyTorch's registry of attention
implementations, and its ScaledDotProductAttention, which Flux has."""

import inspect

import pytest

#: Configuration files, logs and the command line, which no attention needs.
MISSING = ("tyro", "spmd_types", "torch_checkpointing", "datasets", "tensorboard", "grain")
BARE = ("torchtitan.models", "torchtitan.models.common", "torchtitan.distributed",
        "torchtitan.observability", "torchtitan.components")  # fmt: skip
LENGTHS = {"cuda": (1500, 37, 511), "cpu": (40, 7, 23)}


@pytest.fixture
def attention(imported):
    """This is its module of attention. A PyTorch that lacks something skips the test by name."""
    try:
        return imported("torchtitan.models.common.attention", BARE, MISSING)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        pytest.skip(f"needs a trainer's code: this commit needs another PyTorch: {error}")


@pytest.fixture
def patched(registry, page, attention):
    """The page has a user write this before the model is built."""
    from torchtitan.tools import utils

    before = utils.get_cuda_flash_attention_impl
    exec(page("torchtitan")[0], {})
    yield
    utils.get_cuda_flash_attention_impl = before


@pytest.mark.parametrize("window, heads_kv", [(-1, 4), (-1, 2), (15, 4)])
def test_packed_documents(attention, patched, device, window, heads_kv):
    import torch
    from comparison import compare, documents, drawn
    from torch.nn.attention.varlen import varlen_attn

    if heads_kv < 4 and "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        pytest.skip("needs a trainer's code: and a PyTorch with varlen_attn(enable_gqa=)")
    lengths = LENGTHS[device]
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    masks = attention.create_varlen_metadata_for_document(positions)
    config = attention.VarlenAttention.Config(window_size=(window, 0))
    module = attention.VarlenAttention(config)
    inputs = [drawn(sum(lengths), heads, 128, seed=i, device=device)
              for i, heads in enumerate((4, heads_kv, heads_kv))]  # fmt: skip
    compare(lambda q, k, v: module(q, k, v, attention_masks=masks, enable_gqa=heads_kv < 4), inputs,
            None, reference=documents(lengths, window))  # fmt: skip


def test_attention_of_flux(attention, device, tokens):
    from comparison import compare, drawn

    import sagebwd

    module = attention.ScaledDotProductAttention(attention.ScaledDotProductAttention.Config())
    inputs = [drawn(1, tokens(2304, 70), 2, 128, seed=i, device=device) for i in range(3)]
    compare(lambda q, k, v: module(q, k, v, is_causal=False), inputs, sagebwd.sdpa())
