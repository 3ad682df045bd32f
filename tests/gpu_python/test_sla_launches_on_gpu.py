"""How many kernels SLA2's attention launches."""

import pytest
from inputs import torch

import sagebwd
from sagebwd.nn import SparseLinearAttention


def kernels_of(run):
    """The names of the kernels that the call launches."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
        run()
        torch.cuda.synchronize()
    names = [e.name for e in traced.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in names if not name.startswith(("Memcpy", "Memset"))]


@pytest.mark.parametrize("linear", ["complement", "all"])
def test_a_call_launches_few_kernels(linear):
    """Six of a forward and ten of a backward, and a sum of alpha's gradient."""
    q, k, v, dout = (torch.randn(1, 4, 1024, 128, dtype=torch.bfloat16, device="cuda")
                     for _ in range(4))  # fmt: skip
    bits = sagebwd.pack_blocks(torch.rand(1, 4, 8, 16, device="cuda") < 0.3)
    leaves = [t.requires_grad_() for t in (q, k, v, torch.full((4,), 0.4, device="cuda"))]

    def both_passes():
        out = sagebwd.sparse_linear_attention(*leaves[:3], alpha=leaves[3], block_bits=bits,
                                              linear=linear)  # fmt: skip
        torch.autograd.grad(out, leaves, dout)

    names = kernels_of(both_passes)
    ours = [name for name in names if name.startswith("sagebwd_")]
    assert len(ours) == 16 and len(names) <= 17, names


def test_a_module_launches_few_kernels():
    """Those, two that pool blocks and list the best, and PyTorch's for alpha."""
    module = SparseLinearAttention(128, 4, density=0.3, seq_len=1024).cuda().freeze_router()
    q, k, v, dout = (torch.randn(1, 4, 1024, 128, dtype=torch.bfloat16, device="cuda")
                     for _ in range(4))  # fmt: skip
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def both_passes():
        torch.autograd.grad(module(*leaves), [*leaves, module.alpha_logit], dout)

    names = kernels_of(both_passes)
    ours = [name for name in names if name.startswith("sagebwd_")]
    assert len(ours) == 18 and len(names) <= 23, names
