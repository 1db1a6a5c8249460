"""Safetensors files on disk: which file has which tensor, and slices of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .peers import CheckpointError
from .trusted import check_inside

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def find_files(place: Path) -> list[Path]:
    """The safetensors files that a path stands for.

    Args:
        place: A file, an index, or a folder with an index, with ``model.safetensors``, or with
            any ``*.safetensors`` files.

    Raises:
        CheckpointError: If there are none, or the index names a file that is not there.
    """
    if place.is_dir():
        for name in (INDEX, SINGLE):
            if (place / name).exists():
                return find_files(place / name)
        files = sorted(place.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"no safetensors files in {place}")
        return files
    if not place.exists():
        raise CheckpointError(f"{place} does not exist")
    if place.suffix != ".json":
        return [place]
    try:
        names = json.loads(place.read_text())["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{place} is not an index of safetensors files: {error}") from error
    files = [check_inside(place.parent, str(name)) for name in sorted(set(names))]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise CheckpointError(f"{place} names files that are not there: {', '.join(absent)}")
    return files


class Reader:
    """Reads tensors and parts of tensors; only the bytes asked for leave the disk.

    Args:
        files: Safetensors files; a tensor in two of them is read from the last.

    Raises:
        CheckpointError: If a file is truncated or no safetensors file; it is named.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._handles: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                handle: Any = safe_open(str(file), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} can not be read: {error}") from error
            for name in handle.keys():  # noqa: SIM118 (the handle is no dict)
                self._handles[name] = handle
                self.shapes[name] = tuple(handle.get_slice(name).get_shape())

    def whole(self, name: str) -> Tensor:
        """A whole tensor on CPU, in the file's dtype."""
        tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A rectangular part of a tensor on CPU, in the file's dtype."""
        part = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        tensor: Tensor = self._handles[name].get_slice(name)[part]
        return tensor


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes one file under a temporary name and renames it, so that it is whole or absent."""
    from safetensors.torch import save_file

    partial = path.with_name(f"{path.name}.partial")
    # transformers refuses files whose metadata does not name the framework.
    save_file(tensors, str(partial), metadata={"format": "pt"})
    partial.replace(path)


def parse_size(size: int | str) -> int:
    """Bytes of a size such as ``"5GB"`` (decimal units) or ``"4GiB"`` (binary ones).

    Raises:
        ValueError: If it is no positive size.
    """
    if isinstance(size, str):
        text = size.strip().upper()
        units = {"GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3}
        for unit, factor in units.items():
            if text.endswith(unit) and text[: -len(unit)].strip().isdigit():
                size = int(text[: -len(unit)]) * factor
                break
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise ValueError(f"max_shard_size must be a number of bytes or like '5GB', got {size!r}")
    return size


@contextmanager
def scratch(path: Path) -> Iterator[None]:
    """Removes leftovers of unfinished files when the body fails."""
    try:
        yield
    except BaseException:
        for leftover in path.glob("*.safetensors.partial"):
            leftover.unlink(missing_ok=True)
        raise


def nbytes(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """Bytes of a whole tensor in ``dtype``."""
    return tensor.numel() * (dtype or tensor.dtype).itemsize
