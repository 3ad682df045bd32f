"""Training on sequences that several GPUs share: context parallel attention and FSDP2.

    torchrun --nproc-per-node 2 examples/long_context.py
    torchrun --nproc-per-node 8 examples/long_context.py --tokens 1048576 --method ulysses

A small language model learns to predict bytes of Python's own source code, in sequences of 131072
bytes. Each rank has its share of the tokens of every sequence (sagebwd.distributed.shard) and, by
FSDP2, its share of the parameters; only attention needs the others' tokens. Blocks are computed
again in the backward (activation checkpointing). The first rank prints the loss, tokens per second
and its peak memory. --attention pytorch trains with PyTorch's context_parallel and its own kernels
instead. Needs PyTorch and GPUs; --device cpu with few --tokens tries the program itself.
"""

import argparse
import contextlib
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from sagebwd import distributed


class Block(nn.Module):
    """Causal attention with rotary positions, and an MLP."""

    def __init__(self, width, head_dim, attend):
        super().__init__()
        self.head_dim, self.attend = head_dim, attend
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, angles):  # what FSDP has gathered is there when it computes again
        return checkpoint(self.compute, x, angles, use_reentrant=False)

    def compute(self, x, angles):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, tokens, head_dim) each
        attended = self.attend(rotated(q, angles), rotated(k, angles), v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def rotated(x, angles):
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class LanguageModel(nn.Module):
    """Logits of the next byte, for bytes at these positions of the whole sequence."""

    def __init__(self, width, head_dim, layers, attend):
        super().__init__()
        self.head_dim = head_dim
        self.bytes = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, head_dim, attend) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, ids, positions):
        frequency = 1e6 ** (-torch.arange(0, self.head_dim, 2, device=ids.device) / self.head_dim)
        angles = positions[:, None].float() * frequency
        x = self.bytes(ids)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(x)


def source_code(length):
    """Bytes of the standard library, over and over if need be."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray((text * (length // len(text) + 1))[:length]),
                            dtype=torch.uint8)  # fmt: skip


def attention_of(given, mesh):
    """Returns what computes attention, and a context that cuts up the tensors of a step."""
    if given.attention == "pytorch":
        from torch.distributed.tensor.experimental import context_parallel

        def own(*tensors):
            return context_parallel(mesh, buffers=list(tensors), buffer_seq_dims=[1, 1, 0])

        def attend(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return attend, own

    def attend(q, k, v):
        return distributed.attention(q, k, v, mesh=mesh, method=given.method, causal=True)

    @contextlib.contextmanager
    def own(*tensors):
        for x, dim in zip(tensors, (1, 1, 0)):
            part = distributed.shard(x, mesh, dim=dim, method=given.method)
            x.set_(part.contiguous())
        yield

    return attend, own


def train(given, mesh):
    """The losses of the steps, as the first rank prints them."""
    rank, device = mesh.get_local_rank(), given.device
    torch.manual_seed(given.seed)
    attend, own = attention_of(given, mesh)
    model = LanguageModel(given.width, given.head_dim, given.layers, attend).to(device)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32,
                               cast_forward_inputs=False)  # angles stay FP32
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=low)
    fully_shard(model, mesh=mesh, mp_policy=low)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text = source_code(given.tokens * 8 + 1)
    losses, begin = [], time.perf_counter()
    for step in range(given.steps):
        first = step % 8 * given.tokens
        ids = text[first : first + given.tokens + 1].to(device).long()
        inputs, targets = ids[None, :-1].clone(), ids[None, 1:].clone()
        with own(inputs, targets, positions := torch.arange(given.tokens, device=device)):
            logits = model(inputs, positions)
            # FSDP takes the mean of the ranks' gradients, and ranks differ in their tokens.
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(),
                                   reduction="sum") * mesh.size() / given.tokens  # fmt: skip
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / mesh.size()
        dist.all_reduce(loss, group=mesh.get_group())
        losses.append(loss.item())
        if rank == 0:
            seconds = time.perf_counter() - begin
            print(f"step {step}: loss {losses[-1]:.4f}, {given.tokens / seconds:,.0f} tokens/s",
                  flush=True)  # fmt: skip
        begin = time.perf_counter()
    if rank == 0 and device == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at the peak")
    return losses


def options(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tokens", type=int, default=131072, help="of a sequence (default 131072)")
    add("--steps", type=int, default=20)
    add("--method", choices=["ring", "ulysses"], default="ring")
    add("--attention", choices=["sagebwd", "pytorch"], default="sagebwd")
    add("--width", type=int, default=1024)
    add("--head-dim", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--seed", type=int, default=0)
    add("--device", choices=["cuda", "cpu"], default="cuda")
    given = parser.parse_args(arguments)
    if wrong := why_not(given, int(os.environ.get("WORLD_SIZE", 1))):
        parser.error(wrong)
    return given


def why_not(given, ranks):
    """Says what is wrong with the options for so many ranks, and what to pass; else None."""
    for name in ("tokens", "steps", "width", "head_dim", "layers"):
        if getattr(given, name) < 1:
            return f"--{name.replace('_', '-')} {getattr(given, name)}: pass at least 1"
    if given.head_dim % 8 or not 32 <= given.head_dim <= 256:
        return f"--head-dim {given.head_dim}: pass a multiple of 8 from 32 to 512"
    heads = given.width / given.head_dim
    if heads % 1:
        return (f"--width {given.width} is no multiple of --head-dim {given.head_dim}: pass one "
                "that whole heads make up")  # fmt: skip
    if given.attention == "pytorch" and given.device == "cpu":
        return ("--attention pytorch --device cpu: PyTorch's context_parallel has no kernels for a "
                "CPU; pass --attention sagebwd, or --device cuda")  # fmt: skip
    if given.attention == "sagebwd" and given.method == "ulysses" and heads % ranks:
        return (f"--method ulysses: {ranks} ranks cannot share {heads:.0f} heads (--width / "
                "--head-dim); pass a multiple, or --method ring")  # fmt: skip
    chunks = 2 * ranks
    if given.attention == "pytorch" and given.tokens % chunks:
        return f"--tokens {given.tokens}: context_parallel needs a multiple of {chunks} here"
    if given.tokens < chunks:
        return f"--tokens {given.tokens}: {ranks} ranks need at least {chunks}"
    if given.device == "cuda" and torch.cuda.device_count() <= int(os.environ.get("LOCAL_RANK", 0)):
        return (f"{torch.cuda.device_count()} GPUs are here, and each rank needs one: python -m "
                "sagebwd.doctor says what is missing; --device cpu tries the program")  # fmt: skip
    return None


def main():
    given = options()
    if "RANK" not in os.environ:
        raise SystemExit("start it by torchrun --nproc-per-node GPUS examples/long_context.py")
    if given.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    train(given, init_device_mesh(given.device, (dist.get_world_size(),)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
