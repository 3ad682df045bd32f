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
        """ValueError if a part is too short for a sequence of that length."""
        self._starts("to train on", tokens)
        self._starts("held out", tokens)

    def _starts(self, used: str, tokens: int) -> int:
        """In how many places of a part sequences can start."""
        part = self.held_out if used == "held out" else self.train
        if len(part) <= tokens:
            raise ValueError(
                f"a sequence of {tokens} tokens takes {tokens + 1} bytes, and the part of the text "
                f"that is {used} has {len(part)}: give more text, fewer --tokens, or another "
                "--held-out-fraction"
            )
        return len(part) - tokens

    def batch(self, seed: int, step: int, batch: int, tokens: int) -> torch.Tensor:
        """(batch, tokens + 1) bytes: the inputs and, one further, the targets of this step."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(self._starts("to train on", tokens), (batch,), generator=generator)
        return _windows(self.train, starts, tokens)

    def validation(self, sequences: int, tokens: int) -> torch.Tensor:
        """`sequences` windows, evenly spread over the held-out part."""
        last = self._starts("held out", tokens) - 1
        starts = torch.linspace(0, last, sequences, dtype=torch.float64).long()
        return _windows(self.held_out, starts, tokens)


def _windows(text: torch.Tensor, starts: torch.Tensor, tokens: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(tokens + 1)].long()
