"""DiffSynth-Studio's attention_forward, which most of its models call, and that of Qwen-Image,
with DIFFSYNTH_ATTENTION_IMPLEMENTATION=torch."""

import pytest

BARE = ("diffsynth", "diffsynth.core", "diffsynth.core.attention", "diffsynth.models")


@pytest.fixture
def forward(imported, monkeypatch):
    pytest.importorskip("einops", reason="needs a trainer's code: its attention calls einops")
    monkeypatch.setenv("DIFFSYNTH_ATTENTION_IMPLEMENTATION", "torch")
    return imported("diffsynth.core.attention.attention", BARE).attention_forward


@pytest.fixture
def inputs(device, tokens):
    from comparison import drawn

    def draw(heads_kv=4):
        return [drawn(1, heads, tokens(2304, 70), 128, seed=i, device=device)
                for i, heads in enumerate((4, heads_kv, heads_kv))]  # fmt: skip

    return draw


@pytest.mark.parametrize("given", [{}, {"is_causal": True}, {"scale": 0.05}])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_attention(forward, inputs, heads_kv, given):
    from comparison import compare

    import sagebwd

    compare(lambda q, k, v: forward(q, k, v, **given), inputs(heads_kv), sagebwd.sdpa())


def test_heads_beside_each_other(forward, inputs):
    from comparison import compare

    import sagebwd

    rows = [t.detach().transpose(1, 2).flatten(2).requires_grad_() for t in inputs()]
    pattern = dict.fromkeys(("q_pattern", "k_pattern", "v_pattern", "out_pattern"), "b s (n d)")
    compare(lambda q, k, v: forward(q, k, v, **pattern, dims={"n": 4}), rows, sagebwd.sdpa())


def test_a_mask(forward, inputs):
    import torch
    from comparison import compare

    import sagebwd

    given = inputs()
    seen = (torch.arange(given[0].shape[2], device=given[0].device) >= 20)[None, None, None]
    compare(lambda q, k, v: forward(q, k, v, attn_mask=seen), given, mode := sagebwd.sdpa())
    assert not mode.fallbacks


def test_windows_are_left_to_pytorch(forward, inputs):
    """They come as masks of several parts, in which queries of a part see other keys each."""
    from comparison import Kernels

    import sagebwd

    mode = sagebwd.sdpa(fallback="torch")
    with Kernels() as kernels, pytest.warns(UserWarning, match="PyTorch computed"), mode:
        forward(*inputs(), window_size=30)
    assert kernels.forwards == mode.calls - mode.fallbacks.total()


def test_wan(forward, imported, inputs):
    from comparison import compare

    import sagebwd

    missing = {f"diffsynth.models.{name}" for name in ("wan_video_camera_controller", "wantodance")}
    module = imported("diffsynth.models.wan_video_dit", BARE, missing)
    rows = [t.detach().transpose(1, 2).flatten(2).requires_grad_() for t in inputs()]
    compare(lambda q, k, v: module.flash_attention(q, k, v, num_heads=4), rows, sagebwd.sdpa())


@pytest.mark.parametrize("offload", [False, True])
def test_its_checkpoints(forward, imported, inputs, offload):
    from comparison import compare

    import sagebwd

    checkpoint = imported("diffsynth.core.gradient", BARE).gradient_checkpoint_forward
    compare(lambda *x: checkpoint(forward, True, offload, *x), inputs(), sagebwd.sdpa(),
            passes=(2, 1))  # fmt: skip


def test_qwen_image(forward, imported, inputs):
    from comparison import compare

    import sagebwd

    module = imported("diffsynth.models.qwen_image_dit", BARE)
    compare(lambda q, k, v: module.qwen_image_flash_attention(q, k, v, num_heads=4), inputs(),
            sagebwd.sdpa())  # fmt: skip
