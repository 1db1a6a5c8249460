"""Checkpoints of a run: model, optimizer, and what was measured so far."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lm.report import History
from ya_fsdp import checkpoint

# The one before the last is for those who want to go back, say before the loss rose.
KEPT = 2

latest = checkpoint.latest


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    history: History,
    options: dict[str, Any],
) -> Path:
    """Writes the state after ``step`` steps to ``folder/step_XXXXXX``; a collective call.

    Args:
        folder: holds the checkpoints of a run.
        step: steps done.
        model: the sharded model.
        optimizer: its optimizer.
        history: what was measured so far.
        options: what the run was started with, compared when it is resumed.
    """
    extra = {"history": dataclasses.asdict(history), "options": options}
    return checkpoint.save(folder, model, optimizer, extra, step=step, keep_last=KEPT)


def set_aside(folder: Path) -> list[str]:
    """Moves an earlier run's checkpoints out of the way of a new run; a collective call.

    Returns:
        What was done, in words, on the rank that did it.
    """
    notes = []
    old = [*folder.glob("step_*"), *folder.glob("latest")]
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
    """Fills model and optimizer from a checkpoint of any number of ranks; a collective call.

    Returns:
        The history up to the checkpoint, whose length is the number of steps done, and in words
        each option that differs from those of the run that saved.
    """
    extra = checkpoint.load(path, model, optimizer).extra
    saved = extra["options"]
    changes = [
        f"{name} was {saved.get(name)}, is {value}"
        for name, value in options.items()
        if saved.get(name) != value
    ]
    return History(**extra["history"]), changes
