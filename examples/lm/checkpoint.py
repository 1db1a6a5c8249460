"""Checkpoints of a sharded run, written by all ranks together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from lm.report import History

# So many are kept; the one before the last survives a crash in the middle of saving.
KEPT = 2
_META = "run.json"
_HISTORY = "history.json"


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    history: History,
    options: dict[str, Any],
) -> Path:
    """Writes the state after ``step`` steps to ``folder/step_XXXXXX``; a collective call.

    The folder gets its name when everything is in it, so that a name never stands for a part.

    Args:
        folder: holds the checkpoints of a run.
        step: steps done.
        model: the sharded model.
        optimizer: its optimizer.
        history: what was measured so far.
        options: what the run was started with, compared when it is resumed.
    """
    target = folder / f"step_{step:06d}"
    partial = target.with_suffix(".partial")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save_sharded({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)
    if dist.get_rank() == 0:
        history.write(partial / _HISTORY)
        (partial / _META).write_text(json.dumps({"options": options}))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in _complete(folder)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in ``folder``."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def set_aside(folder: Path) -> list[str]:
    """Moves an earlier run's checkpoints out of the way of a new run; a collective call.

    Returns:
        What was done, in words, on the rank that did it.
    """
    notes = []
    old = _complete(folder)
    if old and dist.get_rank() == 0:
        aside = folder / "previous"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)
        notes.append(f"moved an earlier run's checkpoints to {aside}")
    dist.barrier()
    return notes


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]
) -> tuple[History, list[str]]:
    """Fills model and optimizer from a checkpoint; a collective call.

    Returns:
        The history up to the checkpoint, whose length is the number of steps done, and in words
        each option that differs from those of the run that saved.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    load_sharded({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
    )
    saved = json.loads((path / _META).read_text())["options"]
    changes = [
        f"{name} was {saved.get(name)}, is {value}"
        for name, value in options.items()
        if saved.get(name) != value
    ]
    return History.read(path / _HISTORY), changes


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if path.suffix != ".partial")
