"""Distributed checkpoints whose tensors were saved flat: their true shapes are put back."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ya_fsdp.checkpoint import CheckpointError, read_whole

from .errors import ConversionError

Shapes = Mapping[str, tuple[int, ...]]


def read(folder: Path) -> dict[str, Any]:
    """A distributed checkpoint as one nested dictionary of whole tensors on CPU.

    Raises:
        ConversionError: If it is damaged, or would run something.
    """
    try:
        return read_whole(folder)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Parameter shapes from a .json, .safetensors or .pt file.

    Raises:
        ConversionError: If the file is of another kind or can not be read.
    """
    try:
        if path.suffix == ".json":
            return {n: tuple(s) for n, s in json.loads(path.read_text()).items()}
        if path.suffix == ".safetensors":
            return _safetensors_shapes(path)
        if path.suffix in (".pt", ".pth", ".bin"):
            state = torch.load(path, map_location="meta", weights_only=True)
            return {n: tuple(v.shape) for n, v in state.items() if isinstance(v, Tensor)}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConversionError(f"{path} could not be read: {error}") from error
    raise ConversionError(f"{path} is neither .json nor .safetensors nor .pt")


def _safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Reads the header only: eight bytes that give the length of a JSON text, and the text."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {n: tuple(v["shape"]) for n, v in header.items() if n != "__metadata__"}


def reshape(state: Any, shapes: Shapes) -> tuple[Any, list[str]]:
    """Puts back the shapes of flat tensors in a nested dictionary.

    A tensor belongs to the parameter whose name is part of its own, such as
    ``optimizer.state.layers.0.weight.exp_avg``; the longest such name counts.

    Returns:
        A copy with shapes, and the names of 1-D tensors for which none is known.

    Raises:
        ConversionError: If a tensor has another number of elements than its parameter.
    """
    unknown: list[str] = []
    return _walk(state, "", shapes, unknown), unknown


def _walk(value: Any, name: str, shapes: Shapes, unknown: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _walk(item, f"{name}.{key}" if name else str(key), shapes, unknown)
            for key, item in value.items()
        }
    if not isinstance(value, Tensor) or value.dim() != 1:
        return value
    fqn = _owner(name, shapes)
    if fqn is None:
        unknown.append(name)
        return value
    shape = shapes[fqn]
    if torch.Size(shape).numel() != value.numel():
        raise ConversionError(
            f"'{name}' has {value.numel()} elements, but '{fqn}' has the shape {list(shape)}; "
            "are the shapes those of another model?"
        )
    return value.view(shape)


def _owner(name: str, shapes: Shapes) -> str | None:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        for start in range(len(parts) - length + 1):
            candidate = ".".join(parts[start : start + length])
            if candidate in shapes:
                return candidate
    return None
