"""musubi-tuner's unified attention (Z-Image, FLUX.2, HunyuanVideo 1.5, Krea 2) and Wan's, with the
option --sdpa, within sagebwd.sdpa()."""

import pytest


@pytest.fixture
def inputs(device, tokens):
    """Queries, keys and values of (batch, tokens, heads, channels), as its models have them."""
    from comparison import drawn

    def draw(heads=2, heads_kv=None, batch=2, queries=None, keys=None):
        queries = queries or tokens(2304, 70)
        shapes = [(batch, queries, heads, 128)]
        shapes += [(batch, keys or queries, heads_kv or heads, 128)] * 2
        return [drawn(*shape, seed=i, device=device) for i, shape in enumerate(shapes)]

    return draw


UNIFIED = "musubi_tuner.modules.attention"


@pytest.mark.parametrize("split", [False, True])
def test_all_tokens(imported, inputs, split):
    from comparison import compare

    import sagebwd

    module = imported(UNIFIED)
    params = module.AttentionParams.create_attention_params("torch", split)
    compare(lambda q, k, v: module.attention([q, k, v], attn_params=params), inputs(),
            sagebwd.sdpa(), passes=(2, 2) if split else (1, 1))  # fmt: skip


def test_padded_text(imported, inputs, device, tokens):
    """Behind the image's tokens lie those of texts, which differ in length."""
    import torch
    from comparison import compare

    import sagebwd

    module = imported(UNIFIED)
    image, text = tokens(2048, 40), tokens(256, 30)
    seen = torch.arange(text, device=device) < torch.tensor([[text // 3], [text]], device=device)
    params = module.AttentionParams.create_attention_params_from_mask("torch", False, image, seen)
    assert params.attention_mask is not None
    used = torch.cat([torch.ones_like(seen[:, :1]).expand(-1, image), seen], 1)[..., None]

    def attend(q, k, v):
        return module.attention([q, k, v], attn_params=params) * used  # no loss is of padding

    compare(attend, inputs(queries=image + text), mode := sagebwd.sdpa())
    assert mode.calls == 1 and not mode.fallbacks


def test_fewer_key_heads(imported, inputs):
    """Krea 2 has 48 heads of queries and 12 of keys, which the function repeats."""
    from comparison import compare

    import sagebwd

    module = imported(UNIFIED)
    compare(lambda q, k, v: module.attention(q, k, v), inputs(4, 1, batch=1), sagebwd.sdpa())


@pytest.mark.parametrize("keys", [None, 512])
def test_wan(imported, inputs, tokens, keys):
    """Wan's self-attention, and cross-attention to the 512 tokens of its text encoder."""
    from comparison import compare

    import sagebwd

    module = imported("musubi_tuner.wan.modules.attention", bare={"musubi_tuner.wan.modules"})
    keys = keys and tokens(512, 48)
    compare(lambda q, k, v: module.flash_attention([q, k, v], attn_mode="torch"),
            inputs(batch=1, keys=keys), sagebwd.sdpa())  # fmt: skip


@pytest.mark.parametrize("split", [False, True])
def test_hunyuan_video(imported, inputs, device, tokens, split):
    """With --split_attn each sequence is a call without its padding."""
    import torch
    from comparison import compare

    import sagebwd

    module = imported("musubi_tuner.hunyuan_model.attention", {"musubi_tuner.hunyuan_model"})
    n = tokens(2304, 70)
    lengths = torch.tensor([n - 20, n], device=device)
    used = (torch.arange(n, device=device) < lengths[:, None])[..., None]
    mask = None if split else used[..., 0][:, None, None]
    total = lengths if split else None

    def attend(q, k, v):
        found = module.attention([q, k, v], mode="torch", attn_mask=mask, total_len=total)
        return found * used

    compare(attend, inputs(), sagebwd.sdpa(), passes=(2, 2) if split else (1, 1))


def test_a_checkpoint(imported, inputs):
    """--gradient_checkpointing takes PyTorch's own, not reentrant, which computes again within
    sagebwd.sdpa()."""
    from comparison import compare
    from torch.utils.checkpoint import checkpoint

    import sagebwd

    module = imported(UNIFIED)

    def attend(q, k, v):
        return checkpoint(lambda *x: module.attention(*x), q, k, v, use_reentrant=False)

    compare(attend, inputs(batch=1), sagebwd.sdpa(), passes=(2, 1))
