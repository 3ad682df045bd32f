"""Checkpoints of training runs, as `Trainer.save` writes them: what reads them refuses other
files."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from sagebwd.benchmark.environment import brief

from .attentions import AttentionChoice
from .command import torch
from .config import TrainConfig, config_of_record

if TYPE_CHECKING:
    from .language_model import LanguageModel


def load_file(path: Path, kinds: dict[str, type], device="cpu", older: dict | None = None) -> dict:
    """`write_tensors` must have written the file, with such values by these names, else ValueError.
    Files of older versions lack what `older` has."""
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # whatever the unpickler makes of bytes of another kind
        if isinstance(error, OSError) and error.filename:
            raise
        raise ValueError(f"{path} is no checkpoint of these commands, or not the whole of one: "
                         "PyTorch cannot load it") from error  # fmt: skip
    saved = (older or {}) | saved if isinstance(saved, dict) else {}
    for name, kind in kinds.items():
        if name not in saved:
            raise ValueError(f"{path} is no checkpoint of these commands: it has no {name!r}")
        if not isinstance(saved[name], kind):
            raise ValueError(f"{path} is no checkpoint of these commands: its {name!r} is no "
                             f"{kind.__name__}")  # fmt: skip
    return saved


def read_checkpoint(path: Path) -> tuple[dict, TrainConfig, AttentionChoice]:
    """ValueError where it is none."""
    check_is_file(path)
    saved = load_file(path, {
        "model": dict, "optimiser": dict, "step": int, "rows": list, "pending": torch.Tensor,
        "corpus": str, "processes": int, "config": dict, "attention": str, "seconds": float,
    }, older={"seconds": 0.0})  # fmt: skip
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


def check_is_file(path: Path) -> None:
    """ValueError that names the checkpoints which are there, if this one is not."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: pass a checkpoint, a file that train --save wrote")
    if not path.exists():
        near = sorted(p.name for p in path.parent.glob(f"*{path.suffix or '.pt'}") if p.is_file())
        shown = ", ".join(near[:5]) + (", ..." if len(near) > 5 else "")
        raise ValueError(f"{path}: there is no such file; " + (
            f"its folder has {shown}" if near else "train --save FILE writes checkpoints"))


def load_weights(model: LanguageModel, weights: dict, path: Path) -> None:
    """Those of the checkpoint `path`; ValueError where they do not fit or are not finite."""
    with _fitting(path):
        model.load_state_dict(weights)
    _check_finite(weights, path)


def load_state(model: LanguageModel, optimiser: torch.optim.Optimizer, saved: dict,
               path: Path) -> None:  # fmt: skip
    """This loads the optimiser's state with the weights; several processes may share both."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    with _fitting(path):
        if not (saved["model"] and saved["optimiser"]["state"]):  # which PyTorch would pass over
            raise ValueError("it has no weights, or no state of the optimiser")
        set_state_dict(model, optimiser, model_state_dict=saved["model"],
                       optim_state_dict=saved["optimiser"],
                       options=StateDictOptions(full_state_dict=True))  # fmt: skip
    _check_finite(saved["model"], path)


@contextlib.contextmanager
def _fitting(path: Path):
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever PyTorch makes of other names, kinds and sizes
        said = " ".join(str(error).split())[:300]  # PyTorch names the weights from line 2 on
        raise ValueError(f"{path} is no checkpoint of these commands: {type(error).__name__}: "
                         f"{said}") from error  # fmt: skip


def _check_finite(weights: dict, path: Path) -> None:
    """ValueError where a run had diverged before it was noticed."""
    wrong = [name for name, x in weights.items() if not torch.isfinite(x).all()]
    if wrong:
        others = f", and {len(wrong) - 1} others" if len(wrong) > 1 else ""
        raise ValueError(f"{path}: {wrong[0]} has values that are NaN or infinite{others}: its run "
                         "had diverged, so take a checkpoint of an earlier step")  # fmt: skip
