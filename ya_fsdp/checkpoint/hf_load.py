"""Reading Hugging Face safetensors into a sharded model, each rank its own byte ranges."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..ragged import RaggedShardDTensor, piece_boxes
from .entries import Entry, LoadResult, ModelState, compare, model_state, unwrapped, write_whole
from .peers import CheckpointError, Peers
from .safetensors_files import Reader, find_files

NameMap = Callable[[str], str | None]


@torch.no_grad()
def load_safetensors(
    model: nn.Module,
    folder_or_file: str | os.PathLike[str],
    *,
    name_map: NameMap | None = None,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> LoadResult:
    """Fills a model from safetensors files; every rank has to call it and see the files.

    Each rank reads the ranges of elements that it owns and nothing else; buffers are read whole.
    Values are converted to the dtype of their parameter. Names and shapes are compared before
    anything is written.

    Args:
        model: A model with sharded parameters, or a plain one; not on the meta device.
        folder_or_file: A safetensors file, an ``*.index.json``, or a folder with either.
        name_map: Gives the name in the files for a name of the model, or ``None`` for what is not
            to be loaded. Left out: the same names.
        strict: Whether missing and unexpected names are errors.
        process_group: The ranks that make the call, ``None`` for all.

    Returns:
        Missing and unexpected names, as they are in the files.

    Raises:
        CheckpointError: On every rank, if a file is missing, truncated or none of safetensors, or
            names (with ``strict``) or shapes do not fit; the model is then unchanged.
    """
    model = unwrapped(model)
    peers = Peers(process_group)
    peers.arrive("load_safetensors")
    state = model_state(model)
    with peers.together(f"load_safetensors({folder_or_file})"):
        reader = Reader(find_files(Path(folder_or_file)))
        sources = _map_names(state, name_map)
        result = _compare(model, state, sources, reader, strict)
    with peers.together(f"load_safetensors({folder_or_file}), the model may be partly loaded"):
        for entry in state.entries:
            name = next((n for n in sources[entry.name] if n in reader.shapes), None)
            if name is not None:
                _read(reader, name, entry.tensor)
    return result


def _map_names(state: ModelState, name_map: NameMap | None) -> dict[str, tuple[str, ...]]:
    """For each entry, by its first name, the names that it may have in the files."""
    if name_map is None:
        return {entry.name: entry.names for entry in state.entries}
    sources = {}
    for entry in state.entries:
        mapped = (name_map(name) for name in entry.names)
        sources[entry.name] = tuple(name for name in mapped if name is not None)
    return sources


def _compare(
    model: nn.Module,
    state: ModelState,
    sources: Mapping[str, tuple[str, ...]],
    reader: Reader,
    strict: bool,
) -> LoadResult:
    entries = [
        Entry(sources[entry.name], entry.tensor) for entry in state.entries if sources[entry.name]
    ]
    seen: dict[str, str] = {}
    for entry in state.entries:
        for name in sources[entry.name]:
            if seen.setdefault(name, entry.name) != entry.name:
                raise CheckpointError(
                    f"name_map gives '{name}' for both '{seen[name]}' and '{entry.name}'"
                )
    # Extra state is no tensor, and safetensors files have nothing else.
    return compare(model, ModelState(entries, {}, []), reader.shapes, strict)


def _read(reader: Reader, name: str, target: Tensor) -> None:
    if not isinstance(target, RaggedShardDTensor):
        write_whole(target, reader.whole(name))
        return
    flat = target._local_tensor.view(-1)
    for box in piece_boxes(target):
        values = reader.box(name, box.offsets, box.sizes) if box.sizes else reader.whole(name)
        flat[box.start : box.start + box.numel].copy_(values.reshape(-1))
