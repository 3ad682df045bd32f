"""Fused attention of diffusers' models by kernels of norm and RoPE on a simulated GPU."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("diffusers", reason="needs diffusers")

import simulator_needed  # noqa: E402, F401

# It also says where fused_diffusers is.
from test_front_kernels import kernels  # noqa: E402, F401 isort: skip
import fused_diffusers  # noqa: E402

from sagebwd.integrations import _fused_processors as processors  # noqa: E402
from sagebwd.integrations import _processor_check as check  # noqa: E402


@pytest.mark.parametrize("name", ["wan", "flux", "qwen", "hunyuan", "ltx"])
def test_kernels_pass_the_check(kernels, name):  # noqa: F811
    """In bfloat16, which on a CPU nothing else does."""
    model, _ = fused_diffusers.made(fused_diffusers.MODELS[name], torch.bfloat16)
    passes = []
    for place, attn in check._attentions(model.eval()):
        own = type(attn.processor)
        kind = processors.PROCESSORS.get(f"{own.__module__}.{own.__qualname__}")
        if kind is None or kind.left_because(attn, place):
            continue
        reason = check._compared(attn, kind(attn.processor), torch.bfloat16, torch.device("cpu"))
        assert reason is None
        parts = 1 if getattr(attn, "add_q_proj", None) is None else 2  # text and picture
        passes += parts * ["_forward"] + parts * ["_backward"]
    assert kernels == passes and passes
