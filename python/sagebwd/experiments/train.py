"""Trains the language model on text files, with attention chosen by name.

    python -m sagebwd.experiments.train --attention sagebwd --text a.txt --out results

The same seed gives the same weights and the same batches for every attention.
"""

from __future__ import annotations

import csv
import hashlib
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from . import command
from .attentions import AttentionChoice, check_runs_on, make_attention
from .command import Failure, torch
from .config import TrainConfig, add_training_arguments, config_of
from .data import Text
from .environment import brief, environment, replacing, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from .language_model import LanguageModel

COLUMNS = ("step", "tokens", "train_loss", "val_loss", "lr", "ms_per_step", "grad_norm")


class NonFinite(Failure):
    """Training left the finite numbers; the message says at which step and where."""


@dataclass
class Run:
    """What a training run gave."""

    rows: list[dict]
    model: LanguageModel
    batches_sha256: str  #: over every batch: equal means that two runs saw the same bytes
    seconds: float


def validation_curve(rows: list[dict]) -> dict[int, float]:
    """Step to validation loss, of the rows that have one."""
    return {row["step"]: row["val_loss"] for row in rows if row["val_loss"] is not None}


def read_rows(path: Path) -> list[dict]:
    """The rows that a RowWriter wrote."""
    kinds = {"step": int, "tokens": int}
    with path.open(newline="") as file:
        return [{key: kinds.get(key, float)(value) if value else None for key, value in row.items()}
                for row in csv.DictReader(file)]  # fmt: skip


def be_deterministic() -> None:
    """Makes PyTorch's own kernels deterministic; before the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
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
    return LanguageModel(config.model, make_attention(choice, device)).to(device)


def train(config: TrainConfig, choice: AttentionChoice, text: Text, on_row=None) -> Run:
    """Runs `config.steps` steps; `on_row(row)` is called with each logged row as it comes."""
    be_deterministic()
    device = torch.device(config.device)
    model = build_model(config, choice)
    step_model = torch.compile(model) if config.compile else model
    optimiser = _optimiser(model, config)
    held_out = text.validation(config.val_sequences, config.tokens).to(device)
    digest = hashlib.sha256()
    rows: list[dict] = []
    pending: list[tuple[int, Tensor, Tensor, Tensor]] = []  # step, bytes, loss, gradient norm
    started = interval = time.perf_counter()
    for step in range(config.run_steps):
        sequences = text.batch(config.seed, step, config.batch, config.tokens)
        digest.update(sequences.numpy().tobytes())
        sequences = sequences.to(device, non_blocking=True)
        lr = config.learning_rate(step)
        for group in optimiser.param_groups:
            group["lr"] = lr
        with autocast(config):
            loss = step_model(sequences[:, :-1], sequences[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        pending.append((step, sequences, loss.detach(), norm.detach()))

        last = step + 1 == config.run_steps
        evaluate_now = (step + 1) % config.eval_every == 0 or last
        if not (evaluate_now or (step + 1) % config.log_every == 0):
            continue
        # Losses stay on the device until here: reading each would stop the launch queue.
        losses = [_finite_loss(model, config, *entry) for entry in pending]
        milliseconds = (time.perf_counter() - interval) * 1e3 / len(pending)
        val_loss = evaluate(model, held_out, config) if evaluate_now else None
        tokens, train_loss = (step + 1) * config.batch * config.tokens, sum(losses) / len(losses)
        figures = (step + 1, tokens, train_loss, val_loss, lr, milliseconds, float(norm))
        rows.append(dict(zip(COLUMNS, figures)))
        if on_row:
            on_row(rows[-1])
        pending, interval = [], time.perf_counter()
    return Run(rows, model, digest.hexdigest(), time.perf_counter() - started)


def _optimiser(model: LanguageModel, config: TrainConfig) -> torch.optim.Optimizer:
    """Weight decay is for the matrices alone."""
    groups = [{"params": [p for p in model.parameters() if (p.ndim >= 2) == matrices],
               "weight_decay": config.weight_decay * matrices}
              for matrices in (True, False)]  # fmt: skip
    fused = torch.device(config.device).type == "cuda"
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=fused)


def evaluate(model: LanguageModel, held_out: Tensor, config: TrainConfig) -> float:
    """The mean loss of the held-out sequences, through the same attention."""
    losses = []
    for sequences in held_out.split(config.batch):
        with torch.no_grad(), autocast(config):
            losses.append(model(sequences[:, :-1], sequences[:, 1:]).double() * len(sequences))
    return float(torch.stack(losses).sum() / len(held_out))


def _finite_loss(model, config, step, sequences, loss, norm) -> float:
    value = float(loss)
    if math.isfinite(value) and math.isfinite(float(norm)):
        return value
    raise NonFinite(f"non-finite at step {step + 1}: loss {value}, gradient norm {float(norm)}; "
                    + _first_non_finite(model, config, sequences))


def _first_non_finite(model: LanguageModel, config: TrainConfig, sequences: Tensor) -> str:
    """Names the parameters, else the first module of that batch's forward, that went wrong."""
    wrong = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if wrong:
        return f"non-finite by now: {len(wrong)} parameters, the first {wrong[0]}"
    found: list[str] = []

    def watch(name, _module, _inputs, output):
        if not torch.isfinite(output).all():
            found.append(name)

    for name, module in model.named_modules():
        if name:  # training is over: the hooks may stay
            module.register_forward_hook(partial(watch, name))
    with torch.no_grad(), autocast(config):
        model(sequences[:, :-1], sequences[:, 1:])
    return f"first non-finite output: {found[0]}" if found else "in the backward pass only"


