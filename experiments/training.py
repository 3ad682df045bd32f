"""One training run: steps, validations and what is measured on the way. Checkpoints resume it bit
for bit."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sagebwd import qk_norm_rope
from sagebwd.benchmark.environment import brief, write_tensors

from . import parallel, sharing
from .attentions import AttentionChoice, WithFront, make_attention
from .checkpoints import load_state, read_checkpoint
from .command import Failure, torch
from .config import TrainConfig, differing
from .data import Corpus
from .graphed import GraphedStep
from .parallel import ALONE, Group, whole

if TYPE_CHECKING:
    from torch import Tensor

    from .language_model import LanguageModel

COLUMNS = ("step", "tokens", "train_loss", "val_loss", "lr", "tokens_per_second", "grad_norm",
           "grad_norm_max", "max_score", "gamma_q", "gamma_k")  # fmt: skip


@dataclass
class Run:
    """A training run gave these results."""

    rows: list[dict]
    status: str  #: 'finished', 'diverged' or 'cut'
    diverged: dict | None  #: step and why


def largest(values: Iterable[float]) -> float:
    """NaN if one is; `max` keeps only one that comes first."""
    return max(values, key=lambda x: (math.isnan(x), x))


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
        self._started = time.perf_counter()
        be_deterministic(config.deterministic)
        check(config, corpus, group.world)
        self.config, self.choice, self.corpus, self.group = config, choice, corpus, group
        self.device = torch.device(config.device)
        self.sequences = config.sequences_per_step(group.world)
        self.part = _part(config, choice, group)
        self.model = build_model(config, choice)
        self.shared = parallel.shared(self.model, config, group)
        self._attend_by(choice)
        self.optimiser = _optimiser(self.model, config)
        self.order = corpus.order(config.seed, config.tokens)
        held_out = corpus.validation(config.val_sequences, config.tokens)
        self.held_out = held_out[group.team :: group.teams].to(self.device)
        self.step, self.rows = 0, []
        self.resumed_at, self._seconds_before = 0, 0.0  #: step of the checkpoint, and its seconds
        self.saved: tuple[Path, int] | None = None  #: the last checkpoint, and its step
        #: Loss and gradient norm of each step since the last row. They stay on the device until
        #: then: reading each would stop the launch queue.
        self.pending: list[Tensor] = []

    @property
    def seconds(self) -> float:
        """Since the run began, without what was between its parts."""
        return round(self._seconds_before + time.perf_counter() - self._started, 2)

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
        self._attend_by(AttentionChoice.parse(self.config.switch_to))

    def _attend_by(self, choice: AttentionChoice) -> None:
        """The steps from now on attend by this choice."""
        self.model.attend_by(self._attention(choice))
        self._replayed = GraphedStep(self._gradients) if self.config.graph else None

    def _attention(self, choice: AttentionChoice):
        if self.group.sharing > 1:
            return self.part.attention(choice)
        return make_attention(choice, self.device)

    def places(self, step: int) -> Tensor:
        """Which sequences of the corpus this process takes in a step."""
        mine = self.order[step * self.sequences : (step + 1) * self.sequences]
        return mine[self.group.team :: self.group.teams]

    def _one_step(self) -> Tensor:
        config = self.config
        lr = config.learning_rate(self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        parts = self.places(self.step).split(config.batch)
        total = torch.zeros((), device=self.device)
        for number, places in enumerate(parts):
            sequences = self._on_device(places)
            if self._replayed:
                total += self._replayed(sequences)
                continue
            with self.part.step(), parallel.gradients_added(self.shared, number == len(parts) - 1):
                total += self._gradients(sequences)
        most = config.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=not config.graph)  # a graph adds to those of before
        return torch.stack((total, whole(norm).detach().float()))

    def _gradients(self, sequences: Tensor) -> Tensor:
        """Adds those of one of a step's batches; its part of the step's loss."""
        batches = self.sequences // self.group.teams // self.config.batch
        loss = self._loss(self.shared, sequences) / batches
        loss.backward()
        return loss.detach()

    def _loss(self, model, sequences: Tensor) -> Tensor:
        """The mean loss of these sequences. If processes share the sequences, the mean over the
        processes is that."""
        tokens, targets = (self.part.own(x) for x in (sequences[:, :-1], sequences[:, 1:]))
        with autocast(self.config):
            loss = model(tokens, targets, self.part.positions)
        return loss if self.part.weight == 1 else loss * self.part.weight

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
                   val_loss, config.learning_rate(self.step - 1), pace, norms[-1], largest(norms),
                   max_score, *(self.gamma() if evaluate_now else (None, None)))
        return dict(zip(COLUMNS, figures))

    def gamma(self) -> tuple[float | None, float | None]:
        """The largest weight of QK-norm, of queries and of keys."""
        if not self.config.model.qk_norm:
            return None, None
        layers = [block.attention for block in self.model.blocks]
        return tuple(largest(float(whole(getattr(layer, norm).weight.detach()).abs().max())
                             for layer in layers)
                     for norm in ("q_norm", "k_norm"))  # fmt: skip

    def validate(self, choice: AttentionChoice | None = None) -> tuple[float, float]:
        """The mean loss of the held-out sequences, and the largest |score| in one of them; with
        another attention than the model's, if one is given."""
        attend = self.model.blocks[0].attention.attend
        if choice:
            self.model.attend_by(self._attention(choice))
        own = self.model.blocks[0].attention.attend
        largest = torch.zeros((), device=self.device)

        def watched(q, k, v, **front):
            one, other = qk_norm_rope(q[:1], k[:1], **front) if front else (q, k)
            found = sharing.largest_score(one[0], self.part.all(other[0]), self.part.positions)
            torch.maximum(largest, found, out=largest)
            return own(q, k, v, **front)

        first = WithFront(watched, True) if isinstance(own, WithFront) else watched
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        try:
            for number, sequences in enumerate(self.held_out.split(self.config.batch)):
                self.model.attend_by(own if number else first)
                with torch.no_grad(), self.part.step():
                    loss = self._loss(self.shared, sequences)
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
        found: list[tuple[str, bool]] = []

        def watch(name, _module, _inputs, output):
            found.append((name, bool(torch.isfinite(output).all())))

        for name, module in self.model.named_modules():
            if name:  # training is over: the hooks may stay
                module.register_forward_hook(partial(watch, name))
        places = self.places(step)[: self.config.batch]
        sequences = self._on_device(places)
        with torch.no_grad(), self.part.step():
            self._loss(self.model, sequences)
        # Processes compute an output at the same time, and it may be finite in some of them only.
        first = next((i for i, (_, finite) in enumerate(found) if not finite), len(found))
        first = -int(self.group.maximum(torch.tensor(-first, device=self.device)))
        if first == len(found):
            return "in the backward pass only"
        return f"first non-finite output: {found[first][0]}"

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
            self.saved = path, self.step
            return
        pending = torch.stack(self.pending).cpu() if self.pending else torch.zeros(
            0, 2, device="cpu")  # fmt: skip
        content = {"model": model, "optimiser": optimiser, "step": self.step, "rows": self.rows,
                   "pending": pending, "seconds": self.seconds, "config": asdict(self.config),
                   "attention": self.choice.label(), "corpus": self.corpus.header["sha256"],
                   "processes": self.group.world}  # fmt: skip
        try:
            write_tensors(path, content)
        except (OSError, RuntimeError) as error:
            said = getattr(error, "strerror", None) or brief(error)
            before = self.saved and f"{self.saved[0]} is the checkpoint of step {self.saved[1]}"
            raise Failure(f"{path}: the checkpoint of step {self.step} could not be written "
                          f"({said}); {before or 'none was written before'}"
                          ) from error  # fmt: skip
        self.saved = path, self.step

    def load(self, path: Path) -> list[str]:
        """The notes say what should be known of the run that goes on. ValueError where the
        checkpoint is of another run than this."""
        saved, config, choice = read_checkpoint(path)
        self._check_same(path, saved, config, choice)
        load_state(self.model, self.optimiser, saved, path)
        self.step, self.rows = saved["step"], saved["rows"]
        self.resumed_at, self._seconds_before = self.step, saved["seconds"]
        self.pending = list(saved["pending"].to(self.device))
        notes = []
        if (before := _sharing(config)) != (now := _sharing(self.config)):
            notes.append(f"{path} was trained with {before}, and goes on with {now}: the same run "
                         "except for roundings")  # fmt: skip
        if self.step >= self.config.steps:
            notes.append(f"{path} is of step {self.step} of {self.config.steps}, the last: nothing "
                         "is left to train")  # fmt: skip
        return notes

    def _check_same(self, path: Path, saved: dict, config: TrainConfig, choice) -> None:
        """Runs that share sequences otherwise must have the same batches."""
        processes = saved["processes"]
        before, now = (
            replace(one, tokens_per_step=one.sequences_per_step(world) * one.tokens)
            for one, world in ((config, processes), (self.config, self.group.world)))  # fmt: skip
        wrong = differing(before, now)
        if choice != self.choice:
            wrong.append(f"attention {self.choice.label()} (not {choice.label()})")
        if saved["corpus"] != self.corpus.header["sha256"]:
            wrong.append("another corpus")
        hints = ["pass the options of its run"] if wrong else []
        same_sharing = config.context_parallel == self.config.context_parallel
        if same_sharing and processes != self.group.world:
            wrong.append(f"{self.group.world} processes (not {processes})")
            hints.append(f"start torchrun with {processes} processes" if processes > 1 else
                         "start it without torchrun")  # fmt: skip
        if wrong:
            raise ValueError(f"{path} is of another run: the options say {', '.join(wrong)}; "
                             f"{' and '.join(hints)}, or train from the start without --resume")


