"""SimpleTuner's choice of attention, and a processor of Flux that calls PyTorch's function."""

import types

import pytest

BARE = ("simpletuner", "simpletuner.helpers", "simpletuner.helpers.training",
        "simpletuner.helpers.models", "simpletuner.helpers.models.flux")  # fmt: skip


@pytest.fixture
def backends(imported):
    pytest.importorskip("diffusers", reason="needs a trainer's code: it needs diffusers")
    return imported("simpletuner.helpers.training.attention_backend", BARE)


def flux(imported, device):
    import torch

    pytest.importorskip("einops", reason="needs a trainer's code: its attention calls einops")
    module = imported("simpletuner.helpers.models.flux.attention", BARE)
    torch.manual_seed(0)
    attention = torch.nn.Module()
    attention.to_qkv, attention.to_added_qkv = (torch.nn.Linear(256, 768) for _ in range(2))
    attention.heads, attention.to_add_out = 2, torch.nn.Linear(256, 256)
    attention.to_out = torch.nn.ModuleList([torch.nn.Linear(256, 256), torch.nn.Identity()])
    for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        setattr(attention, name, torch.nn.RMSNorm(128, eps=1e-6))
    attention.to(device, torch.bfloat16)
    processor = module.FluxFusedSDPAProcessor()
    return lambda x, text: torch.cat(processor(attention, x, text), 1)


def test_fused_attention_of_flux(backends, imported, device, tokens):
    """With --attention_mechanism=diffusers, the default."""
    from comparison import compare, drawn

    import sagebwd

    attend = flux(imported, device)
    phase = backends.AttentionPhase.TRAIN
    mechanism = types.SimpleNamespace(attention_mechanism="diffusers")
    backends.AttentionBackendController.apply(mechanism, phase)
    x = drawn(1, tokens(2304, 70), 256, seed=0, device=device)
    text = drawn(1, tokens(512, 30), 256, seed=1, device=device)
    compare(attend, [x, text], sagebwd.sdpa())


def test_a_backend_of_diffusers(backends, device, tokens, page):
    """After the patch of the page the trainer puts it in the place of diffusers' own."""
    from comparison import compare, drawn
    from diffusers.models import attention_dispatch

    exec(page("simpletuner")[0], {})
    controller, phase = backends.AttentionBackendController, backends.AttentionPhase.TRAIN
    inputs = [drawn(1, tokens(2304, 70), 2, 128, seed=i, device=device) for i in range(3)]
    exact = attention_dispatch.dispatch_attention_fn

    def attend(q, k, v):
        if q.dtype.itemsize == 8:  # PyTorch's, in FP64
            return exact(q, k, v, backend="native")
        return exact(q, k, v)

    controller.apply(types.SimpleNamespace(attention_mechanism="sagebwd"), phase)
    try:
        compare(attend, inputs, None, reference=attend)
    finally:
        controller.restore_default()