class RowWriter:
    """Appends rows to a CSV file and shows one progress line; nothing is lost on an interrupt."""

    def __init__(self, file, steps: int, title: str) -> None:
        self.file, self.steps, self.title, self.val_loss = file, steps, title, math.nan
        self.writer = csv.DictWriter(file, COLUMNS)
        self.writer.writeheader()

    def __call__(self, row: dict) -> None:
        self.writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value
                              for key, value in row.items()})  # fmt: skip
        self.file.flush()
        new, last = row["val_loss"] is not None, row["step"] == self.steps
        self.val_loss = row["val_loss"] if new else self.val_loss
        bar = "#" * round(20 * row["step"] / self.steps)
        line = (f"{self.title} [{bar:<20}] {row['step']}/{self.steps} train "
                f"{row['train_loss']:.4f} val {self.val_loss:.4f} {row['ms_per_step']:.1f} ms/step")
        if sys.stderr.isatty():
            print(f"\r{line}", end="\n" if last else "", file=sys.stderr, flush=True)
        elif last or new:
            print(line, file=sys.stderr, flush=True)


def origin(config: TrainConfig, choice: AttentionChoice, text: Text) -> dict:
    """What a record's figures come from."""
    return {"attention": choice.label(), "config": asdict(config), "text": text.files,
            "environment": environment()}  # fmt: skip


def recorded_train(
    config: TrainConfig, choice: AttentionChoice, text: Text, out: Path, stem: str,
    save: Path | None = None,
) -> tuple[Run, dict]:  # fmt: skip
    """train(), with STEM.csv and STEM.json written as it goes, and a checkpoint at its end."""
    record = origin(config, choice, text)

    def write(status: str, **more) -> None:
        record.update(status=status, **more)
        write_json(out / f"{stem}.json", record)

    if choice.name == "emulated":
        scores = config.batch * (config.model.dim // config.model.head_dim) * config.tokens**2
        print(f"{choice.label()}: slow; each of its (queries x keys) matrices takes "
              f"{4 * scores / 2**30:.1f} GiB a layer, cut into chunks that fit", file=sys.stderr)
    write("running")
    try:
        with (out / f"{stem}.csv").open("w", newline="") as file:
            run = train(config, choice, text, RowWriter(file, config.run_steps, choice.label()))
    except BaseException as error:
        write(f"stopped: {brief(error)}")
        raise
    write("finished", parameters=run.model.parameter_count(), batches_sha256=run.batches_sha256,
          seconds=round(run.seconds, 2), final_val_loss=run.rows[-1]["val_loss"])  # fmt: skip
    if save:
        with replacing(save) as partial:
            torch.save({"model": run.model.state_dict(), "config": asdict(config),
                        "attention": choice.label()}, partial)  # fmt: skip
    return run, record


def prepared(
    options, choices: list[AttentionChoice], config: TrainConfig | None = None,
) -> tuple[TrainConfig, Text]:  # fmt: skip
    """What the options mean, once it is sure that it can be run here: nothing is written yet. A
    `config` takes the place of what they say of the model and its training."""
    config = config or config_of(options)
    text = Text.read(options.text, config.held_out_fraction)
    text.check(config.tokens)
    command.check_outputs(options)
    device = command.check_device(config.device)
    for choice in choices:
        check_runs_on(choice, device)
    return config, text


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser("train", __doc__)
    add_training_arguments(parser)
    parser.add_argument("--attention", default="sagebwd", metavar="NAME[:OPTION,...]",
                        help="sdpa, sagebwd or emulated, with options, such as "
                        "sagebwd:granularity=block,no-rotate or "
                        "emulated:precision=s+pv+dv+dp+dq+dk (default: sagebwd)")
    parser.add_argument("--name", help="stem of the files' names (default: from the attention)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a checkpoint")

    def work(options) -> int:
        with command.wrong_use(parser):
            choice = AttentionChoice.parse(options.attention)
            config, text = prepared(options, [choice])
        stem = options.name or choice.stem()
        recorded_train(config, choice, text, options.out, stem, options.save)
        return 0

    return command.run(parser, arguments, work)


if __name__ == "__main__":
    sys.exit(main())
