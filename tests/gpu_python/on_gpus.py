"""Ranks that have a GPU each, over NCCL."""

import pytest
from inputs import torch

ranks_of = pytest.importorskip("distributed_ranks", reason="needs torch.distributed")

GPUS = torch.cuda.device_count()
needs_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and there are {GPUS}")
MORE = 1e-3  #: beyond the error of one GPU


def run(folder, ranks, function, *given):
    results = ranks_of.run(folder, ranks, function, *given, timeout=300, backend="nccl", hangs=550)
    for rank, result in enumerate(results):
        assert not isinstance(result, str), f"rank {rank}: {result}"
    return results


def drawn_here(tokens, heads=8, heads_kv=2, d=128):
    """This rank's share of a sequence of so many tokens, and dout, drawn on its GPU."""

    def randn(heads):
        return torch.randn(1, heads, tokens, d, device="cuda", dtype=torch.bfloat16)

    return [randn(heads).requires_grad_(), randn(heads_kv).requires_grad_(),
            randn(heads_kv).requires_grad_()], randn(heads)  # fmt: skip
