"""A distributed checkpoint as one dictionary in this process."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from .peers import CheckpointError
from .trusted import TrustedPlanner, TrustedReader


def read_whole(folder: str | Path) -> dict[str, Any]:
    """Reads all of a distributed checkpoint, of anybody, without running what it says.

    Args:
        folder: A checkpoint that ``torch.distributed.checkpoint`` wrote.

    Returns:
        The nested dictionary that was saved, with whole tensors on CPU.

    Raises:
        CheckpointError: If the checkpoint is damaged, holds more than tensors, numbers, text and
            containers, or names files outside of itself.
    """
    reader = TrustedReader(folder)
    metadata = reader.read_metadata()
    entries: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*single process")
            dcp_load(entries, storage_reader=reader, planner=TrustedPlanner(), no_dist=True)
    except (CheckpointException, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder} is not safe to read or damaged: {error}") from error
    whole: dict[Any, Any] = {}
    for name, value in entries.items():
        _put(whole, (metadata.planner_data or {}).get(name, (name,)), value)
    return {key: _with_lists(value) for key, value in whole.items()}


def _put(into: dict[Any, Any], path: Sequence[str | int], value: Any) -> None:
    for key in path[:-1]:
        into = into.setdefault(key, {})
    into[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """Lists where the saved state had them: torch writes keys of mappings as text only."""
    if not isinstance(value, dict) or not value:
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    if all(isinstance(key, int) for key in items):
        return [items[index] for index in sorted(items)]
    return items
