"""A rank of bench/context_parallel.py, which starts it through torchrun."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as _of_pytorch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import sagebwd
from sagebwd import distributed
from sagebwd.distributed import heads, sharding

KERNELS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}
OURS = ("ring", "ulysses")
ONE = "one GPU"


# ---- the attentions ------------------------------------------------------------------------------


def one_step(call, leaves, dout) -> Callable[[], None]:
    def step():
        torch.autograd.grad(call(*leaves), leaves, dout)

    return step


class _Swap(torch.autograd.Function):
    """Tokens for heads, or back, for the peers' Ulysses."""

    @staticmethod
    def forward(ctx, x, lengths, place, back):
        ctx.given = lengths, place, not back
        there = heads.to_tokens if back else heads.to_heads
        return there(x, lengths, place, "bhsd").wait().contiguous()

    @staticmethod
    def backward(ctx, grad):
        return _Swap.apply(grad.contiguous(), *ctx.given), None, None, None


def ulysses_of_sdpa(mesh, causal, tokens):
    place = sharding.place_of(mesh, "ulysses")
    lengths = sharding.lengths_of(tokens, place)[0]

    def call(q, k, v):
        q, k, v = (_Swap.apply(t, lengths, place, False) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return _Swap.apply(out, lengths, place, True)

    return call


def ring_of_pytorch(mesh, causal, tokens, share):
    """A step of PyTorch's context_parallel, which balances causal masks alone."""
    step = one_step(lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=causal), *share)  # fmt: skip

    def call():
        usual = _of_pytorch._cp_options.enable_load_balance
        _of_pytorch._cp_options.enable_load_balance = causal
        try:  # it asks for a tensor of all tokens, for the length alone
            positions = torch.empty(tokens, device="cuda")
            with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0],
                                  no_restore_buffers={positions}):  # fmt: skip
                step()
        finally:
            _of_pytorch._cp_options.enable_load_balance = usual

    return call


def with_kernel(kernel, step):
    def call():
        with sdpa_kernel(kernel):
            step()

    return call


def candidates(mesh, tokens, causal, given) -> dict[str, Callable[[], None]]:
    """Steps by name; each rank has its share of the tokens, and rank 0 all for one GPU."""
    ranks = mesh.size()

    def drawn(n, heads_kv=given.heads_kv):
        sizes = given.heads, heads_kv, heads_kv, given.heads
        tensors = [torch.randn(1, h, n, given.head_dim, device="cuda", dtype=torch.bfloat16)
                   for h in sizes]  # fmt: skip
        return [t.requires_grad_() for t in tensors[:3]], tensors[3]

    share, steps = drawn(tokens // ranks), {}
    for method in OURS:
        steps[method] = one_step(lambda q, k, v, m=method: distributed.attention(
            q, k, v, mesh=mesh, method=m, causal=causal), *share)  # fmt: skip
    peers = drawn(tokens // ranks, given.heads)  # PyTorch's ring has no groups of query heads
    for name, kernel in KERNELS.items():
        steps[f"Ulysses, {name}"] = with_kernel(
            kernel, one_step(ulysses_of_sdpa(mesh, causal, tokens), *share))  # fmt: skip
        steps[f"context_parallel, {name}"] = with_kernel(
            kernel, ring_of_pytorch(mesh, causal, tokens, peers))  # fmt: skip
    whole = drawn(tokens) if dist.get_rank() == 0 else None
    alone = whole and one_step(lambda q, k, v: sagebwd.attention(q, k, v, causal=causal), *whole)
    steps[ONE] = alone or (lambda: None)
    return steps


# ---- what is measured ----------------------------------------------------------------------------


def seconds_of(step) -> float:
    """Times a step on the slowest rank."""
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    mine = torch.tensor(time.perf_counter() - begin, device="cuda")
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item()


def joined(spans) -> list[tuple[float, float]]:
    """The union of spans, in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def only_first(first, second) -> float:
    """How long `first` lasts while `second` does not."""
    def length(spans) -> float:
        return sum(end - begin for begin, end in joined(spans))

    return length([*first, *second]) - length(second)


def exposed_ms(step) -> float:
    """From a trace: how long this GPU communicates and computes nothing."""
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    messages, kernels = [], []
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = event.time_range.start, event.time_range.end
            (messages if "nccl" in event.name.lower() else kernels).append(span)
    return only_first(messages, kernels) / 1e3


def that_fails(steps) -> dict[str, str]:
    """Runs each step once, and removes those that fail on any rank. Their errors by name."""
    failed = {}
    for name in list(steps):
        error = ""
        try:
            steps[name]()
            torch.cuda.synchronize()
        except Exception as wrong:
            error = f"{type(wrong).__name__}: {wrong}".splitlines()[0]
        said: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(said, error)
        if any(said):
            steps.pop(name)
            failed[name] = next(filter(None, said))
    return failed


def measure(mesh, tokens, causal, given) -> list[dict]:
    """A row for each attention."""
    steps, peaks = candidates(mesh, tokens, causal, given), {}
    failed = that_fails(steps)
    for name, step in steps.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds_of(step)
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(given.rounds):
        for name, step in steps.items():
            samples[name].append(seconds_of(step))
    exposed = {name: exposed_ms(step) for name, step in steps.items() if name != ONE}
    flops = 3.5 * 4 * tokens**2 * given.head_dim * given.heads * (0.5 if causal else 1)
    one, common = median(samples[ONE]), {"gpus": mesh.size(), "tokens": tokens, "causal": causal}
    rows = [common | {"attention": name, "error": error} for name, error in failed.items()]
    for name, times in samples.items():
        seconds, gpus = median(times), 1 if name == ONE else mesh.size()
        rows.append(common | {
            "attention": name,
            "median_ms": round(seconds * 1e3, 3), "tokens_per_second": round(tokens / seconds),
            "tflops_per_gpu": round(flops / seconds / gpus / 1e12, 1),
            "peak_mib": round(peaks[name], 1),
            "efficiency": round(one / seconds / gpus, 4),
            "exposed_ms": round(exposed[name], 3) if name in exposed else None,
        })  # fmt: skip
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("heads", "heads-kv", "head-dim", "rounds", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--rows", required=True, help="a file that gets a JSON line for each row")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(given.seed + int(os.environ["RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for tokens in given.tokens:
        for causal in (True, False):
            rows = measure(mesh, tokens, causal, given)
            torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                with open(given.rows, "a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
