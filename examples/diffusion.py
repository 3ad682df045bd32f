"""A small diffusion transformer learns handwritten digits, with PyTorch's attention and with ours.

    python examples/diffusion.py --out digits

The images ship with scikit-learn: 1,797 digits of 8 x 8, made 32 x 32 here, which are 256 tokens of
2 x 2. The model knows nothing of sagebwd: it calls torch.nn.functional, and `with sagebwd.sdpa():`
serves that. Same weights to begin with, same batches, same noise; at the end both draw each digit,
from the same noise again. Needs torch, scikit-learn's files and pillow, and a GPU.

This shows that training works, not that it is fast: on Hopper (H100, H200) a step takes longer with
sagebwd, because sequences of 256 tokens are too short for INT8 to gain anything. A run that is
faster: examples/deterministic_training.py.
"""

import argparse
import contextlib
import gzip
import importlib.util
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import sagebwd
from sagebwd.benchmark.environment import environment

try:
    from PIL import Image
except ModuleNotFoundError:
    raise SystemExit("diffusion.py draws with pillow: pip install pillow") from None

SIZE, PATCH, WIDTH, HEADS, LAYERS, DIGITS = 32, 2, 384, 6, 8, 10
TOKENS = (SIZE // PATCH) ** 2


def digits():
    """(images of -1 to 1, labels) on the GPU."""
    package = importlib.util.find_spec("sklearn")
    if package is None:
        raise SystemExit("the images ship with scikit-learn: pip install scikit-learn")
    path = Path(package.submodule_search_locations[0]) / "datasets/data/digits.csv.gz"
    with gzip.open(path, "rt") as file:
        rows = torch.tensor(np.loadtxt(file, delimiter=","), dtype=torch.float32)
    small = rows[:, :64].view(-1, 1, 8, 8) / 8 - 1
    images = F.interpolate(small, SIZE, mode="bicubic").clamp(-1, 1)
    return images.cuda(), rows[:, 64].long().cuda()


class Block(nn.Module):
    """Attention and an MLP, each scaled and shifted by time and digit (adaLN-Zero)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.condition = nn.Linear(WIDTH, 6 * WIDTH)
        nn.init.zeros_(self.condition.weight)
        nn.init.zeros_(self.condition.bias)

    def forward(self, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            self.condition(F.silu(condition))[:, None].chunk(6, dim=-1)
        )
        qkv = self.qkv(self.norm(x) * (1 + scale1) + shift1)
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        heads = F.scaled_dot_product_attention(q, k, v)
        x = x + gate1 * self.out(heads.transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    """The velocity from an image to noise at a time of 0 to 1 (flow matching)."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.places = nn.Parameter(0.02 * torch.randn(1, TOKENS, WIDTH))
        self.time = nn.Sequential(nn.Linear(64, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.digit = nn.Embedding(DIGITS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PATCH * PATCH)

    def forward(self, image, time, digit):
        waves = time[:, None] * torch.logspace(0, 3, 32, device=time.device)
        condition = self.time(torch.cat([waves.sin(), waves.cos()], dim=1)) + self.digit(digit)
        x = self.patches(image).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x, condition)
        return F.pixel_shuffle(
            self.out(self.norm(x)).transpose(1, 2).unflatten(2, (SIZE // PATCH, -1)), PATCH
        )


def train(images, labels, steps, batch, seed):
    """(model, loss of every step, median ms)."""
    torch.manual_seed(seed)
    model = DiffusionTransformer().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    generator = torch.Generator("cuda").manual_seed(seed)
    losses, seconds = [], []
    for step in range(steps):
        start = time.perf_counter()
        chosen = torch.randint(len(images), (batch,), device="cuda", generator=generator)
        at = torch.rand(batch, device="cuda", generator=generator)
        image = images[chosen]
        noise = torch.randn(image.shape, device="cuda", generator=generator)
        mixed = torch.lerp(image, noise, at.view(-1, 1, 1, 1))
        optimizer.param_groups[0]["lr"] = 3e-4 * min(1, (step + 1) / 100, 4 * (1 - step / steps))
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.mse_loss(model(mixed, at, labels[chosen]).float(), noise - image)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return model, losses, 1e3 * statistics.median(seconds[10:])


@torch.no_grad()
def draw(model, each, seed, steps=50):
    """`each` images of every digit, from noise of that seed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    digit = torch.arange(DIGITS, device="cuda").repeat(each)
    image = torch.randn(len(digit), 1, SIZE, SIZE, device="cuda", generator=generator)
    for i in range(steps, 0, -1):
        at = torch.full((len(digit),), i / steps, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            velocity = model(image, at, digit)
        image = image - velocity.float() / steps
    return image.clamp(-1, 1)


def sheet(images):
    """A row for each of every digit, as one picture."""
    rows = images.view(-1, DIGITS, SIZE, SIZE).transpose(1, 2).flatten(0, 1).flatten(1)
    return ((rows + 1) * 127.5).byte().cpu().numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--each", type=int, default=3, help="drawings of each digit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="digits", help="of files .json and .png")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU: python -m sagebwd.doctor says what is missing")
    images, labels = digits()

    runs, sheets = [], []
    for name, serving in (("sdpa", contextlib.nullcontext), ("sagebwd", sagebwd.sdpa)):
        with serving():
            model, losses, ms = train(images, labels, options.steps, options.batch, options.seed)
            sheets.append(sheet(draw(model, options.each, options.seed)))
        last = statistics.fmean(losses[-200:])
        print(f"{name:8} loss {losses[0]:.4f} to {last:.4f}, {ms:.1f} ms a step", flush=True)
        runs.append({"attention": name, "ms_per_step": ms, "last_200": last,
                     "losses": losses[::10]})  # fmt: skip

    space = np.full((SIZE // 2, sheets[0].shape[1]), 255, np.uint8)
    Image.fromarray(np.concatenate([sheets[0], space, sheets[1]])).save(f"{options.out}.png")
    record = {"environment": environment(), "options": vars(options) | {"out": None}, "runs": runs}
    Path(f"{options.out}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"drawn: {options.out}.png, PyTorch's above, ours below")


if __name__ == "__main__":
    main()
