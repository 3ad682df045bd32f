"""A process of a study: it has one GPU and trains the arms that it is given, one after another."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from sagebwd.benchmark.environment import brief, write_json

from . import command, runner
from .attentions import AttentionChoice, check_runs_on
from .command import Failure, torch
from .data import Corpus
from .study_plan import Arm
from .training import Trainer, largest

#: Seconds between checkpoints of an arm.
SAVE_SECONDS = 120
CURVE = ("step", "tokens", "train_loss", "val_loss", "grad_norm", "max_score", "gamma_q",
         "gamma_k")  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """All arms of a study share these settings."""

    corpus: Path
    out: Path
    checkpoints: Path
    device: str
    compile: bool
    graph: bool
    keep: bool  #: the models of finished arms
    environment: dict
    threads: int | None = None


def checkpoint_of(settings: Settings, arm: Arm) -> Path:
    return settings.checkpoints / f"{arm.name}.pt"


def run_arm(arm: Arm, corpus: Corpus, settings: Settings, stop=None, on_row=None) -> dict:
    """Trains one arm, or goes on where it was cut, and writes its record."""
    record = {"arm": asdict(arm), "regime": arm.regime(), "status": "failed",
              "corpus": corpus.summary(), "compile": settings.compile,
              "environment": settings.environment}  # fmt: skip
    try:
        record |= trained(arm, corpus, settings, stop, on_row)
        return record
    except BaseException as error:
        record["status"] = f"failed: {brief(error)}"
        raise
    finally:
        write_json(settings.out / f"{arm.name}.json", record)


def trained(arm: Arm, corpus: Corpus, settings: Settings, stop, on_row) -> dict:
    choice = AttentionChoice.parse(arm.attention)
    config = arm.config(corpus.vocab, settings.device, settings.compile, settings.graph)
    check_runs_on(choice, torch.device(config.device))
    saved = time.perf_counter()
    trainer = Trainer(config, choice, corpus)
    path = checkpoint_of(settings, arm)
    if path.exists():
        try:
            trainer.load(path)
        except ValueError as error:
            raise Failure(f"{error}; remove it to begin this arm again") from error

    def each_row(row: dict) -> None:
        nonlocal saved
        if on_row:
            on_row(row)
        if time.perf_counter() - saved > SAVE_SECONDS:
            trainer.save(path)
            saved = time.perf_counter()

    run = trainer.run(None, each_row, stop)
    result = {"status": run.status, "diverged": run.diverged, "steps_done": trainer.step,
              "resumed_at": trainer.resumed_at, "parameters": trainer.model.parameter_count(),
              **figures(run.rows)}  # fmt: skip
    if run.status == "finished" and choice.name != "sdpa":
        # How much of the distance is the forward's rounding, not what training made of it.
        result["final_val_loss_by_sdpa"] = trainer.validate(AttentionChoice(name="sdpa"))[0]
    if run.status == "cut" or (run.status == "finished" and settings.keep):
        trainer.save(path)
    else:
        path.unlink(missing_ok=True)
    return result | {"seconds": trainer.seconds}


def figures(rows: list[dict]) -> dict:
    """A record keeps these figures of a run's rows."""
    if not rows:
        return {"final_val_loss": None, "curve": [], "columns": CURVE, "tokens_per_second": None}
    validated = [row for row in rows if row["val_loss"] is not None]
    later = rows[len(rows) // 10 :]

    def largest_of(name):
        values = [row[name] for row in validated if row[name] is not None]
        return largest(values) if values else None

    return {
        "final_val_loss": validated[-1]["val_loss"] if validated else None,
        "tokens_per_second": median(row["tokens_per_second"] for row in rows),
        "grad_norm": {"median": median(row["grad_norm"] for row in rows),
                      "largest": largest(row["grad_norm_max"] for row in rows),
                      "largest_after_warm_up": largest(row["grad_norm_max"] for row in later)},
        "max_score": largest_of("max_score"),
        "gamma": [largest_of("gamma_q"), largest_of("gamma_k")],
        "columns": CURVE,
        "curve": [[_short(row[name]) for name in CURVE] for row in validated],
    }  # fmt: skip


def _short(value):
    return float(f"{value:.6g}") if isinstance(value, float) else value


def work(pipe, settings: Settings, stop) -> None:
    """The process of a study. If the study was killed, the arm is cut."""
    command.ignore_signals()  # the study says when to stop
    study = multiprocessing.parent_process()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    corpus = Corpus.open(settings.corpus)
    runner.do_tasks(pipe, lambda arm, tell: run_arm(
        arm, corpus, settings, lambda: stop.is_set() or not study.is_alive(), tell))  # fmt: skip