def _sharing(config: TrainConfig) -> str:
    count = config.context_parallel
    return f"--context-parallel {count}" + (f" ({config.context_method})" if count > 1 else "")


def check(config: TrainConfig, corpus: Corpus, processes: int) -> None:
    """ValueError if the corpus is too small for the run, or these processes cannot do it so."""
    sharing.check(config, processes)
    if config.graph and processes > 1:
        raise ValueError(f"--graph is for one process, and here are {processes}: leave it "
                         "out")  # fmt: skip
    teams = processes // config.context_parallel
    if config.val_sequences % teams:
        who = "processes" if config.context_parallel == 1 else "teams of processes"
        raise ValueError(f"--val-sequences {config.val_sequences}: {teams} {who} share them, so "
                         "it must be a multiple of that")  # fmt: skip
    corpus.check(config.steps * config.sequences_per_step(processes), config.tokens,
                 config.val_sequences)  # fmt: skip


def _part(config: TrainConfig, choice: AttentionChoice, group: Group) -> sharing.Whole:
    """Says which part of each sequence this process has."""
    if group.sharing == 1:
        return sharing.Whole()
    choices = [choice]
    if config.switch_to:
        choices.append(AttentionChoice.parse(config.switch_to))
    return sharing.Shared(config, choices, group)


def _optimiser(model: LanguageModel, config: TrainConfig) -> torch.optim.Optimizer:
    """Weight decay is for the matrices alone."""
    groups = [{"params": [p for p in model.parameters() if (p.ndim >= 2) == matrices],
               "weight_decay": config.weight_decay * matrices}
              for matrices in (True, False)]  # fmt: skip
    fused = torch.device(config.device).type == "cuda"
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=fused)
