"""Videos from a seed: textured sprites before a textured background, under a moving camera.

Sprites cover each other and leave the picture and return, so that frames far away say what to draw.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SPRITES = 6


def texture(count: int, size: int, generator: torch.Generator) -> Tensor:
    """(count, 3, size, size) of smooth noise at several scales, mostly from -1 to 1."""
    found, scale = 0.0, 3
    while scale <= size:
        noise = torch.randn(count, 3, scale, scale, generator=generator, device=generator.device)
        found = found + F.interpolate(noise, (size, size), mode="bilinear") * scale**-0.5
        scale *= 2
    return torch.tanh(1.5 * found)


def videos(seed: int, step: int, count: int, frames: int, size: int, device) -> Tensor:
    """(count, frames, 3, size, size), a function of seed and step alone on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + step)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    def path(reach: float, *shape: int) -> Tensor:
        """(*shape, frames, 2): swings that take from one to half a video."""
        time = torch.linspace(0, 1, frames, device=device)[:, None]
        angle = 2 * math.pi * ((0.5 + 1.5 * uniform(*shape, 1, 2)) * time + uniform(*shape, 1, 2))
        return reach * (0.3 + 0.7 * uniform(*shape, 1, 2)) * angle.sin()

    row = torch.linspace(-1, 1, size, device=device)
    pixels = torch.stack(torch.meshgrid(row, row, indexing="xy"), -1)  # (size, size, 2)
    camera = path(0.8, count)  # the picture is half as wide as the world
    places = pixels + camera[:, :, None, None]  # in the world, from -2 to 2
    world = texture(count, 2 * size, generator).repeat_interleave(frames, 0)
    out = F.grid_sample(world, (places / 2).flatten(0, 1), align_corners=False,
                        padding_mode="reflection")  # fmt: skip
    for _ in range(SPRITES):
        centre = 0.8 * (2 * uniform(count, 1, 2) - 1) + path(1.2, count)
        radius = 0.2 + 0.25 * uniform(count, 1, 1, 1, 1)
        rel = (places - centre[:, :, None, None]) / radius
        image = texture(count, 12, generator) + 0.8 * (2 * uniform(count, 3, 1, 1) - 1)
        drawn = F.grid_sample(image.repeat_interleave(frames, 0), rel.flatten(0, 1),
                              align_corners=False, padding_mode="border")  # fmt: skip
        square = uniform(count, 1, 1, 1) < 0.5
        inside = torch.where(square, rel.abs().amax(-1), rel.norm(dim=-1)) < 1
        out = torch.where(inside.flatten(0, 1)[:, None], drawn, out)
    return 1.6 * out.unflatten(0, (count, frames))


def as_tokens(video: Tensor, patch: int) -> Tensor:
    """(count, frames, 3, size, size) as (count, frames rows columns, 3 patch patch)."""
    x = video.unflatten(-1, (-1, patch)).unflatten(-3, (-1, patch))  # b f c rows p columns p
    return x.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(1, 3)
