"""The model and the schedule of a training run, and their options on a command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from . import runner
from .command import torch

#: Numbers of a TrainConfig and its ModelConfig that have no option here.
_FIXED = ("final_lr_fraction", "vocab", "rope_base", "context_parallel")
_FRACTIONS = ("lr", "weight_decay", "clip", "diverged_at")
_HELP = {
    "tied": "use one matrix for embedding and head",
    "compile": "compile everything except attention by torch.compile",
    "graph": "replay a CUDA graph of a batch's forward and backward, with the same numbers",
    "autocast": "compute in bf16 by torch.autocast, instead of FP32; weights are FP32",
    "deterministic": "let PyTorch use deterministic kernels alone",
    "qk_norm": "normalise queries and keys", "seed": "seed of the weights and the batches",
    "steps": "training steps", "batch": "sequences that a GPU computes at once",
    "tokens": "tokens per sequence",
    "tokens_per_step": "tokens of a step, by gradient accumulation; 0: one batch of each GPU",
    "lr": "highest learning rate", "warmup": "steps of the warm-up",
    "weight_decay": "weight decay of matrices", "clip": "largest norm of the gradient; 0: any",
    "eval_every": "steps between validations", "log_every": "steps between rows of the record",
    "val_sequences": "held-out sequences per validation", "dim": "width of the model",
    "layers": "number of layers", "head_dim": "head dimension", "hidden": "width of the MLPs",
    "switch_at": "step from which --switch-to attends; 0: never",
    "diverged_at": "nats above the lowest training loss at which a run has diverged and stops",
}  # fmt: skip


def _check_least(config, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not least <= value < math.inf:
            finite = " and finite" if isinstance(value, float) else ""
            raise ValueError(f"{name} {value}: it must be at least {least}{finite}")


@dataclass(frozen=True)
class ModelConfig:
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


#: By millions of parameters without embedding and head.
MODELS = {
    "toy": ModelConfig(dim=64, layers=2, head_dim=32, hidden=128),
    "26m": ModelConfig(),
    "110m": ModelConfig(dim=768, layers=16, hidden=2048),
}


CONTEXT_METHODS = ("ring", "ulysses")


@dataclass(frozen=True)
class TrainConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    seed: int = 0
    steps: int = 1000
    batch: int = 16
    tokens: int = 1024
    tokens_per_step: int = 0
    lr: float = 1e-3
    final_lr_fraction: float = 0.1
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_every: int = 50
    log_every: int = 10
    val_sequences: int = 64
    device: str = "cuda"
    parallel: str = "ddp"
    context_parallel: int = 1  #: processes that share each sequence
    context_method: str = "ring"
    autocast: bool = True
    compile: bool = False
    graph: bool = False
    deterministic: bool = True
    diverged_at: float = 1.5
    switch_at: int = 0
    switch_to: str = ""

    def __post_init__(self) -> None:
        _check_least(self, 1, "steps", "batch", "tokens", "eval_every", "log_every",
                     "val_sequences")  # fmt: skip
        if self.context_parallel < 1:
            raise ValueError(f"--context-parallel {self.context_parallel}: it must be at least 1")
        _check_least(self, 0, "lr", "clip", "warmup", "weight_decay", "tokens_per_step",
                     "switch_at")  # fmt: skip
        if not self.diverged_at > 0:
            raise ValueError(f"diverged_at {self.diverged_at}: it must be above 0")
        if self.parallel not in ("ddp", "fsdp"):
            raise ValueError(f"parallel {self.parallel!r}: pass ddp or fsdp")
        if self.context_method not in CONTEXT_METHODS:
            raise ValueError(f"--context-method {self.context_method}: pass ring or ulysses")
        if self.graph and not self.device.startswith("cuda"):
            raise ValueError(f"--graph needs a CUDA GPU, and --device is {self.device}: leave it "
                             "out")  # fmt: skip
        if bool(self.switch_at) != bool(self.switch_to):
            raise ValueError("switch_at and switch_to go together: a step, and an attention")
        if self.switch_at and self.switch_at >= self.steps:
            raise ValueError(
                f"switch_at {self.switch_at}: pass a step below {self.steps}, the last"
            )

    def sequences_per_step(self, processes: int = 1) -> int:
        """ValueError if a step is no whole number of batches on each of the processes, or on each
        team that shares sequences."""
        teams = processes // self.context_parallel
        least = self.batch * teams
        sequences = self.tokens_per_step / self.tokens or least
        if sequences % least:
            on = f"{processes} process" + "es" * (processes > 1)
            if self.context_parallel > 1:
                on = f"{teams} team{'s' * (teams > 1)} of {self.context_parallel} processes"
            raise ValueError(
                f"--tokens-per-step {self.tokens_per_step}: it must be a multiple of "
                f"{least * self.tokens}, which is --batch {self.batch} times --tokens "
                f"{self.tokens} times {on}"
            )
        return int(sequences)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `final_lr_fraction`."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.lr * (self.final_lr_fraction + (1 - self.final_lr_fraction) * cosine)


#: These settings change no numbers of a run, or only their roundings, so that a resumed run may
#: have others.
FREE = ("device", "eval_every", "log_every", "context_parallel", "context_method", "graph")


def differing(one: TrainConfig, other: TrainConfig) -> list[str]:
    """Names of the numbers in which two runs differ that cannot be one."""
    def flat(config):
        record = asdict(config)
        return record.pop("model") | {k: v for k, v in record.items() if k not in FREE}

    return runner.differing(flat(one), flat(other), "{name} {given} (not {there})")


def add_common_arguments(parser: argparse.ArgumentParser, corpus_required: bool = True) -> None:
    """The options of all commands that need a corpus."""
    parser.add_argument("--corpus", type=Path, required=corpus_required, metavar="FILE",
                        help="tokens, which python -m experiments.corpus wrote")
    parser.add_argument("--out", type=Path, default=Path("results"),
                        help="folder for the files that are written (default: results)")
    cuda = torch is not None and torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu",
                        help="cuda, cuda:N or cpu (default: cuda if there is a GPU)")


def add_captured_arguments(parser: argparse.ArgumentParser, attention: str | None,
                           shown: str) -> None:  # fmt: skip
    """The commands capture and errors have these options of the pass that they look at."""
    parser.add_argument("--attention", default=attention, metavar="NAME[:OPTION,...]",
                        help=f"attention of the captured pass (default: {shown})")
    parser.add_argument("--layer", type=int, nargs="+", metavar="N",
                        help="layers to trace (default: all)")
    parser.add_argument("--sequences", type=int, default=2, metavar="N",
                        help="held-out sequences in the captured batch (default: 2)")


def add_training_arguments(parser: argparse.ArgumentParser, qk_norm: bool = True,
                           without: Collection[str] = ()) -> None:  # fmt: skip
    """Every setting as an option, except for those `without`; `qk_norm` is that one's default."""
    config = TrainConfig(model=ModelConfig(qk_norm=qk_norm))
    parser.add_argument("--model", choices=MODELS, default="26m", help="sizes of the model "
                        "that the options below may change (default: 26m)")  # fmt: skip
    for name, default in (vars(config) | vars(config.model)).items():
        if not isinstance(default, (int, float)) or name in (*_FIXED, *without):
            continue
        switch = isinstance(default, bool)
        shown = ("yes" if default else "no") if switch else f"{default:g}"
        if name == "warmup":
            default, shown = None, f"{shown}, and at most a tenth of the steps"
        if name in vars(config.model) and not switch:
            default, shown = None, "the --model's"
        how = {"action": argparse.BooleanOptionalAction} if switch else {
            "metavar": "X" if name in _FRACTIONS else "N",
            "type": float if name in _FRACTIONS else int}
        parser.add_argument("--" + name.replace("_", "-"), default=default,
                            help=f"{_HELP[name]} (default: {shown})", **how)
    if "switch_to" not in without:
        parser.add_argument("--switch-to", default="", metavar="NAME[:OPTION,...]",
                            help="attention from step --switch-at on")
    if "parallel" not in without:
        parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp",
                            help="how the processes of torchrun share the work (default: ddp)")


def config_of(arguments: argparse.Namespace, vocab: int) -> TrainConfig:
    """ValueError for a warm-up in which the highest learning rate is never reached."""
    steps, warmup = arguments.steps, arguments.warmup
    if warmup is not None and warmup >= steps >= 1:
        raise ValueError(f"--warmup {warmup}: it must be less than --steps, which is {steps}")

    def given(config):
        chosen = {k: v for k, v in vars(arguments).items() if k in vars(config) and v is not None}
        chosen.pop("model", None)
        return replace(config, **chosen)

    default = TrainConfig(warmup=max(0, min(TrainConfig.warmup, steps // 10)))
    return replace(given(default), model=replace(given(MODELS[arguments.model]), vocab=vocab))


def config_of_record(record: dict) -> TrainConfig:
    """The configuration that ``asdict`` made `record` of."""
    return TrainConfig(**record | {"model": ModelConfig(**record["model"])})
