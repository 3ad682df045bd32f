"""What a training run consists of: the model, the schedule, and their options on a command line."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from .command import torch

#: Numbers of a TrainConfig and its ModelConfig that are no options.
_FIXED = ("final_lr_fraction", "vocab", "rope_base")
_HELP = {"tied": "one matrix for embedding and head", "compile": "torch.compile the model",
         "autocast": "bf16 where it serves, else FP32 throughout"}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """The defaults give 26 million parameters."""

    dim: int = 512
    layers: int = 8
    head_dim: int = 64
    hidden: int = 1408
    qk_norm: bool = True
    tied: bool = False
    vocab: int = 256
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        _check_least(self, 1, "dim", "layers", "head_dim", "hidden")
        if self.dim % self.head_dim or self.head_dim % 2:
            raise ValueError(
                f"dim {self.dim} must be a multiple of head_dim {self.head_dim}, and that even"
            )


@dataclass(frozen=True)
class TrainConfig:
    """The defaults suit one H200: well under a minute with fused attention."""

    model: ModelConfig = field(default_factory=ModelConfig)
    seed: int = 0
    steps: int = 1000
    batch: int = 16
    tokens: int = 1024
    lr: float = 1e-3
    final_lr_fraction: float = 0.1
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_every: int = 50
    log_every: int = 10
    val_sequences: int = 64
    held_out_fraction: float = 0.1
    device: str = "cuda"
    autocast: bool = True
    compile: bool = False
    stop_after: int | None = None  #: steps to run of the schedule's `steps`; None: all

    def __post_init__(self) -> None:
        _check_least(self, 1, "steps", "batch", "tokens", "eval_every", "log_every",
                     "val_sequences")  # fmt: skip
        _check_least(self, 0, "lr", "clip", "warmup", "weight_decay", "held_out_fraction")

    @property
    def run_steps(self) -> int:
        return self.steps if self.stop_after is None else self.stop_after

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `final_lr_fraction`."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.lr * (self.final_lr_fraction + (1 - self.final_lr_fraction) * cosine)


def _check_least(config, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not least <= value < math.inf:
            finite = " and finite" if isinstance(value, float) else ""
            raise ValueError(f"{name} {value}: it must be at least {least}{finite}")


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """The options shared by train, compare and capture."""
    config = TrainConfig()
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="text files to read")
    parser.add_argument("--out", type=Path, default=Path("results"),
                        help="the folder of what is written (default results)")
    cuda = torch is not None and torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    for name, default in (vars(config) | vars(config.model)).items():
        how = {"metavar": "N" if type(default) is int else "X", "type": type(default)}
        if isinstance(default, bool):
            how = {"action": argparse.BooleanOptionalAction}
        words = f"{_HELP[name]}; " if name in _HELP else ""
        how["help"] = f"{words}default {default}"
        if isinstance(default, (int, float)) and name not in _FIXED:
            parser.add_argument("--" + name.replace("_", "-"), default=default, **how)


def config_of(arguments: argparse.Namespace) -> TrainConfig:
    def given(config):
        return replace(config, **{k: v for k, v in vars(arguments).items() if k in vars(config)})

    return replace(given(TrainConfig()), model=given(ModelConfig()))


def config_of_record(record: dict) -> TrainConfig:
    """The configuration that ``asdict`` made `record` of."""
    return TrainConfig(**record | {"model": ModelConfig(**record["model"])})
