"""Converts checkpoints of the original YaFSDP to whole tensors of their true shapes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

from . import classic, classic_optimizer, flattened
from .errors import ConversionError

__all__ = ["ConversionError", "Report", "convert_folder"]


@dataclass
class Report:
    """What was written.

    Attributes:
        tensors: How many tensors.
        elements: Elements of all of them.
        left_flat: Names of 1-D tensors whose shape is not known.
        optimizer_entries: Parameters with optimizer state, if that was asked for.
    """

    tensors: int = 0
    elements: int = 0
    left_flat: list[str] = field(default_factory=list)
    optimizer_entries: int = 0


def convert_folder(
    source: Path,
    output: Path,
    shapes: Path | None = None,
    model_parallel_rank: int | None = None,
    optimizer: Path | None = None,
) -> Report:
    """Converts one checkpoint; it is held in memory as a whole.

    Args:
        source: Folder with one ``yafsdp_model_*.pt`` per rank, or of a distributed checkpoint.
        output: A ``.safetensors`` or ``.pt`` file, or the folder of a distributed checkpoint.
        shapes: File that gives parameters' shapes; for distributed checkpoints only.
        model_parallel_rank: Which tensor-parallel rank's files, if there are several.
        optimizer: Where to write the optimizer's state, too; a ``.pt`` file, or the folder of a
            distributed checkpoint. Of files of one per rank only: in a distributed checkpoint it
            is part of what is converted in any case.

    Returns:
        What was written.

    Raises:
        ConversionError: If ``source`` is no such checkpoint, is incomplete, or ``output`` exists.
    """
    for path in (output, optimizer):
        if path is not None and path.exists():
            raise ConversionError(f"{path} exists already")
    if optimizer is not None and optimizer.suffix == ".safetensors":
        raise ConversionError(f"{optimizer}: a .safetensors file can not hold numbers; use .pt")
    if not source.is_dir():
        raise ConversionError(f"{source} is not a folder")
    report = Report()
    state: Any
    named: Any = None
    if (source / ".metadata").exists():
        if optimizer is not None:
            raise ConversionError(
                f"{source} is a distributed checkpoint, whose optimizer state is converted with "
                "the rest; leave out --optimizer"
            )
        if shapes is None:
            raise ConversionError(
                f"{source} is a distributed checkpoint, which does not say what shapes flattened "
                "tensors had; give them with --shapes (a checkpoint of whole tensors, such as one "
                "of ya_fsdp.checkpoint.save, needs no conversion: python -m torch.distributed."
                f"checkpoint.format_utils dcp_to_torch {source} {output} makes one file of it)"
            )
        state, report.left_flat = flattened.reshape(
            flattened.read(source), flattened.read_shapes(shapes)
        )
    elif any(classic.FILE.fullmatch(path.name) for path in source.iterdir()):
        files = classic.find_files(source, model_parallel_rank)
        parts = _load(files)
        state = classic.join(parts)
        if optimizer is not None:
            kind = classic.OPTIMIZER_FILE
            files = classic.find_files(source, model_parallel_rank, kind)
            named = classic_optimizer.join_optimizer(parts, _load(files))
    else:
        raise ConversionError(
            f"{source} has neither yafsdp_model_*.pt files nor the .metadata of a distributed "
            "checkpoint"
        )
    tensors = dict(_tensors(state, ""))
    report.tensors = len(tensors)
    report.elements = sum(t.numel() for t in tensors.values())
    _write(state, tensors, output)
    if optimizer is not None:
        _write(named, {}, optimizer)
        report.optimizer_entries = len(named["state"])
    return report


def _load(files: Sequence[Path]) -> list[Any]:
    """Only tensors and plain values: nothing in the files is executed."""
    return [torch.load(path, map_location="cpu", weights_only=True) for path in files]


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Tensor):
        yield name, value


def _write(state: Any, tensors: Mapping[str, Tensor], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".safetensors":
        try:
            from safetensors.torch import save_file
        except ModuleNotFoundError:
            raise ConversionError(
                "a .safetensors file needs safetensors: pip install safetensors; or write a .pt"
            ) from None
        save_file({n: t.contiguous() for n, t in tensors.items()}, output, {"format": "pt"})
    elif output.suffix in (".pt", ".pth", ".bin"):
        torch.save(state, output)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            whole = Path(scratch) / "whole.pt"
            torch.save(state, whole)
            torch_save_to_dcp(str(whole), str(output))
