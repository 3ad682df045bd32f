"""One training run: steps, validations and what is measured on the way. Checkpoints resume it bit
for bit."""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from . import parallel
from .attentions import AttentionChoice, make_attention
from .command import torch
from .config import TrainConfig, config_of_record, differing
from .data import Corpus
from .environment import brief, replacing
from .parallel import ALONE, Group, whole

if TYPE_CHECKING:
    from torch import Tensor

    from .language_model import LanguageModel

COLUMNS = ("step", "tokens", "train_loss", "val_loss", "lr", "tokens_per_second", "grad_norm",
           "grad_norm_max", "max_score", "gamma_q", "gamma_k")  # fmt: skip


@dataclass
class Run:
    """What a training run gave."""

    rows: list[dict]
    status: str  #: 'finished', 'diverged' or 'cut'
    diverged: dict | None  #: step and why


def be_deterministic(deterministic: bool) -> None:
    """Makes PyTorch's own kernels deterministic; before the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # Filling fresh memory finds reads of it, but would be timed with every step.
    torch.utils.deterministic.fill_uninitialized_memory = False


def autocast(config: TrainConfig):
    device = torch.device(config.device).type
    return torch.autocast(device, dtype=torch.bfloat16, enabled=config.autocast)


def build_model(config: TrainConfig, choice: AttentionChoice) -> LanguageModel:
    from .language_model import LanguageModel

    device = torch.device(config.device)
    torch.manual_seed(config.seed)
    # Drawn on the CPU, so that the weights do not depend on the device.
    model = LanguageModel(config.model, make_attention(choice, device), config.compile)
    return model.to(device)


class Trainer:
    def __init__(self, config: TrainConfig, choice: AttentionChoice, corpus: Corpus,
                 group: Group = ALONE) -> None:  # fmt: skip
        be_deterministic(config.deterministic)
        check(config, corpus, group.world)
        self.config, self.choice, self.corpus, self.group = config, choice, corpus, group
        self.device = torch.device(config.device)
        self.sequences = config.sequences_per_step(group.world)
        self.model = build_model(config, choice)
        self.shared = parallel.shared(self.model, config, group)
        self.optimiser = _optimiser(self.model, config)
        self.order = corpus.order(config.seed, config.tokens)
        held_out = corpus.validation(config.val_sequences, config.tokens)
        self.held_out = held_out[group.rank :: group.world].to(self.device)
        self.step, self.rows = 0, []
        #: Loss and gradient norm of each step since the last row. They stay on the device until
        #: then: reading each would stop the launch queue.
        self.pending: list[Tensor] = []

    # ---- steps -----------------------------------------------------------------------------------

    def run(self, until: int | None = None, on_row=None, stop=None) -> Run:
        """Trains up to step `until`. `on_row(row)` is called with each row as it comes; where
        `stop()` is true, the run is cut after the step."""
        config = self.config
        until = config.steps if until is None else until
        if config.switch_at and self.step > config.switch_at:
            self._switch()
        interval, counted = time.perf_counter(), self.step
        while self.step < until:
            if config.switch_at and self.step == config.switch_at:
                self._switch()
            self.pending.append(self._one_step())
            self.step += 1
            evaluate_now = self.step % config.eval_every == 0 or self.step == config.steps
            if evaluate_now or self.step % config.log_every == 0:
                losses, norms = self._read_pending()
                seconds = time.perf_counter() - interval
                pace = (self.step - counted) * self.sequences * config.tokens / seconds
                row = self._row(losses, norms, pace, evaluate_now)
                self.rows.append(row)
                if on_row:
                    on_row(row)
                if why := self._diverged(losses, norms):
                    return Run(self.rows, "diverged", {"step": self.step, "why": why})
                interval, counted = time.perf_counter(), self.step
            if stop and self.step < until and stop():
                return Run(self.rows, "cut", None)
        return Run(self.rows, "finished" if self.step == config.steps else "cut", None)

    def _switch(self) -> None:
        choice = AttentionChoice.parse(self.config.switch_to)
        self.model.attend_by(make_attention(choice, self.device))

    def places(self, step: int) -> Tensor:
        """Which sequences of the corpus this process takes in a step."""
        mine = self.order[step * self.sequences : (step + 1) * self.sequences]
        return mine[self.group.rank :: self.group.world]

    def _one_step(self) -> Tensor:
        config = self.config
        lr = config.learning_rate(self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        parts = self.places(self.step).split(config.batch)
        total = torch.zeros((), device=self.device)
        for number, places in enumerate(parts):
            sequences = self._on_device(places)
            with parallel.gradients_added(self.shared, number == len(parts) - 1):
                with autocast(config):
                    loss = self.shared(sequences[:, :-1], sequences[:, 1:]) / len(parts)
                loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return torch.stack((total, whole(norm).detach().float()))

    def _on_device(self, places: Tensor) -> Tensor:
        sequences = self.corpus.batch(places, self.config.tokens)
        if self.device.type == "cuda":  # pinned memory, so that the copy waits for nothing
            sequences = sequences.pin_memory()
        return sequences.to(self.device, non_blocking=True)

    # ---- what is measured ------------------------------------------------------------------------

    def _read_pending(self) -> tuple[list[float], list[float]]:
        pending = torch.stack([entry.to(self.device) for entry in self.pending])
        self.pending = []
        losses = self.group.mean(pending[:, 0].clone())
        return losses.tolist(), pending[:, 1].tolist()

    def _row(self, losses, norms, pace: float, evaluate_now: bool) -> dict:
        config = self.config
        val_loss = max_score = None
        if evaluate_now:
            val_loss, max_score = self.validate()
        figures = (self.step, self.step * self.sequences * config.tokens, sum(losses) / len(losses),
                   val_loss, config.learning_rate(self.step - 1), pace, norms[-1], max(norms),
                   max_score, *(self.gamma() if evaluate_now else (None, None)))
        return dict(zip(COLUMNS, figures))

    def gamma(self) -> tuple[float | None, float | None]:
        """The largest weight of QK-norm, of queries and of keys."""
        if not self.config.model.qk_norm:
            return None, None
        layers = [block.attention for block in self.model.blocks]
        return tuple(max(float(whole(getattr(layer, norm).weight.detach()).abs().max())
                         for layer in layers)
                     for norm in ("q_norm", "k_norm"))  # fmt: skip

    def validate(self, choice: AttentionChoice | None = None) -> tuple[float, float]:
        """The mean loss of the held-out sequences, and the largest |score| in one of them; with
        another attention than the model's, if one is given."""
        attend = self.model.blocks[0].attention.attend
        if choice:
            self.model.attend_by(make_attention(choice, self.device))
        own = self.model.blocks[0].attention.attend
        largest = torch.zeros((), device=self.device)

        def watched(q, k, v):
            torch.maximum(largest, _largest_score(q[0], k[0]), out=largest)
            return own(q, k, v)

        total = torch.zeros((), dtype=torch.float64, device=self.device)
        try:
            for number, sequences in enumerate(self.held_out.split(self.config.batch)):
                self.model.attend_by(own if number else watched)
                with torch.no_grad(), autocast(self.config):
                    loss = self.shared(sequences[:, :-1], sequences[:, 1:])
                total += loss.double() * len(sequences)
        finally:
            self.model.attend_by(attend)
        mean = self.group.mean(total / len(self.held_out))
        return float(mean), float(self.group.maximum(largest))

    def _diverged(self, losses, norms) -> str | None:
        config = self.config
        for number, (loss, norm) in enumerate(zip(losses, norms)):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                step = self.step - len(losses) + number
                return (f"non-finite at step {step + 1}: loss {loss}, gradient norm {norm}; "
                        + self._first_non_finite(step))
        lowest = min(row["train_loss"] for row in self.rows)
        if (now := self.rows[-1]["train_loss"]) > lowest + config.diverged_at:
            return f"the training loss rose from {lowest:.3f} to {now:.3f}"
        return None

    def _first_non_finite(self, step: int) -> str:
        """Names the parameters, else the first module of that step's forward, that went wrong."""
        wrong = [name for name, p in self.model.named_parameters()
                 if not torch.isfinite(whole(p)).all()]  # fmt: skip
        if wrong:
            return f"non-finite by now: {len(wrong)} parameters, the first {wrong[0]}"
        found: list[str] = []

        def watch(name, _module, _inputs, output):
            if not torch.isfinite(output).all():
                found.append(name)

        for name, module in self.model.named_modules():
            if name:  # training is over: the hooks may stay
                module.register_forward_hook(partial(watch, name))
        places = self.places(step)[: self.config.batch]
        sequences = self._on_device(places)
        with torch.no_grad(), autocast(self.config):
            self.model(sequences[:, :-1], sequences[:, 1:])
        return f"first non-finite output: {found[0]}" if found else "in the backward pass only"

    # ---- checkpoints -----------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """All processes must call it; the first one writes."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        if self.pending:  # losses of all processes, as only one writes
            pending = torch.stack(self.pending)
            pending[:, 0] = self.group.mean(pending[:, 0].clone())
            self.pending = list(pending)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimiser = get_state_dict(self.model, self.optimiser, options=options)
        if self.group.rank:
            return
        pending = torch.stack(self.pending).cpu() if self.pending else torch.zeros(0, 2)
        with replacing(path) as partial_file:
            torch.save({"model": model, "optimiser": optimiser, "step": self.step,
                        "rows": self.rows, "pending": pending, "config": asdict(self.config),
                        "attention": self.choice.label(), "corpus": self.corpus.header["sha256"],
                        "processes": self.group.world}, partial_file)  # fmt: skip

    def load(self, path: Path) -> None:
        """ValueError where the checkpoint is of another run than this."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        saved, config, choice = read_checkpoint(path)
        wrong = differing(config, self.config)
        if choice != self.choice:
            wrong.append(f"attention {self.choice.label()} (not {choice.label()})")
        if saved["corpus"] != self.corpus.header["sha256"]:
            wrong.append("another corpus")
        if saved["processes"] != self.group.world:
            wrong.append(f"{self.group.world} processes (not {saved['processes']})")
        if wrong:
            raise ValueError(f"{path} is a checkpoint of another run: here are {', '.join(wrong)}")
        set_state_dict(self.model, self.optimiser, model_state_dict=saved["model"],
                       optim_state_dict=saved["optimiser"],
                       options=StateDictOptions(full_state_dict=True))  # fmt: skip
        self.step, self.rows = saved["step"], saved["rows"]
        self.pending = list(saved["pending"].to(self.device))


def read_checkpoint(path: Path) -> tuple[dict, TrainConfig, AttentionChoice]:
    """ValueError where it is none."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        names = ("model", "optimiser", "step", "rows", "pending", "corpus", "processes")
        if missing := [name for name in names if name not in saved]:
            raise KeyError(missing[0])
        return saved, config_of_record(saved["config"]), AttentionChoice.parse(saved["attention"])
    except OSError:
        raise
    except Exception as error:  # whatever the unpickler makes of bytes of another kind
        raise ValueError(f"{path} is no checkpoint of these commands: {brief(error)}") from error


