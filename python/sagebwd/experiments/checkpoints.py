"""Checkpoints of training runs, as `Trainer.save` writes them: what reads them refuses other
files."""

from __future__ import annotations

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
