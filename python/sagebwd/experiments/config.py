"""The model and the schedule of a training run, and their options on a command line."""

from __future__ import annotations

import argparse
import copy
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from .command import torch

#: Numbers of a TrainConfig and its ModelConfig that have no option.
_FIXED = ("final_lr_fraction", "vocab", "rope_base")
_HELP = {
    "tied": "use one matrix for embedding and head", "compile": "compile the model",
    "autocast": "compute in bf16 by torch.autocast, instead of FP32",
    "qk_norm": "normalise queries and keys", "seed": "seed of the weights and the batches",
    "steps": "training steps", "batch": "sequences per batch", "tokens": "tokens per sequence",
    "lr": "highest learning rate", "warmup": "steps of the warm-up",
    "weight_decay": "weight decay of matrices", "clip": "largest norm of the gradient",
    "eval_every": "steps between validations", "log_every": "steps between rows of the record",
    "val_sequences": "held-out sequences per validation",
    "held_out_fraction": "share of the text that is held out", "dim": "width of the model",
    "layers": "number of layers", "head_dim": "head dimension", "hidden": "width of the MLPs",
}  # fmt: skip


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
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim}: it must be even")
        if self.dim % self.head_dim:
            raise ValueError(
                f"dim {self.dim}: it must be a multiple of head_dim, which is {self.head_dim}"
            )


@dataclass(frozen=True)
class TrainConfig:
    """With the defaults a run takes well under a minute on one H200 with fused attention."""

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
    stop_after: int | None = None  #: how many of the schedule's `steps` to run; None means all

    def __post_init__(self) -> None:
        _check_least(self, 1, "steps", "batch", "tokens", "eval_every", "log_every",
                     "val_sequences")  # fmt: skip
        _check_least(self, 0, "lr", "clip", "warmup", "weight_decay", "held_out_fraction")
        if self.held_out_fraction >= 1:
            raise ValueError(
                f"held_out_fraction {self.held_out_fraction} is not a share: it must be less than 1"
            )

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
                        help="folder for the files that are written (default: results)")
    cuda = torch is not None and torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu",
                        help="cuda, cuda:N or cpu (default: cuda if there is a GPU)")
    for name, default in (vars(config) | vars(config.model)).items():
        if not isinstance(default, (int, float)) or name in _FIXED:
            continue
        switch = isinstance(default, bool)
        shown = ("yes" if default else "no") if switch else default
        how = {"action": argparse.BooleanOptionalAction} if switch else {
            "metavar": "N" if type(default) is int else "X", "type": type(default)}
        parser.add_argument("--" + name.replace("_", "-"), default=default,
                            help=f"{_HELP[name]} (default: {shown})", **how)


def check_left_to_checkpoint(parser: argparse.ArgumentParser, arguments: list[str] | None) -> None:
    """ValueError if an option is given that the checkpoint decides: those of the model and of its
    training."""
    probe = copy.deepcopy(parser)
    for action in probe._actions:
        action.default = argparse.SUPPRESS
    decided = [name for name in vars(probe.parse_args(arguments)) if name in _HELP]
    if decided:
        flags = ", ".join("--" + name.replace("_", "-") for name in decided)
        raise ValueError(f"{flags}: the checkpoint decides that. Leave it out; or leave out "
                         "--checkpoint, to train a model first")


def config_of(arguments: argparse.Namespace) -> TrainConfig:
    def given(config):
        return replace(config, **{k: v for k, v in vars(arguments).items() if k in vars(config)})

    return replace(given(TrainConfig()), model=given(ModelConfig()))


def config_of_record(record: dict) -> TrainConfig:
    """The configuration that ``asdict`` made `record` of."""
    return TrainConfig(**record | {"model": ModelConfig(**record["model"])})
