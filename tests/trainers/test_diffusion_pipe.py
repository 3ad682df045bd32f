"""diffusion-pipe's attention of Wan, which calls flash-attn, and of Cosmos-Predict2, which calls
PyTorch's function."""

import checkouts
import pytest


@pytest.fixture
def wan(imported, device, page):
    """This is its module after the patch of the page. On the simulator tensors are on no GPU, for
    which the module asks."""
    module = imported("models.wan.attention", bare={"models", "models.wan"})
    exec(page("diffusion-pipe")[0], {})
    assert module.FLASH_ATTN_2_AVAILABLE
    if device == "cuda":
        return module
    copy = checkouts.without_asserts(module)
    copy.flash_attn, copy.FLASH_ATTN_2_AVAILABLE = module.flash_attn, True
    copy.FLASH_ATTN_3_AVAILABLE = False
    return copy


@pytest.mark.parametrize("padded", [False, True])
def test_wan(wan, device, tokens, padded):
    import torch
    from comparison import compare, drawn

    keys = tokens(512, 48)
    used = torch.tensor([keys // 3, keys], device=device) if padded else None
    inputs = [drawn(2, n, 2, 128, seed=i, device=device)
              for i, n in enumerate((tokens(2304, 70), keys, keys))]  # fmt: skip

    def exact(q, k, v):
        seen = torch.arange(keys, device=device) < (used[:, None] if padded else keys)
        out = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)),
            attn_mask=seen.view(-1, 1, 1, keys).expand(2, 1, 1, keys))  # fmt: skip
        return out.transpose(1, 2)

    compare(lambda q, k, v: wan.flash_attention(q, k, v, k_lens=used), inputs, None,
            reference=exact)  # fmt: skip


def test_cosmos_predict2(imported, device, tokens):
    from comparison import compare, drawn

    import sagebwd

    pytest.importorskip("einops", reason="needs a trainer's code: its attention calls einops")
    module = imported("models.cosmos_predict2_modeling", {"models"}, {"torchvision"})
    inputs = [drawn(1, tokens(2304, 70), 2, 128, seed=i, device=device) for i in range(3)]
    compare(module.torch_attention_op, inputs, sagebwd.sdpa())
