"""Attention over GPUs that share a sequence: ours and PyTorch's, forward and backward.

    torchrun --nproc-per-node 2 bench/context_parallel.py --tokens 32768 131072 [--out FILE]

Per length, with and without a causal mask: `ring` and `ulysses` of sagebwd.distributed, PyTorch's
context_parallel (a ring of SDPA), Ulysses with SDPA, and on one GPU of the same run
sagebwd.attention with all tokens. All take turns. tokens/s are of all GPUs together; efficiency is
one GPU's time by the number of GPUs and their time. `exposed` is the time of a ring that goes when
no message is sent. The highest memory of a rank includes its inputs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import sagebwd
from sagebwd import distributed
from sagebwd.distributed import heads, ring, sharding


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--heads-kv", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="a JSON file to write")
    return parser.parse_args()


def one_step(call, leaves, dout):
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


def seconds_of(step):
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    mine = torch.tensor(time.perf_counter() - begin, device="cuda")
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item()


def without_messages(step):
    def silent():
        messages, ring.dist.batch_isend_irecv = ring.dist.batch_isend_irecv, lambda ops: []
        try:
            step()
        finally:
            ring.dist.batch_isend_irecv = messages

    return silent


def candidates(mesh, tokens, causal, given):
    """Steps by name; each rank has its share of the tokens, and rank 0 all for one GPU."""
    ranks = mesh.size()

    def drawn(n, heads_kv=given.heads_kv):
        sizes = given.heads, heads_kv, heads_kv, given.heads
        tensors = [torch.randn(1, h, n, given.head_dim, device="cuda", dtype=torch.bfloat16)
                   for h in sizes]  # fmt: skip
        return [t.requires_grad_() for t in tensors[:3]], tensors[3]

    share = drawn(tokens // ranks)
    steps = {}
    for method in ("ring", "ulysses"):
        if method == "ulysses" and given.heads % ranks:
            continue
        steps[method] = one_step(lambda q, k, v, m=method: distributed.attention(
            q, k, v, mesh=mesh, method=m, causal=causal), *share)  # fmt: skip
    steps["ring without messages"] = without_messages(steps["ring"])
    if given.heads % ranks == given.heads_kv % ranks == 0:
        steps["Ulysses, SDPA"] = one_step(ulysses_of_sdpa(mesh, causal, tokens), *share)
    peers = drawn(tokens // ranks, given.heads)  # its ring has no groups of query heads

    def pytorchs():
        with context_parallel(mesh):
            one_step(lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, is_causal=causal), *peers)()  # fmt: skip

    steps["context_parallel, SDPA"] = pytorchs
    whole = drawn(tokens) if dist.get_rank() == 0 else None
    alone = whole and one_step(lambda q, k, v: sagebwd.attention(q, k, v, causal=causal), *whole)
    steps["one GPU"] = alone or (lambda: None)
    return steps


def measure(mesh, tokens, causal, given):
    steps, times, peaks = candidates(mesh, tokens, causal, given), {}, {}
    for name in list(steps):
        error = ""
        try:
            steps[name]()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as wrong:
            error = str(wrong).splitlines()[0]
        said = [None] * mesh.size()
        dist.all_gather_object(said, error)
        if any(said):
            steps.pop(name)
            times[name] = {"error": next(filter(None, said))}
    for name, step in steps.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds_of(step)
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    samples = {name: [] for name in steps}
    for _ in range(given.rounds):
        for name, step in steps.items():
            samples[name].append(seconds_of(step))
    flops = 3.5 * 4 * tokens**2 * given.head_dim * given.heads * (0.5 if causal else 1)
    one = median(samples["one GPU"]) if "one GPU" in samples else None
    for name, of_name in samples.items():
        seconds, gpus = median(of_name), 1 if name == "one GPU" else mesh.size()
        times[name] = {
            "ms": round(seconds * 1e3, 3), "tokens_per_second": round(tokens / seconds),
            "tflops_per_gpu": round(flops / seconds / gpus / 1e12, 1),
            "extra_mib": round(peaks[name], 1),
            "efficiency": round(one / seconds / gpus, 4) if one else None,
        }  # fmt: skip
    if "ring" in samples and "ring without messages" in samples:
        quiet = median(samples["ring without messages"])
        times["ring"]["exposed_ms"] = round((median(samples["ring"]) - quiet) * 1e3, 3)
    return {"tokens": tokens, "causal": causal, "gpus": mesh.size(), "times": times}


def main():
    given = arguments()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    records = []
    for tokens in given.tokens:
        for causal in (True, False):
            records.append(measure(mesh, tokens, causal, given))
            torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                print(json.dumps(records[-1]), flush=True)
    if given.out and dist.get_rank() == 0:
        record = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                  "shape": {name: getattr(given, name) for name in ("heads", "heads_kv",
                                                                    "head_dim")},
                  "results": records}  # fmt: skip
        with open(given.out, "w") as file:
            json.dump(record, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
