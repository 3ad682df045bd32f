"""Deterministic training on long sequences, which is faster with sagebwd than with PyTorch.

    python examples/deterministic_training.py

A small language model with the attention of Gemma (head dimension 256, two query heads for each
key/value head) learns to predict bytes of Python's own source code, in sequences of 16384 bytes. It
is trained three times from the same weights: with PyTorch's attention, with PyTorch's attention
under torch.use_deterministic_algorithms, and with sagebwd under it. The program prints the time of
a step in each, and whether a second run with sagebwd repeats the losses bit for bit. PyTorch's
fastest attention (cuDNN) is not available in deterministic training. Needs PyTorch and a GPU.
"""

import argparse
import contextlib
import os
import statistics
import sysconfig
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matmuls need

import torch
import torch.nn.functional as F
from torch import nn

import sagebwd


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, width, heads, head_dim):
        super().__init__()
        self.heads, self.heads_kv, self.head_dim = heads, heads // 2, head_dim
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, (heads + 2 * self.heads_kv) * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.heads_kv, self.heads_kv], dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    """Logits of the next byte."""

    def __init__(self, width, heads, head_dim, layers, tokens):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads, head_dim) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids):
        x = self.bytes(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def source_code(least):
    """Bytes of Python's standard library, at least so many."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) > least:
            return torch.tensor(list(text))
    raise SystemExit(f"Python's library has only {len(text)} bytes of source here: pass --tokens "
                     f"below {len(text) // 8}")  # fmt: skip


def train(options, text, device):
    """(losses, median ms) of the steps; the same for the same seed where all is deterministic."""
    torch.manual_seed(options.seed)
    width = options.heads * options.head_dim
    model = LanguageModel(width, options.heads, options.head_dim, options.layers, options.tokens)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    chooser = torch.Generator().manual_seed(options.seed)
    losses, seconds = [], []
    for _ in range(options.steps):
        first = int(torch.randint(len(text) - options.tokens - 1, (), generator=chooser))
        ids = text[first : first + options.tokens + 1].to(device)[None]
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    return losses, 1e3 * statistics.median(seconds[len(seconds) // 3 :])


def runs_of(options, text, device):
    """Prints the time of a step of each run; whether sagebwd's losses are repeated."""
    ours = {"precision": options.precision}
    runs = [("PyTorch, not deterministic", False, contextlib.nullcontext),
            ("PyTorch, deterministic", True, contextlib.nullcontext),
            ("sagebwd, deterministic", True, lambda: sagebwd.sdpa(**ours)),
            ("sagebwd again", True, lambda: sagebwd.sdpa(**ours))]  # fmt: skip
    found = {}
    for name, deterministic, serving in runs:
        torch.use_deterministic_algorithms(deterministic)
        try:
            with serving():
                losses, ms = found[name] = train(options, text, device)
        finally:
            torch.use_deterministic_algorithms(False)
        print(f"{name:28} {ms:8.1f} ms a step, loss {losses[0]:.4f} to {losses[-1]:.4f}",
              flush=True)  # fmt: skip
    theirs, mine = found["PyTorch, deterministic"][1], found["sagebwd, deterministic"][1]
    same = found["sagebwd, deterministic"][0] == found["sagebwd again"][0]
    print(f"deterministic steps are {theirs / mine:.2f} times as fast with sagebwd; its losses are "
          f"{'repeated bit for bit' if same else 'NOT repeated'}")  # fmt: skip
    return same


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384, help="of a sequence")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, help="default: 256, or 128 on GPUs whose kernels "
                        "train no more")  # fmt: skip
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", default="gradients16", help="of sagebwd")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU: python -m sagebwd.doctor says what is missing")
    gpu = torch.cuda.get_device_properties(0)
    if options.head_dim is None:  # kernels of 256 channels need more shared memory than 128 KiB
        shared = getattr(gpu, "shared_memory_per_block_optin", 0)
        options.head_dim = 256 if shared > 128 << 10 else 128
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, finds errors only
    print(f"{gpu.name}, PyTorch {torch.__version__}: {options.layers} layers, {options.heads} "
          f"heads of {options.head_dim} channels, {options.tokens} tokens")  # fmt: skip
    raise SystemExit(0 if runs_of(options, source_code(8 * options.tokens), "cuda") else 1)


if __name__ == "__main__":
    main()
