"""Byte-level text: training batches drawn from (seed, step) alone, and held-out sequences."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from .command import torch


@dataclass(frozen=True)
class Text:
    """The bytes of some files, split into a part to train on and a held-out end."""

    train: torch.Tensor
    held_out: torch.Tensor
    files: tuple[dict, ...]  #: name, bytes and SHA-256 of each

    @staticmethod
    def read(paths: list[Path], held_out_fraction: float = 0.1) -> Text:
        contents = [Path(path).read_bytes() for path in paths]
        if not any(contents):
            raise ValueError(f"no text in {' '.join(map(str, paths))}")
        digests = [hashlib.sha256(content).hexdigest() for content in contents]
        files = tuple({"name": Path(path).name, "bytes": len(content), "sha256": digest}
                      for path, content, digest in zip(paths, contents, digests))  # fmt: skip
        every = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)
        split = len(every) - int(len(every) * held_out_fraction)
        return Text(every[:split], every[split:], files)

    def check(self, tokens: int) -> None:
        """ValueError where a part holds no sequence of that length."""
        for part in (self.train, self.held_out):
            _starts(part, tokens)

    def batch(self, seed: int, step: int, batch: int, tokens: int) -> torch.Tensor:
        """(batch, tokens + 1) bytes: the inputs and, one further, the targets of this step."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(_starts(self.train, tokens), (batch,), generator=generator)
        return _windows(self.train, starts, tokens)

    def validation(self, sequences: int, tokens: int) -> torch.Tensor:
        """`sequences` windows, evenly spread over the held-out part."""
        last = _starts(self.held_out, tokens) - 1
        starts = torch.linspace(0, last, sequences, dtype=torch.float64).long()
        return _windows(self.held_out, starts, tokens)


def _starts(text: torch.Tensor, tokens: int) -> int:
    starts = len(text) - tokens
    if starts < 1:
        raise ValueError(f"a part of {len(text)} bytes holds no sequence of {tokens} + 1: give "
                         "more text, a larger held-out fraction or shorter sequences")
    return starts


def _windows(text: torch.Tensor, starts: torch.Tensor, tokens: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(tokens + 1)].long()