def load_weights(model: LanguageModel, weights: dict, path: Path) -> None:
    """Those of the checkpoint `path`; ValueError where they do not fit."""
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no checkpoint of these commands: {brief(error)}") from error


def check(config: TrainConfig, corpus: Corpus, processes: int) -> None:
    """ValueError if the corpus is too small for the run, or the processes cannot share it."""
    if config.val_sequences % processes:
        raise ValueError(f"val_sequences {config.val_sequences}: {processes} processes share them, "
                         "so it must be a multiple of that")
    corpus.check(config.steps * config.sequences_per_step(processes), config.tokens,
                 config.val_sequences)  # fmt: skip


def _largest_score(q: Tensor, k: Tensor) -> Tensor:
    """The largest |score| that a causal mask leaves, of (heads, tokens, head_dim) tensors."""
    with torch.autocast(q.device.type, enabled=False):
        found = [(queries @ keys.mT).tril_().abs().max()
                 for queries, keys in zip(q.float(), k.float())]  # fmt: skip
    return torch.stack(found).max() / math.sqrt(q.shape[-1])


def _optimiser(model: LanguageModel, config: TrainConfig) -> torch.optim.Optimizer:
    """Weight decay is for the matrices alone."""
    groups = [{"params": [p for p in model.parameters() if (p.ndim >= 2) == matrices],
               "weight_decay": config.weight_decay * matrices}
              for matrices in (True, False)]  # fmt: skip
    fused = torch.device(config.device).type == "cuda"
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=fused)
