"""ai-toolkit's own attention of FLUX.2 and Chroma, and its processor of Wan 2.1, which call
PyTorch's function."""

import pytest

MODELS = "extensions_built_in.diffusion_models"
BARE = ("extensions_built_in", MODELS, *(f"{MODELS}.{name}" for name in (
    "chroma", "chroma.src", "flux2", "flux2.src")), "toolkit", "toolkit.models",
    "toolkit.models.wan21")  # fmt: skip


@pytest.fixture
def rotated(device, tokens):
    """Queries, keys, values and the rotations of their positions, of one image."""
    import torch
    from comparison import drawn

    n = tokens(2304, 70)
    angles = torch.arange(n, device=device)[:, None] / 10 ** torch.linspace(0, 3, 64, device=device)
    turns = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1)
    inputs = [drawn(1, 2, n, 128, seed=i, device=device) for i in range(3)]
    return inputs, turns.unflatten(-1, (2, 2))[None, None].float()


def test_flux2(imported, rotated):
    from comparison import compare

    import sagebwd

    pytest.importorskip("einops", reason="needs a trainer's code: its attention calls einops")
    module = imported(f"{MODELS}.flux2.src.model", BARE)
    inputs, turns = rotated
    compare(lambda q, k, v: module.attention(q, k, v, pe=turns), inputs, sagebwd.sdpa())


@pytest.mark.parametrize("padded", [False, True])
def test_chroma(imported, rotated, padded):
    """The mask of this model hides padded text from all queries."""
    import torch
    from comparison import compare

    import sagebwd

    pytest.importorskip("einops", reason="needs a trainer's code: its attention calls einops")
    module = imported(f"{MODELS}.chroma.src.math", BARE)
    if module._HAS_FLASH:
        pytest.skip("needs a trainer's code without flash-attn, which this function would call")
    (q, k, v), turns = rotated
    seen = torch.arange(q.shape[2], device=q.device) >= 20
    mask = seen.expand(1, 1, len(seen), -1) if padded else None
    compare(lambda *x: module.attention(*x, turns, mask), [q, k, v], mode := sagebwd.sdpa())
    assert not mode.fallbacks


def test_wan21(imported, device, tokens):
    import torch
    from comparison import compare, drawn

    import sagebwd

    diffusers = pytest.importorskip("diffusers", reason="needs a trainer's code: and diffusers")
    module = imported("toolkit.models.wan21.wan_attn", BARE)
    torch.manual_seed(0)
    attention = diffusers.models.attention_processor.Attention(
        256, heads=2, kv_heads=2, dim_head=128, qk_norm="rms_norm_across_heads",
        processor=module.WanAttnProcessor2_0()).to(device, torch.bfloat16)  # fmt: skip
    x = drawn(1, tokens(2304, 70), 256, seed=0, device=device)
    text = drawn(1, tokens(512, 48), 256, seed=1, device=device)
    compare(lambda x, text: attention(x, encoder_hidden_states=text), [x, text], sagebwd.sdpa())
