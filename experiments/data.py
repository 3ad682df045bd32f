"""A corpus of tokens on disk: sequences to train on, of which no run sees one twice, and held-out
ones. `experiments.corpus` writes it."""

from __future__ import annotations

import errno
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .command import torch

FORMAT = "sagebwd corpus 1"


def header_of(path: Path) -> Path:
    """The JSON file beside a file of tokens, which says what they are."""
    return path.with_name(path.name + ".json")


@dataclass(frozen=True)
class Corpus:
    """Memory-mapped tokens: the first `train_tokens` of them to train on, the others held out."""

    train: np.ndarray
    held_out: np.ndarray
    header: dict

    @staticmethod
    def open(path: Path) -> Corpus:
        """ValueError where `path` is no corpus, or not the whole one; OSError where nothing is."""
        path = Path(path)
        made = "python -m experiments.corpus makes one"
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, f"there is no such file; {made}", str(path))
        if not path.is_file():
            raise ValueError(f"{path} is no file: pass a corpus; {made}")
        size = path.stat().st_size
        try:
            header = json.loads(header_of(path).read_text())
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']!r}")
            train, held_out = header["train_tokens"], header["validation_tokens"]
        except FileNotFoundError:
            raise ValueError(
                f"{path} is no corpus: {header_of(path).name} is not there; {made}"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{header_of(path)} describes no corpus ({error}); {made}") from None
        if size != 2 * (train + held_out):
            raise ValueError(f"{path} has {size} bytes, and {header_of(path).name} says "
                             f"{2 * (train + held_out)}: it is not whole, or another file")
        if _sha256(path) != header["sha256"]:
            raise ValueError(f"{path} has not the SHA-256 that {header_of(path).name} says: it has "
                             "changed since it was made")  # fmt: skip
        tokens = np.memmap(path, np.uint16, "r")
        return Corpus(tokens[:train], tokens[train:], header)

    @property
    def vocab(self) -> int:
        return self.header["vocab"]

    def summary(self) -> dict:
        """A record says this of the corpus."""
        names = ("sha256", "tokenizer", "vocab", "train_tokens", "validation_tokens", "seed")
        return {name: self.header[name] for name in names}

    def check(self, sequences: int, tokens: int, held_out: int,
              option: str = "--val-sequences") -> None:  # fmt: skip
        """ValueError if there are not that many sequences of `tokens` to train on, each used once,
        or not that many held out, for which `option` asks."""
        have = _count(self.train, tokens)
        if sequences > have:
            raise ValueError(
                f"the run takes {sequences * tokens:,} tokens ({sequences:,} sequences of {tokens})"
                f", of which none is seen twice, and the corpus has {len(self.train):,} ({have:,} "
                "sequences): take more text, or run fewer steps"
            )
        if held_out > (have := _count(self.held_out, tokens)):
            raise ValueError(f"{option} {held_out}: the corpus has {have} held-out sequences of "
                             f"{tokens} tokens; pass at most that, or make a corpus of more text")

    def order(self, seed: int, tokens: int) -> torch.Tensor:
        """A permutation of the sequences to train on: a run takes them one after another."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(_count(self.train, tokens), generator=generator, device="cpu")

    def batch(self, places: torch.Tensor, tokens: int) -> torch.Tensor:
        """(sequences, tokens + 1): the inputs and, one further, the targets."""
        return _sequences(self.train, places.tolist(), tokens)

    def validation(self, sequences: int, tokens: int) -> torch.Tensor:
        """`sequences` held-out ones, evenly spread."""
        have = _count(self.held_out, tokens)
        return _sequences(self.held_out, [i * have // sequences for i in range(sequences)], tokens)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _count(part: np.ndarray, tokens: int) -> int:
    return max(0, (len(part) - 1) // tokens)


def _sequences(part: np.ndarray, places: list[int], tokens: int) -> torch.Tensor:
    rows = [part[i * tokens : (i + 1) * tokens + 1] for i in places]
    return torch.from_numpy(np.stack(rows).astype(np.int64))
