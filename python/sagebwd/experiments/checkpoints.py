"""Checkpoints of training runs, as `Trainer.save` writes them: what reads them refuses other
files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from .attentions import AttentionChoice
from .command import torch
from .config import TrainConfig, config_of_record
from .environment import brief

if TYPE_CHECKING:
    from .language_model import LanguageModel


def read_checkpoint(path: Path) -> tuple[dict, TrainConfig, AttentionChoice]:
    """ValueError where it is none."""
    _check_is_file(path)
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the unpickler makes of bytes of another kind
        if isinstance(error, OSError) and error.filename:
            raise
        raise ValueError(f"{path} is no checkpoint of these commands, or not the whole of one: "
                         "PyTorch cannot load it") from error  # fmt: skip
    names = ("model", "optimiser", "step", "rows", "pending", "corpus", "processes", "config",
             "attention")  # fmt: skip
    missing = [name for name in names if not isinstance(saved, dict) or name not in saved]
    if missing:
        raise ValueError(f"{path} is no checkpoint of these commands: it has no {missing[0]!r}")
    try:
        return saved, config_of_record(saved["config"]), AttentionChoice.parse(saved["attention"])
    except Exception as error:  # such as options of another version
        raise ValueError(f"{path} is no checkpoint of these commands: {brief(error)}") from error


def in_force(step: int, config: TrainConfig, choice: AttentionChoice) -> AttentionChoice:
    """With which attention a run came to this step."""
    switched = config.switch_at and step > config.switch_at
    return AttentionChoice.parse(config.switch_to) if switched else choice


def check_save(save: Path, resume: Path | None) -> None:
    """ValueError if a checkpoint would take the place of what is not of the run that goes on."""
    form = re.compile(re.escape(save.name).replace(r"\{step\}", r"\d+"))
    there = sorted(p for p in save.parent.glob("*") if form.fullmatch(p.name))
    if not there or (resume and resume.resolve() in [p.resolve() for p in there]):
        return
    try:
        step = read_checkpoint(there[0])[0]["step"]
    except ValueError:
        raise ValueError(f"--save {save}: {there[0]} is there, and no checkpoint of these "
                         "commands: name another file") from None  # fmt: skip
    raise ValueError(f"--save {save}: {there[0]} is there, a checkpoint of step {step}: pass "
                     f"--resume {there[0]} to go on from it, or name another file")


def _check_is_file(path: Path) -> None:
    """ValueError that names the checkpoints which are there, if this one is not."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: pass a checkpoint, a file that train --save wrote")
    if not path.exists():
        near = sorted(p.name for p in path.parent.glob(f"*{path.suffix or '.pt'}") if p.is_file())
        shown = ", ".join(near[:5]) + (", ..." if len(near) > 5 else "")
        raise ValueError(f"{path}: there is no such file; " + (
            f"its folder has {shown}" if near else "train --save FILE writes checkpoints"))


def load_weights(model: LanguageModel, weights: dict, path: Path) -> None:
    """Those of the checkpoint `path`; ValueError where they do not fit."""
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no checkpoint of these commands: {brief(error)}") from error
