"""Writing a sharded model as a folder that Hugging Face libraries open."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .entries import Entry, model_state, unwrapped
from .full import Gather, gather_entries, plan_gathers
from .peers import CheckpointError, Peers
from .safetensors_files import INDEX, SINGLE, nbytes, parse_size, scratch, write_file

NameMap = Callable[[str], str | None]


@dataclass
class _File:
    """One file to be written, as long as tensors still come for it."""

    name: str = ""
    names: list[str] = field(default_factory=list)
    size: int = 0


@torch.no_grad()
def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    name_map: NameMap | None = None,
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a model as safetensors files with an index; every rank has to call it.

    One group is gathered at a time and rank 0 writes, holding at most one file's tensors in host
    memory. Files appear whole or not at all, the index last. The model's ``config``, if it has one
    that can save itself, is written too, so that ``from_pretrained`` opens the folder. Of tied
    weights one name is written.

    Args:
        model: A model with sharded parameters, or a plain one.
        folder: Made if it is not there. Safetensors files of an earlier save are replaced.
        max_shard_size: Bytes of a file, or a size such as ``"5GB"``; a larger tensor has a file of
            its own.
        name_map: Gives the name to write for a name of the model, or ``None`` for what is not to
            be written. Left out: the same names.
        dtype: Dtype of floating-point tensors in the files; left out: each tensor's own.
        process_group: The ranks that share the model, ``None`` for all.

    Raises:
        ValueError: If ``max_shard_size`` is no size.
        CheckpointError: On every rank, if the folder can not be written.
    """
    limit = parse_size(max_shard_size)
    place = Path(folder)
    model = unwrapped(model)
    peers = Peers(process_group)
    peers.arrive("save_safetensors")
    what = f"save_safetensors({folder})"
    with peers.together(what):
        gathers = plan_gathers(model, model_state(model).entries)
        names = _written_names(model, gathers, name_map)
        files = _plan_files(gathers, names, limit, dtype)
        if peers.leads:
            place.mkdir(parents=True, exist_ok=True)
    stream = _named(gather_entries(gathers), names, dtype)
    for file in files:
        # Every rank takes part in the gathers; only the first keeps what comes.
        tensors = _collect(stream, len(file.names), keep=peers.leads)
        with peers.together(what), scratch(place):
            if peers.leads:
                write_file(place / file.name, tensors)
        del tensors
    for _ in stream:  # gathers of what is not written
        pass
    with peers.together(what):
        if peers.leads:
            _finish(model, place, files)


def _written_names(
    model: nn.Module, gathers: list[Gather], name_map: NameMap | None
) -> dict[str, str]:
    """The name to write for each entry, by the entry's first name."""
    patterns: Iterable[str] = getattr(model, "_tied_weights_keys", None) or ()
    names: dict[str, str] = {}
    for gather in gathers:
        for entry, _ in gather.entries:
            name: str | None = _main_name(entry, patterns)
            if name_map is not None and name is not None:
                name = name_map(name)
            if name is not None:
                names[entry.name] = name
    taken: dict[str, str] = {}
    for own, name in names.items():
        if name in taken:
            raise CheckpointError(f"name_map gives '{name}' for both '{taken[name]}' and '{own}'")
        taken[name] = own
    return names


def _main_name(entry: Entry, patterns: Iterable[str]) -> str:
    """The name of a tied weight that a transformers model expects, else the first."""
    for name in entry.names:
        if not any(re.search(pattern, name) for pattern in patterns):
            return name
    return entry.name


def _plan_files(
    gathers: list[Gather], names: dict[str, str], limit: int, dtype: torch.dtype | None
) -> list[_File]:
    files = [_File()]
    for gather in gathers:
        for entry, _ in gather.entries:
            if entry.name not in names:
                continue
            size = nbytes(entry.tensor, dtype if entry.tensor.is_floating_point() else None)
            if files[-1].names and files[-1].size + size > limit:
                files.append(_File())
            files[-1].names.append(names[entry.name])
            files[-1].size += size
    for number, file in enumerate(files, start=1):
        file.name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
    if len(files) == 1:
        files[0].name = SINGLE
    return files


def _named(
    stream: Iterator[tuple[Entry, Tensor]], names: dict[str, str], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    for entry, tensor in stream:
        if entry.name in names:
            yield names[entry.name], tensor.to(dtype) if _casts(tensor, dtype) else tensor


def _casts(tensor: Tensor, dtype: torch.dtype | None) -> bool:
    return dtype is not None and tensor.is_floating_point()


def _collect(stream: Iterator[tuple[str, Tensor]], count: int, *, keep: bool) -> dict[str, Tensor]:
    tensors = {}
    for _ in range(count):
        name, tensor = next(stream)
        if keep:
            tensors[name] = tensor.to("cpu", copy=True).contiguous()
    return tensors


def _finish(model: nn.Module, place: Path, files: list[_File]) -> None:
    """Writes index and config, and removes what an earlier save with other files left."""
    index = place / INDEX
    if len(files) > 1:
        weight_map = {name: file.name for file in files for name in file.names}
        content = {
            "metadata": {"total_size": sum(file.size for file in files)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        partial = index.with_name(f"{index.name}.partial")
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.replace(index)
    else:
        index.unlink(missing_ok=True)
    current = {file.name for file in files}
    for path in place.glob("model*.safetensors"):
        ours = path.name == SINGLE or re.fullmatch(r"model-\d{5}-of-\d{5}.safetensors", path.name)
        if ours and path.name not in current:
            path.unlink()
    _save_config(model, place)


def _save_config(model: nn.Module, place: Path) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(place)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(place)
